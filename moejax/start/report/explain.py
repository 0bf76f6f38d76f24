"""The arithmetic of an engine's memory, a line a step, so that a person can check it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import Budget, format_bytes
from host_offload.queue.cached import CachedRecords
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.start.options import Config


@dataclasses.dataclass(frozen=True)
class ExplanationLine:
    """A line of the table. The lines of a block add up to its total, its last line."""

    what: str
    bytes: int
    how: str = ""
    """Where the number comes from."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Blocks of lines; `print` shows them."""

    blocks: tuple[tuple[ExplanationLine, ...], ...]
    notes: tuple[str, ...]
    """What the numbers given came to and what was cut."""

    def __str__(self) -> str:
        every = [line for block in self.blocks for line in block]
        what = max(len(line.what) for line in every)
        digits = max(len(f"{line.bytes:,}") for line in every)
        rows = []
        for block in self.blocks:
            for line in block:
                if line is block[-1]:
                    rows.append(" " * (what + 2) + "─" * digits)
                size = f"{line.bytes:>{digits},}  {format_bytes(line.bytes):>10}"
                rows.append(f"{line.what:<{what}}  {size}  {line.how}".rstrip())
            rows.append("")
        return "\n".join([*rows, *self.notes])


def explain(engine: Engine, budget: Budget) -> Explanation:
    """How an engine's memory is divided now, in bytes. budget: that it began with."""
    arena, layout = engine.scheduler.arena, engine.scheduler.arena.layout
    size, page = layout.slot_bytes, layout.page
    total = arena.slots * size
    blocks: list[tuple[ExplanationLine, ...]] = []
    if (memory := budget.memory) is not None:
        taken = [
            ExplanationLine("free device memory", memory.free, "at the start, parameters loaded")
        ]
        what = "activations and everything else"
        if memory.activations:
            how = "the largest step's temporaries and two results, from XLA's memory analysis"
            taken.append(ExplanationLine("activations", -memory.activations, how))
            what = "everything else"
        largest = ExplanationLine("largest arena", memory.available)
        reserve = f"{memory.reserve / memory.free:.0%} of it"
        blocks.append(_block(largest, *taken, rest=what, how=reserve))
        whole = ExplanationLine("arena", total, f"{arena.slots} slots of {size} bytes")
        why = "not needed, not given, or no slot"
        blocks.append(_block(whole, largest, rest="not taken", how=why))
    experts, kv = arena.count(SlotClass.EXPERT), arena.count(SlotClass.KV)
    cells, pages = cells_of(arena), arena.pages
    each = f"{min(cells)}" if min(cells) == max(cells) else f"{min(cells)} to {max(cells)}"
    shared = f"{each} of {arena.experts} in each of {len(cells)} layers"
    if engine.runner.placement is not None:  # layers have no cells of their own
        names = " or ".join(r.version for r in layout.records)
        shared = f"all {arena.experts * len(cells)} of {len(cells)} layers, each in {names}"
    held = sum(cells)
    if engine.runner.steps.window:
        held = experts
        held_layers = "two" if engine.runner.steps.owned else "one"
        shared = f"a window of {held_layers} of {len(cells)} layers"
    tokens = f"{pages} pages of {page.block_size} tokens, {pages * page.block_size} in all"
    ends = f"{layout.pages_per_slot} pages of {page.nbytes} bytes in a slot"
    parts = (
        ExplanationLine("experts", experts * size, f"{experts} slots: {shared}"),
        ExplanationLine("KV", kv * size, f"{kv} slots"),
    )
    shares = parts[1:] if budget.in_place else parts
    owner = "memory of the native ops, never moved" if engine.runner.steps.owned else ""
    rest = "ends of slots" if len(layout.records) == 1 else "spare cells, ends"
    blocks += (
        _block(
            ExplanationLine("arena", total, owner), *shares, rest="free", how="given to neither"
        ),
        _block(
            ExplanationLine("KV", kv * size),
            ExplanationLine("KV pages", pages * page.nbytes, tokens),
            rest="ends of slots",
            how=ends,
        ),
        _in_place(engine)
        if budget.in_place
        else _block(ExplanationLine("experts", experts * size), *_weights(engine, held), rest=rest),
    )
    if store := engine.runner.store.file_bytes:
        held = experts * size
        arrays = engine.runner.store.arrays.values()
        cached = any(isinstance(array, CachedRecords) for array in arrays)
        through = "through a cache in pinned host memory" if cached else "the arena is their cache"
        blocks.append(
            _block(
                ExplanationLine("experts' files", store, "read as they are computed"),
                ExplanationLine("in cells, at most", held, through),
                rest="in files alone",
            )
        )
    return Explanation(tuple(blocks), budget.notes)


def store_stats(engine: Engine, options: Config) -> dict[str, Any]:
    """Where experts without a cell are, as plain data: bytes in host memory and in files."""
    store = engine.runner.store
    found: dict[str, Any] = {
        "kind": options.memory.store.name,
        "memory_bytes": store.nbytes,
        "file_bytes": store.file_bytes,
    }
    for records in store.arrays.values():
        if isinstance(records, CachedRecords):
            found["verify_reads"] = records.source.verify
            found["past_the_page_cache"] = False
            found["cache"] = {
                "bytes": records.spec.bytes,
                **dataclasses.asdict(records.totals()),
            }
    queue, source = engine.runner.transport.queue, next(iter(store.files.values()), None)
    if source is not None and queue is not None:
        found["verify_reads"] = source.verify
        found["past_the_page_cache"] = queue.reads_past_the_cache(source.first_file)
    return found


def _block(
    total: ExplanationLine, *parts: ExplanationLine, rest: str, how: str = ""
) -> tuple[ExplanationLine, ...]:
    """The parts, what is left of the total or goes beyond it, and the total."""
    left = total.bytes - sum(part.bytes for part in parts)
    return (*parts, ExplanationLine(rest, left, how), total)


def _in_place(engine: Engine) -> tuple[ExplanationLine, ...]:
    """The experts that are resident in the store."""
    store = engine.runner.store
    lines = [
        ExplanationLine(
            f"{version} experts", array.nbytes, f"{math.prod(array.shape[:2])} where they lie"
        )
        for version, array in store.arrays.items()
    ]
    return *lines, ExplanationLine(
        "experts", store.nbytes, "in place in the store: one copy, no slots"
    )


def _weights(engine: Engine, cells: int) -> list[ExplanationLine]:
    """What is in so many cells; of several versions, a line each with the cells cut for it."""
    tables, formats = engine.runner.tables, engine.runner.steps.formats
    dense, *others = engine.runner.layout.records
    sizes, counts = {"experts' weights": dense.nbytes}, {"experts' weights": cells}
    if others:
        assert formats is not None, "several versions lie in cells as their formats say"
        granted = np.asarray(tables.cell_version)[np.asarray(tables.cell_row) >= 0]
        sizes = {f"{lies.cell.version} cells": lies.cell.nbytes for lies in formats}
        counts = dict.fromkeys(sizes, 0)
        # Two versions of the store may lie alike in cells: lossless12 that is decoded on the way.
        for number, lies in enumerate(formats):
            counts[f"{lies.cell.version} cells"] += int(np.sum(granted == number))
    return [
        ExplanationLine(name, n * sizes[name], f"{n} of {sizes[name]} bytes")
        for name, n in counts.items()
    ]
