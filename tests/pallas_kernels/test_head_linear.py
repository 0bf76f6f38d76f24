"""head_linear against float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head_linear import api
from pallas_kernels.head_linear.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

LAYER = 1


def case(spec, seed):
    """x and weights; every layer but LAYER is poison."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (spec.tokens, spec.heads, spec.inputs), spec.dtype)
    weights = np.full((spec.layers, spec.heads, spec.outputs, spec.inputs), np.nan, x.dtype)
    weights[LAYER] = draw(rng, weights.shape[1:], spec.dtype, spec.inputs**-0.5)
    return x, weights


def run(spec, implementation, x, weights):
    op = compiled(api.head_linear, implementation=implementation, row_tile=spec.row_tile)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    return np.asarray(op(x, weights, np.int32(LAYER), tiles=tiles))


def check(spec, implementation):
    for seed in SEEDS:
        x, weights = case(spec, seed)
        needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights)
        assert got.dtype == spec.dtype
        want = np.einsum("tha,hba->thb", wide(x), wide(weights[LAYER]))
        assert got.shape == want.shape
        close("head_linear", spec.dtype, got[:needed], want[:needed])


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others_and_of_their_number(implementation, dtype):
    """The row tile decides the bits; T, the other rows and how many are needed do not."""
    spec = Spec(16, dtype, row_tile=16, inputs=200)
    x, weights = case(spec, 0)
    want = run(spec, implementation, x, weights)
    for tokens, tiles in ((16, None), (64, 3)):
        more = dataclasses.replace(spec, tokens=tokens, tiles=tiles)
        many = np.full((tokens, spec.heads, spec.inputs), np.nan, x.dtype)
        at = 0 if tokens == 16 else 16
        many[at + 3] = x[3]
        same_bits(run(more, implementation, many, weights)[at + 3], want[3])


def wrong_layer(op, x, weights, layer, **options):
    return op(x, weights, layer - 1, **options)


def heads_reversed(op, x, weights, layer, **options):
    return op(x, weights[:, ::-1], layer, **options)


def narrow_sum(op, x, weights, layer, **options):
    halves = slice(None, 24), slice(24, None)
    return sum(op(x[..., half], weights[..., half], layer, **options) for half in halves)


def one_tile_too_few(op, x, weights, layer, *, tiles, **options):
    return op(x, weights, layer, tiles=tiles - 1, **options)


@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", [wrong_layer, heads_reversed, narrow_sum, one_tile_too_few])
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec(64, "bfloat16", row_tile=16, tiles=3), name)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ((3, 2, 5), {}, r"x is \(3, 2, 5\), the weights need \[T, 2, 4\]"),
        ((3, 4, 2), {}, r"x is \(3, 4, 2\), the weights need"),
        ((3, 2, 4), {"row_tile": 2}, "3 rows are not whole tiles of 2"),
        ((3, 2, 4), {"implementation": "pallas"}, "op 'head_linear' has no implementation 'pallas"),
    ],
)
def test_refuses(x, options, message):
    with pytest.raises(ValueError, match=message):
        api.head_linear(jnp.zeros(x), jnp.zeros((2, 2, 6, 4)), 0, **options)
