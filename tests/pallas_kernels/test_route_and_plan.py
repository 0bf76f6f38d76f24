"""route_and_plan against the two ops it is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory.tables import empty_tables
from pallas_kernels.linear import sum_of_parts
from pallas_kernels.plan import plan_routed
from pallas_kernels.plan.record import record_size
from pallas_kernels.route import api, planned
from pallas_kernels.route.specs import PLANNED_SPECS, RULES, PlannedSpec
from tests.pallas_kernels.contract import close, compiled, each, same_bits
from tests.pallas_kernels.test_plan import cold

LAYER, STACK_LAYER, STEPS = 1, 0, 4


def case(spec, seed):
    """Logits in parts, whose sums are not near to each other; every third token is padding."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((spec.parts, spec.tokens, spec.experts)).astype(np.float32)
    valid = np.arange(spec.tokens) % 3 != 1
    logits[:, ~valid] = np.nan
    correction = None
    if spec.correction:
        correction = np.full((2, spec.experts), np.nan, np.float32)
        correction[STACK_LAYER] = rng.standard_normal(spec.experts) / 8
    return logits, valid, correction


def tables_of(spec):
    """Two layers' tables, every cell granted and none owned; some experts are not to be cached."""
    tables = cold(spec.cells, spec.experts, spec.cells)
    two = {
        name: np.repeat(np.asarray(table), 2, axis=0)
        for name, table in tables._asdict().items()
        if name != "victim_weights"
    }
    wanted = two["fill_version"].copy()
    wanted[:, ::7] = -1
    wanted[:, 3::5] = -spec.versions
    return tables._replace(**two)._replace(
        fill_version=wanted, victim_weights=np.asarray(tables.victim_weights)
    )


def check(spec, implementation):
    """Ids, tables, records and plans are the references', weights too but for rounding; and those
    have the bits that route by itself has."""
    rule = RULES[spec.rule]
    both = compiled(
        *(api.route_and_plan,),
        rule=rule,
        versions=spec.versions,
        implementation=implementation,
    )
    reference = compiled(api.route, rule=rule, implementation="xla")
    alone = compiled(api.route, rule=rule, implementation=implementation)
    plan = compiled(plan_routed, versions=spec.versions, implementation="xla")
    size = record_size(spec.tokens * rule.top_k, spec.experts, spec.versions)
    tables, records = tables_of(spec), np.full((2, size), -7, np.int32)
    layers = np.int32(STACK_LAYER), np.int32(LAYER)
    for seed in range(STEPS):
        logits, valid, correction = case(spec, seed)
        ids, weights, got_tables, got_records, work = both(
            *(logits, valid, correction, layers[0], tables, layers[1], records)
        )
        want_ids, near = reference(sum_of_parts(logits), valid, correction, layers[0])
        np.testing.assert_array_equal(ids, want_ids)
        close("route", "float32", np.asarray(weights), np.asarray(near, np.float64))
        lone = alone(logits, valid, correction, layers[0])
        for got, want in zip((ids, weights), lone, strict=True):
            same_bits(got, want)
        planned = plan(tables, layers[1], np.asarray(ids), np.asarray(weights), records)
        jax.tree.map(
            functools.partial(np.testing.assert_array_equal, strict=True),
            jax.device_get((got_tables, got_records, work)),
            jax.device_get(planned),
        )
        tables, records = jax.device_get((got_tables, got_records))
    assert np.any(records[LAYER] != -7) and np.all(records[1 - LAYER] == -7)


@each(api.IMPLEMENTATIONS, PLANNED_SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


def test_which_steps_are_one_kernel():
    def rows(tokens, experts, rule="top1"):
        return planned.rows_of(tokens, experts, experts, RULES[rule])

    assert rows(4, 128) == 8 and rows(16, 128) == 16 and rows(4, 8) == 4 and rows(4, 512) == 8
    assert rows(17, 128) is None and rows(16, 512) is None
    assert rows(4, 12, "sigmoid-groups") is None


def fewer_rows(route_planned, logits, valid, *operands, **options):
    return route_planned(logits, valid.at[0].set(False), *operands, **options)


def other_layer(route_planned, logits, valid, correction, i, *operands, **options):
    return route_planned(logits, valid, correction, i + 1, *operands, **options)


def first_part_alone(route_planned, logits, *operands, **options):
    return route_planned(logits[:1], *operands, **options)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("mutant", [fewer_rows, other_layer, first_part_alone])
def test_contract_catches(mutant, monkeypatch):
    spec = PlannedSpec(4, 16, 5, "moonlight", correction=True)
    monkeypatch.setitem(api.AS_ONE, "pallas", functools.partial(mutant, api.AS_ONE["pallas"]))
    with pytest.raises(AssertionError):
        check(spec, "pallas")


@pytest.mark.parametrize(
    ("logits", "records", "correction", "message"),
    [
        ((4, 8), (2, 3), None, "records are .*, those of 8 pairs"),
        ((4, 8), None, (2, 7), r"correction is \(2, 7\), it must be \[layers, 8\]"),
        ((4, 1), None, None, "top_k is 2, there are 1 experts"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_refuses(logits, records, correction, message, implementation):
    tables = empty_tables(2, 3, 8)
    records = records or (2, record_size(8, 8))
    with pytest.raises(ValueError, match=message):
        api.route_and_plan(
            *(jnp.zeros(logits), jnp.ones(4, bool)),
            None if correction is None else jnp.zeros(correction),
            *(0, tables, 1, jnp.zeros(records, jnp.int32)),
            rule=api.RouteRule(2),
            implementation=implementation,
        )
