"""Decodes packed residents (lossless12) into the dense cells that a layer is computed from."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.cpu.arena import OwnedArena
from pallas_kernels.cpu.library import call, int32
from pallas_kernels.records.cpu import format_numbers
from pallas_kernels.records.format import RecordFormat


def unpack(
    arena: OwnedArena,
    layer: Int[Array, ""] | int,
    expert: Int[Array, " A"],
    source: Int[Array, " A"],
    row: Int[Array, " A"],
    count: Int[Array, ""],
    *,
    packed: RecordFormat,
) -> OwnedArena:
    """Queues the first `count` packed records for decoding into dense cells, part by part.

    The threads of the queue decode from arena rows `source` on into rows `row` on. An op that reads
    a cell waits for it, as it does for a record that crosses the link. The packed records stay
    unchanged until all are decoded.

    - `arena`: an owned arena with a queue.
    - `packed`: the format, lossless12.

    A place outside the arena is an error, before anything is queued. Raises ValueError for another
    format. Returns the arena.
    """
    if packed.version != "lossless12":
        raise ValueError(f"residents are packed as lossless12, not {packed.version}")
    operands = arena, int32(layer), expert, source, row, int32(count)
    said = {"width": np.int64(packed.width), "packed": np.array(format_numbers(packed), np.int64)}
    return call("unpack", arena, *operands, aliases={0: 0}, **said)
