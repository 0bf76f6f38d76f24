"""Transitions beside a device in numpy: whatever the order of events, every step finds every expert
complete, the budget holds, and what is wanted comes about."""

import contextlib
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
from host_offload.control.transitions import Transitions
from host_offload.memory.tables import Move
from pallas_kernels.move import Moves, move
from pallas_kernels.plan import Tables
from tests.host_offload.control.policy_runs import scripted
from tests.host_offload.memory.resident_device import Device, Host, StaleRead, resident, spec_for
from tests.host_offload.memory.test_precision_pools import partial_slots

THREE_LAYERS = resident([[1], [1], [1]], 4, capacity=(2, 3))
"""One expert a layer, so that a cell may go from a layer to an earlier one."""
ONE_LAYER = resident([[1, 1, 1]], 4, capacity=(2, 3))
EVENTS = (0, 1, 2, "dispatch", "read", "compact")
"""By number: another version is wanted of an expert; a step is made; the oldest one is read; a slot
is wanted free, or no longer."""


def legal(host: Host) -> list:
    return [
        event
        for event in EVENTS
        if (event != "read" or host.unread) and (event != "dispatch" or len(host.unread) < 2)
    ]


def happen(host: Host, event) -> None:
    match event:
        case "dispatch":
            host.dispatch()
        case "read":
            host.read()
        case "compact":
            host.transitions.keep_free = 1 - host.transitions.keep_free
        case expert:
            host.toggle(*np.argwhere(host.wanted >= 0)[expert].tolist())


def finish(host: Host) -> None:
    """What was wanted last comes about, if it fits."""
    host.transitions.keep_free = 0
    while np.sum(host.wanted == 0) > host.where.capacity[0]:
        host.wanted[tuple(np.argwhere(host.wanted == 0)[0])] = 1
    # What was on the way in steps that failed is known first, or nobody would want it again.
    host.run(2)
    while host.unread:
        host.read()
    host.want()
    host.drain()
    np.testing.assert_array_equal(host.transitions.version, host.wanted)
    host.check_drained()


def explore(host: Host, events: int) -> int:
    """All orders of so many events from here; returns how many there are."""
    if events == 0:
        finish(host)
        return 1
    count = 0
    for event in legal(host):
        after = host.clone()
        happen(after, event)
        count += explore(after, events - 1)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("where", [THREE_LAYERS, ONE_LAYER], ids=["layers", "layer"])
def test_every_order_of_four_events(where):
    assert explore(Host(where), 4) > 500


@pytest.mark.nightly
@pytest.mark.parametrize("where", [THREE_LAYERS, ONE_LAYER], ids=["layers", "layer"])
def test_every_order_of_six_events(where):
    assert explore(Host(where), 6) > 20_000


# ---- beyond


SHAPES: tuple[dict[str, Any], ...] = (
    dict(start=[[1, 1], [1, 0], [0, 1]], slots=6, capacity=(2, 6)),
    dict(start=[[1, 1, 1, 1]], slots=4, cells_per_slot=(1, 3), slot_rows=6, capacity=(1, 4)),
    dict(start=[[1, 0, 1]], slots=3, cells_per_slot=(2, 4), slot_rows=8, capacity=(1, 3)),
    dict(start=[[1, 1], [1, 1]], slots=5, columns=1, capacity=(2, 4)),
    dict(start=[[1, 1, 1, 1, 1]], slots=6, step_bytes=10, move_bytes=4, capacity=(3, 5)),
    dict(start=[[1, 1, 1, 1, 1]], slots=7, spares=2, capacity=(3, 5)),
    SEVERAL_HIGH := dict(
        start=[[1] * 18],
        slots=4,
        cells_per_slot=(3, 7),
        record_rows=(7, 3),
        slot_rows=21,
        capacity=(2, 18),
    ),
)


EVENTS_OF_A_STEP = ["lost", "fails", "refused", "compact", "read"]


