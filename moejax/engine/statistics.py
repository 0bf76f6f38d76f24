"""The numbers of `LLM.stats()`: requests, steps, times, transfers, and the use of the arena."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.step_record import Glance, LinkUse, PageUse
from host_offload.control.window import HOST, PAYS_FROM, WindowSpec
from host_offload.memory.arena import SlotClass
from host_offload.memory.layout import SlotLayout
from host_offload.memory.sequence_blocks import SequenceBlocks
from host_offload.memory.tables import Tables
from host_offload.queue.native import Totals
from host_offload.queue.transfer import QueueSpec
from moejax.engine.scheduler import Scheduler
from moejax.engine.step_work import Step, demand_bytes, routed_ids
from moejax.requests.request import Request
from moejax.step.experts import Paging
from moejax.step.processor import PlacementTotals
from moejax.step.step_parts import SecondProcessor, StepShapes

KEPT_TIMES = 100_000
"""Latest times kept for percentiles, so that memory stays flat however long the engine runs."""


class Statistics:
    """Counters of one engine.

    - `record_bytes`: bytes of one expert over the link, by version number.
    """

    def __init__(self, record_bytes: Sequence[int]):
        self.record_bytes = tuple(record_bytes)
        self.requests = self.prompt_tokens = self.generated_tokens = 0
        self.steps = {"prefill": 0, "decode": 0}
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.device_s = 0.0
        """Seconds of those in which the host waited for the device."""
        self.paging = dict.fromkeys(Paging._fields, 0)
        self.moved = {"fill": 0, "read_through": 0}
        """Bytes over the link by cause."""
        self.first_token_times: deque[float] = deque(maxlen=KEPT_TIMES)
        self.token_times: deque[float] = deque(maxlen=KEPT_TIMES)
        self.last_read_s: float | None = None
        """Time from which the next step counts."""

    def add_step(
        self, kind: str, totals: Sequence[int], now: float, demand: np.ndarray | None = None
    ) -> None:
        """Counts a step that was read.

        - `kind`: prefill or decode.
        - `totals`: the sums of the fields of Paging.
        - `now`: when its results were read, in seconds.
        - `demand`: Results.demand.
        """
        self.steps[kind] += 1
        # A step runs while the host reads the one before, so it gets the time between two reads.
        self.seconds[kind] += now - (self.last_read_s or now)
        self.last_read_s = now
        for name, count in zip(Paging._fields, totals, strict=True):
            self.paging[name] += count
        _, _, fills, read_through = totals
        if fills or read_through:
            moved = demand_bytes(fills, read_through, demand, self.record_bytes)
            for name, count in zip(self.moved, moved, strict=True):
                self.moved[name] += count

    def add_token(self, request: Request, now: float) -> None:
        """Counts a token. Of several that one step gave, drafts that were accepted, all but the
        first took no time."""
        self.generated_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now
            self.first_token_times.append(now - request.arrival_s)
        else:
            took = now - (request.last_token_s or now)
            self.token_times.append(took)
            request.token_times.append(took)
        request.last_token_s = now

    def summary(self) -> dict:
        """Returns the part of LLM.stats() on requests: seconds, counts, bytes over the link."""
        wall, paging = sum(self.seconds.values()), self.paging
        first, between = np.asarray(self.first_token_times), np.asarray(self.token_times)
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "ttft_s": {
                "mean": float(first.mean()) if first.size else None,
                "max": float(first.max()) if first.size else None,
            },
            "tpot_s": {
                "mean": float(between.mean()) if between.size else None,
                "p50": float(np.percentile(between, 50)) if between.size else None,
                "p99": float(np.percentile(between, 99)) if between.size else None,
            },
            "tokens_per_s": self.generated_tokens / wall if wall else None,
            "steps": dict(self.steps),
            "experts": {
                "activations": paging["active"],
                "hits": paging["hits"],
                "fills": paging["fills"],
                "read_through": paging["read_through"],
                "hit_rate": paging["hits"] / paging["active"] if paging["active"] else None,
            },
            "bytes": dict(self.moved),
        }


class StartTimes:
    """Seconds by phase of a start, `stats()["time"]["start"]`.

    - `backend`: options and jax's backend.
    - `headers`: config and headers of the weights.
    - `allocate`: memory for the weights.
    - `read`: from the files to their places, with conversion and copies to the device.
    - `load`: what else loading took.
    - `engine`: arena and executables, and the rest of experts that are read beside them, unless
      steps wait for them (`stats()["store"]["unread_bytes"]`).
    - `tokenizer`: waiting for the tokenizer, which is read at the same time.
    """

    def __init__(self):
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """Ends a phase now.

        - `parts`: seconds of phases within it, which are taken from its own time.
        """
        now, parts = time.perf_counter(), parts or {}
        self.seconds |= parts
        self.seconds[phase] = now - self._last - sum(parts.values())
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds until the last phase ended."""
        return sum(self.seconds.values())

    def report(self) -> dict[str, Any]:
        """Returns the part of LLM.stats()["time"] on the start: load_s until the weights are in
        their places, start_s of the whole start, and the phases."""
        after = self.seconds.get("engine", 0.0) + self.seconds.get("tokenizer", 0.0)
        start = dict(self.seconds)
        return {"load_s": self.total_s - after, "start_s": self.total_s, "start": start}

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())


