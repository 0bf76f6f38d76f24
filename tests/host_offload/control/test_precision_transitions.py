"""Transitions beside a device in numpy: whatever the order of events, every step finds every expert
complete, the budget holds, and what is wanted comes about; also while slots change sides, where KV
writes into each slot that it gets at once."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, State
from host_offload.control.rules import PolicyError
from host_offload.control.transitions import ArrivingTransitions, Transitions
from host_offload.memory.placement import ResidentSpec
from host_offload.memory.tables import Move
from pallas_kernels.move import Moves, move
from pallas_kernels.plan import Tables
from tests.host_offload.control.policy_runs import scripted
from tests.host_offload.memory.resident_device import Device, Host, StaleRead, resident, spec_for

SHAPES: tuple[dict[str, Any], ...] = (
    dict(start=[[1, 1], [1, 0], [0, 1]], slots=6),
    dict(start=[[1, 1, 1, 1]], slots=4, cells_per_slot=(1, 3), slot_rows=6),
    dict(start=[[1, 1], [1, 1]], slots=5, columns=1),
    dict(start=[[1] * 8], slots=10, cells_per_slot=(1, 4), slot_rows=8, record_rows=(8, 2)),
    dict(start=[[1] * 6], slots=6, cells_per_slot=(2, 4), slot_rows=8),
    dict(start=[[1] * 6], slots=9, step_bytes=10, move_bytes=4),
    dict(start=[[1] * 5, [1] * 5], slots=12, spares=2, columns=2),
    dict(start=[[1] * 18], slots=4, cells_per_slot=(3, 7), record_rows=(7, 3), slot_rows=21),
    dict(
        **dict(start=[[1] * 16] * 2, slots=28, step_bytes=64),
        **dict(cells_per_slot=(1, 4), record_rows=(8, 2), slot_rows=8),
    ),
)


def spec_of(shape: dict[str, Any]) -> ResidentSpec:
    """With the capacity that the slots have."""
    where = resident(**{"capacity": (1, 1), **shape})
    total = where.start.size
    return resident(**{**shape, "capacity": (where.most_high(where.slots), total)})


def want_at_most(host: Host, order: np.ndarray) -> None:
    """The first experts of an order are wanted high, as many as there is room for now: what a
    policy does that sees the capacity."""
    assert host.transitions.capacity is not None
    host.wanted.reshape(-1)[:] = 1
    host.wanted.reshape(-1)[order[: host.transitions.capacity]] = 0
    host.want()


def settle(host: Host, slots: int, order: np.ndarray, most: int = 150) -> int:
    """Steps until experts have no more slots than that."""
    for step in range(most):
        host.aim(slots)
        if host.transitions.slots <= slots:
            return step
        want_at_most(host, order)
        host.run(1)
    raise AssertionError(f"{host.transitions.slots} slots left of {slots} wanted")


def finish(host: Host) -> None:
    """What was wanted last comes about. What was on the way in steps that failed is known first, or
    nobody would want it again."""
    host.transitions.keep_free = 0
    host.ends, host.device.lossy = lambda: True, False
    host.run(2)
    while host.unread:
        host.read()
    host.want()
    host.drain()
    np.testing.assert_array_equal(host.transitions.version, host.wanted)
    host.check_drained()
    said = host.transitions.stats()["precision"]
    assert said["peak_bytes"] <= said["budget_bytes"]


EVENTS = ["step"] * 5 + ["lost", "fails", "refused", "compact", "read", "line", "back", "order"]


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data())
def test_schedules_are_safe_and_finish(data):
    """Wishes for another high set and another number of slots, more often than either is carried
    out; copies in steps or beside them; steps that never reach the device or whose results are
    lost, moves that it refuses, several columns, bounds of a step, and versions of which several
    cells fit into a slot."""
    make = data.draw(st.sampled_from([Transitions, ArrivingTransitions]))
    host = Host(spec_of(data.draw(st.sampled_from(SHAPES))), make)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    host.ends = lambda: rng.random() < 0.6
    least, slots = host.where.least_slots(), host.where.slots
    order, aimed = np.arange(host.wanted.size), slots
    for _ in range(data.draw(st.integers(1, 20))):
        host.backwards = data.draw(st.booleans())
        what = data.draw(st.sampled_from(EVENTS))
        if what == "order":
            order = np.array(data.draw(st.permutations(order.tolist())))
        if what == "line":
            aimed = data.draw(st.integers(least, slots))
        if what == "back":
            host.give_back(data.draw(st.integers(0, len(host.kv))))
            aimed = host.transitions.slots
        host.aim(min(aimed, host.transitions.slots))
        if what == "compact" and aimed >= host.transitions.slots:
            host.transitions.keep_free = 1 - host.transitions.keep_free
        if data.draw(st.booleans()):
            want_at_most(host, order)
        host.dispatch(lost=what == "lost", fails=what == "fails", refused=what == "refused")
        while len(host.unread) > (what != "read"):
            host.read()
    host.transitions.keep_free = 0
    settle(host, min(aimed, host.transitions.slots), order)
    want_at_most(host, order)
    finish(host)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_one_pool_admits_what_the_papers_two_pools_would(shape):
    """DynaExq has a pool for each version; here slots are cut into cells of either. After any order
    of transitions, with as many high experts as fit, both versions have their spares at the same
    time, taken in any order, and no high one more: as pools of n + spares and E − n + spares."""
    where = dataclasses.replace(spec_of(shape), move_bytes=1 << 30)
    host, rng = Host(where), np.random.default_rng(0)
    for _ in range(12):
        want_at_most(host, rng.permutation(host.wanted.size))
        host.drain()
        alone = copy.deepcopy(host.transitions)
        for version in rng.permutation([0, 1] * where.spares).tolist():
            assert alone._reserve(version) is not None
        assert alone._reserve(0) is None


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_give_all_but_the_least_and_get_it_back(shape):
    """From as many high as fit down to all low, and up again; n follows the bytes."""
    where = spec_of(shape)
    host, least = Host(where), where.least_slots()
    order = np.arange(host.wanted.size)
    want_at_most(host, order)
    host.drain()
    assert np.sum(host.transitions.version == 0) == where.capacity[0] > 0
    for slots in range(where.slots - 1, least - 1, -1):
        settle(host, slots, order)
        assert np.sum(host.transitions.version == 0) <= where.most_high(slots)
    want_at_most(host, order)
    host.drain()
    assert len(host.kv) == where.slots - least and host.transitions.keep_free == 0
    with pytest.raises(ValueError, match=f"experts must keep {least} slots, for all of them in v1"):
        host.aim(least - 1)
    while host.kv:
        host.give_back(1)
    want_at_most(host, order)
    host.drain()
    assert np.sum(host.transitions.version == 0) == where.capacity[0]
    host.check_drained()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [Transitions, ArrivingTransitions])
def test_a_full_replacement_finishes(shape, make):
    """Both pools as full as they get: all high experts change places with low ones (papers.md 2.7,
    item 5)."""
    where = spec_of(shape)
    replace_all(Host(where, make), where.capacity[0])


@pytest.mark.parametrize("seed", [3, 8, 17])
def test_moves_of_a_step_can_be_carried_out_in_any_order(seed):
    """Several slots become free before a step: the op skips a cell that its list has twice, so its
    expert would be where the books do not say."""
    host = Host(spec_of(SHAPES[-1]))
    want_at_most(host, np.random.default_rng(seed).permutation(host.wanted.size))
    host.run(25)
    finish(host)
    assert host.transitions.stats()["precision"]["moves"] > 0


def replace_all(host: Host, n: int) -> None:
    order = np.arange(host.wanted.size)
    for first in (order, order[::-1]):
        host.wanted.reshape(-1)[:] = 1
        host.wanted.reshape(-1)[first[:n]] = 0
        host.want()
        host.drain()
    np.testing.assert_array_equal(host.transitions.version, host.wanted)
    host.check_drained()


def test_states_of_an_expert():
    """As observations give them: low, promoting, high, demoting, low;
    the version flips with the end of promoting."""
    host = Host(resident([[1, 1, 1]], 4, capacity=(2, 3)))
    seen = []

    def look() -> None:
        tables = host.device.pager.tables
        state = State(int(host.transitions.state(tables)[0, 0]))
        seen.append((state.name, int(host.transitions.version[0, 0])))

    look()
    for version in (0, 1):
        host.wanted[0, 0] = version
        host.want()
        host.dispatch()
        look()
        host.read()
        look()
        host.dispatch()
        look()
        host.read()
    assert seen == [
        ("RESIDENT", 1),
        ("PROMOTING", 1),
        ("RESIDENT", 0),
        ("RESIDENT", 0),
        ("DEMOTING", 0),
        ("RESIDENT", 1),
        ("RESIDENT", 1),
    ]


def test_the_pager_moves_as_the_op_does():
    rng, sizes = np.random.default_rng(0), (4, 2)
    device = Device(resident([[1, 0, 1], [0, 1, 1]], 8, capacity=(2, 6)))
    tables = device.pager.tables
    op = jax.jit(move, static_argnames="record_rows")
    for _ in range(10):
        layer, cell = (int(rng.integers(n)) for n in tables.cell_row.shape)
        row = int(rng.integers(31))
        moves = [Move(layer, cell, row), Move(-1, -1, -1)]
        before = Tables._make(map(jnp.asarray, device.pager.copy()))
        arena = jnp.asarray(device.tags, jnp.uint16)[:, None]
        listed = Moves._make(np.array(moves, np.int32).T)
        arena, after, done = op(arena, before, listed, record_rows=sizes)
        device.pager.move_cells(moves[:1])
        begin, size = int(before.cell_row[layer, cell]), sizes[tables.cell_version[layer, cell]]
        assert done.tolist() == [int(begin >= 0 and row not in (begin, 31)), 0]
        if done[0]:
            device.tags[row : row + size] = device.tags[begin : begin + size].copy()
        np.testing.assert_array_equal(arena[:, 0], device.tags.astype(np.uint16))
        for name in ("cell_row", "address"):
            np.testing.assert_array_equal(getattr(after, name), getattr(tables, name))


# ---- mistakes


class FreesUnread(Transitions):
    """Gives back the old cell when the next step is made, before the one that flipped the entry was
    read. Steps run in order, so nobody reads it; but nothing said yet that the entry flipped."""

    def entries(self, step, tables, *, between_layers=False):
        flying, self.flying = self.flying, []
        for flight in flying:
            self._settle(flight, True)
        return super().entries(step, tables, between_layers=between_layers)


class PublishesEarly(ArrivingTransitions):
    """An expert has its new version while bytes of it are still to come."""

    def publish(self, step, ended):
        super().publish(step, dict.fromkeys(self.flying_places(), True))


class GivesBackAtOnce(ArrivingTransitions):
    """Gives back the old cell when the entry changes, though a step that was dispatched before may
    read it."""

    def publish(self, step, ended):
        super().publish(step, ended)
        self.settle(step, None)


class GivesFullSlots(Transitions):
    """Gives away a slot that has a cell in it."""

    def aim(self, slots):
        gone = super().aim(slots)
        if not gone and slots < self.slots:
            gone = [int(self.cell_row[self.cell_row >= 0].max()) // self.resident.slot_rows]
        return gone


def shuffle(host: Host) -> None:
    """Experts change places for a while, more than fit at once."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        host.wanted.reshape(-1)[:] = 1
        high = rng.permutation(host.wanted.size)[: host.where.capacity[0]]
        host.wanted.reshape(-1)[high] = 0
        host.backwards = bool(rng.integers(2))
        host.want()
        host.transitions.keep_free = int(rng.integers(2))
        host.run(2)


