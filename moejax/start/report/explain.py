"""The arithmetic of an engine's memory, a line a step, so that a person can check it."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import Budget, format_bytes
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table. The lines of a block add up to its total, its last line."""

    what: str
    bytes: int
    how: str = ""
    """Where the number comes from."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Blocks of lines; `print` shows them."""

    blocks: tuple[tuple[Line, ...], ...]
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
    size, record = layout.slot_bytes, layout.records[0].nbytes
    total = arena.slots * size
    blocks: list[tuple[Line, ...]] = []
    if (memory := budget.memory) is not None:
        taken = [Line("free device memory", memory.free, "at the start, parameters loaded")]
        if memory.activations:
            how = "the largest step's temporaries and two results, from XLA's memory analysis"
            taken.append(Line("activations", -memory.activations, how))
        what = "everything else" if memory.activations else "activations and everything else"
        taken.append(Line(what, -memory.reserve, f"{memory.reserve / memory.free:.0%} of it"))
        blocks.append((*taken, Line("largest arena", memory.available)))
        blocks.append(
            (
                Line("largest arena", memory.available),
                Line("not taken", total - memory.available, "not needed, not given, or no slot"),
                Line("arena", total, f"{arena.slots} slots of {size} bytes"),
            )
        )
    experts, kv = arena.count(SlotClass.EXPERT), arena.count(SlotClass.KV)
    runner, cells = engine.runner, cells_of(arena)
    each = f"{min(cells)}" if min(cells) == max(cells) else f"{min(cells)} to {max(cells)}"
    shared = f"{each} of {arena.experts} in each of {len(cells)} layers"
    if runner.placement is not None:  # layers have no cells of their own
        names = " or ".join(r.version for r in layout.records)
        shared = f"all {arena.experts * len(cells)} of {len(cells)} layers, each in {names}"
    blocks.append(
        (
            Line("experts", experts * size, f"{experts} slots: {shared}"),
            Line("KV", kv * size, f"{kv} slots"),
            Line("free", (arena.slots - experts - kv) * size, "given to neither"),
            Line("arena", total),
        )
    )
    page = layout.page
    tokens = (
        f"{arena.pages} pages of {page.block_size} tokens, {arena.pages * page.block_size} in all"
    )
    blocks.append(
        (
            Line("KV pages", arena.pages * page.nbytes, tokens),
            Line(
                "ends of slots",
                kv * size - arena.pages * page.nbytes,
                f"{layout.pages_per_slot} pages of {page.nbytes} bytes in a slot",
            ),
            Line("KV", kv * size),
        )
    )
    if len(layout.records) == 1:
        resident = sum(cells)
        blocks.append(
            (
                Line("experts' weights", resident * record, f"{resident} of {record} bytes"),
                Line("ends of slots", experts * size - resident * record),
                Line("experts", experts * size),
            )
        )
    else:
        parts = [
            Line(f"{version} cells", count * nbytes, f"{count} of {nbytes} bytes")
            for version, (count, nbytes) in _cells_by_version(engine).items()
        ]
        rest = experts * size - sum(part.bytes for part in parts)
        blocks.append((*parts, Line("spare cells, ends", rest), Line("experts", experts * size)))
    return Explanation(tuple(blocks), budget.notes)


def _cells_by_version(engine: Engine) -> dict[str, tuple[int, int]]:
    """Version → how many cells are cut for it and granted, and the bytes of one."""
    tables, formats = engine.runner.tables, engine.runner.formats
    assert formats is not None, "several versions lie in cells as their formats say"
    granted = np.asarray(tables.cell_version)[np.asarray(tables.cell_row) >= 0]
    found: dict[str, tuple[int, int]] = {}
    # Two versions of the store may lie alike in cells: lossless12 that is decoded on the way.
    for number, lies in enumerate(formats):
        before, _ = found.get(lies.cell.version, (0, 0))
        count = before + int(np.sum(granted == number))
        found[lies.cell.version] = count, lies.cell.nbytes
    return found