def schedule(data, host: Host, steps: int) -> None:
    wishes = st.lists(st.integers(0, host.wanted.size - 1), max_size=3)
    for _ in range(steps):
        host.backwards = data.draw(st.booleans())
        for expert in data.draw(wishes):
            happen(host, expert)
        what = data.draw(st.sampled_from(["step"] * 5 + EVENTS_OF_A_STEP))
        if what == "compact":
            happen(host, what)
        host.dispatch(lost=what == "lost", fails=what == "fails", refused=what == "refused")
        while len(host.unread) > (what != "read"):
            host.read()


@settings(max_examples=60)
@given(st.data())
def test_schedules_are_safe_and_finish(data):
    """Also steps that never reach the device or whose results are lost, moves that it refuses,
    several columns, bounds of a step, and versions of which several cells fit into a slot."""
    host = Host(resident(**data.draw(st.sampled_from(SHAPES))))
    schedule(data, host, data.draw(st.integers(1, 15)))
    finish(host)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_replacement_finishes(shape):
    """Both pools as full as they get: all high experts change places with low ones (papers.md 2.7,
    item 5)."""
    where = resident(**shape)
    replace_all(Host(where), where.capacity[0])


def test_more_than_fit_on_the_way_stand_still():
    """Five high and 13 low cells and the spares fit into the four slots of SEVERAL_HIGH, three and
    15 do not: the way to five leads there. So the capacity of these slots is two."""
    where = resident(**{**SEVERAL_HIGH, "capacity": (5, 18)})
    assert where.most_high(4) == 2
    with pytest.raises(AssertionError, match="transitions do not finish"):
        replace_all(Host(where), 5)


def replace_all(host: Host, n: int) -> None:
    flat = host.wanted.reshape(-1)
    flat[:] = 1
    flat[:n] = 0
    host.want()
    host.drain()
    flat[:] = 1
    flat[-n:] = 0
    host.want()
    host.drain()
    np.testing.assert_array_equal(host.transitions.version, host.wanted)
    host.check_drained()


def test_more_high_experts_than_fit_wait_and_are_counted():
    host = Host(THREE_LAYERS)
    for expert in range(3):
        host.toggle(expert, 0)
    host.run(12)
    said = host.transitions.stats()["precision"]
    assert said["hi"] == 3 and said["deferred"] > 0  # the spare cell is used, none is left
    host.wanted[:] = 1
    host.want()
    host.drain()
    assert host.transitions.stats()["precision"]["hi"] == 0


@pytest.mark.parametrize(
    ("limits", "issued"),
    [
        (dict(stage_entries=1), 1),
        (dict(staging_bytes=16), 2),
        (dict(step_bytes=24), 3),
        (dict(columns=2), 2),
        (dict(spares=1, slots=6), 3),
    ],
    ids=["list", "bytes", "step", "columns", "cells"],
)
def test_all_who_wait_are_counted(limits, issued):
    """Six are wanted high, whatever it is that some of them wait for."""
    of_spec = {k: v for k, v in limits.items() if k in ("stage_entries", "staging_bytes")}
    others = {k: v for k, v in limits.items() if k not in of_spec}
    where = resident([[1] * 6], **{**dict(slots=12, capacity=(6, 6), columns=6), **others})
    host = Host(where, **of_spec)
    host.wanted[:] = 0
    host.want()
    host.dispatch()
    assert len(host.lists[0]) == issued
    said = host.transitions.stats()["precision"]
    assert said["deferred"] == 6 - issued and said["queued"] == 6
    host.dispatch()  # the first step was not read: its entries are on the way, the others wait
    more = len(host.lists[1])
    assert host.transitions.stats()["precision"]["deferred"] == 2 * (6 - issued) - more


def test_bytes_of_a_step_are_bounded():
    where = resident([[1] * 6], 12, capacity=(6, 6), step_bytes=20)
    host = Host(where, stage_entries=4)
    host.wanted[:] = 0
    host.want()
    host.run(6)
    counts = [len(entries) for entries in host.lists]
    assert max(counts) == 2  # of 8 bytes each
    host = Host(resident([[1] * 6], 12, capacity=(6, 6)), stage_entries=3)
    host.wanted[:] = 0
    host.want()
    host.run(4)
    assert max(len(entries) for entries in host.lists) == 3


