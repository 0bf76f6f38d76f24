"""The arithmetic of an engine's memory, one step a line, so that a person can check it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import Budget, format_bytes
from host_offload.queue.cached import CachedRecords
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.start.options import Config


class ExplanationLine(NamedTuple):
    """A line of the table. The lines of a block add up to its total, its last line."""

    what: str
    bytes: int
    how: str = ""
    """Where the number comes from."""


Block = tuple[ExplanationLine, ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Blocks of lines; `print` shows them."""

    blocks: tuple[Block, ...]
    notes: tuple[str, ...]
    """The results of the given numbers, what was cut, and the model's sampling defaults."""

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
    """Returns how an engine's memory is divided now, in bytes.

    - `budget`: the budget that the engine began with.
    """
    arena, runner, line = engine.scheduler.arena, engine.runner, ExplanationLine
    layout, blocks = arena.layout, list[Block]()
    size, page, pages = layout.slot_bytes, layout.page, arena.pages
    total = arena.slots * size
    if (memory := budget.memory) is not None:
        taken = [line("free device memory", memory.free, "at the start, parameters loaded")]
        if memory.activations:
            how = "the largest step's temporaries and two results, from XLA's memory analysis"
            taken.append(line("activations", -memory.activations, how))
        largest = line("largest arena", memory.available)
        rest = "everything else" if memory.activations else "activations and everything else"
        blocks.append(
            _block(largest, *taken, rest=(rest, f"{memory.reserve / memory.free:.0%} of it"))
        )
        whole = line("arena", total, f"{arena.slots} slots of {size} bytes")
        rest = "not taken", "not needed, not given, or no slot"
        blocks.append(_block(whole, largest, rest=rest))
    experts, kv = arena.count(SlotClass.EXPERT), arena.count(SlotClass.KV)
    owner = "memory of the native ops, never moved" if runner.steps.owned else ""
    parts = [line("KV", kv * size, f"{kv} slots")]
    if not budget.in_place:
        how = f"{experts} slots: {_describe_sharing(engine)}"
        parts.insert(0, line("experts", experts * size, how))
    blocks.append(_block(line("arena", total, owner), *parts, rest=("free", "given to neither")))
    tokens = f"{pages} pages of {page.block_size} tokens, {page.tokens(pages)} in all"
    ends = f"{layout.pages_per_slot} pages of {page.nbytes} bytes in a slot"
    held = line("KV pages", pages * page.nbytes, tokens)
    blocks.append(_block(line("KV", kv * size), held, rest=("ends of slots", ends)))
    if budget.in_place:
        arrays = runner.store.arrays.items()
        lies = [
            line(f"{v} experts", a.nbytes, f"{math.prod(a.shape[:2])} where they lie")
            for v, a in arrays
        ]
        how = "in place in the store: one copy, no slots"
        blocks.append((*lies, line("experts", runner.store.nbytes, how)))
    else:
        rest = "ends of slots" if len(layout.records) == 1 else "spare cells, ends", ""
        blocks.append(_block(line("experts", experts * size), *_weights(engine), rest=rest))
    if in_files := runner.store.file_bytes:
        cached = any(isinstance(array, CachedRecords) for array in runner.store.arrays.values())
        through = "through a cache in pinned host memory" if cached else "the arena is their cache"
        files = line("experts' files", in_files, "read as they are computed")
        cells = line("in cells, at most", experts * size, through)
        blocks.append(_block(files, cells, rest=("in files alone", "")))
    return Explanation(tuple(blocks), budget.notes)


def _block(total: ExplanationLine, *parts: ExplanationLine, rest: tuple[str, str]) -> Block:
    """Returns lines of the parts, of what they leave of the total or exceed it by, and of the
    total."""
    name, how = rest
    left = ExplanationLine(name, total.bytes - sum(part.bytes for part in parts), how)
    return (*parts, left, total)


def _describe_sharing(engine: Engine) -> str:
    """Says how the layers share the slots of experts."""
    arena, runner = engine.scheduler.arena, engine.runner
    cells = cells_of(arena)
    if runner.steps.window:
        return f"a window of {'two' if runner.steps.owned else 'one'} of {len(cells)} layers"
    if runner.placement is not None:  # layers have no cells of their own
        names = " or ".join(record.version for record in runner.layout.records)
        return f"all {arena.experts * len(cells)} of {len(cells)} layers, each in {names}"
    each = f"{min(cells)}" if min(cells) == max(cells) else f"{min(cells)} to {max(cells)}"
    return f"{each} of {arena.experts} in each of {len(cells)} layers"


def _weights(engine: Engine) -> list[ExplanationLine]:
    """Returns the lines on what cells hold. With several versions, each version has a line with its
    cells."""
    arena, tables, formats = (
        engine.scheduler.arena,
        engine.runner.tables,
        engine.runner.steps.formats,
    )
    dense, *others = engine.runner.layout.records
    cells = arena.count(SlotClass.EXPERT) if engine.runner.steps.window else sum(cells_of(arena))
    counts = {("experts' weights", dense.nbytes): cells}
    if others:
        assert formats is not None, "several versions lie in cells as their formats say"
        granted = np.asarray(tables.cell_version)[np.asarray(tables.cell_row) >= 0]
        # Two versions of the store may lie alike in cells: lossless12 that is decoded on the way.
        counts = Counter[tuple[str, int]]()
        for number, lies in enumerate(formats):
            name = f"{lies.cell.version} cells"
            counts[name, lies.cell.nbytes] += int(np.sum(granted == number))
    return [
        ExplanationLine(name, n * nbytes, f"{n} of {nbytes} bytes")
        for (name, nbytes), n in counts.items()
    ]


def store_stats(engine: Engine, options: Config) -> dict[str, Any]:
    """Returns the bytes of experts without a cell in host memory and in files, as plain data."""
    store = engine.runner.store
    found: dict[str, Any] = {
        "kind": options.memory.store.name,
        "memory_bytes": store.nbytes,
        "file_bytes": store.file_bytes,
        "unread_bytes": store.unread,
    }
    if cached := [held for held in store.arrays.values() if isinstance(held, CachedRecords)]:
        found["verify_reads"] = all(records.source.verify for records in cached)
        found["past_the_page_cache"] = False
        counts = [
            {"bytes": records.spec.bytes, **dataclasses.asdict(records.totals())}
            for records in cached
        ]
        found["cache"] = {name: sum(each[name] for each in counts) for name in counts[0]}
    queue, source = engine.runner.transport.queue, next(iter(store.files.values()), None)
    if source is not None and queue is not None:
        found["verify_reads"] = source.verify
        found["past_the_page_cache"] = queue.reads_past_the_cache(source.first_file)
    return found
