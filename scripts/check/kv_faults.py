"""The invariants of KV pages, blocks and a scheduler's rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from host_offload.memory.arena import SlotClass
from host_offload.memory.kv_cache import Block, KVCache
from moejax.engine.scheduler import Scheduler


def kv_faults(scheduler: Scheduler) -> list[str]:
    """Broken invariants of pages, blocks and rows, in words."""
    running = (*(r.blocks for r in scheduler.running.values()), scheduler.states)
    waiting = (r.blocks for _, r in scheduler.queue)
    between_turns = (s.blocks for s in scheduler.sessions.all)
    faults = cache_faults(scheduler.cache, running, itertools.chain(waiting, between_turns))
    rows = sorted([*scheduler.free_rows, *scheduler.running])
    if rows != list(range(scheduler.max_num_seqs)):
        faults.append(f"rows free and in use: {rows}")
    for row, request in scheduler.running.items():
        table = scheduler.block_table[row]
        blocks = scheduler.page.groups * scheduler.table_blocks
        state = [block.row for block in request.blocks.state]
        if (
            len(state) != scheduler.page.state_pages
            or table[len(table) - len(state) :].tolist() != state
        ):
            faults.append(f"row {row} does not have its request's state")
        if (read := table[blocks : len(table) - len(state)].tolist()) not in ([], state):
            faults.append(f"row {row} reads another state: {read}")
        table = table[:blocks].reshape(scheduler.page.groups, -1)
        expected = [request.blocks.of_group(group) for group in range(scheduler.page.groups)]
        if request.row != row or any(
            block is not None and block.row != found
            for blocks, rows in zip(expected, table.tolist(), strict=True)
            for block, found in zip(blocks, rows, strict=False)
        ):
            faults.append(f"row {row} does not have its request's pages")
        if len(request.blocks) * scheduler.block_size < request.computed:
            faults.append(f"row {row} has too few pages for {request.computed} tokens")
    return faults


def cache_faults(
    cache: KVCache, running: Iterable[Iterable[Block]], others: Iterable[Iterable[Block]]
) -> list[str]:
    """Broken invariants in words. running, others: the blocks of every sequence that runs, and
    of everybody else who holds some."""
    faults, pinned = [], Counter(block for blocks in running for block in blocks)
    held = pinned + Counter(block for blocks in others for block in blocks)
    rows = Counter()
    for block in {*held, *cache._idle.values()}:
        if (block.refs, block.pins) != (held[block], pinned[block]):
            faults.append(
                f"a block has {block.refs} references, {block.pins} pins; it has "
                f"{held[block]} holders, {pinned[block]} of them running"
            )
        if block.pins and block.row is None:
            faults.append("a block that a running sequence holds is swapped out")
        if (block.row is None) == (block.host is None):
            faults.append(f"a block is on both sides or none: {block}")
        if block.row is not None:
            rows[block.row] += 1
            slot = block.row // cache.arena.layout.kv_rows_per_slot
            if cache.arena.slot_class[slot] != SlotClass.KV:
                faults.append(f"page at KV row {block.row} lies in a slot that is not KV")
    faults += [f"page at KV row {row} belongs to {n} blocks" for row, n in rows.items() if n > 1]
    if len(rows) + cache.arena.free_pages != cache.arena.pages:
        faults.append(
            f"{len(rows)} pages held + {cache.arena.free_pages} free of {cache.arena.pages}"
        )
    if sum(b.row is None for b in held) != cache.swapped:
        faults.append(f"{cache.swapped} blocks are counted as swapped out")
    return faults
