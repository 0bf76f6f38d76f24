"""Routing together with what is made of it, as one kernel where there is one: route_and_plan,
route_and_list, norm_route_and_list, against the ops that they are made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.tables import empty_tables
from pallas_kernels.combine import row_squares
from pallas_kernels.linear import LinearOptions, Norm, norm_linear_parts, sum_of_parts
from pallas_kernels.plan import plan_routed
from pallas_kernels.plan.record import record_size
from pallas_kernels.route import RouteOperands, api
from pallas_kernels.route.specs import PLANNED_SPECS, RULES, PlannedSpec
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, same_bits
from tests.pallas_kernels.ops.plan import cold

EPS, LAYER, STACK_LAYER, STEPS = 1e-6, 1, 0, 4

LONE = -7
"""What records hold that nobody wrote."""


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
    return logits, RouteOperands(valid, correction, np.int32(STACK_LAYER))


def check_routing(spec, implementation, given, ids, weights):
    """Ids are the reference's, weights too but for rounding; both have the bits that route by
    itself has."""
    rule, (logits, of) = RULES[spec.rule], given
    want_ids, near = compiled(api.route, rule=rule, implementation="xla")(sum_of_parts(logits), *of)
    np.testing.assert_array_equal(ids, want_ids)
    close("route", "float32", np.asarray(weights), np.asarray(near, np.float64))
    lone = compiled(api.route, rule=rule, implementation=implementation)(logits, *of)
    for got, want in zip((ids, weights), lone, strict=True):
        same_bits(got, want)


def tables_of(spec):
    """Two layers' tables, every cell granted and none owned; some experts are not to be cached."""
    tables = cold(spec.cells, spec.experts, spec.cells)
    two = {
        name: np.repeat(np.asarray(table), 2, axis=0)
        for name, table in tables._asdict().items()
        if name != "victim_weights"
    }
    two["fill_version"][:, ::7] = -1
    two["fill_version"][:, 3::5] = -spec.versions
    return tables._replace(**two, victim_weights=np.asarray(tables.victim_weights))


def check_planned(spec, implementation):
    """Tables, records and plans are those of plan_routed."""
    rule, static = RULES[spec.rule], {"versions": spec.versions}
    both = compiled(api.route_and_plan, rule=rule, implementation=implementation, **static)
    plan = compiled(plan_routed, implementation="xla", **static)
    size = record_size(spec.tokens * rule.top_k, spec.experts, spec.versions)
    tables, records = tables_of(spec), np.full((2, size), LONE, np.int32)
    layer = np.int32(LAYER)
    for seed in range(STEPS):
        given = case(spec, seed)
        made = both(*given, tables, layer, records)
        ids, weights, *rest = jax.device_get(made)
        check_routing(spec, implementation, given, ids, weights)
        same = functools.partial(np.testing.assert_array_equal, strict=True)
        planned = jax.device_get(plan(tables, layer, ids, weights, records))
        jax.tree.map(same, tuple(rest), planned)
        tables, records, _ = rest
    assert np.any(records[LAYER] != LONE) and np.all(records[1 - LAYER] == LONE)


def check_listed(spec, implementation):
    """The layer's record has ids and weights; active experts are listed once each, ascending."""
    rule = RULES[spec.rule]
    both = compiled(api.route_and_list, rule=rule, implementation=implementation)
    pairs = spec.tokens * rule.top_k
    for seed, counters in enumerate((None, np.zeros(2, np.int32))):
        given = case(spec, seed)
        records = np.full((2, 2 * pairs), LONE, np.int32)
        made = both(*given, records, np.int32(LAYER), counters)
        ids, weights, records, active, count, after = jax.device_get(made)
        if counters is not None:
            np.testing.assert_array_equal(after, counters)
        check_routing(spec, implementation, given, ids, weights)
        kept = np.concatenate([ids.ravel(), weights.ravel().view(np.int32)])
        np.testing.assert_array_equal(records[LAYER], kept)
        assert np.all(records[1 - LAYER] == LONE)
        np.testing.assert_array_equal(active[: int(count)], np.unique(ids[given[1].valid]))


@dataclasses.dataclass(frozen=True)
class Scored:
    """A case of norm_route_and_list."""

    tokens: int
    experts: int
    hidden: int
    rule: str
    correction: bool = False
    squares: bool = False
    dtype: str = "bfloat16"


SCORED = (
    Scored(3, 48, 512, "top4-normalized"),
    Scored(16, 64, 512, "moonlight", correction=True, squares=True),
    Scored(1, 128, 1024, "top8-normalized", squares=True),
    Scored(8, 60, 600, "ernie", dtype="float16"),
    Scored(2, 16, 256, "phi-3.5"),
    Scored(17, 16, 512, "top4"),
    Scored(4, 12, 512, "sigmoid-groups"),
    Scored(3, 1100, 512, "top1"),
    Scored(3, 48, 512, "top4-normalized", dtype="float32"),
)
"""The last four are for two kernels or none: too many tokens, groups, a product of one part, the
dtype."""


def scored_case(spec, seed):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, spec.dtype)

    x, factors = draw(spec.tokens, spec.hidden), draw(2, spec.hidden, scale=0.5)
    weights = draw(2, spec.experts, spec.hidden, scale=spec.hidden**-0.5)
    correction = rng.standard_normal((2, spec.experts)).astype(np.float32) / 8
    valid, i = np.arange(spec.tokens) % 3 != 1, np.int32(1)
    return x, factors, weights, RouteOperands(valid, correction if spec.correction else None, i)


