"""Slots, cells and pages as plain numbers."""

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from host_offload.memory.layout import (
    BLOCK_SIZES,
    SlotLayout,
    slot_layout,
)
from host_offload.memory.placement import (
    ResidentSpec,
    capacity,
    place,
    read_resident,
    resident_spec,
    slots_for,
)
from host_offload.memory.pools import CellPools

QWEN3_30B: dict[str, Any] = dict(
    hidden=2048, width=768, layers=48, rows_per_token=8, row_values=128
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(itemsize=1), "2 or 4 bytes a value, not 1"),
        (dict(versions=("int3",)), "unknown expert version 'int3'"),
        (dict(dtype="float32"), "a value of float32 does not have 2 bytes"),
        (dict(versions=()), "name each resident version once"),
        (dict(versions=("int4", "int4")), "name each resident version once"),
        (dict(block_size=48), r"block_size must be one of \(16, 32, 64\), not 48"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(fields, message):
    shape = dict(hidden=8, width=8, layers=1, rows_per_token=2, row_values=8, itemsize=2)
    with pytest.raises(ValueError, match=message):
        slot_layout(**{**shape, **fields})


@pytest.mark.parametrize(
    ("versions", "cells", "slot"),
    [
        (("dense", "int8"), (1, 2), 1.02),
        (("dense", "int4"), (1, 4), 1.04),
        (("dense", "int2"), (1, 8), 1.07),
        (("int8", "int4"), (1, 2), 1.02),
        (("int4", "int2"), (1, 2), 1.04),
        (("lossless12", "int4"), (1, 3), 1.04),
        (("dense", "lossless12"), (1, 1), 1.0),
        (("int4",), (1,), 1.0),
    ],
)
def test_slots_hold_whole_records_of_every_version(versions, cells, slot):
    """cells: of each version. slot: at most so many of the largest record."""
    layout = slot_layout(**QWEN3_30B, itemsize=2, versions=versions)
    assert tuple(record.version for record in layout.records) == versions
    assert layout.cells_per_slot == cells
    largest = max(record.rows for record in layout.records)
    assert largest <= layout.slot_rows <= slot * largest


@hypothesis.given(
    hidden=st.integers(1, 64).map(lambda n: 2 * n),
    width=st.integers(1, 96),
    itemsize=st.sampled_from([2, 4]),
    layers=st.integers(1, 8),
    rows_per_token=st.integers(1, 8),
    row_values=st.integers(1, 48).map(lambda n: 2 * n),
    block_size=st.sampled_from([None, *BLOCK_SIZES]),
)
def test_addresses(**shape):
    """Cells and pages lie whole inside their own slot, at whole addresses, without overlap."""
    slot = slot_layout(**shape)
    assert isinstance(slot, SlotLayout) and slot.hidden == shape["hidden"]
    record, page = slot.records[0], slot.page
    assert slot.slot_rows % 2 == 0  # 32-bit views see whole values
    assert slot.pages_per_slot >= 1 and slot.cells_per_slot[0] >= 1
    # In uint16 elements from the start of the arena:
    slot_elements = slot.slot_rows * slot.hidden
    assert slot.slot_bytes == 2 * slot_elements
    for index in (0, 3):
        first, end = index * slot_elements, (index + 1) * slot_elements
        for cell in range(slot.cells_per_slot[0]):
            start = first + cell * record.rows * slot.hidden
            assert start + record.rows * slot.hidden <= end
        for number in range(slot.pages_per_slot):
            start = slot.page_row(index, number) * page.row_elements
            assert start == first + number * page.nbytes // 2
            assert start + page.nbytes // 2 <= end


# ---- cells of several versions

DENSE_INT4 = slot_layout(
    hidden=128,
    width=128,
    itemsize=2,
    layers=4,
    rows_per_token=4,
    row_values=32,
    versions=("dense", "int4"),
)
"""One dense or four int4 cells a slot."""


def allocated(pools: CellPools, count: int) -> list[int]:
    """Rows of so many cells of version 1."""
    rows = [pools.allocate(1) for _ in range(count)]
    return [row for row in rows if row is not None]


def pools(slots=4, cells=(1, 3)) -> CellPools:
    return CellPools(range(slots), 6, (6, 2), cells)


# ---- pools


@pytest.mark.parametrize("row", [0, 6, 1, 100])
def test_what_is_not_taken_cannot_be_given_back(row):
    mine = pools()
    taken = allocated(mine, 2)
    mine.release(taken[0])
    with pytest.raises(ValueError, match=f"no cell is taken at arena row {row}"):
        mine.release(row)
    assert mine.compact(1, lambda row: False, 1) == []
    with pytest.raises(ValueError, match="9 slots wanted, 3 are free"):
        mine.remove(9)


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


def test_too_little_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"64 experts in int4 and 1 spare .* take 18 slots"):
        capacity(DENSE_INT4, 17, 64)
    with pytest.raises(ValueError, match="at least one spare cell"):
        capacity(DENSE_INT4, 99, 64, spares=0)
    one = slot_layout(hidden=128, width=128, itemsize=2, layers=4, rows_per_token=4, row_values=32)
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
    again = read_resident(json.loads(json.dumps(where.said)))
    assert again is not None and again.said == where.said and read_resident(None) is None
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
