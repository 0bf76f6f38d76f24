"""rms_norm against float64, rounded where the op rounds."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import api
from pallas_kernels.rms_norm.pallas_triton import CHUNK, sum_of_row
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


def test_a_row_is_summed_in_one_order():
    """Halves down to a chunk, then neighbours: norm_linear adds chunks to each other first."""
    rows = np.random.default_rng(0).uniform(size=(3, 4 * CHUNK)).astype(np.float32)
    a, b, c, d = np.split(rows, 4, axis=1)
    chunk = want = (a + c) + (b + d)
    while want.shape[1] > 1:
        want = want[:, 0::2] + want[:, 1::2]
    same_bits(np.asarray(sum_of_row(jnp.asarray(rows))), want[:, 0])
    same_bits(np.asarray(sum_of_row(jnp.asarray(chunk))), want[:, 0])
