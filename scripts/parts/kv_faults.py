"""What must hold of a scheduler's KV between two steps."""

from __future__ import annotations

from moejax.engine.scheduler import Scheduler


def kv_faults(scheduler: Scheduler) -> list[str]:
    """Broken invariants of pages, blocks and rows, in words."""
    running = [r.blocks for r in scheduler.running.values()]
    waiting = [r.blocks for _, r in scheduler.queue]
    between_turns = [s.blocks for s in scheduler.sessions.all]
    faults = scheduler.cache.faults(running, waiting + between_turns)
    rows = sorted([*scheduler.free_rows, *scheduler.running])
    if rows != list(range(scheduler.max_num_seqs)):
        faults.append(f"rows free and in use: {rows}")
    for row, request in scheduler.running.items():
        expected = [b.row for b in request.blocks]
        if request.row != row or scheduler.block_table[row, : len(expected)].tolist() != expected:
            faults.append(f"row {row} does not have its request's pages")
        if len(expected) * scheduler.block_size < request.computed:
            faults.append(f"row {row} has too few pages for {request.computed} tokens")
    return faults
