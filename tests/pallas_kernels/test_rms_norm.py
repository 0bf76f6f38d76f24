"""rms_norm against float64, rounded where the op rounds."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import api
from pallas_kernels.rms_norm.pallas_triton import sum_of_row
from pallas_kernels.rms_norm.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

LAYER, EPS = 1, 1e-6


def case(spec, seed):
    rng = np.random.default_rng(seed)
    x = draw(rng, (*spec.rows, spec.width), spec.dtype, spec.scale)
    weights = np.full((spec.layers, spec.width), np.nan, x.dtype)
    weights[LAYER] = draw(rng, spec.width, spec.dtype)
    return x, weights


def run(implementation, x, weights):
    return compiled(api.rms_norm, eps=EPS, implementation=implementation)(
        x, weights, np.int32(LAYER)
    )


def check(spec, implementation):
    for seed in SEEDS:
        x, weights = case(spec, seed)
        got = run(implementation, x, weights)
        assert got.dtype == spec.dtype
        normed = wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + EPS)
        close("rms_norm", spec.dtype, got, wide(weights[LAYER]) * normed)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS)
def test_rounds_before_the_weight(implementation):
    """As transformers does: 3 · bf16(normed), where normed lies between two bfloat16 values."""
    x, weights = case(Spec((64,), "bfloat16"), 0)
    weights[LAYER] = 3
    got = np.asarray(run(implementation, x, weights))
    normed = wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + EPS)
    want = (3 * normed.astype(x.dtype).astype(np.float32)).astype(x.dtype)
    once = (3 * normed).astype(x.dtype)
    # A float32 mean may put a value that lies near the middle on the other side, no more.
    assert np.mean(got != want) < 0.01 < np.mean(got != once)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others(implementation, dtype):
    x, weights = case(Spec((17,), dtype), 0)
    want = run(implementation, x, weights)
    for t in (0, 8, 16):
        others = np.full_like(x, np.nan)
        others[t] = x[t]
        same_bits(run(implementation, others, weights)[t], want[t])


def wrong_layer(rms_norm, x, weights, layer, eps):
    return rms_norm(x, weights, layer - 1, eps)


def no_eps(rms_norm, x, weights, layer, eps):
    return rms_norm(x, weights, layer, 0.0)


def mean_of_a_padded_row(rms_norm, x, weights, layer, eps):
    return rms_norm(x * (64 / x.shape[-1]) ** 0.5, weights, layer, eps)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", [wrong_layer, no_eps, mean_of_a_padded_row])
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec((17,), "bfloat16", scale=1e-3), name)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (5, {}, "x has 5 columns, the weights have 4"),
        (4, {"implementation": "cuda"}, "op 'rms_norm' has no implementation 'cuda'"),
        (4, {"implementation": "pallas"}, "not float32; 'xla' takes it"),
    ],
)
def test_refuses(columns, options, message):
    with pytest.raises(ValueError, match=message):
        api.rms_norm(jnp.zeros((3, columns)), jnp.zeros((2, 4)), 0, EPS, **options)


def neighbours_first(values):
    """The sum over the last axis, a power of two."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def test_a_row_is_summed_in_one_order():
    """Neighbours first, so that a tile of any power of two is a subtree."""
    rows = np.random.default_rng(0).uniform(size=(3, 2048)).astype(np.float32)
    want = neighbours_first(rows)
    same_bits(np.asarray(sum_of_row(jnp.asarray(rows))), want)
    for tile in (16, 256, 2048):
        sums = np.asarray(sum_of_row(jnp.asarray(rows.reshape(3, -1, tile))))
        same_bits(np.asarray(sum_of_row(jnp.asarray(sums))), want)


SQUARES_SPECS = (
    Spec((3,), "bfloat16", width=512),
    Spec((2,), "float16", width=600),
    Spec((3,), "bfloat16", width=40),
)
"""Whole tiles; the last one not whole; less than one."""


def check_tile_squares(spec, implementation, tile=256):
    """The bits of the one tree."""
    x, _ = case(spec, 0)
    got = compiled(api.tile_squares, tile=tile, implementation=implementation)(x)
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -spec.width % tile)))
    want = neighbours_first(padded.reshape(len(x), -1, tile) ** 2)
    same_bits(np.asarray(got), want)
    api.check_squares(jnp.asarray(x), got)


@each(api.TILE_SQUARES, SQUARES_SPECS)
def test_squares_of_tiles(spec, implementation):
    check_tile_squares(spec, implementation)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 2), "bfloat16"), ((2, 3), "float32"), ((3, 4), "float32")]
)
def test_refuses_squares_of_another_array(shape, dtype):
    """Of 40 columns there are 1, 2, 3, 5, … tiles, but not 4."""
    x = jnp.zeros((3, 40), "bfloat16")
    for tiles in (1, 2, 3, 5, 10, 20, 40):
        api.check_squares(x, jnp.zeros((3, tiles), "float32"))
    with pytest.raises(ValueError, match="3 rows of 40 columns over a power of 2"):
        api.check_squares(x, jnp.zeros(shape, dtype))
    with pytest.raises(ValueError, match="a tile of 12 columns is no subtree"):
        api.tile_squares(x, 12)
