"""SlotArena: who owns which slot, cell and page, whatever the order of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.memory.arena import OutOfPages, SlotArena, SlotClass
from host_offload.memory.layout import slot_layout

LAYOUT = slot_layout(
    hidden=32, width=16, itemsize=2, layers=2, rows_per_token=2, row_values=8, block_size=16
)
SLOTS, LAYERS, EXPERTS, CELLS = 9, 2, 4, 3
PER_SLOT = LAYOUT.pages_per_slot


def arena() -> SlotArena:
    return SlotArena(LAYOUT, SLOTS, LAYERS, EXPERTS, CELLS)


def slot_of(page: int) -> int:
    return page // LAYOUT.kv_rows_per_slot


def state(arena: SlotArena):
    """What a request that is refused leaves as it was."""
    return arena.slot_class.tolist(), arena.cell_row.tolist(), arena.pages, arena.free_pages


def check(arena: SlotArena, live: list[int]) -> None:
    """Classes, cells, pages and counts agree with each other and with the pages handed out."""
    granted = arena.cell_row[arena.cell_row >= 0]
    expert_slots = np.flatnonzero(arena.slot_class == SlotClass.EXPERT)
    assert sorted(granted) == [int(s) * LAYOUT.slot_rows for s in expert_slots]
    kv_slots = np.flatnonzero(arena.slot_class == SlotClass.KV).tolist()
    assert arena.pages == PER_SLOT * len(kv_slots)
    assert arena.free_pages == arena.pages - len(live)
    assert len(set(live)) == len(live)
    legal = {LAYOUT.page_row(s, p) for s in kv_slots for p in range(PER_SLOT)}
    assert set(live) <= legal
    assert sum(arena.count(c) for c in SlotClass) == SLOTS
    assert arena.count(SlotClass.KV) == len(kv_slots)


def free_by_slot(arena: SlotArena, live: list[int]) -> dict[int, int]:
    kv_slots = np.flatnonzero(arena.slot_class == SlotClass.KV).tolist()
    return {s: PER_SLOT - sum(slot_of(p) == s for p in live) for s in kv_slots}


def fullest_first(free: dict[int, int], count: int) -> dict[int, int]:
    """Pages left per slot after taking `count`, slot by slot, the fewest free first."""
    left = dict(free)
    for slot in sorted(free, key=lambda s: (free[s], s)):
        taken = min(left[slot], count)
        left[slot] -= taken
        count -= taken
    return left


ACTIONS = st.one_of(
    st.tuples(st.just("cells"), st.lists(st.integers(0, CELLS), min_size=2, max_size=2)),
    st.tuples(st.just("kv"), st.integers(0, SLOTS)),
    st.tuples(st.just("allocate"), st.integers(0, 2 * PER_SLOT)),
    st.tuples(st.just("allocate"), st.integers(0, 2 * PER_SLOT)),
    st.tuples(st.just("release"), st.randoms(use_true_random=False), st.integers(0, 3 * PER_SLOT)),
    st.tuples(st.just("release all"), st.none()),
)


@given(st.lists(ACTIONS, min_size=4, max_size=20))
def test_any_order_of_requests(actions):
    """Every request does what its docstring says or raises and changes nothing."""
    slots, live = arena(), []
    for kind, value, *more in actions:
        before = state(slots)
        kv = int(np.sum(slots.slot_class == SlotClass.KV))
        if kind == "cells":
            granted = slots.cell_row.copy()
            if sum(value) > SLOTS - kv:
                with pytest.raises(ValueError, match="slots are not KV"):
                    slots.grant_cells(value)
                assert state(slots) == before
            else:
                after = slots.grant_cells(value)
                np.testing.assert_array_equal(after, slots.cell_row)
                for old, new, wanted in zip(granted, after, value, strict=True):
                    assert np.sum(new >= 0) == wanted
                    assert np.sum((old == new) & (old >= 0)) == min(np.sum(old >= 0), wanted)
        elif kind == "kv":
            used = {slot_of(page) for page in live}
            if len(used) <= value <= SLOTS - slots.count(SlotClass.EXPERT):
                slots.grant_kv_slots(value)
                assert slots.count(SlotClass.KV) == value
            else:
                with pytest.raises(ValueError, match=f"{value} KV slots wanted"):
                    slots.grant_kv_slots(value)
                assert state(slots) == before
        elif kind == "allocate":
            if value > slots.free_pages:
                with pytest.raises(OutOfPages, match=f"{value} pages wanted"):
                    slots.allocate_pages(value)
                assert state(slots) == before
            else:
                left = fullest_first(free_by_slot(slots, live), value)
                live += slots.allocate_pages(value)
                assert free_by_slot(slots, live) == left
        else:
            if kind == "release":
                value.shuffle(live)
            count = more[0] if more else len(live)
            slots.release_pages(live[:count])
            live = live[count:]
        check(slots, live)


@pytest.mark.parametrize("cells", [[1], [1, 1, 1], [4, 0], [0, -1]])
def test_refuses_cells(cells):
    slots = arena()
    slots.grant_cells([2, 1])
    before = state(slots)
    with pytest.raises(ValueError, match="cells per layer must be 2 numbers of 0…3"):
        slots.grant_cells(cells)
    assert state(slots) == before


@pytest.mark.parametrize("which", ["never allocated", "twice", "no page at all"])
def test_refuses_to_release(which):
    slots = arena()
    slots.grant_kv_slots(1)
    (page,) = slots.allocate_pages(1)
    other = LAYOUT.page_row(slot_of(page), 1)
    if which == "twice":
        slots.release_pages([page])
    before = state(slots)
    with pytest.raises(ValueError, match="is not allocated"):
        slots.release_pages([{"never allocated": other, "twice": page}.get(which, page + 1)])
    assert state(slots) == before


# ---- several versions

MIXED = slot_layout(
    hidden=32,
    width=16,
    itemsize=2,
    layers=2,
    rows_per_token=2,
    row_values=8,
    block_size=16,
    versions=("dense", "int4"),
)


def mixed_arena() -> SlotArena:
    arena = SlotArena(MIXED, SLOTS, LAYERS, EXPERTS, cells=6)
    arena.grant_kv_slots(2)
    return arena


def test_versions_get_cells_of_their_own_slots():
    slots, rows = mixed_arena(), [record.rows for record in MIXED.records]
    per_slot = MIXED.cells_per_slot[1]
    assert per_slot > 1
    cell_row, cell_version = slots.grant_versions([(2, 4), (0, 1)])
    assert (cell_row[0] >= 0).tolist() == [True] * 6
    assert cell_version[0].tolist() == [0, 0, 1, 1, 1, 1] and cell_version[1, 0] == 1
    used = cell_row[cell_row >= 0]
    taken = [
        r
        for row, version in zip(used, cell_version[cell_row >= 0], strict=True)
        for r in range(row, row + rows[version])
    ]
    assert len(taken) == len(set(taken))
    assert slots.count(SlotClass.EXPERT) == 2 + -(-5 // per_slot)
    assert slots.count(SlotClass.KV) == 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([(4, 3), (0, 0)], "in a layer 6 at most"),
        ([(1, 1)], "must be 2 × 2 numbers"),
        ([(-1, 1), (0, 0)], "must be 2 × 2 numbers"),
        ([(6, 0), (2, 0)], r"cells \[8, 0\] of 2 versions wanted; 7 slots are not KV"),
    ],
)
def test_versions_that_do_not_fit_are_refused(wanted, message):
    slots = mixed_arena()
    before = state(slots)
    with pytest.raises(ValueError, match=message):
        slots.grant_versions(wanted)
    assert state(slots) == before


def test_expert_slots_are_the_first_ones():
    slots = mixed_arena()
    slots.grant_expert_slots(5)
    assert slots.slot_class.tolist() == [1] * 5 + [0] * 2 + [2] * 2
    slots.grant_expert_slots(3)
    assert slots.count(SlotClass.EXPERT) == 3
    for wanted in (8, 10):
        with pytest.raises(ValueError, match=f"{wanted} expert slots wanted, 7 at the front"):
            slots.grant_expert_slots(wanted)
    with pytest.raises(ValueError, match="laid out once, at the start"):
        slots.grant_cells([1, 1])
    slots.grant_kv_slots(6)
    with pytest.raises(ValueError, match="7 KV slots wanted, 6 are not experts'"):
        slots.grant_kv_slots(7)