def test_moves_of_a_step_are_bounded_and_counted():
    """Six low experts fill three slots; demoted again in another order, they leave holes."""
    where = resident([[1] * 6], 8, capacity=(4, 6), move_bytes=4)
    host = Host(where)
    host.wanted[0, ::2] = 0
    host.want()
    host.drain()
    assert partial_slots(host.transitions.pools, 1) == 3
    host.transitions.keep_free = 9
    before = host.transitions.stats()["precision"]["moves"]
    host.dispatch()
    assert host.transitions.stats()["precision"]["moves"] == before + 1
    host.run(5)
    said = host.transitions.stats()["precision"]
    assert said["moved_bytes"] == 4 * said["moves"] > 0
    assert partial_slots(host.transitions.pools, 1) <= 1


def test_states_of_an_expert():
    """As observations give them: lo, promoting, evicting until the next step is made, hi, demoting;
    the version flips with the end of promoting."""
    host = Host(ONE_LAYER)
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
        ("EVICTING", 0),
        ("RESIDENT", 0),
        ("DEMOTING", 0),
        ("EVICTING", 1),
        ("RESIDENT", 1),
    ]


def test_a_wish_that_is_gone_is_cancelled():
    host = Host(ONE_LAYER, stage_entries=1)
    for expert in range(2):
        host.toggle(0, expert)
    host.dispatch()
    host.wanted[:] = 1
    host.want()  # the first is in flight: it is made high, and low again when that is wanted
    host.read()
    assert host.transitions.stats()["precision"]["cancelled"] == 1
    assert host.transitions.version.tolist() == [[0, 1, 1]]
    host.want()
    host.drain()
    assert host.transitions.version.tolist() == [[1, 1, 1]]


def test_blocking_transitions_are_done_before_the_step():
    """With one spare cell of each version, list after list."""
    where = resident([[1] * 5], 6, capacity=(3, 5), blocking=True)
    host, rng = Host(where, stage_entries=2), np.random.default_rng(0)
    for _ in range(12):
        host.wanted[0] = 1
        host.wanted[0, rng.permutation(5)[:3]] = 0
        host.want()
        host.dispatch()
        np.testing.assert_array_equal(host.device.pager.tables.version, host.wanted)
        if len(host.unread) > 1:
            host.read()
    assert not any(host.lists)
    assert host.transitions.stats()["precision"]["promotions"] > 10


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
        device.pager.move(moves[:1])
        begin, size = int(before.cell_row[layer, cell]), sizes[tables.cell_version[layer, cell]]
        assert done.tolist() == [int(begin >= 0 and row not in (begin, 31)), 0]
        if done[0]:
            device.tags[row : row + size] = device.tags[begin : begin + size].copy()
        np.testing.assert_array_equal(arena[:, 0], device.tags.astype(np.uint16))
        for name in ("cell_row", "address"):
            np.testing.assert_array_equal(getattr(after, name), getattr(tables, name))


# ---- mutations


class FreesEarly(Transitions):
    """Gives back the old cell when the copy is issued, not when its step was read."""

    def issue(self, transfer, index, between_layers):
        super().issue(transfer, index, between_layers)
        old = int(self.column[transfer.layer, transfer.expert])
        row = int(self.cell_row[transfer.layer, old])
        del self._holder[row]
        self.pools.release(row)

    def _drop(self, layer, cell):
        self.cell_row[layer, cell] = -1
        self._changed = True


class FreesUnread(Transitions):
    """Gives back the old cell when the next step is made, before the one that flipped the entry was
    read. Steps run in order, so nobody reads it; but nothing said yet that the entry flipped."""

    def entries(self, step, tables, *, between_layers=False):
        flying, self.flying = self.flying, []
        for flight in flying:
            self._settle(flight, True)
        return super().entries(step, tables, between_layers=between_layers)


class FlipsEarly(Device):
    """Points an entry to a copy of which half the rows are there; the rest come a step later."""

    def __init__(self, where):
        super().__init__(where)
        self.late = []

    def step(self, entries):
        late, self.late = self.late, []
        done = super().step(entries)
        for rows, record in late:
            self.tags[rows] = record
        return done

    def copy(self, entry):
        row = self.pager.tables.cell_row[entry.layer, entry.cell]
        record = self.record(entry.layer, entry.expert, entry.version)
        half = len(record) // 2
        self.tags[row : row + half] = record[:half]
        self.late.append((np.arange(row + half, row + len(record)), record[half:]))