WHERE: dict[str, Any] = dict(start=[[1, 1], [1, 1], [1, 1]], slots=7, capacity=(4, 6))


@pytest.mark.slow
def test_a_cell_is_reused_only_when_no_dispatched_step_can_read_it():
    """A mistake that no bit would show, since steps run in order."""
    with pytest.raises(AssertionError, match="can still read what is overwritten"):
        shuffle(Host(resident(**WHERE), make=FreesUnread))


@pytest.mark.parametrize("make", [Transitions, ArrivingTransitions])
def test_without_a_mistake_it_passes(make):
    host = Host(resident(**WHERE), make)
    rng = np.random.default_rng(1)
    host.ends = lambda: rng.random() < 0.6
    shuffle(host)
    finish(host)
    assert host.transitions.stats()["precision"]["moves"] > 0


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (PublishesEarly, StaleRead, "row"),
        (GivesBackAtOnce, AssertionError, "can still read what is overwritten"),
    ],
)
def test_a_version_that_is_published_wrongly_is_found(make, error, said):
    """DynaExq publishes a version when its last byte is there, and frees the old one when no step
    can read it."""
    host = Host(resident(**WHERE), make=make)
    rng = np.random.default_rng(1)
    host.ends = lambda: rng.random() < 0.6
    with pytest.raises(error, match=said):
        shuffle(host)


