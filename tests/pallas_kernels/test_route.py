"""route against a sort in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.route import api
from pallas_kernels.route.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, close, compiled, each, same_bits, wide


def case(spec, seed):
    """Logits in steps of 1/4, so that a row has many exact ties and no near ones; every third row
    is padding and holds NaN."""
    rng = np.random.default_rng(seed)
    logits = np.round(4 * rng.standard_normal((spec.tokens, spec.experts))) / 4
    valid = np.arange(spec.tokens) % 3 != 1
    logits[~valid] = np.nan
    return logits.astype(np.float32), valid


def run(spec, implementation, logits, valid):
    op = compiled(
        api.route, top_k=spec.top_k, normalize=spec.normalize, implementation=implementation
    )
    return op(logits, valid)


def brute_force(logits, valid, spec):
    ids = np.full((spec.tokens, spec.top_k), spec.experts, np.int32)
    weights = np.zeros(ids.shape)
    for t in np.flatnonzero(valid):
        exp = np.exp(wide(logits[t]) - wide(logits[t]).max())
        probability = exp / exp.sum()
        ids[t] = sorted(np.argsort(-probability, kind="stable")[: spec.top_k])
        weights[t] = probability[ids[t]]
        if spec.normalize:
            weights[t] /= weights[t].sum()
    return ids, weights


def check(spec, implementation):
    for seed in SEEDS:
        logits, valid = case(spec, seed)
        ids, weights = run(spec, implementation, logits, valid)
        want_ids, want_weights = brute_force(logits, valid, spec)
        assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
        np.testing.assert_array_equal(ids, want_ids)
        close("route", "float32", weights, want_weights)
        np.testing.assert_array_equal(np.asarray(weights)[~valid], 0)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS)
def test_a_row_is_independent_of_the_others(implementation):
    spec = Spec(17, 128, 8)
    logits = np.random.default_rng(0).standard_normal((17, 128)).astype(np.float32)
    ids, weights = run(spec, implementation, logits, np.ones(17, bool))
    for t in (0, 8, 16):
        others = np.full_like(logits, np.nan)
        others[t] = logits[t]
        lone_ids, lone_weights = run(spec, implementation, others, np.arange(17) == t)
        np.testing.assert_array_equal(lone_ids[t], ids[t])
        same_bits(lone_weights[t], weights[t])


@each(api.IMPLEMENTATIONS)
def test_a_row_of_nans_is_not_hidden(implementation):
    """Ids that exist and weights that are NaN, so that the token's output is NaN too."""
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = np.nan
    ids, weights = run(Spec(3, 8, 2), implementation, logits, np.ones(3, bool))
    np.testing.assert_array_equal(np.isnan(weights), np.arange(3)[:, None] == [1, 1])
    assert np.all(np.diff(ids) > 0) and np.min(ids) >= 0 and np.max(ids) < 8


def ties_to_the_higher_id(route, logits, valid, **options):
    experts = logits.shape[-1]
    ids, weights = route(logits[:, ::-1], valid, **options)
    ids = jnp.where(valid[:, None], experts - 1 - ids, experts)
    return ids[:, ::-1], weights[:, ::-1]


def by_weight(route, logits, valid, *, top_k, normalize):
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(valid[:, None], ids, logits.shape[-1]), jnp.where(valid[:, None], weights, 0)


def never_normalized(route, logits, valid, *, top_k, normalize):
    return route(logits, valid, top_k=top_k, normalize=False)


def padding_to_expert_0(route, logits, valid, **options):
    ids, weights = route(logits, valid, **options)
    return jnp.where(valid[:, None], ids, 0), weights


@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "mutant", [ties_to_the_higher_id, by_weight, never_normalized, padding_to_expert_0]
)
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec(17, 16, 4), name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is 0, there are 4 experts"),
        ({"top_k": 5}, "top_k is 5, there are 4 experts"),
        ({"top_k": 2, "implementation": "cuda"}, "op 'route' has no implementation 'cuda'"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        api.route(jnp.zeros((3, 4)), jnp.ones(3, bool), normalize=True, **options)
