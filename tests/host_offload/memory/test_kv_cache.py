"""Blocks, their references and their way to the host and back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from host_offload.memory.arena import OutOfPages, SlotArena
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.layout import PageLayout, slot_layout
from host_offload.memory.swap import SWAP_PAGES, move_pages, read_pages, write_pages
from scripts.check.kv_faults import cache_faults

LAYOUT = slot_layout(
    hidden=64, width=64, itemsize=2, layers=1, rows_per_token=2, row_values=64, block_size=16
)


@pytest.fixture
def cache():
    arena = SlotArena(LAYOUT, 4, 1, 1, 1)
    arena.grant_kv_slots(2)
    moved: list = []
    swap_bytes = 6 * LAYOUT.page.nbytes
    read = lambda rows: [("page", row) for row in rows]  # noqa: E731
    write = lambda pages, rows: moved.append((pages, rows))  # noqa: E731
    cache = KVCache(arena, read, write, lambda *rows: moved.append(rows), swap_bytes)
    cache.copied = moved  # pyright: ignore[reportAttributeAccessIssue]
    return cache


def test_a_published_block_stays_until_its_page_is_needed(cache):
    blocks = cache.allocate(3)
    cache.publish(blocks[0], b"a")
    cache.publish(blocks[1], b"b")
    cache.publish(blocks[2], b"a")
    assert blocks[2].key is None  # of two equal ones the first is found
    cache.release(blocks)
    assert cache.idle == 2 and cache.available == cache.arena.pages
    assert cache.lookup(b"a") is blocks[0] and cache.idle == 1
    assert not cache.held(b"b") and cache.held(b"a")
    rest = cache.allocate(cache.available)
    assert cache.dropped == 1 and cache.lookup(b"b") is None
    assert cache_faults(cache, [], [[blocks[0]], rest]) == []
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 available"):
        cache.allocate(1)


def test_swapping_moves_what_nobody_runs_on(cache):
    mine, shared = cache.allocate(2)
    cache.pin([shared])
    row = mine.row
    assert cache.swap_out([mine, shared]) == 1
    assert mine.row is None and mine.host == ("page", row) and shared.row is not None
    assert cache.missing([mine, shared]) == 1
    assert cache_faults(cache, [[shared]], [[mine]]) == []
    cache.swap_in([mine, shared])
    assert cache.copied == [([("page", row)], [mine.row])]
    assert (cache.swapped, cache.swapped_out, cache.swapped_in) == (0, 1, 1)


def test_a_swapped_block_is_not_found_and_dies_with_its_last_holder(cache):
    (block,) = cache.allocate(1)
    cache.publish(block, b"a")
    cache.swap_out([block])
    assert cache.lookup(b"a") is None and not cache.held(b"a")
    cache.release([block])
    assert cache.swapped == 0 and cache_faults(cache, [], []) == []


def test_swap_space_ends(cache):
    blocks = cache.allocate(7)
    assert cache.swap_out(blocks) == 6 and cache.swap_room == 0
    assert cache.missing(blocks) == 6 and cache.swap_out(blocks) == 0
    copies = [cache.copy(blocks[0]), cache.copy(blocks[6])]  # on the device
    assert [copy.host for copy in copies] == [None, None]
    assert cache.copied == [
        ([blocks[0].host], [copies[0].row]),
        ([blocks[6].row], [copies[1].row]),
    ]
    assert cache_faults(cache, [], [blocks, copies]) == []
    rest = cache.allocate(cache.available)
    assert cache.copy(blocks[6]) is None
    assert cache_faults(cache, [], [blocks, copies, rest]) == []


def test_pages_that_cannot_be_moved_stay_where_they_are(cache, monkeypatch):
    blocks = cache.allocate(3)

    def fail(*_):
        raise RuntimeError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "read", fail)
        with pytest.raises(RuntimeError, match="no pinned"):
            cache.swap_out(blocks)
    assert cache.missing(blocks) == 0
    cache.swap_out(blocks)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write", fail)
        with pytest.raises(RuntimeError, match="no pinned"):
            cache.swap_in(blocks)
    assert cache.missing(blocks) == 3 and cache_faults(cache, [], [blocks]) == []


def test_a_copy_is_another_block_with_the_same_bytes(cache):
    (block,) = cache.allocate(1)
    copy = cache.copy(block)
    assert copy.host == ("page", block.row)
    cache.swap_in([copy])
    assert copy.row != block.row and cache_faults(cache, [], [[block], [copy]]) == []


def test_what_was_not_written_is_forgotten(cache):
    idle, held = cache.allocate(2)
    cache.publish(idle, b"a")
    cache.publish(held, b"b")
    cache.release([idle])
    cache.forget([idle, held])
    assert cache.lookup(b"a") is None and cache.lookup(b"b") is None
    assert cache_faults(cache, [], [[held]]) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda c, b: setattr(b[0], "refs", 2), "2 references, 0 pins; it has 1 holders"),
        (lambda c, b: setattr(b[0], "row", b[1].row), "belongs to 2 blocks"),
    ],
)
def test_broken_invariants_are_named(cache, break_it, message):
    blocks = cache.allocate(2)
    assert cache_faults(cache, [], [blocks]) == []
    break_it(cache, blocks)
    assert any(message in fault for fault in cache_faults(cache, [], [blocks])), message


@pytest.mark.parametrize("itemsize", [2, 4])
def test_pages_come_back_to_other_places_bit_for_bit(itemsize):
    page = PageLayout(layers=2, rows_per_token=2, row_values=8, itemsize=itemsize, block_size=16)
    rng = np.random.default_rng(0)
    arena = rng.integers(0, 2**16, (page.nbytes // 2 * 12 // 16, 16), np.uint16)
    flat = arena.reshape(-1, page.row_elements)
    rows = np.arange(SWAP_PAGES, dtype=np.int32) * page.rows
    host = jax.jit(
        lambda arena: read_pages(arena, rows, page),
        out_shardings=jax.sharding.SingleDeviceSharding(
            jax.devices()[0], memory_kind="pinned_host"
        ),
    )(arena)
    assert all(h.sharding.memory_kind == "pinned_host" for h in host)
    for i, h in enumerate(host):
        expected = flat[rows[i] : rows[i] + page.rows].reshape(-1)
        np.testing.assert_array_equal(np.asarray(h), expected)
    # Three of them to the end of the arena; the others of the list are not written.
    places = np.array([9, 11, 10, 0, 0, 0, 0, 0], np.int32) * page.rows
    write = jax.jit(lambda a, p, r, n: write_pages(a, p, r, n, page), donate_argnums=0)
    after = np.asarray(write(jax.numpy.asarray(arena), host, places, np.int32(3)))
    expected = flat.copy()
    for i, place in enumerate((9, 11, 10)):
        expected[place * page.rows : (place + 1) * page.rows] = flat[
            i * page.rows : (i + 1) * page.rows
        ]
    np.testing.assert_array_equal(after.reshape(flat.shape), expected)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_pages_move_within_the_arena_bit_for_bit(itemsize):
    page = PageLayout(layers=2, rows_per_token=2, row_values=8, itemsize=itemsize, block_size=16)
    arena = np.random.default_rng(0).integers(0, 2**16, (page.nbytes // 2, 12), np.uint16)
    source = np.array([3, 0, 7, 7, 7, 7, 7, 7], np.int32)  # a list is filled up with its last pair
    target = np.array([9, 11, 10, 10, 10, 10, 10, 10], np.int32)
    moved = jax.jit(lambda a, s, t: move_pages(a, s, t, page), donate_argnums=0)
    after = np.asarray(moved(jax.numpy.asarray(arena), source * page.rows, target * page.rows))
    expected = arena.reshape(12, -1).copy()
    expected[[9, 11, 10]] = expected[[3, 0, 7]]
    np.testing.assert_array_equal(after.reshape(12, -1), expected)


def test_idle_blocks_make_room_for_those_that_are_held(cache):
    per_slot = LAYOUT.pages_per_slot
    idle, held = cache.allocate(per_slot), cache.allocate(1)
    for i, block in enumerate(idle):
        cache.publish(block, bytes([i]))
    cache.release(idle)
    assert cache.empty_slot(8) == held and cache.dropped == 1 and cache.slots_in_use == 1
    # The last in the sequence is the longest idle.
    assert cache.held(bytes([0])) is False and cache.lookup(bytes([per_slot - 1])) is None


def test_the_emptiest_slot_is_emptied_into_the_fullest(cache):
    per_slot = LAYOUT.pages_per_slot
    blocks = cache.allocate(2 * per_slot - 1)
    cache.release(blocks[1 : per_slot - 1])  # two of the first slot stay, and all of the second
    kept = [blocks[0], *blocks[per_slot - 1 :]]
    assert cache.slots_in_use == 2 and cache.empty_slot(8) == [], "the other one is full"
    cache.release(kept[-2:])
    kept = kept[:-2]
    moved = cache.empty_slot(1)
    assert len(moved) == 1 and cache.moved == 1 and cache.slots_in_use == 2
    moved += cache.empty_slot(8)
    assert set(moved) == set(kept[:2]) and cache.slots_in_use == 1 and cache.moved == 2
    assert cache_faults(cache, [], [kept]) == []
    cache.arena.grant_kv_slots(1)