def options_of(rule, implementation):
    names = dict.fromkeys(("implementation", "norm_implementation"), implementation)
    return api.NormRouteOptions(rule, LinearOptions(**names), implementation)


def as_one(given, records, layer, counters, squares, *, options):
    x, factors, weights, operands = given
    of = operands, records, layer, counters
    return api.norm_route_and_list(x, Norm(factors, EPS, squares), weights, *of, options=options)


def one_by_one(given, records, layer, counters, squares, *, options):
    x, factors, weights, operands = given
    of = Norm(factors, EPS, squares), weights, operands.stack_layer, options.linear
    rows, logits = norm_linear_parts(x, *of)
    of = jax.lax.optimization_barrier(logits), operands, records, layer, counters
    name = options.implementation
    return rows, *api.route_and_list(*of, rule=options.rule, implementation=name)


def check_scored(spec, implementation):
    """The bits of both ops, of all that they give; counters are zeros again."""
    rule = RULES[spec.rule]
    options = options_of(rule, implementation)
    op, apart = compiled(as_one, options=options), compiled(one_by_one, options=options)
    records = np.full((3, 2 * spec.tokens * rule.top_k), LONE, np.int32)
    counters = np.zeros(2, np.int32)
    for seed in range(2):
        operands = scored_case(spec, seed)
        squares = row_squares(operands[0]) if spec.squares else None
        of = operands, records, np.int32(2), counters, squares
        *got, active, count, after = map(np.asarray, op(*of))
        *wanted, listed, number, _ = map(np.asarray, apart(*of))
        for mine, other in zip(got, wanted, strict=True):
            same_bits(mine, other)
        assert count == number
        np.testing.assert_array_equal(active[:count], listed[:count])
        np.testing.assert_array_equal(after, counters)


def refused_planned(logits, records, correction, implementation):
    records = jnp.zeros(records or (2, record_size(8, 8)), jnp.int32)
    correction = None if correction is None else jnp.zeros(correction)
    operands = RouteOperands(jnp.ones(4, bool), correction, 0)
    given = jnp.zeros(logits), operands, empty_tables(2, 3, 8), 1
    rule = api.RouteRule(2)
    return api.route_and_plan(*given, records, rule=rule, implementation=implementation)


def refused_listed(counters, width, implementation):
    records = jnp.zeros((2, width), jnp.int32)
    operands = jnp.zeros((4, 8)), RouteOperands(jnp.ones(4, bool), None, 0), records, 0
    rule = RULES["phi-3.5"]
    return api.route_and_list(*operands, counters, rule=rule, implementation=implementation)


def refused_scored(dtype="bfloat16", factors=512, width=24):
    x, of_norm, weights, to = scored_case(SCORED[0], 0)
    records, norm = jnp.zeros((3, width), jnp.int32), Norm(of_norm[:, :factors], EPS)
    operands = x.astype(dtype), norm, weights, to, records, 0, jnp.zeros(1, jnp.int32)
    options = options_of(RULES[SCORED[0].rule], "pallas")
    return api.norm_route_and_list(*operands, options=options)


WRONG = PlannedSpec(4, 16, 5, "moonlight", correction=True)

CONTRACTS = (
    Contract(
        "route_and_plan",
        api.IMPLEMENTATIONS,
        PLANNED_SPECS,
        check_planned,
        mutant=Mutant(lambda a: {"logits": a["logits"][:1]}, WRONG, api.AS_ONE, "pallas"),
        refused=refused_planned,
        refusals=[
            (*given, implementation, message)
            for implementation in ("xla", "pallas")
            for *given, message in (
                ((4, 8), (2, 3), None, "records are .*, 8 pairs need"),
                ((4, 8), None, (2, 7), r"correction is \(2, 7\), it must be \[layers, 8\]"),
                ((4, 1), None, None, "top_k is 2, there are 1 experts"),
            )
        ],
    ),
    Contract(
        "route_and_list",
        api.IMPLEMENTATIONS,
        PLANNED_SPECS,
        check_listed,
        mutant=Mutant.in_record(
            "operands", "valid", lambda v: v.at[0].set(False), WRONG, api.LISTED, "pallas"
        ),
        refused=refused_listed,
        refusals=[
            (*given, implementation, message)
            for implementation in ("xla", "pallas")
            for *given, message in (
                (None, 15, r"records are \(2, 15\), 8 pairs need \[M, 16\]"),
                (jnp.zeros(2), 16, r"int32\[C\], not float32\[2\]"),
                (jnp.zeros((1, 2), jnp.int32), 16, r"not int32\[1, 2\]"),
                (jnp.zeros(0, jnp.int32), 16, r"counters \(0,\) are fewer than the 1 of a step"),
            )
        ],
    ),
    Contract(
        "norm_route_and_list",
        # Of others it is the ops themselves, which have contracts.
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas")},
        SCORED,
        check_scored,
        refused=refused_scored,
        refusals=(
            ("float32", "not float32; 'xla' takes it"),
            ("bfloat16", 4, "x has 512 columns, the norm has 4"),
            ("bfloat16", 512, 15, r"records are \(3, 15\), 12 pairs need \[M, 24\]"),
        ),
    ),
)
