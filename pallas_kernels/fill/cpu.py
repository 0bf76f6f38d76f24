import numpy as np

from pallas_kernels.cpu.library import call, int32
from pallas_kernels.records.absent import stood_in
from pallas_kernels.records.cpu import versions


def fill(arena, stores, layer, fills, *, formats, ahead=False):
    """Threads copy parts of records, and decode what is decoded on the way. An entry whose record
    or cell is not there is an error, before anything is written. Where the arena has a queue, it
    brings what is not decoded. ahead: of need, so that demands go first."""
    operands = arena, int32(layer), *fills[:3], int32(fills.count)
    said = versions(formats, stores) | {"ahead": np.int64(ahead)}
    return call("fill", arena, *operands, *stood_in(stores, arena, "cpu"), aliases={0: 0}, **said)
