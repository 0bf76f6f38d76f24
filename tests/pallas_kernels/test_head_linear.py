"""head_linear against float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head_linear import api, pallas_triton
from pallas_kernels.head_linear.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

LAYER = 1


def case(spec, seed):
    """x and weights [L, H, n, r]; every layer but LAYER and all rows but the part are poison."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (spec.tokens, spec.heads, spec.inputs), spec.dtype)
    used, columns = spec.outputs, spec.inputs
    if spec.transposed:
        used, columns = columns, used
    rows = spec.before + used + spec.after
    weights = np.full((spec.layers, spec.heads, rows, columns), np.nan, x.dtype)
    part = draw(rng, (spec.heads, used, columns), spec.dtype, spec.inputs**-0.5)
    weights[LAYER, :, spec.before : spec.before + used] = part
    return x, weights


def part_of(spec):
    """The rows of the weights that a product takes; None: all."""
    used = spec.inputs if spec.transposed else spec.outputs
    whole = not spec.before and not spec.after
    return None if whole else (spec.before, spec.before + used)


def run(spec, implementation, x, weights):
    op = compiled(
        api.head_linear,
        implementation=implementation,
        row_tile=spec.row_tile,
        part=part_of(spec),
        transposed=spec.transposed,
    )
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    return np.asarray(op(x, weights, np.int32(LAYER), tiles=tiles))


def check(spec, implementation):
    for seed in SEEDS:
        x, weights = case(spec, seed)
        needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights)
        assert got.dtype == spec.dtype
        used = wide(weights[LAYER])[:, slice(*(part_of(spec) or (None,)))]
        equation = "tha,hab->thb" if spec.transposed else "tha,hba->thb"
        want = np.einsum(equation, wide(x), used)
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


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", [wrong_layer, heads_reversed, narrow_sum, one_tile_too_few])
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec(64, "bfloat16", row_tile=16, tiles=3), name)


def another_part(op, x, weights, layer, *, part, **options):
    return op(x, weights, layer, part=(part[0] - 1, part[1] - 1), **options)


def not_transposed(op, x, weights, layer, *, transposed, **options):
    return op(x, weights, layer, transposed=not transposed, **options)


@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", [another_part, not_transposed])
def test_contract_of_a_part_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec(3, "bfloat16", outputs=48, transposed=True, before=1), name)


@pytest.mark.parametrize("part", [((0, 24)), ((24, 40))])
def test_parts_have_the_bits_of_weights_that_are_cut_out(part):
    """What the reference computed when it was given one layer's parts by themselves."""
    rng = np.random.default_rng(0)
    x, whole = draw(rng, (17, 3, 48), "bfloat16"), draw(rng, (2, 3, 40, 48), "bfloat16")
    product = compiled(api.head_linear, part=part)
    alone = compiled(api.head_linear)(x, whole[LAYER:, :, slice(*part)], np.int32(0))
    same_bits(np.asarray(product(x, whole, np.int32(LAYER))), np.asarray(alone))
    x, turned = x[..., : part[1] - part[0]], whole[LAYER:, :, slice(*part)].swapaxes(2, 3)
    product = compiled(api.head_linear, part=part, transposed=True)
    alone = compiled(api.head_linear)(x, turned, np.int32(0))
    same_bits(np.asarray(product(x, whole, np.int32(LAYER))), np.asarray(alone))


@pytest.mark.parametrize(
    ("row_tile", "heads", "outputs", "inputs", "tile"),
    [
        (16, 16, 512, 128, (16, 32, 128)),  # DeepSeek-V2-Lite's keys and values
        (16, 16, 128, 512, (16, 16, 512)),
        (16, 128, 512, 128, (16, 128, 128)),  # DeepSeek-V3's
        (64, 128, 128, 512, (64, 128, 64)),
        (16, 2, 24, 32, (16, 16, 32)),
    ],
)
def test_configuration(row_tile, heads, outputs, inputs, tile):
    config = pallas_triton.configuration(row_tile, heads, outputs, inputs, "bfloat16")
    assert (config.rows, config.columns, config.depth) == tile


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ((3, 2, 5), {}, r"x is \(3, 2, 5\), the weights need \[T, 2, 4\]"),
        ((3, 4, 2), {}, r"x is \(3, 4, 2\), the weights need"),
        ((3, 2, 4), {"row_tile": 2}, "3 rows are not whole tiles of 2"),
        ((3, 2, 4), {"part": (1, 7)}, r"part \(1, 7\) is no part of 6 rows"),
        ((3, 2, 4), {"part": (2, 2)}, r"part \(2, 2\) is no part of 6 rows"),
        ((3, 2, 4), {"transposed": True}, r"the weights need \[T, 2, 6\]"),
        ((3, 2, 4), {"part": (1, 4), "transposed": True}, r"the weights need \[T, 2, 3\]"),
        ((3, 2, 4), {"implementation": "cuda"}, "op 'head_linear' has no implementation 'cuda"),
        ((3, 2, 4), {"implementation": "pallas"}, "'pallas' takes .* not float32; 'xla' takes it"),
    ],
)
def test_refuses(x, options, message):
    with pytest.raises(ValueError, match=message):
        api.head_linear(jnp.zeros(x), jnp.zeros((2, 2, 6, 4)), 0, **options)
