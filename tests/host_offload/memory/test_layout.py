"""Slots, cells and pages as plain numbers."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from host_offload.memory.layout import (
    BLOCK_SIZES,
    PageLayout,
    SlotLayout,
    slot_layout,
)
from pallas_kernels.records import RecordFormat

DEMO: dict[str, Any] = dict(hidden=128, width=128, layers=4, kv_heads=2, head_dim=32)
QWEN3_30B: dict[str, Any] = dict(hidden=2048, width=768, layers=48, kv_heads=4, head_dim=128)


def test_expert_record():
    record = RecordFormat("dense", 2048, 768, "bfloat16")
    assert (record.rows, record.nbytes) == (2304, 2304 * 2048 * 2)
    record = RecordFormat("dense", 128, 64, "float32")
    assert (record.rows, record.nbytes) == (384, 192 * 128 * 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(itemsize=1), "2 or 4 bytes a value, not 1"),
        (dict(itemsize=2, versions=("int3",)), "unknown expert version 'int3'"),
        (dict(itemsize=2, dtype="float32"), "a value of float32 does not have 2 bytes"),
    ],
)
def test_records_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        slot_layout(hidden=8, width=8, layers=1, kv_heads=1, head_dim=8, **fields)


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


@pytest.mark.parametrize("versions", [(), ("int4", "int4")])
def test_versions_are_named_once(versions):
    with pytest.raises(ValueError, match="name each resident version once"):
        slot_layout(**DEMO, itemsize=2, versions=versions)


def test_dtype_reaches_the_format():
    layout = slot_layout(**DEMO, itemsize=2, dtype="float16", versions=("dense", "int8"))
    assert [record.dtype for record in layout.records] == ["float16"] * 2


def test_page():
    page = PageLayout(layers=48, kv_heads=4, head_dim=128, itemsize=2, block_size=16)
    assert (page.row_elements, page.rows_per_token, page.rows_per_layer) == (128, 8, 128)
    assert page.rows == 48 * 128
    assert page.nbytes == 16 * 48 * 2 * 4 * 128 * 2  # tokens, layers, K and V, heads, values, bytes


def test_latent_page():
    """DeepSeek-V2-Lite: 512 latent and 64 rotary values, once per token and layer."""
    page = PageLayout(layers=27, kv_heads=1, head_dim=576, itemsize=2, block_size=16, latent=512)
    assert (page.row_elements, page.rows_per_token, page.rows_per_layer) == (576, 1, 16)
    assert page.nbytes == 16 * 27 * 576 * 2  # tokens, layers, values, bytes


@pytest.mark.parametrize(("kv_heads", "latent"), [(2, 512), (1, 577), (1, -1)])
def test_latent_page_refuses(kv_heads, latent):
    with pytest.raises(ValueError, match=rf"not {kv_heads} heads and latent {latent} of 576"):
        PageLayout(2, kv_heads, 576, 2, 16, latent)


@pytest.mark.parametrize(("hidden", "layers"), [(2048, 27), (5120, 60), (7168, 61)])
def test_slots_of_latent_pages_begin_at_whole_rows(hidden, layers):
    """DeepSeek-V2-Lite, V2 and V3: 576 values do not divide a hidden size."""
    sizes: dict[str, Any] = dict(
        hidden=hidden, width=1408, itemsize=2, layers=layers, kv_heads=1, head_dim=576
    )
    slot = slot_layout(**sizes, latent=512)
    assert slot.page.latent == 512 and slot.page.rows_per_token == 1
    assert slot.kv_rows_per_slot * 576 == slot.slot_rows * hidden
    assert slot.slot_rows - slot.records[0].rows < 18 and slot.cells_per_slot == (1,)


def test_qwen3_30b_slot():
    slot = slot_layout(**QWEN3_30B, itemsize=2)
    assert slot.slot_rows == slot.records[0].rows == 2304
    assert slot.cells_per_slot == (1,)
    # A slot of 9 MiB holds 6 pages of 16 tokens or 3 of 32, both exactly: the smaller is taken.
    assert (slot.page.block_size, slot.pages_per_slot) == (16, 6)
    assert slot.pages_per_slot * slot.page.nbytes == slot.slot_bytes


def test_refuses_a_block_size():
    with pytest.raises(ValueError, match=r"block_size must be one of \(16, 32, 64\), not 48"):
        slot_layout(**DEMO, itemsize=2, block_size=48)


def test_chosen_block_size():
    for size in BLOCK_SIZES:
        assert slot_layout(**DEMO, itemsize=2, block_size=size).page.block_size == size


def test_slot_grows_to_hold_one_page():
    slot = slot_layout(hidden=64, width=8, itemsize=2, layers=64, kv_heads=4, head_dim=64)
    assert slot.pages_per_slot == 1 and slot.page.block_size == 16
    assert slot.slot_rows > slot.records[0].rows


@hypothesis.given(
    hidden=st.integers(1, 64).map(lambda n: 2 * n),
    width=st.integers(1, 96),
    itemsize=st.sampled_from([2, 4]),
    layers=st.integers(1, 8),
    kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 48).map(lambda n: 2 * n),
    block_size=st.sampled_from([None, *BLOCK_SIZES]),
    is_latent=st.booleans(),
)
def test_addresses(is_latent, **shape):
    """Cells and pages lie whole inside their own slot, at whole addresses, without overlap."""
    if is_latent:
        shape |= dict(kv_heads=1, latent=1 + shape["head_dim"] // 2)
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
