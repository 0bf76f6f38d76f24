"""plan against a plain Python pager, over histories of references and regrants."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from host_offload.memory.tables import empty_tables, regrant
from host_offload.policies.eviction.eviction_names import EVICTION
from pallas_kernels.plan import api, plan_resident
from pallas_kernels.plan.record import record_size
from pallas_kernels.plan.specs import SPECS, Spec
from pallas_kernels.plan.victim import MAX_PRIOR
from tests.pallas_kernels.contract import Contract, Mutant, compiled
from tests.pallas_kernels.pager import INT, Pager, tables_of

WEIGHTS = ((1, 0, 0), (0, 1, 0), (1, 1, 0), (3, -2, 5), (0, 0, 1), (0, 0, 0))
VERSIONS = 2
PAIRS = 34
"""Of tokens and their choices, in test_contract_of_routed: no power of two."""


def histories(spec: Spec):
    """(version of each cell, fill version of each expert, cells granted at first, actions).

    Long enough to fill the cells and evict. Versions, priors and cells change on the way; there
    may be no cell at all, and experts that are not to be cached are common.
    """
    layer = st.integers(0, spec.layers - 1)
    expert = st.integers(0, spec.experts - 1)
    version = st.sampled_from([0, 0, 0, 1, -1, -2])
    prior = st.sampled_from([0, 1, -4096, MAX_PRIOR, -MAX_PRIOR])
    active = st.frozensets(expert, max_size=4)
    # 12 strategies: one_of counts several occurrences of the same object once.
    refer = [st.tuples(st.just("reference"), layer, active) for _ in range(12)]
    # −1: not granted; 0 and 1: two places of the cell in the arena.
    place = _list(st.sampled_from([0, 0, 0, 0, 1, -1]), spec.cells)
    action = st.one_of(
        *refer,
        st.tuples(st.just("regrant"), layer, place),
        st.tuples(st.just("fill_version"), layer, expert, version),
        st.tuples(st.just("prior"), layer, expert, prior),
        st.tuples(st.just("weights"), st.sampled_from(WEIGHTS)),
    )
    return st.tuples(
        _list(st.sampled_from([0, 0, 0, 1]), spec.cells),
        _list(version, spec.experts),
        st.one_of(st.just([0] * spec.cells), place),
        st.lists(action, min_size=12, max_size=30),
    )


def _list(values, size: int):
    return st.lists(values, min_size=size, max_size=size)


def rows(layer: int, place: list[int]) -> list[int]:
    return [-1 if p < 0 else 100 * layer + 7 * i + 3 * p for i, p in enumerate(place)]


def check(spec: Spec, implementation: str, history, routed: bool = False) -> None:
    """Plans and tables equal the pager's after every action. routed: of plan_routed."""
    versions, fill_versions, granted, actions = history
    op = compiled(api.plan, implementation=implementation)
    if routed:
        op = compiled(api.plan_routed, versions=VERSIONS, implementation=implementation)
        size = record_size(PAIRS, spec.experts, VERSIONS)
        records = np.full((spec.layers, size), -7, INT)
    move = compiled(regrant)
    weights = WEIGHTS[0]
    pagers = [Pager(versions, spec.experts) for _ in range(spec.layers)]
    for layer, pager in enumerate(pagers):
        pager.regrant(rows(layer, granted))
        pager.fill_version = list(fill_versions)
    tables = tables_of(pagers, weights)
    for kind, *action in actions:
        if kind == "weights":
            (weights,) = action
            tables = tables._replace(victim_weights=INT(weights))
        elif kind == "reference":
            layer, active = action
            absent = [e for e in active if e not in pagers[layer].where]
            want = pagers[layer].reference(active, weights)
            if routed:
                ids, shares = routing(active, spec.experts)
                tables, got_records, got = op(tables, INT(layer), ids, shares, records)
                records[layer] = record_of(ids, shares, want, absent, pagers[layer])
                np.testing.assert_array_equal(got_records, records, strict=True)
            else:
                mask = np.isin(np.arange(spec.experts), list(active))
                tables, got = op(tables, INT(layer), mask)
            equal(got, want)
        elif kind == "regrant":
            layer, place = action
            pagers[layer].regrant(rows(layer, place))
            tables = move(tables, tables_of(pagers, weights).cell_row)
        else:
            layer, expert, value = action
            getattr(pagers[layer], kind)[expert] = value
            tables = tables._replace(**{kind: getattr(tables_of(pagers, weights), kind)})
        equal(tables, tables_of(pagers, weights))