def kv_stats(scheduler: Scheduler) -> dict:
    """Returns KV statistics as plain data: pages by state, cache hits, bytes swapped."""
    cache = scheduler.cache
    return {
        "prefix_hit_tokens": scheduler.prefixes.hit_tokens,
        **scheduler.counts,
        "pages": page_states(scheduler),
        "page_groups": page_groups(scheduler),
        "state_pages": sum(len(blocks.state) for blocks in _holders(scheduler)),
        "swapped_out_bytes": cache.swapped_out * cache.page_bytes,
        "swapped_in_bytes": cache.swapped_in * cache.page_bytes,
        "cached_pages_dropped": cache.dropped,
        "sessions": len(scheduler.sessions.all),
        "sessions_evicted": scheduler.sessions.evicted,
    }


def page_states(scheduler: Scheduler) -> dict[str, int]:
    """Counts pages by state."""
    running = {b for r in scheduler.running.values() for b in r.blocks}.union(scheduler.states)
    holders = (*(r for _, r in scheduler.queue), *scheduler.sessions.all)
    held = {b for holder in holders for b in holder.blocks if b.row is not None}
    return {
        "running": len(running),
        "session": len(held - running),
        "cached": scheduler.cache.idle,
        "free": scheduler.arena.free_pages,
        "swapped": scheduler.cache.swapped,
    }


