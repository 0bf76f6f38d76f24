import numpy as np

from pallas_kernels.cpu.library import call, int32
from pallas_kernels.records.absent import stood_in
from pallas_kernels.records.cpu import versions


def fill(arena, stores, layer, fills, *, formats, ahead=False):
    """Copies parts of records by several threads, and decodes records on the way if their formats
    differ.

    If the arena has a queue, the queue copies all records that are not decoded. An entry with an
    unknown record or cell is an error, before anything is written.
    """
    operands = arena, int32(layer), *fills[:3], int32(fills.count)
    said = versions(formats, stores) | {"ahead": np.int64(ahead)}
    return call("fill", arena, *operands, *stood_in(stores, arena, "cpu"), aliases={0: 0}, **said)
