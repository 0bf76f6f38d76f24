"""What an engine holds and does at one moment, as plain data: for the server's page and for
pictures."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import jax
import numpy as np

from host_offload.memory.arena import SlotClass
from host_offload.simulate.auto import describe_choice
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.engine.step_work import ScheduledWork, Step, placed_rows

FREE, KV_FREE, KV_USED, EMPTY_CELL = -4, -3, -2, -1
"""What a slot holds, if it holds no expert: nothing; KV pages, none or some of them used; a cell
without an expert."""

_KEPT_STEPS = 8
"""Newest steps whose routing is counted later, so that counting never waits for the device."""


class RoutingCounts:
    """Counts how often each expert was chosen, as a listener of an engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps: deque[tuple[ScheduledWork, np.ndarray, jax.Array]] = deque()
        layers, experts = engine.runner.tables.address.shape
        self._chosen = np.zeros((layers, experts), np.int64)

    def listen(self, step: Step) -> None:
        """Takes a step that was dispatched."""
        # Not the step, which holds its logits.
        self._steps.append((step.work, step.positions, step.output.routing.ids))
        if len(self._steps) > _KEPT_STEPS:
            self._count(*self._steps.popleft())

    def read(self) -> np.ndarray:
        """Returns int64[L, E], tokens that chose each expert since the start. Waits for the steps
        so far."""
        while self._steps:
            self._count(*self._steps.popleft())
        return self._chosen

    def _count(self, work: ScheduledWork, positions: np.ndarray, ids: jax.Array) -> None:
        place = placed_rows(work, positions, self._engine.runner.shapes).place
        experts = self._chosen.shape[1]
        for layer, chosen in enumerate(np.asarray(ids)[:, place]):
            self._chosen[layer] += np.bincount(chosen.reshape(-1), minlength=experts)[:experts]


def least_kv_slots(engine: Engine) -> int:
    """Returns the slots that one sequence of the greatest length needs."""
    scheduler = engine.scheduler
    pages = scheduler.pages_for(scheduler.max_model_len, 0)
    return -(-pages // scheduler.arena.layout.pages_per_slot)


def describe(engine: Engine) -> dict[str, Any]:
    """Returns what does not change."""
    arena = engine.scheduler.arena
    layers, experts = engine.runner.tables.address.shape
    return {
        "layers": layers,
        "experts": experts,
        "slots": arena.slots,
        "slot_bytes": arena.layout.slot_bytes,
        "most_cells": int(arena.cell_row.shape[1]),
        "least_kv_slots": least_kv_slots(engine),
        "movable": not (engine.runner.steps.in_place or engine.runner.steps.window)
        and len(engine.runner.layout.records) == 1,
    }


def choices_of(engine: Engine) -> list[str]:
    """Returns what `policy="auto"` runs, how long adaptive drafts are, and why, a line each."""
    drafts = None if engine.drafts is None else engine.drafts.why()
    return [why for why in (describe_choice(engine.control), drafts) if why]


def snapshot(engine: Engine, counts: RoutingCounts) -> dict[str, Any]:
    """Returns what changes. Call it between two steps; it waits for the device.

    - `slots`: for each slot of the arena, version × L × E + layer × E + expert, or FREE, KV_FREE,
      KV_USED, EMPTY_CELL.
    - `resident`: for each layer × E + expert, 1 + the version that is in a cell, else 0.
    - `chosen`: for each layer × E + expert, the tokens that chose it since the start.
    - `time`: when it was taken, in seconds.
    - `policy`: choices_of, null without any.
    - Counters since the start, times in seconds, and what waits and runs.
    """
    runner, scheduler, statistics = engine.runner, engine.scheduler, engine.statistics
    with engine.undisturbed():
        tables, arena = runner.tables, scheduler.arena
        owner, row, version = (
            np.asarray(table) for table in (tables.owner, tables.cell_row, tables.cell_version)
        )
        chosen = counts.read()
        layers, experts = chosen.shape
        slots = np.full(arena.slots, FREE, np.int64)
        for slot in np.flatnonzero(arena.slot_class == SlotClass.KV).tolist():
            slots[slot] = KV_USED if scheduler.cache.holds(slot) else KV_FREE
        # Where experts are read in place, none needs a cell.
        resident = np.full((layers, experts), int(runner.steps.in_place), np.int64)
        for layer, cell in np.argwhere(row >= 0).tolist():
            slot, expert = int(row[layer, cell]) // arena.layout.slot_rows, int(owner[layer, cell])
            kind = int(version[layer, cell])
            if 0 <= expert < experts:
                resident[layer, expert] = kind + 1
                slots[slot] = (kind * layers + layer) * experts + expert
            elif slots[slot] < 0:
                slots[slot] = EMPTY_CELL
        totals = runner.transport.totals()
        return {
            "slots": slots.tolist(),
            "resident": resident.reshape(-1).tolist(),
            "chosen": chosen.reshape(-1).tolist(),
            "cells_per_layer": cells_of(arena),
            "kv_slots": arena.count(SlotClass.KV),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "generated_tokens": statistics.generated_tokens,
            "prompt_tokens": statistics.prompt_tokens,
            "steps": sum(statistics.steps.values()),
            "seconds": sum(statistics.seconds.values()),
            "device_seconds": statistics.device_s,
            "time": time.perf_counter(),
            "activations": statistics.paging["active"],
            "hits": statistics.paging["hits"],
            "bytes": sum(statistics.moved.values()),
            "policy": "; ".join(choices_of(engine)) or None,
            "wait_seconds": None if totals is None else totals.wait_seconds,
        }