def page_groups(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Returns for each group of layers its window in tokens (None: it sees all), and the pages that
    sequences and sessions hold."""
    holders = _holders(scheduler)
    return [
        {
            "window": None if window is None else window.tokens,
            "pages": len({b for blocks in holders for b in blocks.of_group(group) if b}),
        }
        for group, window in enumerate(scheduler.page.windows)
    ]


def _holders(scheduler: Scheduler) -> list[SequenceBlocks]:
    """Returns the blocks of every sequence and session."""
    requests = *scheduler.running.values(), *(r for _, r in scheduler.queue)
    return [each.blocks for each in (*requests, *scheduler.sessions.all)]


def page_use(scheduler: Scheduler, link: LinkUse | None = None) -> PageUse:
    """Returns the state of KV, queues and link as policies and traces see it."""
    return PageUse(
        kv_used=scheduler.arena.pages - scheduler.cache.available,
        kv_peak=scheduler.peak_pages,
        kv_pages=scheduler.arena.pages,
        kv_swapped=scheduler.cache.swapped,
        running=len(scheduler.running),
        waiting=scheduler.totals.requests,
        waiting_tokens=scheduler.totals.prompt_tokens,
        **({} if link is None else link._asdict()),
    )


def step_glance(
    step: Step, shapes: StepShapes, missed: int, seconds: float, scheduler: Scheduler
) -> Glance:
    """Returns the glance of a step that was read.

    - `missed`: active experts that were not resident.
    - `seconds`: from the start until it was read.
    """
    decode = bool(step.work.rows)
    cache, pages, waiting = scheduler.cache, scheduler.arena.pages, scheduler.totals
    return Glance(
        decode,
        step.output.logits.shape[0] if decode else 0,
        missed,
        seconds,
        step.compiled,
        functools.partial(routed_ids, step, shapes),
        kv_used=pages - cache.available,
        kv_pages=pages,
        kv_swapped=cache.swapped,
        running=len(scheduler.running),
        waiting=waiting.requests,
        waiting_tokens=waiting.prompt_tokens,
    )


def arena_stats(scheduler: Scheduler, tables: Tables) -> dict:
    """Returns the use of the arena as plain data. Waits for the device."""
    arena, layout = scheduler.arena, scheduler.arena.layout
    return {
        "bytes": arena.slots * layout.slot_bytes,
        "slots": arena.slots,
        "slot_bytes": layout.slot_bytes,
        "expert_slots": arena.count(SlotClass.EXPERT),
        "kv_slots": arena.count(SlotClass.KV),
        "free_slots": arena.count(SlotClass.FREE),
        # From the tables: if every expert is resident, SlotArena has granted no cells to layers.
        "cells_per_layer": np.sum(np.asarray(tables.cell_row) >= 0, axis=1).tolist(),
        "cells_used": int(np.sum(np.asarray(tables.owner) >= 0)),
        "block_size": layout.page.block_size,
        "kv_pages": arena.pages,
        "kv_pages_used_peak": scheduler.peak_pages,
    }


def stream_stats(
    window: WindowSpec | None, statistics: Statistics, layout: SlotLayout, moved: np.ndarray
) -> dict[str, Any] | None:
    """Returns statistics of the stream driver as plain data; None with another driver.

    `used` is the mean share of a layer's experts that a step's tokens chose. The others were moved
    for nothing, so below `pays_from` another driver moves fewer bytes.

    - `moved`: int64[L], bytes of an expert over the link.
    """
    if window is None:
        return None
    steps = sum(statistics.steps.values())
    every = window.layers * window.experts
    placement, record = window.placement, layout.records[0].nbytes
    dense, packed, _ = placement.sum(axis=0).tolist()
    return {
        "cells": window.cells,
        "bytes": window.rows * layout.hidden * 2,
        "staging_bytes": window.staged_rows * layout.hidden * 2,
        "resident_per_layer": dense / window.layers,
        "packed_per_layer": packed / window.layers,
        "bytes_per_step": int(placement[:, HOST] @ moved),
        "unpacked_bytes_per_step": 0 if window.direct else packed * record,
        "steps": steps,
        "used": statistics.paging["active"] / (steps * every) if steps else None,
        "pays_from": PAYS_FROM,
    }


def placement_stats(
    totals: PlacementTotals | None, placement: str | None, second: SecondProcessor | None
) -> dict[str, Any] | None:
    """Returns the work of a second processor (PlacementTotals) as plain data; None without one. If
    `same_bits` is False, outputs depend on the placement."""
    if totals is None or second is None:
        return None
    about = {"implementation": second.implementation, "same_bits": second.keeps_outputs}
    return {"placement": placement, **about, **dataclasses.asdict(totals)}


def transfer_stats(queue: QueueSpec | None, totals: Totals | None) -> dict | None:
    """Returns the link and its transfers beside compute (host_offload.queue.native.Totals) as plain
    data; None if the steps' ops copy experts."""
    if queue is None or totals is None:
        return None
    return {
        "link_rate": queue.rate or None,
        "link_latency_s": queue.latency,
        "chunk_bytes": queue.chunk_bytes,
        "threads": queue.threads,
        **dataclasses.asdict(totals),
    }
