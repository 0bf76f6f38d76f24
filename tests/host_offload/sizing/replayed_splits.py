"""Schedules of cells and KV pages played again, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.sizing.configurator import Turn
from host_offload.sizing.kv_reuse import page_keys


class Replayed(NamedTuple):
    """What a schedule of splits missed; n turns."""

    expert_misses: np.ndarray
    """int64[n], first sights included."""
    kv_misses: np.ndarray
    """int64[n]: pages that came back and were not there."""
    expert_first: int
    """First sights of experts, the same under every schedule."""


def replay_split(
    turns: Iterable[Turn], cells: Sequence[np.ndarray], pages: Sequence[int]
) -> Replayed:
    """Both streams under given budgets, exactly: experts through the pager (LRU), KV as an LRU pool
    of pages, which gives up what was used least recently when it shrinks.

    cells: int[L] during each turn. pages: of the KV pool at the end of each turn.
    """
    pager, seen = None, None
    held = np.zeros(0, np.int64)
    known: set[int] = set()
    experts, missed = [], []
    for turn, now, pool in zip(turns, cells, pages, strict=True):
        count = 0
        for active in turn.active:
            if pager is None or seen is None:
                pager = Pager(cold_tables(now, active.shape[1], (1, 0, 0)))
                seen = np.zeros_like(active)
            if active is turn.active[0]:
                pager.regrant(now)
            count += np.count_nonzero(pager.reference(active).missing)
            seen |= active
        experts.append(count)
        keys = page_keys(turn.pages)
        gone = ~np.isin(keys, held)
        missed.append(sum(key in known for key in keys[gone].tolist()))
        known.update(keys[keys >= 0].tolist())
        kept = np.concatenate([keys, held[~np.isin(held, keys)]])[: max(pool, 0)]
        held = kept[kept >= 0]
    first = 0 if seen is None else int(np.count_nonzero(seen))
    return Replayed(np.array(experts, np.int64), np.array(missed, np.int64), first)
