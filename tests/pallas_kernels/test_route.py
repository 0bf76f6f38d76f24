"""route against a sort in float64, and against transformers' own routers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.route import RouteRule, api, why_not_pallas
from pallas_kernels.route.specs import RULES, SPECS, Spec
from tests.pallas_kernels.contract import (
    NATIVE,
    SEEDS,
    close,
    compiled,
    each,
    same_bits,
    wide,
)

LAYER = 1


def case(spec, seed):
    """Logits in steps of 1/4, so that a row has many exact ties and no near ones; every third row
    is padding and holds NaN. Corrections in steps of 1/8, other layers' NaN."""
    rng = np.random.default_rng(seed)
    logits = np.round(4 * rng.standard_normal((spec.tokens, spec.experts))) / 4
    valid = np.arange(spec.tokens) % 3 != 1
    logits[~valid] = np.nan
    correction = None
    if spec.correction:
        correction = np.full((2, spec.experts), np.nan, np.float32)
        correction[LAYER] = np.round(4 * rng.standard_normal(spec.experts)) / 8
    return logits.astype(np.float32), valid, correction


def run(rule, implementation, logits, valid, correction=None):
    op = compiled(api.route, rule=rule, implementation=implementation)
    return op(logits, valid, correction, np.int32(LAYER))


def brute_force(logits, valid, correction, spec):
    rule = RULES[spec.rule]
    ids = np.full((spec.tokens, rule.top_k), spec.experts, np.int32)
    weights = np.zeros(ids.shape)
    for t in np.flatnonzero(valid):
        if rule.scoring == "sparsemixer":
            found = sparsemixer(wide(logits[t]), rule.jitter)
        else:
            added = 0 if correction is None else wide(correction[LAYER])
            found = best_experts(wide(logits[t]), added, rule)
        ids[t] = sorted(found)
        weights[t] = [rule.scale * found[i] for i in ids[t]]
    return ids, weights


def best_experts(logits, correction, rule):
    """Expert -> weight."""
    exp = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if rule.scoring == "sigmoid" else exp / exp.sum()
    groups = (scores + correction).reshape(rule.groups, -1)
    of_group = np.sort(groups)[:, -1 if rule.group_score == "max" else -2 :].sum(axis=1)
    allowed = np.argsort(-of_group, kind="stable")[: rule.top_groups]
    choice = np.full_like(groups, -np.inf)
    choice[allowed] = groups[allowed]
    chosen = np.argsort(-choice.ravel(), kind="stable")[: rule.top_k]
    total = scores[chosen].sum() if rule.normalize else 1
    return {i: scores[i] / total for i in chosen}


def sparsemixer(logits, jitter):
    """Expert -> weight."""
    found, left = {}, logits.copy()
    for _ in range(2):
        top = left.max()
        near = (top - logits) / np.maximum(np.abs(logits), top) <= 2 * jitter
        found[left.argmax()] = 1 / np.exp(left - top)[near].sum()
        left[left.argmax()] = -np.inf
    return found


def check(spec, implementation):
    for seed in SEEDS:
        logits, valid, correction = case(spec, seed)
        ids, weights = run(RULES[spec.rule], implementation, logits, valid, correction)
        want_ids, want_weights = brute_force(logits, valid, correction, spec)
        assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
        np.testing.assert_array_equal(ids, want_ids)
        close("route", "float32", weights, want_weights)
        np.testing.assert_array_equal(np.asarray(weights)[~valid], 0)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


