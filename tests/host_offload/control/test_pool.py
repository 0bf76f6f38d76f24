"""Cells of one pool: the cache that a policy names, whichever layer's turn it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Stage, StagedTransfer
from host_offload.control.pool import PooledStaging
from host_offload.control.rules import PolicyError
from host_offload.memory.budget import cells_per_layer
from host_offload.memory.pager import Pager
from host_offload.memory.tables import (
    HandOver,
    HandOvers,
    Residency,
    cold_tables,
    hand_over_cells,
)
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.eviction.weights import GlobalLRU
from host_offload.simulate.simulator import simulate
from pallas_kernels.plan import Tables
from pallas_kernels.plan.victim import victim_key
from tests.host_offload.control.policy_runs import scripted, spec
from tests.host_offload.traces.traces_of import random_routing, write_trace

LAYERS, EXPERTS, CELLS = 3, 6, 4


@st.composite
def used_tables(draw) -> Residency:
    """Granted cells of any number, with and without owners."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = Residency(
        *(np.full((LAYERS, n), -1, np.int32) for n in (CELLS,) * 4),
        *(np.full((LAYERS, EXPERTS), -1, np.int32) for _ in range(5)),
        np.full(LAYERS, 5, np.int32),
        np.array([1, 0, 0], np.int32),
    )
    rows = rng.permutation(LAYERS * CELLS)
    for place in np.ndindex(LAYERS, CELLS):
        if rng.random() < 0.7:
            tables.cell_row[place] = 10 * rows[place[0] * CELLS + place[1]]
    tables.cell_version[:] = rng.integers(2, size=(LAYERS, CELLS))
    for layer in range(LAYERS):
        experts = rng.permutation(EXPERTS)
        for cell in range(CELLS):
            if tables.cell_row[layer, cell] >= 0 and rng.random() < 0.7:
                tables.owner[layer, cell] = experts[cell]
                # Or its record is elsewhere by now.
                if rng.random() < 0.8:
                    tables.address[layer, experts[cell]] = tables.cell_row[layer, cell]
    return tables


numbers = st.tuples(
    st.integers(0, LAYERS - 1),
    st.integers(0, CELLS - 1),
    st.integers(-1, EXPERTS - 1),
    st.integers(0, LAYERS - 1),
    st.integers(0, CELLS - 1),
)
_compiled = jax.jit(hand_over_cells)