@pytest.mark.slow
def test_a_slot_that_is_given_away_too_early_is_found():
    where = spec_of(SHAPES[0])
    host, order = Host(where, make=GivesFullSlots, checked=False), np.arange(where.start.size)
    want_at_most(host, order)
    host.drain()
    with pytest.raises(StaleRead, match="row"):
        settle(host, where.least_slots(), order)


def test_a_version_never_has_more_cells_than_its_capacity_and_spares():
    """Though the slots have room for nine, and a policy wants all."""
    host = Host(resident(start=[[1] * 6], slots=9, capacity=(1, 6)))
    for _ in range(8):
        host.wanted.reshape(-1)[:] = 0
        host.want()
        host.run(1)
        assert host.transitions.pools.count_taken(0) == 1 + 1


# ---- in a controller


def test_policies_that_page_are_refused():
    spec = spec_for(resident([[1], [1], [1]], 4, capacity=(2, 3)))
    for field in ("stages", "cells", "fill_version"):
        policy = scripted(lambda seen: Decision(), writes={field}, moments={Moment.STEP_END})
        with pytest.raises(PolicyError, match=f"writes '{field}', and every expert is resident"):
            Controller(spec, [policy])
    fixed = resident([[1], [0]], 2, capacity=(1, 1), spares=0, columns=0)
    for field in ("transitions", "kv_pages"):
        policy = scripted(lambda seen: Decision(), writes={field}, moments={Moment.STEP_END})
        with pytest.raises(PolicyError, match=f"writes '{field}', and the versions are fixed"):
            Controller(spec_for(fixed), [policy])
