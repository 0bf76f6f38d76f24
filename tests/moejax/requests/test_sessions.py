"""Which sessions are asked for pages, and how often."""

import pytest

from host_offload.memory.arena import SlotArena
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.layout import slot_layout
from host_offload.memory.sequence_blocks import SequenceBlocks
from moejax.requests.sessions import Sessions

LAYOUT = slot_layout(
    hidden=64, width=64, itemsize=2, layers=1, rows_per_token=2, row_values=64, block_size=16
)
COUNT = 6


@pytest.mark.parametrize("overflow", ["swap", "recompute"])
def test_a_session_whose_pages_have_left_is_not_asked_again(monkeypatch, overflow):
    arena = SlotArena(LAYOUT, 4, 1, 1, 1)
    arena.grant_kv_slots(4)
    room = COUNT * LAYOUT.page.nbytes
    cache = KVCache(arena, list, lambda *_: None, lambda *_: None, room + LAYOUT.page.nbytes)
    sessions = Sessions(cache, overflow)
    for i in range(COUNT):
        blocks = SequenceBlocks(LAYOUT.page, [[block] for block in cache.allocate(1)])
        assert not sessions.replace(sessions[str(i)], blocks)
    oldest, newest = sessions["0"], sessions[str(COUNT - 1)]
    cache.pin(newest.blocks)
    asked = []
    movable = cache.movable
    monkeypatch.setattr(cache, "movable", lambda *args: asked.append(1) or movable(*args))

    assert sessions.evict() and not movable(oldest.blocks) and movable(sessions["1"].blocks)
    while sessions.evict():
        pass
    assert sessions.evicted == COUNT - 1
    asked.clear()
    assert not sessions.evict() and len(asked) == 1  # the pinned one
    cache.unpin(newest.blocks)
    assert sessions.evict() and not sessions.evict()
    assert sessions.pages == (COUNT if overflow == "swap" else 0)
    if overflow == "swap":  # another request brings a shared page back
        cache.swap_in(oldest.blocks)
        sessions.returned(oldest.blocks)
        assert sessions.evict() and not movable(oldest.blocks) and not sessions.evict()
    for i in range(COUNT):
        sessions.end(str(i))
    assert sessions.pages == 0 and cache.swapped == 0 and not sessions._away