@given(used_tables(), st.lists(st.tuples(numbers, st.booleans()), max_size=8))
def test_cells_go_to_other_layers_on_the_device_as_in_the_simulator(tables, given_moves):
    """Most entries name the owner that is there; some do not fit."""
    moves = [
        HandOver(*m[:2], int(tables.owner[m[0], m[1]]) if right else m[2], *m[3:])
        for m, right in given_moves
    ]
    lists = np.full((5, 8), -1, np.int32)
    if moves:
        lists[:, : len(moves)] = np.array(moves).T
    found = _compiled(Tables(*map(jnp.array, tables)), HandOvers(*map(jnp.asarray, lists)))
    rows, resident = sorted(tables.cell_row.ravel()), np.sum(tables.address >= 0)
    Pager(tables).hand_over(moves)
    for name, a, b in zip(Tables._fields, found, tables, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert sorted(tables.cell_row.ravel()) == rows and np.sum(tables.address >= 0) <= resident
    held = tables.owner >= 0
    assert np.all(tables.cell_row[held] >= 0)


def cached(routing, cells: int, worth) -> list[list[int]]:
    """Hits of each step and layer of one cache of all layers, in plain Python. worth(used, count):
    the smallest goes; of equals who was used the longest ago, by time, then the smallest id."""
    cache, used, counts = set(), {}, {}
    hits = []
    for step, ids in enumerate(routing):
        hits.append([])
        for layer in range(LAYERS):
            active = {(layer, int(e)) for e in np.unique(ids[:, layer])}
            hits[-1].append(len(active & cache))
            kept = active & cache

            def key(place, now=step, at=layer):
                age = now - used[place][0] + (place[0] < at)
                return worth(age, counts[place]), used[place], place

            for place in sorted(active - cache):
                if len(cache) == cells:
                    victims = sorted(cache - active, key=key)
                    if not victims:
                        continue
                    cache.remove(victims[0])
                cache.add(place)
                kept.add(place)
            for place in active:
                counts[place] = counts.get(place, 0) + 1
                if place in kept:
                    used[place] = (step, layer)
    return hits


WORTH = {
    "global-lru": lambda age, count: 0,
    "global-lfu": lambda age, count: np.log2(1 + count),
}


@pytest.mark.parametrize("name", WORTH)
@pytest.mark.parametrize("cells", [1, 2, 4])
def test_it_is_one_cache_of_all_layers(name, cells, tmp_path):
    """Hit for hit; the order of experts with equal counts is by their last use."""
    routing = random_routing(np.random.default_rng(cells), 60, LAYERS, EXPERTS, 2)
    trace = write_trace(tmp_path / "t", routing, EXPERTS)
    found = simulate(trace, eviction=name, cells=cells, driver="host")
    assert found.hits.tolist() == cached(routing, cells * LAYERS, WORTH[name])
    # Three cells that layers use in turn: the least recently used is who comes next.
    assert found.hits.sum() > 0 or (name, cells) == ("global-lru", 1)
    assert found.read_through.sum() == 0 or cells == 1


@dataclasses.dataclass(frozen=True)
class Ahead:
    """Wants what it is told at ROUTED of layer 0, from a step on."""

    wanted: tuple[Stage, ...]
    since: int = 0
    moments: frozenset = frozenset({Moment.ROUTED})
    needs: frozenset = frozenset()
    writes: frozenset = frozenset({"stages"})
    pool: bool = True

    def init(self, spec):
        return None

    def decide(self, state, observation):
        due = observation.layer == 0 and observation.step >= self.since
        return None, Decision(stages=self.wanted if due else None)


def test_what_comes_ahead_takes_the_cell_of_whom_nobody_wants(tmp_path):
    """Six cells of all layers, and eight experts in turn. Who comes ahead of layer 2 takes what
    layer 1 had, which was not used for longest; without that the layer itself makes room."""
    first = np.array([[[0, 1], [0, 1], [0, 1]]])
    later = np.array([[[0, 1], [0, 1], [2, 3]]])
    trace = write_trace(tmp_path / "t", [first, later], EXPERTS)
    policy = Ahead((Stage(2, 2), Stage(2, 3)), since=1)
    found = simulate(trace, policies=[policy], cells=2, driver="host")
    assert found.hits.tolist() == [[0, 0, 0], [2, 0, 2]]
    assert found.staged[1].tolist() == [0, 0, 2]
    plain = simulate(trace, eviction="global-lru", cells=2, driver="host")
    assert plain.hits.tolist() == [[0, 0, 0], [2, 2, 0]]


def test_who_came_ahead_stays_until_its_layer(tmp_path):
    """Of six cells two are of experts that came ahead of layer 2 and were never used, so LFU would
    give them to what layer 1 misses. They go last; where nothing else is left they do go."""
    usual = np.array([[[0, 1], [0, 1], [0, 1]]])
    other = np.array([[[0, 1], [4, 5], [2, 3]]])
    trace = write_trace(tmp_path / "t", [usual, usual, usual, other], EXPERTS)
    policies = [POLICIES["global-lfu"](), Ahead((Stage(2, 2), Stage(2, 3)), 3, pool=False)]
    found = simulate(trace, policies=policies, cells=2, driver="host")
    assert found.hits[3].tolist() == [2, 0, 2] and found.staged[3].tolist() == [0, 0, 2]
    least = simulate(trace, policies=policies, cells=1, driver="host")
    assert least.read_through.sum() == 0, "two of three cells are of what came ahead"
    assert least.staged[3].tolist() == [0, 0, 2] and least.hits[3, 2] < 2


@dataclasses.dataclass(frozen=True)
class ByTurns:
    """LRU, with one pool from step `first` on and before step `last`."""

    first: int
    last: int
    pool: bool = True
    victim_weights: tuple = (1, 0, 0)
    moments: frozenset = frozenset({Moment.STEP_END})
    needs: frozenset = frozenset()
    writes: frozenset = frozenset({"victim_weights"})

    def init(self, spec) -> int:
        """The number of the next step."""
        return 0

    def pools(self, state: int) -> bool:
        return self.first <= state < self.last

    def decide(self, state, observation):
        return state + 1, Decision()


def test_without_a_pool_layers_have_even_shares_and_keep_them(tmp_path):
    """All hits are those of a pool, or of each layer's own cells once their residents are theirs
    again."""
    routing = random_routing(np.random.default_rng(0), 60, LAYERS, EXPERTS, 2)
    trace = write_trace(tmp_path / "t", routing, EXPERTS)
    given: dict[str, Any] = {"cells": 4, "driver": "host"}
    own, pooled = (simulate(trace, eviction=n, **given).hits for n in ("lru", "global-lru"))

    def run(first: int, last: int) -> tuple[np.ndarray, list[int]]:
        tables = cold_tables(np.full((LAYERS, 1), 4), EXPERTS, bound=EXPERTS)
        found = simulate(trace, policies=[ByTurns(first, last)], tables=tables, **given)
        return found.hits, np.sum(tables.cell_row >= 0, axis=1).tolist()

    (never, even), (always, moved), (hits, back) = run(60, 60), run(0, 60), run(20, 40)
    assert even == back == [4] * LAYERS != moved
    assert np.array_equal(never, own) and np.array_equal(always, pooled)
    assert np.array_equal(hits[:20], own[:20]) and np.array_equal(hits[50:], own[50:])
    assert not np.array_equal(hits[20:40], own[20:40])


def staging_of(used: int) -> tuple[PooledStaging, Residency]:
    """Two layers of four cells, which experts 0 to 3 own; layer 0's were used at 5, layer 1's at
    `used`."""
    told = spec(driver="host", version_bytes={"dense": np.full(2, 100)}, cell_bound=4)
    columns = np.arange(4)
    tables = Residency(
        *(np.array([columns, columns + 4], np.int32) * 10, np.zeros((2, 4), np.int32)),
        *(np.array([columns, columns], np.int32), np.array([[5] * 4, [used] * 4], np.int32)),
        *(np.full((2, 8), -1, np.int32) for _ in range(5)),
        np.array([5, 5], np.int32),
        np.array([1, 0, 0], np.int32),
    )
    tables.address[:, :4], tables.version[:] = tables.cell_row, 0
    return PooledStaging(told, lambda transfer: None), tables


def needed(*experts: int) -> np.ndarray:
    return np.isin(np.arange(8), experts)


def test_a_layer_has_no_more_cells_than_its_tables_have_numbers():
    """Layer 0 has all four numbers granted: it evicts its own, whoever else is worth less."""
    staging, tables = staging_of(used=1)
    staging.look(0, tables, 0, needed(1, 6), room=True)
    (move,) = staging.changes.hand_overs
    assert move == HandOver(0, 0, 0, 0, 0) and staging.handed == 0
    assert tables.owner[0].tolist() == [-1, 1, 2, 3] and tables.address[0, 0] == -1


def test_room_that_was_made_is_for_what_is_missing():
    """Layer 0 gets layer 1's first cell for expert 6; what comes ahead of layer 1 takes another."""
    staging, tables = staging_of(used=1)
    tables.cell_row[0, 3] = tables.owner[0, 3] = tables.address[0, 3] = -1
    staging.want("stages", [Stage(1, 7)], tables)
    staging.look(0, tables, 0, needed(0, 6), room=True)
    (entry,) = staging.entries(0, tables, between_layers=True)
    assert staging.changes.hand_overs == [HandOver(1, 0, 0, 0, 3)]
    assert entry == (1, 7, 0, 1) and tables.owner[0, 3] == -1 and tables.cell_row[0, 3] == 40


@dataclasses.dataclass
class Scanned:
    """A pool that compares all cells for each one that it gives away."""

    tables: Residency
    staging: PooledStaging
    layer: int = 0
    needed: frozenset[int] = frozenset()
    """Experts of `layer`."""

    def __post_init__(self):
        self.moves, self.flying = [], self.staging.flying_places()

    def look(self, room: bool) -> None:
        """Finds the cells that may go and what they are worth."""
        tables, self.worth = self.tables, {}
        came = {
            (layer, flight.transfer.cell, expert)
            for (layer, expert), flight in self.staging._unused.items()
            if flight.transfer.issued == STEP and layer >= self.layer
        }
        flying = {(t.layer, t.cell) for t in self.staging.in_flight}
        for place in {*zip(*np.nonzero(tables.cell_row >= 0), strict=True)} - flying:
            layer, owner = place[0], tables.owner[place]
            if layer == self.layer and (owner in self.needed or (room and owner < 0)):
                continue
            age = tables.clock[layer] + 1 + (layer >= self.layer) - tables.last_used[place]
            score = tables.frequency[layer, owner], tables.prior[layer, owner]
            key = (0, layer != self.layer, *place)
            if owner >= 0:
                key = (1, victim_key(age, *score, tables.victim_weights), -age, layer, owner)
            self.worth[place] = (*place, owner) in came, *key

    def give(self, layer: int, evict: bool, may_go: Callable[..., bool]) -> int | None:
        """Gives a layer the worst cell that may go, by its place and owner."""
        full = (self.tables.cell_row[layer] >= 0).all()
        places = [
            place
            for place in self.worth
            if may_go(place, self.tables.owner[place]) and not (full and place[0] != layer)
        ]
        if not places:
            return None
        giver, cell = place = min(places, key=self.worth.__getitem__)
        owner, to = int(self.tables.owner[place]), cell
        if giver != layer:
            to = int(np.argmax(self.tables.cell_row[layer] < 0))
        if giver != layer or evict:
            self.moves.append(HandOver(giver, cell, owner, layer, to))
            Pager(self.tables).hand_over(self.moves[-1:])
        del self.worth[place]
        return to

    def even(self) -> None:
        self.look(room=False)
        count = int(np.sum(self.tables.cell_row >= 0))
        shares = np.array(cells_per_layer(count, LAYERS, EXPERTS))
        for taker in range(LAYERS):
            while shares[taker] > np.sum(self.tables.cell_row[taker] >= 0):
                spare = np.sum(self.tables.cell_row >= 0, axis=1) > shares
                if self.give(taker, True, lambda place, _, spare=spare: spare[place[0]]) is None:
                    return

    def make_room(self) -> None:
        self.look(room=False)
        own = self.layer, -1
        lacks = sum(self.tables.address[self.layer, e] < 0 for e in self.needed)
        lacks -= sum((p[0], self.tables.owner[p]) == own for p in self.worth)
        for _ in range(lacks):
            self.give(self.layer, True, lambda place, owner: (place[0], owner) != own)

    def entries(self, queue: list[Stage]) -> list[tuple[int, int, int, int]]:
        rank, found = {stage[:2]: i for i, stage in enumerate(queue)}, []
        absent = [place for place in rank if self.tables.address[place] < 0]
        for layer, expert in absent:
            if (layer, expert) in self.flying:
                continue
            mine = rank[layer, expert]
            for may_go in (
                lambda place, owner, to=layer: (place[0], owner) == (to, -1),
                lambda place, owner: (place[0], owner) not in rank,
                lambda place, owner, mine=mine: rank.get((place[0], owner), mine) > mine,
            ):
                if (cell := self.give(layer, False, may_go)) is not None:
                    found.append((layer, expert, 0, cell))
                    break
        return found


STEP = 1


@given(used_tables(), st.integers(0, 2**32))
def test_a_sorted_pool_gives_the_cells_of_a_scan(tables, seed):
    """With transfers in flight, others that came ahead, of which some were evicted since, and
    queues that want residents too."""
    rng = np.random.default_rng(seed)
    tables.cell_version[:] = tables.version[:] = 0
    for name in ("last_used", "frequency", "prior"):
        table = getattr(tables, name)
        table[:] = rng.integers(4, size=table.shape)
    tables.victim_weights[:] = rng.integers(2, size=3)
    one = {"dense": np.full(LAYERS, 100)}
    told = spec(driver="host", version_bytes=one, layers=LAYERS, experts=EXPERTS, cell_bound=CELLS,
                staging_bytes=10_000, stage_entries=30)  # fmt: skip
    staging = PooledStaging(told, lambda transfer: None)
    staging.look(STEP, tables, 0, None, room=False)
    for done in (True, False):
        for layer, cell in np.argwhere(
            (tables.cell_row >= 0) & (rng.random((LAYERS, CELLS)) < 0.3)
        ):
            owner = tables.owner[layer, cell]
            others = [owner] if owner >= 0 and done else []
            for expert in [*others, *rng.integers(EXPERTS, size=rng.integers(2))]:
                place = int(layer), int(expert), 0, int(cell)
                issued = int(rng.integers(STEP + 1))
                staging.issue(StagedTransfer(*place, 100, "ahead", issued), 0, True)
        if done:
            staging.settle_between_layers(np.ones(1, np.int32))
    layer, active = int(rng.integers(LAYERS)), rng.random(EXPERTS) < 0.5
    places = rng.permutation([*np.ndindex(LAYERS, EXPERTS)])[: rng.integers(19)]
    queue, room = [Stage(at, expert) for at, expert in places.tolist()], bool(rng.integers(2))
    own, even = tables.copy(), Scanned(tables.copy(), staging)
    even.even()
    staging.begin_step(STEP, own, pools=False)
    assert staging.changes.hand_overs == even.moves and same_tables(own, even.tables)
    staging.changes.hand_overs.clear()
    staging.begin_step(STEP, tables, pools=True)
    scanned = Scanned(tables.copy(), staging, layer, frozenset(np.flatnonzero(active).tolist()))
    if room:
        scanned.make_room()
    scanned.look(room)
    wanted = scanned.entries(queue)
    staging.want("stages", queue, tables)
    staging.look(STEP, tables, layer, active, room)
    assert staging.entries(STEP, tables, between_layers=True) == wanted
    assert staging.changes.hand_overs == scanned.moves and same_tables(tables, scanned.tables)


def same_tables(a: Residency, b: Residency) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def test_what_a_pool_cannot_be_is_refused():
    with pytest.raises(PolicyError, match=r"one pool.*driver='device' lacks; driver='host'"):
        Controller(spec(), [dataclasses.replace(GlobalLRU(), moments=frozenset())])
    one = {"dense": np.full(2, 100)}
    with pytest.raises(PolicyError, match="which hold one version"):
        Controller(spec(driver="host"), [GlobalLRU()])
    writes = scripted(moments={Moment.STEP_END}, writes={"cells"})
    with pytest.raises(PolicyError, match="writes 'cells', and cells are of one pool"):
        Controller(spec(driver="host", version_bytes=one), [GlobalLRU(), writes])
    controller = Controller(spec(driver="host", version_bytes=one), [POLICIES["global-lfu"]()])
    assert controller.pool is not None and Moment.EXPERTS_BEGIN in controller.moments