class DoubleBooks(Transitions):
    """Hands out a cell that another expert has."""

    def _reserve(self, version):
        row = super()._reserve(version)
        others = [
            other
            for other, place in self._holder.items()
            if self.cell_version[place] == version and other != row
        ]
        return others[0] if row is not None and others else row


class ForgetsMoves(Transitions):
    """Moves cells, and does not tell the device."""

    def take_moves(self):
        super().take_moves()
        return []


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


@pytest.mark.parametrize(
    "broken",
    [
        dict(make=FreesEarly),
        dict(device=FlipsEarly),
        dict(make=DoubleBooks),
        dict(make=ForgetsMoves),
    ],
    ids=lambda d: next(iter(d.values())).__name__,
)
def test_mutations_are_caught(broken, monkeypatch):
    """By a step that reads what is not there, the books being left unchecked."""
    monkeypatch.setattr(Host, "check", lambda self: None)
    monkeypatch.setattr(Host, "_overwrite", lambda self, rows: None)
    with pytest.raises(StaleRead):
        shuffle(Host(resident(**WHERE), **broken))


def test_a_cell_is_reused_only_when_no_dispatched_step_can_read_it():
    """A mutation that no bit would show, since steps run in order."""
    with pytest.raises(AssertionError, match="can still read what is overwritten"):
        shuffle(Host(resident(**WHERE), make=FreesUnread))


@pytest.mark.parametrize("make", [FreesEarly, DoubleBooks])
def test_the_books_show_two_owners(make, monkeypatch):
    monkeypatch.setattr(Host, "_overwrite", lambda self, rows: None)
    with pytest.raises(AssertionError, match="two cells share arena rows"):
        shuffle(Host(resident(**WHERE), make=make))


@pytest.mark.parametrize("forgets", [False, True])
def test_moves_that_were_refused_are_made_up_for(forgets, monkeypatch):
    """Of every second step that moves cells; a host that forgets them lets a step read what is not
    there."""
    host, rng, refused = Host(resident(**WHERE)), np.random.default_rng(0), 0
    was_refused = False
    if forgets:
        monkeypatch.setattr(Host, "check", lambda self: None)
        monkeypatch.setattr(Host, "_overwrite", lambda self, rows: None)
    with pytest.raises(StaleRead) if forgets else contextlib.nullcontext():
        for step in range(120):
            if step % 2 == 0:
                host.wanted.reshape(-1)[:] = 1
                high = rng.permutation(host.wanted.size)[: host.where.capacity[0]]
                host.wanted.reshape(-1)[high] = 0
                host.backwards = bool(rng.integers(2))
                host.want()
                host.transitions.keep_free = int(rng.integers(3))
            host.dispatch(refused=not was_refused)
            was_refused = bool(host.unmoved)
            refused += was_refused
            if forgets:
                host.unmoved = []
            while len(host.unread) > 1:
                host.read()
        assert refused > 3
        finish(host)


def test_the_unbroken_one_passes():
    host = Host(resident(**WHERE))
    shuffle(host)
    finish(host)
    assert host.transitions.stats()["precision"]["moves"] > 0


# ---- in a controller


def test_policies_that_page_are_refused():
    spec = spec_for(THREE_LAYERS)
    for field in ("stages", "cells"):
        policy = scripted(lambda seen: Decision(), writes={field}, moments={Moment.STEP_END})
        with pytest.raises(PolicyError, match=f"writes '{field}', and every expert is resident"):
            Controller(spec, [policy])
    fixed = resident([[1], [0]], 2, capacity=(1, 1), spares=0, columns=0)
    for field in ("transitions", "kv_pages"):
        policy = scripted(lambda seen: Decision(), writes={field}, moments={Moment.STEP_END})
        with pytest.raises(PolicyError, match=f"writes '{field}', and the versions are fixed"):
            Controller(spec_for(fixed), [policy])
