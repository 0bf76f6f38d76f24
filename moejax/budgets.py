"""Moving the line between experts and KV: table contents only, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from host_offload.arena import SlotArena, SlotClass
from host_offload.policy_rules import PolicyError
from moejax.runner import Runner
from moejax.scheduler import Scheduler


def check_grant(arena: SlotArena, cells: Sequence[int], kv_slots: int) -> None:
    """Raises ValueError for cells per layer and KV slots that the arena cannot have at once."""
    layers, bound = arena.cell_row.shape
    if len(cells) != layers or any(not 0 <= n <= bound for n in cells):
        raise ValueError(f"cells per layer must be {layers} numbers of 0…{bound}: {cells}")
    if kv_slots < 0 or sum(cells) + kv_slots > arena.slots:
        raise ValueError(f"{sum(cells)} cells + {kv_slots} KV slots of {arena.slots} slots")


def grant(runner: Runner, arena: SlotArena, cells: Sequence[int], kv_slots: int) -> None:
    """Gives the layers so many cells and KV so many slots. Shrinks before it grows: at no moment do
    both sides hold a slot. Raises ValueError, changing nothing, where KV that is in use would have
    to go."""
    if kv_slots < arena.count(SlotClass.KV):
        arena.grant_kv_slots(kv_slots)
    runner.grant_cells(arena.grant_cells(cells))
    arena.grant_kv_slots(kv_slots)


def try_grant(
    runner: Runner, scheduler: Scheduler, cells: np.ndarray | None, kv_pages: int | None
) -> bool:
    """What a policy wants while requests run, None: as it is. False: not now, KV is in the way.
    Raises PolicyError for what can never be."""
    arena = scheduler.arena
    wanted = (np.sum(arena.cell_row >= 0, axis=1) if cells is None else cells).tolist()
    kv_slots = arena.count(SlotClass.KV)
    if kv_pages is not None:
        kv_slots = -(-kv_pages // arena.layout.pages_per_slot)
    live = [*scheduler.running.values(), *scheduler.waiting]
    needs = [scheduler.pages_for(len(r.prompt), r.to_generate) for r in live]
    if max(needs, default=0) > kv_slots * arena.layout.pages_per_slot:
        return False  # one of them could never run
    try:
        check_grant(arena, wanted, kv_slots)
    except ValueError as error:
        raise PolicyError(f"a policy wants what the arena cannot give: {error}") from error
    try:
        if kv_slots < arena.count(SlotClass.KV):
            scheduler.move_out_all()  # of what KV holds, only what requests run on stays
        grant(runner, arena, wanted, kv_slots)
    except ValueError:
        return False
    return True
