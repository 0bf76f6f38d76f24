"""layer_norm against float64, and against torch's."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer_norm import api
from pallas_kernels.layer_norm.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

LAYER, EPS = 1, 1e-5


def case(spec, seed):
    """Rows whose mean is not zero; other layers' parameters are NaN."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (*spec.rows, spec.width), spec.dtype, spec.scale)
    x += rng.uniform(-spec.scale, spec.scale, (*spec.rows, 1)).astype(x.dtype)
    weights, biases = np.full((2, spec.layers, spec.width), np.nan, x.dtype)
    weights[LAYER], biases[LAYER] = draw(rng, (2, spec.width), spec.dtype)
    return x, weights, biases


def run(implementation, x, weights, biases):
    op = compiled(api.layer_norm, eps=EPS, implementation=implementation)
    return op(x, weights, biases, np.int32(LAYER))


def exact(x, weights, biases):
    centered = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    normed = centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + EPS)
    return normed * wide(weights[LAYER]) + wide(biases[LAYER])


def check(spec, implementation):
    for seed in SEEDS:
        operands = case(spec, seed)
        got = run(implementation, *operands)
        assert got.dtype == spec.dtype
        close("layer_norm", spec.dtype, got, exact(*operands))


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS)
def test_rounds_once(implementation):
    """At the end, so that only a float32 result next to the middle of two values differs."""
    operands = case(Spec((64,), "bfloat16"), 0)
    got, want = np.asarray(run(implementation, *operands)), exact(*operands)
    assert np.mean(got != want.astype(got.dtype)) < 0.01


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agrees_with_torch(dtype):
    import torch

    x, weights, biases = (wide(a) for a in case(Spec((64,), dtype), 0))
    kind = getattr(torch, dtype)
    theirs = torch.nn.functional.layer_norm(
        torch.from_numpy(x).to(kind),
        (x.shape[-1],),
        torch.from_numpy(weights[LAYER]).to(kind),
        torch.from_numpy(biases[LAYER]).to(kind),
        EPS,
    )
    got = run("xla", *(jnp.asarray(a, dtype) for a in (x, weights, biases)))
    if dtype == "float32":
        close("layer_norm", dtype, got, wide(theirs.numpy()))
    else:
        assert np.mean(wide(got) != wide(theirs.float().numpy())) < 0.01


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others(implementation, dtype):
    x, *parameters = case(Spec((17,), dtype), 0)
    want = run(implementation, x, *parameters)
    for t in (0, 8, 16):
        others = np.full_like(x, np.nan)
        others[t] = x[t]
        same_bits(run(implementation, others, *parameters)[t], want[t])


def wrong_layer(layer_norm, x, weights, biases, layer, eps):
    return layer_norm(x, weights, biases, layer - 1, eps)


def no_eps(layer_norm, x, weights, biases, layer, eps):
    return layer_norm(x, weights, biases, layer, 0.0)


def no_bias(layer_norm, x, weights, biases, layer, eps):
    return layer_norm(x, weights, biases * 0, layer, eps)


def mean_of_a_padded_row(layer_norm, x, weights, biases, layer, eps):
    padded, wider = jnp.zeros_like(x, shape=(*x.shape[:-1], 64)), [(0, 0), (0, 24)]
    padded = padded.at[..., : x.shape[-1]].set(x)
    parameters = (jnp.pad(a, wider) for a in (weights, biases))
    return layer_norm(padded, *parameters, layer, eps)[..., : x.shape[-1]]


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", [wrong_layer, no_eps, no_bias, mean_of_a_padded_row])
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec((17,), "bfloat16", scale=1e-3), name)


@pytest.mark.parametrize(
    ("columns", "biases", "options", "message"),
    [
        (5, (2, 4), {}, "x has 5 columns, the weights have 4"),
        (4, (1, 4), {}, r"biases are \(1, 4\), the weights need \(2, 4\)"),
        (4, (2, 4), {"implementation": "cuda"}, "op 'layer_norm' has no implementation 'cuda'"),
        (4, (2, 4), {"implementation": "pallas"}, "not float32; 'xla' takes it"),
    ],
)
def test_refuses(columns, biases, options, message):
    arrays = jnp.zeros((3, columns)), jnp.zeros((2, 4)), jnp.zeros(biases)
    with pytest.raises(ValueError, match=message):
        api.layer_norm(*arrays, 0, EPS, **options)
