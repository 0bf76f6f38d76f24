"""plan against a plain Python pager, over histories of references and regrants."""

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from host_offload.memory.tables import empty_tables, regrant
from host_offload.policies.eviction.names import EVICTION
from pallas_kernels.plan import api, pallas_triton
from pallas_kernels.plan.listing import places
from pallas_kernels.plan.record import record_size
from pallas_kernels.plan.specs import SPECS, Spec
from pallas_kernels.plan.victim import MAX_PRIOR
from tests.pallas_kernels.contract import compiled, each
from tests.pallas_kernels.pager import INT, Pager, tables_of
from tests.pallas_kernels.plan_mutants import MUTANTS

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


check_routed = functools.partial(check, routed=True)


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


@each(api.IMPLEMENTATIONS, SPECS)
@given(data=st.data())
def test_contract(spec, implementation, data):
    check(spec, implementation, data.draw(histories(spec)))


@each(api.IMPLEMENTATIONS, SPECS, quick=1)
@given(data=st.data())
def test_contract_of_routed(spec, implementation, data):
    check_routed(spec, implementation, data.draw(histories(spec)))


@each(api.IMPLEMENTATIONS, (Spec(1, 40, 60), Spec(1, 70, 33)))
def test_more_cells_than_a_block(spec, implementation):
    """Sizes at which a kernel compares blocks, which pad."""
    config = pallas_triton.configuration(spec.cells, spec.experts)
    assert config.block < spec.cells
    rng = np.random.default_rng(0)

    def numbers(low, high, count):
        return rng.integers(low, high, count).tolist()

    actions = []
    for _ in range(20):
        active = rng.choice(spec.experts, rng.integers(spec.experts // 2), replace=False)
        actions.append(("reference", 0, frozenset(active.tolist())))
        actions.append(("prior", 0, int(rng.integers(spec.experts)), MAX_PRIOR))
    actions.insert(12, ("weights", (3, -2, 5)))
    actions.insert(30, ("regrant", 0, numbers(-1, 2, spec.cells)))
    versions = numbers(0, VERSIONS, spec.cells), numbers(-1, VERSIONS, spec.experts)
    check(spec, implementation, (*versions, [0] * spec.cells, actions))
    check_routed(spec, implementation, (*versions, [0] * spec.cells, actions))


def test_places_are_a_permutation():
    mask = np.array([False, True, True, False, True])
    np.testing.assert_array_equal(places(mask), [3, 0, 1, 4, 2])
    np.testing.assert_array_equal(places(mask[:1]), [0])


def cold(cells: int, experts: int, granted: int, eviction: str = "lru"):
    """Tables of one layer with so many cells granted; cell c lies at row 10·c."""
    tables = empty_tables(1, experts, cells, EVICTION[eviction])
    row = jnp.where(jnp.arange(cells) < granted, 10 * jnp.arange(cells), -1)
    return tables._replace(cell_row=row[None].astype(jnp.int32))


def refer(implementation, tables, *active):
    mask = np.isin(np.arange(tables.address.shape[1]), active)
    return compiled(api.plan, implementation=implementation)(tables, INT(0), mask)


@each(api.IMPLEMENTATIONS)
def test_an_active_expert_is_never_a_victim(implementation):
    """Even the least recently used one, and even if a miss then finds no cell."""
    tables, _ = refer(implementation, cold(5, 8, 2), 0)
    tables, _ = refer(implementation, tables, 1)
    tables, plan = refer(implementation, tables, 0, 5, 6)
    assert (plan.hits, plan.fill_count, plan.read_through) == (1, 1, 1)
    np.testing.assert_array_equal(plan.active, [0, 5, 6, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(plan.fill_expert, [5] + [-1] * 7)
    np.testing.assert_array_equal(tables.address[0], [0, -1, -1, -1, -1, 10, -1, -1])


@each(api.IMPLEMENTATIONS)
def test_without_cells_everything_is_read_through(implementation):
    tables, plan = refer(implementation, cold(5, 8, 0), 0, 3, 7)
    assert (plan.active_count, plan.read_through, plan.fill_count) == (3, 3, 0)
    np.testing.assert_array_equal(tables.address, -1)
    np.testing.assert_array_equal(tables.frequency[0], [1, 0, 0, 1, 0, 0, 0, 1])


@each(api.IMPLEMENTATIONS)
def test_a_superseded_copy_may_be_a_victim_of_its_own_expert_active(implementation):
    """Expert 2 has a copy of version 1 that its address points to and an older one of version 0:
    only the former is read, so the latter may go, and the address stays."""
    tables = cold(5, 8, 2)._replace(
        cell_version=INT([[0, 1, 0, 0, 0]]),
        owner=INT([[2, 2, -1, -1, -1]]),
        address=INT([[-1, -1, 10, -1, -1, -1, -1, -1]]),
        version=INT([[0, 0, 1, 0, 0, 0, 0, 0]]),
        clock=INT([4]),
    )
    tables, plan = refer(implementation, tables, 2, 6)
    assert (plan.hits, plan.fill_count) == (1, 1)
    np.testing.assert_array_equal(tables.owner[0, :2], [6, 2])
    np.testing.assert_array_equal(tables.address[0], [-1, -1, 10, -1, -1, -1, 0, -1])


@each(api.IMPLEMENTATIONS)
def test_counts_stay_exact_at_the_ends_of_the_clock(implementation):
    """Ages near 2^31: no overflow, the oldest goes."""
    tables = cold(5, 8, 3)._replace(
        owner=INT([[1, 2, 3, -1, -1]]),
        last_used=INT([[5, 1, 2**31 - 3, 0, 0]]),
        address=INT([[-1, 0, 10, 20, -1, -1, -1, -1]]),
        frequency=INT([[0, 2**31 - 2, 9, 1, 0, 0, 0, 0]]),
        clock=INT([2**31 - 2]),
    )
    tables, _ = refer(implementation, tables, 6)
    np.testing.assert_array_equal(tables.owner[0, :3], [1, 6, 3])


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS, mutants=True)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)

    @settings(
        max_examples=300,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    @given(histories(SPECS[0]))
    def search(history):
        check(SPECS[0], name, history)

    with pytest.raises(AssertionError):
        search()


@pytest.mark.parametrize(
    ("change", "active", "options", "message"),
    [
        ({}, 7, {}, r"active is \(7,\), the tables have 8 experts"),
        ({"cell_row": INT([[-1] * 5])}, 8, {}, "1 layers of cells, 2 of experts"),
        ({}, 8, {"implementation": "cuda"}, "op 'plan' has no implementation 'cuda'"),
    ],
)
def test_refuses(change, active, options, message):
    tables = empty_tables(2, 8, 5)._replace(**change)
    with pytest.raises(ValueError, match=message):
        api.plan(tables, 0, jnp.zeros(active, bool), **options)


@pytest.mark.parametrize(
    ("records", "weights", "message"),
    [
        ((2, 14), (2, 2), r"records are \(2, 14\), those of 4 pairs \(2, 13\)"),
        ((1, 13), (2, 2), r"records are \(1, 13\), those of 4 pairs \(2, 13\)"),
        ((2, 13), (4,), r"weights are \(4,\), ids \(2, 2\)"),
    ],
)
def test_routed_refuses(records, weights, message):
    ids, tables = jnp.zeros((2, 2), jnp.int32), empty_tables(2, 8, 5)
    with pytest.raises(ValueError, match=message):
        api.plan_routed(tables, 0, ids, jnp.zeros(weights), jnp.zeros(records, jnp.int32))
