"""Residents that are packed without loss, into the dense cells that a layer is computed from."""

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
    """The arena in which the threads of its queue decode the first `count` records of the format
    `packed`, lossless12, from the arena rows `source` on into dense cells from the rows `row` on,
    part by part, ahead of need. Who reads a cell waits for it as for one that comes over the link,
    which these do not pass. The packed records stay as they are until all have been decoded.

    Native: an owned arena with a queue. Raises ValueError for another format; a place outside of
    the arena is an error, before anything is queued.
    """
    if packed.version != "lossless12":
        raise ValueError(f"residents are packed as lossless12, not {packed.version}")
    operands = arena, int32(layer), expert, source, row, int32(count)
    said = {"width": np.int64(packed.width), "packed": np.array(format_numbers(packed), np.int64)}
    return call("unpack", arena, *operands, aliases={0: 0}, **said)
