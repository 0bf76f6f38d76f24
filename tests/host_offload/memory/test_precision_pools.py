"""Whole slots and their cells, bytes by tier, and how many experts fit."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from host_offload.memory.layout import slot_layout
from host_offload.memory.placement import (
    ResidentSpec,
    capacity,
    place,
    resident_spec,
    slots_for,
)
from host_offload.memory.pools import CellPools

DENSE_INT4 = slot_layout(
    hidden=128,
    width=128,
    itemsize=2,
    layers=4,
    kv_heads=2,
    head_dim=32,
    versions=("dense", "int4"),
)
"""One dense or four int4 cells a slot."""


def allocated(pools: CellPools, count: int) -> list[int]:
    """Rows of so many cells of version 1."""
    rows = [pools.allocate(1) for _ in range(count)]
    return [row for row in rows if row is not None]


def partial_slots(pools: CellPools, version: int) -> int:
    """Slots cut for that version that are neither full nor free."""
    return sum(map(len, pools._by_free[version][1:]))


def pools(slots=4, cells=(1, 3)) -> CellPools:
    return CellPools(range(slots), 6, (6, 2), cells)


# ---- pools


@settings(max_examples=60)
@given(data=st.data())
def test_cells_are_disjoint_and_slots_come_back(data):
    """Any order of taking, giving back and compacting: no arena row is taken twice, counts are
    right, and compaction leaves at most one partial slot of a version."""
    mine, taken = pools(slots=6), {}
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["take", "take", "give", "compact"]))
        version = data.draw(st.integers(0, 1))
        if what == "take":
            possible = mine.free_slots or mine.free_cells(version)
            row = mine.allocate(version)
            assert (row is not None) == bool(possible)
            if row is not None:
                assert row not in taken
                taken[row] = version
        elif what == "give" and taken:
            row = data.draw(st.sampled_from(sorted(taken)))
            mine.release(row)
            del taken[row]
        elif what == "compact":
            while pairs := mine.compact(version, lambda row: True, 1):
                ((source, target),) = pairs
                assert target not in taken and taken.pop(source) == version
                taken[target] = version
            assert partial_slots(mine, version) <= 1
        rows = [r for row, v in taken.items() for r in range(row, row + (6, 2)[v])]
        assert len(rows) == len(set(rows)) and max(rows, default=0) < 36
        slots = [{row // 6 for row, v in taken.items() if v == version} for version in (0, 1)]
        assert not slots[0] & slots[1]
        assert mine.free_slots == 6 - len(slots[0]) - len(slots[1])
        for v, per_slot in enumerate((1, 3)):
            used = sum(other == v for other in taken.values())
            assert mine.free_cells(v) == per_slot * len(slots[v]) - used
    for row in taken:
        mine.release(row)
    assert mine.free_slots == 6


def test_cells_come_from_the_fullest_slot():
    mine = pools(slots=3)
    rows = allocated(mine, 6)
    assert rows == [0, 2, 4, 6, 8, 10]
    mine.release(0)
    mine.release(6)
    mine.release(8)
    assert mine.allocate(1) == 0 and mine.allocate(1) == 8


def test_only_movable_cells_are_moved_and_no_more_than_allowed():
    mine = pools(slots=3, cells=(1, 3))
    rows = allocated(mine, 9)
    for row in rows[1], rows[4], rows[8]:
        mine.release(row)
    assert mine.compact(1, lambda row: False, 9) == []
    (first,) = mine.compact(1, lambda row: row < 6, 1)
    assert first[0] in (0, 4) and first[1] in (8, 16)
    (second,) = mine.compact(1, lambda row: True, 9)
    assert {first[0], second[0]} == {0, 4} and mine.free_slots == 1


def test_slots_are_kept_free():
    mine = pools(slots=2)
    assert mine.allocate(0, keep=2) is None
    assert mine.allocate(1, keep=1) == 0
    assert mine.allocate(1, keep=1) == 2  # of the slot that is cut already
    assert mine.allocate(0, keep=1) is None and mine.allocate(0) == 6


@pytest.mark.parametrize("row", [0, 6, 1, 100])
def test_what_is_not_taken_cannot_be_given_back(row):
    mine = pools()
    taken = allocated(mine, 2)
    mine.release(taken[0])
    with pytest.raises(ValueError, match=f"no cell is taken at arena row {row}"):
        mine.release(row)


# ---- what fits


def test_capacity_is_the_papers_in_whole_slots():
    assert DENSE_INT4.cells_per_slot == (1, 4)
    # (30 + 1) slots of dense ones and ⌈(34 + 1) / 4⌉ = 9 of int4.
    assert capacity(DENSE_INT4, 40, 64) == (30, 64)
    assert slots_for(DENSE_INT4, (30, 34), 1) == 40 < slots_for(DENSE_INT4, (31, 33), 1)
    assert capacity(DENSE_INT4, 66, 64) == (64, 64)
    assert capacity(DENSE_INT4, 18, 64) == (1, 64)


@given(
    per_slot=st.tuples(st.integers(1, 8), st.integers(1, 16)),
    total=st.integers(1, 60),
    spares=st.integers(1, 4),
    slots=st.integers(1, 80),
)
def test_every_number_of_high_experts_up_to_the_capacity_fits(per_slot, total, spares, slots):
    """By brute force, also where one high expert more needs a slot less."""
    where = ResidentSpec(
        *(slots, 8, (2, 1), per_slot, np.ones((1, total), np.int8), (0, total), spares, 1, 1, 4)
    )

    def fits(high: int) -> bool:
        pairs = zip((high, total - high), per_slot, strict=True)
        return sum(-(-(count + spares) // cells) for count, cells in pairs) <= slots

    wanted = next((n - 1 for n in range(total + 1) if not fits(n)), total)
    assert where.most_high(slots) == wanted
    if wanted >= 0:
        least = where.least_slots(wanted)
        assert least <= slots and where.most_high(least) >= wanted > where.most_high(least - 1)


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(1, 3), st.integers(0, 150))
def test_no_more_than_the_capacity_fits(total, spares, more):
    slots = slots_for(DENSE_INT4, (0, total), spares) + more
    n, _ = capacity(DENSE_INT4, slots, total, spares)
    assert slots_for(DENSE_INT4, (n, total - n), spares) <= slots
    assert n == total or slots_for(DENSE_INT4, (n + 1, total - n - 1), spares) > slots


def test_too_little_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"64 experts in int4 and 1 spare .* take 18 slots"):
        capacity(DENSE_INT4, 17, 64)
    with pytest.raises(ValueError, match="at least one spare cell"):
        capacity(DENSE_INT4, 99, 64, spares=0)
    one = slot_layout(hidden=128, width=128, itemsize=2, layers=4, kv_heads=2, head_dim=32)
    with pytest.raises(ValueError, match="between two versions, not 1"):
        capacity(one, 99, 64)
    every_low = np.ones((4, 16), int)
    with pytest.raises(ValueError, match="version numbers 0…1"):
        resident_spec(DENSE_INT4, 40, every_low + 1)
    with pytest.raises(ValueError, match="31 experts begin in dense, 30 fit with 1 spare"):
        resident_spec(DENSE_INT4, 40, np.arange(64).reshape(4, 16) >= 31)
    with pytest.raises(ValueError, match="the map takes 16 slots"):
        resident_spec(DENSE_INT4, 15, every_low, spares=0)
    with pytest.raises(ValueError, match="step_bytes must be at least 1"):
        resident_spec(DENSE_INT4, 40, every_low, step_bytes=0)


def test_a_start_gives_every_expert_a_cell():
    start = np.arange(64).reshape(4, 16) % 3 > 0  # 22 high ones
    where = resident_spec(DENSE_INT4, 40, start)
    assert where.capacity == (30, 64) and where.cell_bound == 20
    tables = place(where).contents
    sizes = np.array([r.rows for r in DENSE_INT4.records])
    rows = [
        r
        for row, v in zip(tables["address"].flat, tables["version"].flat, strict=True)
        for r in range(row, row + sizes[v])
    ]
    assert len(rows) == len(set(rows)) == sizes[start.astype(int)].sum()
    np.testing.assert_array_equal(tables["version"], start)
    np.testing.assert_array_equal(tables["cell_row"][:, :16], tables["address"])
    assert (tables["cell_row"][:, 16:] == -1).all() and (tables["owner"][:, 16:] == -1).all()
    fixed = resident_spec(DENSE_INT4, 33, start, spares=0)
    assert fixed.cell_bound == 16 and fixed.capacity == (22, 42)


@pytest.mark.parametrize(("spares", "columns"), [(1, 4), (2, 4), (5, 10)])
def test_one_layer_can_use_the_spares_of_both_versions(spares, columns):
    where = resident_spec(DENSE_INT4, 40, np.ones((1, 16), int), spares=spares)
    assert (where.columns, where.cell_bound) == (columns, 16 + columns)
