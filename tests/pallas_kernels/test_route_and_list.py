"""route_and_list against route, and plan_resident against plan_routed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import sum_of_parts
from pallas_kernels.plan import plan_resident, plan_routed
from pallas_kernels.plan.record import record_size
from pallas_kernels.route import api, listed
from pallas_kernels.route.specs import PLANNED_SPECS, RULES, PlannedSpec
from tests.pallas_kernels.contract import close, compiled, each, same_bits
from tests.pallas_kernels.test_plan import cold
from tests.pallas_kernels.test_route_and_plan import LAYER, STACK_LAYER, case

LONE = -7
"""What records hold that nobody wrote."""


def check(spec, implementation):
    """Ids are the reference's, weights too but for rounding, and have the bits that route by itself
    has; the layer's record has both; active experts are listed once each, ascending."""
    for counters in (None, np.zeros(2, np.int32)):
        _check(spec, implementation, counters)


def _check(spec, implementation, counters, every=False):
    rule = RULES[spec.rule]
    options = {"rule": rule, "implementation": implementation}
    both = compiled(api.route_and_list, **options)
    reference = compiled(api.route, rule=rule, implementation="xla")
    alone = compiled(api.route, **options)
    pairs = spec.tokens * rule.top_k
    layers = np.int32(STACK_LAYER), np.int32(LAYER)
    for seed in range(2):
        logits, valid, correction = case(spec, seed)
        records = np.full((2, 2 * pairs), LONE, np.int32)
        ids, weights, records, active, count, after = both(
            *(logits, valid, correction, layers[0], records, layers[1], counters)
        )
        if counters is not None:
            np.testing.assert_array_equal(after, counters)
        want_ids, near = reference(sum_of_parts(logits), valid, correction, layers[0])
        np.testing.assert_array_equal(ids, want_ids)
        close("route", "float32", np.asarray(weights), np.asarray(near, np.float64))
        lone = alone(logits, valid, correction, layers[0])
        for got, want in zip((ids, weights), lone, strict=True):
            same_bits(got, want)
        kept = np.asarray(records)[LAYER]
        np.testing.assert_array_equal(kept[:pairs], np.ravel(ids))
        np.testing.assert_array_equal(kept[pairs:], np.ravel(weights).view(np.int32))
        assert np.all(np.asarray(records)[1 - LAYER] == LONE)
        named = np.asarray(active)[: int(count)]
        used = np.unique(np.asarray(ids)[valid])
        np.testing.assert_array_equal(named, np.arange(spec.experts) if every else used)


@each(api.IMPLEMENTATIONS, PLANNED_SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@pytest.mark.slow
def test_all_experts_are_listed_only_where_there_are_as_many_pairs(monkeypatch):
    """As expert_ffn has a program for each pair, it would leave out the others."""
    monkeypatch.setattr(listed, "MOST_FLAGS", 0)
    for counters in (None, np.zeros(2, np.int32)):
        _check(PlannedSpec(19, 64, 5, "top1"), "pallas", counters)
        _check(PlannedSpec(18, 16, 5, "top4"), "pallas", counters, every=True)


def test_which_steps_have_a_list():
    def tile(tokens, experts, rule="top1"):
        return listed.tile_of(tokens, experts, RULES[rule])

    assert tile(1, 128) == (1, 1) and tile(4, 128) == (4, 4) and tile(16, 128) == (16, 8)
    assert tile(17, 128) is None and tile(16, 512) is None and tile(4, 12, "sigmoid-groups") is None


def one_row_less(route_listed, logits, valid, *operands, **options):
    return route_listed(logits, valid.at[0].set(False), *operands, **options)


def other_record(route_listed, logits, valid, correction, i, records, layer, **options):
    return route_listed(logits, valid, correction, i, records, 1 - layer, **options)


def last_one_missing(route_listed, *operands, **options):
    *found, count, counters = route_listed(*operands, **options)
    return *found, count - 1, counters


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("mutant", [one_row_less, other_record, last_one_missing])
def test_contract_catches(mutant, monkeypatch):
    spec = PlannedSpec(4, 16, 5, "moonlight", correction=True)
    monkeypatch.setitem(api.LISTED, "pallas", functools.partial(mutant, api.LISTED["pallas"]))
    with pytest.raises(AssertionError):
        check(spec, "pallas")


def test_records_of_another_width_are_refused():
    operands = jnp.zeros((4, 8)), jnp.ones(4, bool), None, 0, jnp.zeros((2, 15), jnp.int32), 0
    with pytest.raises(ValueError, match=r"records are \(2, 15\), those of 8 pairs are \[M, 16\]"):
        api.route_and_list(*operands, rule=RULES["phi-3.5"])


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        (jnp.zeros(2), r"int32\[C\], not float32\[2\]"),
        (jnp.zeros((1, 2), jnp.int32), r"not int32\[1, 2\]"),
        (jnp.zeros(0, jnp.int32), r"counters \(0,\) are fewer than the 1 of a step"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_other_counters_are_refused(counters, message, implementation):
    operands = jnp.zeros((4, 8)), jnp.ones(4, bool), None, 0, jnp.zeros((2, 16), jnp.int32), 0
    with pytest.raises(ValueError, match=message):
        api.route_and_list(
            *operands, counters, rule=RULES["phi-3.5"], implementation=implementation
        )


def resident_tables(layers, experts, cells, rng):
    """Tables in which every expert is in a cell, some in a second one that is not theirs any
    more."""
    one = cold(cells, experts, cells)
    tables = {
        name: np.repeat(np.asarray(table), layers, axis=0)
        for name, table in one._asdict().items()
        if name != "victim_weights"
    }
    for layer in range(layers):
        order = rng.permutation(cells)[:experts]
        tables["owner"][layer, order] = np.arange(experts)
        tables["address"][layer] = tables["cell_row"][layer, order]
        left = np.setdiff1d(np.arange(cells), order)
        tables["owner"][layer, left] = rng.integers(0, experts, len(left))
        tables["last_used"][layer] = rng.integers(0, 9, cells)
        tables["frequency"][layer] = rng.integers(0, 9, experts)
        tables["clock"][layer] = 9 + layer
    return one._replace(**tables)


def resident_matches(function):
    rng = np.random.default_rng(0)
    layers, experts, top_k, tokens = 3, 37, 4, 5
    tables = resident_tables(layers, experts, experts + 6, rng)
    ids = np.sort(rng.integers(0, experts + 1, (layers, tokens, top_k)), axis=2).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    records = jnp.zeros((layers, record_size(tokens * top_k, experts)), jnp.int32)
    wanted = tables
    for layer in range(layers):
        wanted, records, _ = plan_routed(wanted, layer, ids[layer], weights[layer], records)
    got, counts = function(tables, ids.reshape(layers, -1))
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, jax.device_get(got), jax.device_get(wanted))
    same(np.asarray(counts), np.asarray(records)[:, 2 * tokens * top_k :])


def test_resident_tables_are_those_of_plans():
    resident_matches(jax.jit(plan_resident))


@pytest.mark.parametrize("field", ["last_used", "frequency", "clock"])
def test_resident_tables_that_stay_are_found(field):
    def stays(tables, ids):
        after, counts = plan_resident(tables, ids)
        return after._replace(**{field: jnp.asarray(getattr(tables, field))}), counts

    with pytest.raises(AssertionError):
        resident_matches(stays)