def routing(active: Iterable[int], experts: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights [T, K] of tokens that are routed to these experts, some of them several
    times, one token that is padding, and some that are routed nowhere else."""
    ids = np.full(PAIRS, experts, INT)
    for i, expert in enumerate(itertools.islice(itertools.cycle(active or [experts]), PAIRS - 3)):
        ids[(5 * i) % PAIRS] = expert
    weights = np.linspace(-1, 2, PAIRS, dtype=np.float32)
    return ids.reshape(-1, 2), weights.reshape(-1, 2)


def record_of(ids, weights, plan, absent: list[int], pager: Pager) -> np.ndarray:
    """The record of a reference that found these experts absent; pager: after it."""
    bits = np.zeros(32 * -(-len(pager.version) // 32), np.uint8)
    bits[absent] = 1
    filled = [v for v in plan.fill_version if v >= 0]
    through = [pager.version[e] for e in absent if e not in plan.fill_expert]
    totals = [plan.active_count, plan.hits, plan.fill_count, plan.read_through]
    by_version = [v.count(i) for v in (filled, through) for i in range(VERSIONS)]
    words = np.packbits(bits, bitorder="little").view(INT)
    return np.concatenate([ids.ravel(), weights.view(INT).ravel(), totals, words, by_version])


def equal(got, want) -> None:
    for name, a, b in zip(type(want)._fields, jax.device_get(got), want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name, strict=True)


def cold(cells: int, experts: int, granted: int, eviction: str = "lru"):
    """Tables of one layer with so many cells granted; cell c lies at row 10·c."""
    tables = empty_tables(1, experts, cells, EVICTION[eviction])
    row = jnp.where(jnp.arange(cells) < granted, 10 * jnp.arange(cells), -1)
    return tables._replace(cell_row=row[None].astype(jnp.int32))


def check_routed(spec, implementation, history):
    check(spec, implementation, history, routed=True)


def more_cells_than_a_block(implementation):
    """Sizes at which a kernel compares blocks, which pad."""
    for spec in (Spec(1, 40, 60), Spec(1, 70, 33)):
        rng, actions = np.random.default_rng(0), []

        def numbers(low, high, count, rng=rng):
            return rng.integers(low, high, count).tolist()

        for _ in range(20):
            active = rng.choice(spec.experts, rng.integers(spec.experts // 2), replace=False)
            actions.append(("reference", 0, frozenset(active.tolist())))
            actions.append(("prior", 0, int(rng.integers(spec.experts)), MAX_PRIOR))
        actions.insert(12, ("weights", (3, -2, 5)))
        actions.insert(30, ("regrant", 0, numbers(-1, 2, spec.cells)))
        versions = numbers(0, VERSIONS, spec.cells), numbers(-1, VERSIONS, spec.experts)
        check(spec, implementation, (*versions, [0] * spec.cells, actions))
        check_routed(spec, implementation, (*versions, [0] * spec.cells, actions))


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


def check_resident(sizes, implementation):
    """Tables and counts are those of plan_routed, layer by layer."""
    rng = np.random.default_rng(0)
    layers, experts, top_k, tokens = dataclasses.astuple(sizes)
    tables = resident_tables(layers, experts, experts + 6, rng)
    ids = np.sort(rng.integers(0, experts + 1, (layers, tokens, top_k)), axis=2).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    records = jnp.zeros((layers, record_size(tokens * top_k, experts)), jnp.int32)
    wanted, plan = tables, compiled(api.plan_routed)
    for layer in range(layers):
        wanted, records, _ = plan(wanted, np.int32(layer), ids[layer], weights[layer], records)
    got, counts = compiled(RESIDENT[implementation])(tables, ids.reshape(layers, -1))
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, jax.device_get(got), jax.device_get(wanted))
    same(np.asarray(counts), np.asarray(records)[:, 2 * tokens * top_k :])


@dataclasses.dataclass(frozen=True)
class Resident:
    layers: int
    experts: int
    top_k: int
    tokens: int


RESIDENT = {"xla": plan_resident}


def refused(change, active, options):
    tables = empty_tables(2, 8, 5)._replace(**change)
    return api.plan(tables, 0, jnp.zeros(active, bool), **options)


def refused_routed(records, weights):
    ids, tables = jnp.zeros((2, 2), jnp.int32), empty_tables(2, 8, 5)
    return api.plan_routed(tables, 0, ids, jnp.zeros(weights), jnp.zeros(records, jnp.int32))


CONTRACTS = (
    Contract(
        "plan",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        histories=histories,
        facts=(more_cells_than_a_block,),
        mutant=Mutant(
            lambda a: {"tables": a["tables"]._replace(victim_weights=-a["tables"].victim_weights)},
            SPECS[0],
        ),
        refused=refused,
        refusals=(
            ({}, 7, {}, r"active is \(7,\), the tables have 8 experts"),
            ({"cell_row": INT([[-1] * 5])}, 8, {}, "1 layers of cells, 2 of experts"),
            ({}, 8, {"implementation": "cuda"}, "op 'plan' has no implementation 'cuda'"),
        ),
    ),
    Contract(
        "plan_routed",
        api.IMPLEMENTATIONS,
        SPECS,
        check_routed,
        histories=histories,
        refused=refused_routed,
        refusals=(
            ((2, 14), (2, 2), r"records are \(2, 14\), 4 pairs need \(2, 13\)"),
            ((1, 13), (2, 2), r"records are \(1, 13\), 4 pairs need \(2, 13\)"),
            ((2, 13), (4,), r"weights are \(4,\), ids \(2, 2\)"),
        ),
    ),
    Contract(
        "plan_resident",
        RESIDENT,
        (Resident(3, 37, 4, 5),),
        check_resident,
        mutant=Mutant(lambda a: {"ids": 0 * a["ids"]}, Resident(3, 37, 4, 6)),
    ),
)
