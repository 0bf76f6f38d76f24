"""Figures of the arena and of a scheduler's KV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from host_offload.control.step_record import PageUse
from host_offload.memory.arena import SlotClass
from host_offload.memory.kv_cache import Block
from host_offload.memory.tables import Tables
from moejax.engine.scheduler import Scheduler


def at_rest(scheduler: Scheduler) -> Iterator[list[Block]]:
    """The blocks of those who hold some and do not run."""
    yield from (r.blocks for _, r in scheduler.queue)
    yield from (s.blocks for s in scheduler.sessions.all)


def kv_stats(scheduler: Scheduler) -> dict:
    """Pages by state, what was found in them and what was moved, as plain data."""
    cache = scheduler.cache
    return {
        "prefix_hit_tokens": scheduler.prefixes.hit_tokens,
        **scheduler.counts,
        "pages": page_states(scheduler),
        "swapped_out_bytes": cache.swapped_out * cache.page_bytes,
        "swapped_in_bytes": cache.swapped_in * cache.page_bytes,
        "cached_pages_dropped": cache.dropped,
        "sessions": len(scheduler.sessions.all),
        "sessions_evicted": scheduler.sessions.evicted,
    }


def page_states(scheduler: Scheduler) -> dict[str, int]:
    """How many pages are in which state."""
    running = {b for r in scheduler.running.values() for b in r.blocks}
    held = {b for blocks in at_rest(scheduler) for b in blocks if b.row is not None}
    return {
        "running": len(running),
        "session": len(held - running),
        "cached": scheduler.cache.idle,
        "free": scheduler.arena.free_pages,
        "swapped": scheduler.cache.swapped,
    }


def page_use(scheduler: Scheduler) -> PageUse:
    """KV and queues as policies and traces see them."""
    waiting = scheduler.waiting
    return PageUse(
        kv_used=scheduler.arena.pages - scheduler.cache.available,
        kv_peak=scheduler.peak_pages,
        kv_pages=scheduler.arena.pages,
        kv_swapped=scheduler.cache.swapped,
        running=len(scheduler.running),
        waiting=len(waiting),
        waiting_tokens=sum(len(r.prompt) for r in waiting),
    )


def arena_stats(scheduler: Scheduler, tables: Tables) -> dict:
    """What holds the arena, as plain data. Waits for the device."""
    arena, layout = scheduler.arena, scheduler.arena.layout
    return {
        "bytes": arena.slots * layout.slot_bytes,
        "slots": arena.slots,
        "slot_bytes": layout.slot_bytes,
        "expert_slots": arena.count(SlotClass.EXPERT),
        "kv_slots": arena.count(SlotClass.KV),
        "free_slots": arena.count(SlotClass.FREE),
        # The tables': where every expert is resident, the arena has no cells of layers to grant.
        "cells_per_layer": np.sum(np.asarray(tables.cell_row) >= 0, axis=1).tolist(),
        "cells_used": int(np.sum(np.asarray(tables.owner) >= 0)),
        "block_size": layout.page.block_size,
        "kv_pages": arena.pages,
        "kv_pages_used_peak": scheduler.peak_pages,
    }
