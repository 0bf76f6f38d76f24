"""linear against float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import api, pallas_triton
from pallas_kernels.linear.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

LAYER = 1


def case(spec, seed):
    """x, weights and bias; every layer but LAYER is poison."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (spec.tokens, spec.inputs), spec.dtype)
    weights = np.full((spec.layers, spec.outputs, spec.inputs), np.nan, x.dtype)
    weights[LAYER] = draw(rng, weights.shape[1:], spec.dtype, spec.inputs**-0.5)
    bias = np.full(weights.shape[:2], np.nan, x.dtype)
    bias[LAYER] = draw(rng, spec.outputs, spec.dtype)
    return x, weights, bias if spec.bias else None


def run(spec, implementation, x, weights, bias, residual=None):
    options = dict(out_dtype=spec.out_dtype, row_tile=spec.row_tile)
    op = compiled(api.linear, implementation=implementation, **options)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    more = {} if residual is None else {"residual": residual}
    return np.asarray(op(x, weights, np.int32(LAYER), bias, tiles=tiles, **more))


def check(spec, implementation):
    for seed in SEEDS:
        x, weights, bias = case(spec, seed)
        needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights, bias)
        out_dtype = spec.out_dtype or spec.dtype
        assert got.dtype == out_dtype
        want = wide(x) @ wide(weights[LAYER]).T + (0 if bias is None else wide(bias[LAYER]))
        close("linear", out_dtype, got[:needed], want[:needed])


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


RESIDUAL_SPECS = (
    Spec(17, "bfloat16", bias=True),
    Spec(64, "bfloat16", row_tile=16, tiles=3),
    Spec(3, "float16", inputs=200, outputs=4100),
    Spec(128, "bfloat16", inputs=200, outputs=150, row_tile=64),
    Spec(3, "float32"),
)


def check_residual(spec, implementation):
    """The bits of the sum with the rounded product, rounded again."""
    x, weights, bias = case(spec, 0)
    out_dtype = spec.out_dtype or spec.dtype
    residual = draw(np.random.default_rng(1), (spec.tokens, spec.outputs), out_dtype)
    product = run(spec, implementation, x, weights, bias)
    got = run(spec, implementation, x, weights, bias, residual)
    assert got.dtype == out_dtype
    needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
    want = residual.astype(np.float32) + product.astype(np.float32)
    same_bits(got[:needed], want.astype(out_dtype)[:needed])


@each(api.IMPLEMENTATIONS, RESIDUAL_SPECS)
def test_a_residual_is_added_to_the_rounded_product(spec, implementation):
    check_residual(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others(implementation, dtype):
    spec = Spec(17, dtype)
    x, weights, bias = case(spec, 0)
    want = run(spec, implementation, x, weights, bias)
    for t in (0, 8, 16):
        others = np.full_like(x, np.nan)
        others[t] = x[t]
        same_bits(run(spec, implementation, others, weights, bias)[t], want[t])


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_number_of_rows(implementation, dtype):
    """The row tile decides the bits; T, the other tiles and how many are needed do not."""
    spec = Spec(16, dtype, row_tile=16, inputs=200)
    x, weights, bias = case(spec, 0)
    want = run(spec, implementation, x, weights, bias)
    for tokens, tiles in ((64, None), (64, 3), (32, 2)):
        more = dataclasses.replace(spec, tokens=tokens, tiles=tiles)
        many = np.full((tokens, spec.inputs), np.nan, x.dtype)
        many[16:32] = x
        same_bits(run(more, implementation, many, weights, bias)[16:32], want)


def wrong_layer(linear, x, weights, layer, bias, **options):
    return linear(x, weights, layer - 1, bias, **options)


def narrow_sum(linear, x, weights, layer, bias, **options):
    halves = slice(None, 24), slice(24, None)
    return sum(linear(x[:, half], weights[:, :, half], layer, None, **options) for half in halves)


def no_bias(linear, x, weights, layer, bias, **options):
    return linear(x, weights, layer, None, **options)


def one_tile_too_few(linear, x, weights, layer, bias, *, tiles, **options):
    return linear(x, weights, layer, bias, tiles=tiles - 1, **options)


def last_columns_left_out(linear, x, weights, layer, bias, **options):
    return linear(x[:, :-16], weights[:, :, :-16], layer, bias, **options)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("mutant", "spec"),
    [
        (wrong_layer, Spec(3, "bfloat16")),
        (narrow_sum, Spec(64, "bfloat16")),
        (no_bias, Spec(3, "bfloat16", bias=True)),
        (one_tile_too_few, Spec(64, "bfloat16", row_tile=16, tiles=3)),
        (last_columns_left_out, Spec(3, "bfloat16", inputs=272)),
    ],
)
def test_contract_catches(mutant, spec, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(spec, name)


def test_the_row_tile_and_the_sizes_decide_the_configuration():
    """As the docstring says; T is no parameter."""
    decode = functools.partial(pallas_triton.configuration, 16, dtype="bfloat16")
    assert [decode(n).columns for n in (128, 2048, 5120, 151936)] == [16, 16, 32, 128]
    assert {pallas_triton.configuration(t, 40, "float16").rows for t in (1, 16, 63)} == {16}
    assert {pallas_triton.configuration(t, 40, "float16").rows for t in (64, 128)} == {64}


@pytest.mark.parametrize(
    ("x", "bias", "options", "message"),
    [
        (
            *((3, 4), None, {"residual": np.zeros((3, 4), np.float32)}),
            r"residual is float32 \(3, 4\), the result float32 \(3, 6\)",
        ),
        (
            *((3, 4), None, {"residual": np.zeros((3, 6), np.float16)}),
            "residual is float16 .* the result float32",
        ),
        ((3, 5), None, {}, "x has 5 columns, the weights have 4"),
        ((3, 4), (2, 7), {}, r"bias is \(2, 7\), the weights need \(2, 6\)"),
        ((3, 4), None, {"row_tile": 2}, "3 rows are not whole tiles of 2"),
        ((3, 4), None, {"implementation": "cuda"}, "op 'linear' has no implementation 'cuda'"),
        ((3, 4), None, {"implementation": "pallas"}, "not float32; 'xla' takes it"),
    ],
)
def test_refuses(x, bias, options, message):
    bias = None if bias is None else jnp.zeros(bias)
    with pytest.raises(ValueError, match=message):
        api.linear(jnp.zeros(x), jnp.zeros((2, 6, 4)), 0, bias, **options)