def check_parts(implementation):
    """Logits in parts have the routing of their sum in ascending order, to the bit."""
    rng = np.random.default_rng(0)
    parts = (100 ** rng.uniform(-1, 1, (5, 17, 60))).astype(np.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    other = parts[::-1].cumsum(axis=0)[-1]
    assert np.any(other != total)  # so another order would show
    valid = np.arange(17) != 3
    rule = RouteRule(4)
    want = run(rule, implementation, total, valid)
    for got, wanted in zip(run(rule, implementation, parts, valid), want, strict=True):
        same_bits(got, wanted)


@each(api.IMPLEMENTATIONS)
def test_logits_come_in_parts(implementation):
    check_parts(implementation)


@each(api.IMPLEMENTATIONS)
def test_a_row_is_independent_of_the_others(implementation):
    logits = np.random.default_rng(0).standard_normal((17, 128)).astype(np.float32)
    rule = RULES["top8-normalized"]
    ids, weights = run(rule, implementation, logits, np.ones(17, bool))
    for t in (0, 8, 16):
        others = np.full_like(logits, np.nan)
        others[t] = logits[t]
        lone_ids, lone_weights = run(rule, implementation, others, np.arange(17) == t)
        np.testing.assert_array_equal(lone_ids[t], ids[t])
        same_bits(lone_weights[t], weights[t])


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        # An interpreted kernel takes four seconds to compile for a rule.
        pytest.param(
            *(name, implementation),
            marks=[
                *[NATIVE] * (implementation == "cpu"),
                *[pytest.mark.slow] * (implementation == "pallas"),
                *[pytest.mark.nightly] * (implementation == "pallas" and name != "top4"),
            ],
        )
        for name in ("top4", "deepseek-v3", "wide-jitter")
        for implementation in api.IMPLEMENTATIONS
    ],
)
def test_a_nan_is_not_hidden(name, implementation):
    """Ids that exist and weights that are NaN, so that the token's output is NaN too."""
    logits = np.zeros((3, 64), np.float32)
    logits[1, 50] = np.nan
    ids, weights = run(RULES[name], implementation, logits, np.ones(3, bool))
    np.testing.assert_array_equal(np.isnan(weights), np.arange(3)[:, None] == [1] * ids.shape[1])
    assert np.all(np.diff(ids) > 0) and np.min(ids) >= 0 and np.max(ids) < 64


@each(api.IMPLEMENTATIONS)
def test_a_correction_may_choose_experts_of_no_score(implementation):
    """The sum by which weights are divided is 1e-12 at least, as in ERNIE-4.5."""
    logits = np.array([[0, -29, -30, -31], [0, -900, -900, -900]], np.float32)
    correction = np.tile(np.float32([0, 1, 2, 1.5]), (2, 1))
    rule = RouteRule(2, normalize=True)
    ids, weights = run(rule, implementation, logits, np.ones(2, bool), correction)
    np.testing.assert_array_equal(ids, [[2, 3]] * 2)
    scores = np.exp([-30.0, -31.0])
    assert scores.sum() < 1e-12
    close("route", "float32", weights, np.array([scores / 1e-12, [0, 0]]))


