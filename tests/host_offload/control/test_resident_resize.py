"""Slots that change sides while versions change: beside a device in numpy, KV writes into each slot
that it gets at once, so a copy that still lay there is found by the next step."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from host_offload.control.interface import Moment, Observation
from host_offload.control.transitions import Transitions
from host_offload.memory.pools import CellPools
from host_offload.policies.budget.peak_headroom import ResidentHeadroom
from host_offload.policies.precision.dynaexq import DynaExq
from tests.host_offload.control.policy_runs import spec as policy_spec
from tests.host_offload.memory.resident_device import Host, StaleRead, resident, spec_for

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

SHAPES: tuple[dict[str, Any], ...] = (
    dict(start=[[1, 1, 1], [1, 1, 1]], slots=8, capacity=(5, 6)),
    dict(start=[[1] * 8], slots=10, cells_per_slot=(1, 4), slot_rows=8, record_rows=(8, 2)),
    dict(start=[[1] * 6], slots=6, cells_per_slot=(2, 4), slot_rows=8),
    dict(start=[[1] * 6], slots=9, step_bytes=10, move_bytes=4),
    dict(start=[[1] * 5, [1] * 5], slots=12, spares=2, columns=2),
)


def spec_of(shape: dict[str, Any]):
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


@settings(max_examples=60)
@given(st.data())
def test_schedules_with_moving_slots_are_safe_and_finish(data):
    """Wishes for another high set and another line, more often than either is carried out, steps
    that fail or whose results are lost; then what was wanted last comes about."""
    host = Host(spec_of(data.draw(st.sampled_from(SHAPES))))
    least, slots = host.where.least_slots(), host.where.slots
    order, aimed = np.arange(host.wanted.size), slots
    for _ in range(data.draw(st.integers(1, 20))):
        host.backwards = data.draw(st.booleans())
        what = data.draw(st.sampled_from(["step"] * 4 + ["lost", "fails", "line", "back", "order"]))
        if what == "order":
            order = np.array(data.draw(st.permutations(order.tolist())))
        if what == "line":
            aimed = data.draw(st.integers(least, slots))
        if what == "back":
            host.give_back(data.draw(st.integers(0, len(host.kv))))
            aimed = host.transitions.slots
        host.aim(min(aimed, host.transitions.slots))
        if data.draw(st.booleans()):
            want_at_most(host, order)
        host.dispatch(lost=what == "lost", fails=what == "fails")
        while len(host.unread) > 1:
            host.read()
    host.run(2)
    while host.unread:
        host.read()
    settle(host, min(aimed, host.transitions.slots), order)
    want_at_most(host, order)
    host.drain()
    np.testing.assert_array_equal(host.transitions.version, host.wanted)
    host.check_drained()
    said = host.transitions.stats()["precision"]
    assert said["peak_bytes"] <= said["budget_bytes"]


def test_a_slot_goes_when_it_can_be_done_without():
    """8 experts, 1 high or 4 low a slot: 10 slots hold 6 high ones with the spares. For 9 slots one
    has to be demoted, and the spare slot stays until that is done."""
    where = spec_of(SHAPES[1])
    host, order = Host(where), np.arange(8)
    want_at_most(host, order)
    host.drain()
    high = where.capacity[0]
    assert where.least_slots(high) == 10
    host.aim(9)
    assert host.kv == [] and host.transitions.capacity == where.most_high(9) < high
    host.run(3)
    assert host.kv == [], "nobody was demoted yet"
    steps = settle(host, 9, order)
    assert 0 < steps < 8 and len(host.kv) == 1
    said = host.transitions.stats()["precision"]
    assert said["slots"] == 9 and said["hi_capacity"] == where.most_high(9)
    assert said["budget_bytes"] == 9 * where.slot_rows * 2
    assert said["peak_bytes"] <= said["budget_bytes"]


def test_a_wish_that_is_taken_back_changes_nothing():
    host, order = Host(spec_of(SHAPES[0])), np.arange(6)
    want_at_most(host, order)
    host.drain()
    before = host.transitions.capacity
    least = host.where.least_slots()
    host.aim(least)
    assert host.transitions.capacity == host.where.most_high(least) < before
    host.aim(host.transitions.slots)
    assert (host.transitions.capacity, host.transitions.keep_free) == (before, 0)


class GivesFullSlots(Transitions):
    """Gives away a slot that has a cell in it."""

    def aim(self, slots):
        gone = super().aim(slots)
        if not gone and slots < self.slots:
            gone = [int(self.cell_row[self.cell_row >= 0].max()) // self.resident.slot_rows]
        return gone


class ForgetsTheSpares(Transitions):
    """Gives a free slot away at once, whoever is high."""

    def _surplus(self):
        return self.slots - self._aimed


def test_a_slot_that_is_not_empty_is_found(monkeypatch):
    monkeypatch.setattr(Host, "check", lambda self: None)
    monkeypatch.setattr(Host, "_overwrite", lambda self, rows: None)
    where = spec_of(SHAPES[0])
    host = Host(where, make=GivesFullSlots)
    want_at_most(host, np.arange(6))
    host.drain()
    with pytest.raises(StaleRead):
        settle(host, where.least_slots(), np.arange(6))


def test_without_the_spares_transitions_stand_still():
    where = spec_of(SHAPES[1])
    host = Host(where, make=ForgetsTheSpares)
    want_at_most(host, np.arange(8))
    host.drain()
    with pytest.raises(AssertionError, match="slots left of"):
        settle(host, where.least_slots(), np.arange(8))


def test_pools_take_and_give_free_slots():
    pools = CellPools(range(3), 4, (4, 2), (1, 2))
    row = pools.allocate(1)
    assert pools.remove(2) == [2, 1] and pools.slots == (0,)
    with pytest.raises(ValueError, match="1 slots wanted, 0 are free"):
        pools.remove(1)
    pools.add([5, 7])
    assert pools.free_slots == 2 and pools.allocate(0) in (20, 28)
    pools.release(row)
    assert sorted(pools.slots) == [0, 5, 7]


# ---- policies


def test_dynaexq_follows_the_capacity_at_once():
    """n falls and rises between intervals; who goes is the coldest, who comes the hottest."""
    where = resident([[1] * 4, [1] * 4], 10, capacity=(6, 8))
    policy = DynaExq(resized=True, margin=0.0, alpha=0.0)
    state = policy.init(spec_for(where))
    counts = np.array([[9, 5, 7, 1], [2, 8, 4, 6]], np.int32)
    version, resting = np.ones((2, 4), np.int8), np.ones((2, 4), np.int8)

    def asked(moment: Moment, capacity: int, **more):
        nonlocal state
        seen = Observation(
            *(moment, 1, 1, 1, -1, -1, 0.0),
            capacity=capacity,
            version=version,
            state=resting,
            **more,
        )
        state, decision = policy.decide(state, seen)
        return decision.transitions

    queue = asked(Moment.INTERVAL, 6, counts=counts)
    assert {(t.layer, t.expert) for t in queue} == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)}
    version[...] = 1 - state.high
    assert asked(Moment.STEP_END, 6, counts=counts) is None
    queue = asked(Moment.STEP_END, 4, counts=9 - counts)
    assert {tuple(t) for t in queue} == {(0, 1, 1), (1, 2, 1)}, "by the interval's scores"
    version[...] = 1 - state.high
    queue = asked(Moment.STEP_END, 5, counts=counts)
    assert {tuple(t) for t in queue} == {(0, 1, 0)}
    assert DynaExq().moments == {Moment.INTERVAL} and "capacity" not in DynaExq().needs


def test_the_closed_form_never_asks_for_less_than_all_low():
    where = resident([[1] * 4, [1] * 4], 12, capacity=(7, 8))
    told = spec_for(where, page_bytes=4, slot_bytes=8, budget_bytes=20 * 8, kv_floor_bytes=8)
    state = ResidentHeadroom().init(told)
    assert state.division.least_cap == -(-where.least_slots() // 2) == 3
    seen = Observation(
        *(Moment.TURN_END, 1, 1, 0, 7, -1, 0.0),
        kv_used=39,
        kv_swapped=0,
        kv_pages=16,
        waiting=3,
        waiting_tokens=900,
    )
    state, decision = ResidentHeadroom().decide(state, seen)
    assert decision.cells is None and decision.kv_pages == (20 - 6) * 2
    with pytest.raises(ValueError, match="for two versions with every expert resident"):
        ResidentHeadroom().init(policy_spec())
