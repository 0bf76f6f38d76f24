"""route against a sort in float64, and against transformers' own routers."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.route import RouteRule, api
from pallas_kernels.route.specs import RULES, SPECS
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, same_bits, wide

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
    for seed in contract.SEEDS:
        logits, valid, correction = case(spec, seed)
        ids, weights = run(RULES[spec.rule], implementation, logits, valid, correction)
        want_ids, want_weights = brute_force(logits, valid, correction, spec)
        assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
        np.testing.assert_array_equal(ids, want_ids)
        close("route", "float32", weights, want_weights)
        np.testing.assert_array_equal(np.asarray(weights)[~valid], 0)


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


def bits_of_a_row(implementation):
    """They depend on no other row."""
    logits = np.random.default_rng(0).standard_normal((17, 128)).astype(np.float32)
    rule = RULES["top8-normalized"]
    ids, weights = run(rule, implementation, logits, np.ones(17, bool))
    for row, others in contract.alone(logits):
        lone_ids, lone_weights = run(rule, implementation, others, np.arange(17) == row)
        np.testing.assert_array_equal(lone_ids[row], ids[row])
        same_bits(lone_weights[row], weights[row])


def a_nan_is_not_hidden(implementation):
    """Ids that exist and weights that are NaN, so that the token's output is NaN too."""
    for name in ("top4", "deepseek-v3", "wide-jitter"):
        logits = np.zeros((3, 64), np.float32)
        logits[1, 50] = np.nan
        ids, weights = run(RULES[name], implementation, logits, np.ones(3, bool))
        of_row = np.arange(3)[:, None] == [1] * ids.shape[1]
        np.testing.assert_array_equal(np.isnan(weights), of_row)
        assert np.all(np.diff(ids) > 0) and np.min(ids) >= 0 and np.max(ids) < 64


def a_correction_may_choose_experts_of_no_score(implementation):
    """The sum by which weights are divided is 1e-12 at least, as in ERNIE-4.5."""
    logits = np.array([[0, -29, -30, -31], [0, -900, -900, -900]], np.float32)
    correction = np.tile(np.float32([0, 1, 2, 1.5]), (2, 1))
    rule = RouteRule(2, normalize=True)
    ids, weights = run(rule, implementation, logits, np.ones(2, bool), correction)
    np.testing.assert_array_equal(ids, [[2, 3]] * 2)
    scores = np.exp([-30.0, -31.0])
    assert scores.sum() < 1e-12
    close("route", "float32", weights, np.array([scores / 1e-12, [0, 0]]))


EXTREMES = (0.0, -0.0, 1.0, 30.0, -30.0, 88.0, -104.0, 1e4, -1e4, 3e38, -3e38)


def any_logits(implementation):
    """As many different experts as the rule says, of no more groups than it allows, whatever the
    scores: also where they all underflow."""
    rng = np.random.default_rng(0)
    for rule in RULES.values():
        for extreme in (0.0, 0.5, 1.0):
            values = np.where(
                rng.random(24) < extreme, rng.choice(EXTREMES, 24), rng.uniform(-20, 20, 24)
            )
            logits = np.tile(values.astype(np.float32), (2, 1))
            routed = run(rule, implementation, logits, np.array([True, False]))
            ids, weights = map(np.asarray, routed)
            assert np.all(np.diff(ids[0]) > 0) and ids[0, 0] >= 0 and ids[0, -1] < 24
            assert np.all(weights[0] >= 0) and np.all(np.isfinite(weights[0]))
            groups = set(ids[0] // (24 // rule.groups))
            assert len(groups) <= rule.top_groups or rule.groups == 1
            if rule.normalize and rule.scoring == "softmax":
                np.testing.assert_allclose(weights[0].sum(), 1, rtol=1e-6)
            assert np.all(ids[1] == 24) and np.all(weights[1] == 0)


GROUPED = RouteRule(3, groups=2)
PAIRS = RouteRule(1, groups=4, group_score="top2")
MIXER = RouteRule(2, scoring="sparsemixer")
SOFTPLUS = RouteRule(2, scoring="sqrtsoftplus")
MANY = RouteRule(1, groups=32)


def refused(experts, rule, options):
    return api.route(jnp.zeros((3, experts)), jnp.ones(3, bool), rule=rule, **options)


def refused_rule(fields):
    return RouteRule(**{"top_k": 2, **fields})


def without_normalizing(arguments):
    return {"rule": dataclasses.replace(arguments["rule"], normalize=False)}


CONTRACTS = (
    Contract(
        "route",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(
            check_parts,
            bits_of_a_row,
            a_nan_is_not_hidden,
            a_correction_may_choose_experts_of_no_score,
            any_logits,
        ),
        mutant=Mutant(without_normalizing, SPECS[0]),
        refused=refused,
        refusals=(
            (4, RouteRule(5), {}, "top_k is 5, there are 4 experts"),
            (5, GROUPED, {}, "5 experts are not 2 groups of as many"),
            (4, GROUPED, {}, "top_k is 3, 1 groups have 2 experts"),
            (4, PAIRS, {}, "group_score 'top2' needs 2 experts in a group, 4 experts are 4 groups"),
            (4, MIXER, {"correction": jnp.zeros((2, 4))}, "sparsemixer takes no correction"),
            (4, RouteRule(2), {"correction": jnp.zeros((2, 5))}, r"correction is \(2, 5\), it"),
            (4, RouteRule(2), {"correction": jnp.zeros(4)}, r"it must be \[layers, 4\]"),
            (4, RouteRule(2), {"implementation": "cuda"}, "op 'route' has no implementation"),
            (32, MANY, {"implementation": "pallas"}, "at most 16 groups, not 32; 'xla'"),
            (4, SOFTPLUS, {"implementation": "pallas"}, "no score 'sqrtsoftplus'; 'xla' takes it"),
            (4, SOFTPLUS, {"implementation": "cpu"}, "no score 'sqrtsoftplus'; 'xla' takes it"),
        ),
    ),
    Contract(
        "rules of route",
        {},
        (),
        check,
        refused=refused_rule,
        refusals=(
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
            ({"scoring": "sparsemixer", "groups": 2}, "neither normalizes nor has groups"),
        ),
    ),
)