LOGITS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 30.0, -30.0, 88.0, -104.0, 1e4, -1e4, 3e38, -3e38]),
    st.floats(-20, 20, width=32),
)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("xla", marks=pytest.mark.slow),  # a program for each rule
        pytest.param("pallas", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
@settings(max_examples=60)
@given(name=st.sampled_from(sorted(RULES)), values=st.lists(LOGITS, min_size=24, max_size=24))
def test_any_logits(implementation, name, values):
    """As many different experts as the rule says, of no more groups than it allows, whatever the
    scores: also where they all underflow."""
    rule, logits = RULES[name], np.tile(np.float32(values), (2, 1))
    ids, weights = (
        np.asarray(array) for array in run(rule, implementation, logits, np.array([True, False]))
    )
    assert np.all(np.diff(ids[0]) > 0) and ids[0, 0] >= 0 and ids[0, -1] < 24
    assert np.all(weights[0] >= 0) and np.all(np.isfinite(weights[0]))
    assert len(set(ids[0] // (24 // rule.groups))) <= rule.top_groups or rule.groups == 1
    if rule.normalize and rule.scoring == "softmax":
        np.testing.assert_allclose(weights[0].sum(), 1, rtol=1e-6)
    assert np.all(ids[1] == 24) and np.all(weights[1] == 0)


def transformers_router(name, experts, correction):
    """The router of a family's block, whose logits are its input."""
    import torch
    import transformers
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

    rule = RULES[name]
    sizes = {"hidden_size": experts, "num_experts_per_tok": rule.top_k}
    sizes |= {"n_group": rule.groups, "topk_group": rule.top_groups}
    sizes |= {"routed_scaling_factor": rule.scale, "norm_topk_prob": rule.normalize}
    if name == "deepseek-v2":
        router = DeepseekV2TopkRouter(
            transformers.DeepseekV2Config(
                **sizes, n_routed_experts=experts, topk_method="group_limited_greedy"
            )
        )
    elif rule.scoring == "sigmoid":
        router = DeepseekV3TopkRouter(
            transformers.DeepseekV3Config(**sizes, n_routed_experts=experts)
        )
        router.e_score_correction_bias.copy_(torch.from_numpy(correction[LAYER]))
    elif name == "ernie":
        router = Ernie4_5_MoeTopKRouter(
            transformers.Ernie4_5_MoeConfig(
                hidden_size=experts, moe_num_experts=experts, moe_k=rule.top_k
            )
        )
        router.moe_statics.e_score_correction_bias.data = torch.from_numpy(correction[LAYER])[None]
    else:
        router = PhimoeTopKRouter(
            transformers.PhimoeConfig(
                hidden_size=experts, num_local_experts=experts, router_jitter_noise=rule.jitter
            )
        )
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    return router.eval()


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v3", "moonlight", "wide-jitter", "ernie"]
)
def test_agrees_with_transformers(name):
    import torch

    rng, experts = np.random.default_rng(3), 64
    logits = rng.standard_normal((200, experts)).astype(np.float32)
    corrected = RULES[name].scoring == "sigmoid" or name == "ernie"
    correction = rng.uniform(-1, 1, (2, experts)).astype(np.float32) if corrected else None
    ids, weights = run(RULES[name], "xla", logits, np.ones(200, bool), correction)
    with torch.no_grad():
        _, *theirs = transformers_router(name, experts, correction)(torch.from_numpy(logits))
    theirs = sorted(theirs, key=lambda array: array.dtype != torch.float32)  # weights, ids
    want_weights, want_ids = (array.numpy() for array in theirs)
    order = np.argsort(want_ids, axis=1)
    np.testing.assert_array_equal(ids, np.take_along_axis(want_ids, order, axis=1))
    close("route", "float32", weights, wide(np.take_along_axis(want_weights, order, axis=1)))


def ties_to_the_higher_id(route, logits, valid, correction, layer, *, rule):
    experts = logits.shape[-1]
    ids, weights = route(logits[:, ::-1], valid, correction, layer, rule=rule)
    ids = jnp.where(valid[:, None], experts - 1 - ids, experts)
    return ids[:, ::-1], weights[:, ::-1]


def by_weight(route, logits, valid, correction, layer, *, rule):
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), rule.top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(valid[:, None], ids, logits.shape[-1]), jnp.where(valid[:, None], weights, 0)


def padding_to_expert_0(route, logits, valid, *args, rule):
    ids, weights = route(logits, valid, *args, rule=rule)
    return jnp.where(valid[:, None], ids, 0), weights


def never_normalized(route, *args, rule):
    return route(*args, rule=dataclasses.replace(rule, normalize=False))


def catches(mutant, spec, implementation, monkeypatch):
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    name = f"{implementation}_mutant_{id(broken)}"
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(spec, name)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "mutant", [ties_to_the_higher_id, by_weight, never_normalized, padding_to_expert_0]
)
def test_contract_catches(mutant, implementation, monkeypatch):
    catches(mutant, Spec(17, 16, "top4-normalized"), implementation, monkeypatch)


def weights_of_the_choice(route, logits, valid, correction, layer, *, rule):
    ids, weights = route(logits, valid, correction, layer, rule=rule)
    added = jnp.append(correction[layer], 0.0)[ids]
    return ids, jnp.where(valid[:, None], weights + added, 0)


