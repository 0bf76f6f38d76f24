"""Each fault of FAULTS is found on tables, arena or pages broken in exactly that way."""

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory.arena import SlotArena
from host_offload.memory.integrity import FAULTS, describe_faults, has_record
from host_offload.memory.layout import slot_layout
from host_offload.memory.record_source import StackedRecords
from host_offload.memory.tables import empty_tables, regrant
from host_offload.versions.encoders import encode
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.memory_faults import memory_faults

LAYOUT = slot_layout(
    hidden=32, width=16, itemsize=2, layers=2, rows_per_token=2, row_values=8, block_size=16
)
SLOTS, LAYERS, EXPERTS, CELLS = 9, 2, 4, 4
ROWS = LAYOUT.records[0].rows


@pytest.fixture(scope="module")
def store():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**16, (LAYERS, EXPERTS, ROWS, LAYOUT.hidden), np.uint16)


def sound(store):
    """Arena and tables. Layer 0: experts 1, 3 in cells 0, 1, cell 2 empty, cell 3 not granted.
    Layer 1: experts 0, 2 in cells 0, 1."""
    rows = SlotArena(LAYOUT, SLOTS, LAYERS, EXPERTS, CELLS).grant_cells((3, 2))
    tables = regrant(empty_tables(LAYERS, EXPERTS, CELLS), jnp.asarray(rows))
    owner, address = np.array(tables.owner), np.array(tables.address)
    arena = np.zeros((SLOTS * LAYOUT.slot_rows, LAYOUT.hidden), np.uint16)
    for layer, experts in enumerate(((1, 3), (0, 2))):
        for cell, expert in enumerate(experts):
            row = address[layer, expert] = rows[layer, cell]
            owner[layer, cell] = expert
            arena[row : row + ROWS] = store[layer, expert]
    return jnp.asarray(arena), tables._replace(owner=jnp.array(owner), address=jnp.array(address))


def test_a_sound_state_has_no_faults(store):
    counts = memory_faults(*sound(store), (store,))
    assert counts == [0] * len(FAULTS)
    assert describe_faults(counts) == []


def address_elsewhere(arena, tables):
    return arena, tables._replace(address=tables.address.at[0, 1].set(tables.cell_row[0, 2]))


def address_in_another_version(arena, tables):
    return arena, tables._replace(version=tables.version.at[0, 3].set(1))


def two_cells_of_one_expert(arena, tables):
    first, second = int(tables.cell_row[0, 0]), int(tables.cell_row[0, 2])
    arena = arena.at[second : second + ROWS].set(arena[first : first + ROWS])
    return arena, tables._replace(owner=tables.owner.at[0, 2].set(1))


def ungranted_cell_with_an_owner(arena, tables):
    return arena, tables._replace(owner=tables.owner.at[0, 3].set(2))


def shared_row(arena, tables):
    row = tables.cell_row[0, 1]
    return arena, tables._replace(cell_row=tables.cell_row.at[0, 2].set(row))


def one_wrong_bit(arena, tables):
    place = tables.cell_row[1, 1] + ROWS - 1, LAYOUT.hidden - 1
    return arena.at[place].set(arena[place] ^ 1), tables


@pytest.mark.parametrize(
    ("corrupt", "fault"),
    [
        (address_elsewhere, 0),
        (address_in_another_version, 0),
        (two_cells_of_one_expert, 1),
        (ungranted_cell_with_an_owner, 2),
        (shared_row, 3),
        (one_wrong_bit, 4),
    ],
)
def test_finds(corrupt, fault, store):
    counts = memory_faults(*corrupt(*sound(store)), (store,))
    assert counts[fault]
    if corrupt is not ungranted_cell_with_an_owner:  # which has no bytes that could be right
        assert np.flatnonzero(counts).tolist() == [fault]
    assert any(line.startswith(FAULTS[fault]) for line in describe_faults(counts))


@pytest.mark.slow
def test_what_was_decoded_on_the_way_is_compared_decoded():
    """A store of lossless12 under cells of dense records, which lacks the first layer."""
    dense, packed = (
        RecordFormat(version, 32, 16, "bfloat16") for version in ("dense", "lossless12")
    )
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((1, 48, 32)).astype(jnp.bfloat16)
    (record,) = encode(weights, packed)
    stored = StackedRecords(packed, jnp.asarray(record)[None, None])
    held = np.array(weights[0]).view(np.uint16)
    lies = VersionFormats(dense, packed, (-1, 0))
    assert has_record(held, stored, 1, 0, lies) and has_record(held[::-1], stored, 0, 0, lies)
    held[5, 5] ^= 1
    assert not has_record(held, stored, 1, 0, lies)