def no_correction(route, logits, valid, correction, layer, *, rule):
    return route(logits, valid, None, layer, rule=rule)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", [no_correction, weights_of_the_choice])
def test_contract_catches_a_wrong_correction(mutant, monkeypatch):
    catches(mutant, Spec(17, 64, "deepseek-v3", correction=True), "xla", monkeypatch)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-v3", {"group_score": "max"}),
        ("deepseek-v3", {"scale": 1.0}),
        ("deepseek-v2", {"top_groups": 8}),
        ("wide-jitter", {"jitter": 0.05}),
    ],
)
def test_rules_are_told_apart(name, fields, monkeypatch):
    def mutant(route, *args, rule):
        return route(*args, rule=dataclasses.replace(rule, **fields))

    catches(mutant, Spec(17, 64, name), "xla", monkeypatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"scoring": "tanh"}, "scoring is 'tanh'; there are softmax, sigmoid, sparsemixer"),
        ({"group_score": "mean"}, "group_score is 'mean'; there are max, top2"),
        ({"groups": 2, "top_groups": 3}, "top_groups is 3, there are 2 groups"),
        ({"groups": 0}, "top_groups is 1, there are 0 groups"),
        ({"top_groups": 0}, "top_groups is 0, there are 1 groups"),
        ({"scale": 0.0}, "scale must be a positive number, not 0.0"),
        ({"scale": float("nan")}, "scale must be a positive number, not nan"),
        ({"jitter": -0.1}, "jitter must be a number from zero up, not -0.1"),
        ({"jitter": 0.1}, "only sparsemixer has a jitter, softmax has none"),
        ({"scoring": "sparsemixer", "top_k": 3}, "sparsemixer chooses 2 experts, top_k is 3"),
        ({"scoring": "sparsemixer", "normalize": True}, "sparsemixer neither normalizes nor"),
        ({"scoring": "sparsemixer", "groups": 2}, "sparsemixer neither normalizes nor has groups"),
    ],
)
def test_refuses_rules(fields, message):
    with pytest.raises(ValueError, match=message):
        RouteRule(**{"top_k": 2, **fields})


GROUPED = RouteRule(3, groups=2)
PAIRS = RouteRule(1, groups=4, group_score="top2")
MIXER = RouteRule(2, scoring="sparsemixer")
MANY = RouteRule(1, groups=32)


@pytest.mark.parametrize(
    ("experts", "rule", "options", "message"),
    [
        (4, RouteRule(5), {}, "top_k is 5, there are 4 experts"),
        (5, GROUPED, {}, "5 experts are not 2 groups of as many"),
        (4, GROUPED, {}, "top_k is 3, 1 groups have 2 experts"),
        (4, PAIRS, {}, "group_score 'top2' needs 2 experts in a group, 4 experts are 4 groups"),
        (4, MIXER, {"correction": jnp.zeros((2, 4))}, "sparsemixer takes no correction"),
        (4, RouteRule(2), {"correction": jnp.zeros((2, 5))}, r"correction is \(2, 5\), it must be"),
        (4, RouteRule(2), {"correction": jnp.zeros(4)}, r"it must be \[layers, 4\]"),
        (4, RouteRule(2), {"implementation": "cuda"}, "op 'route' has no implementation 'cuda'"),
        (
            32,
            MANY,
            {"implementation": "pallas"},
            "the kernel takes at most 16 groups, not 32; 'xla'",
        ),
    ],
)
def test_refuses(experts, rule, options, message):
    with pytest.raises(ValueError, match=message):
        api.route(jnp.zeros((3, experts)), jnp.ones(3, bool), rule=rule, **options)


def test_says_which_rules_the_kernel_cannot_follow():
    assert {name: why_not_pallas(rule) for name, rule in RULES.items()} == dict.fromkeys(RULES)
    assert why_not_pallas(MANY) == "the kernel takes at most 16 groups, not 32"
