from pallas_kernels.cpu.library import call, int32
from pallas_kernels.records.cpu import versions


def fill(arena, stores, layer, expert, row, version, count, *, formats):
    """Threads copy parts of records, and decode what is decoded on the way. An entry whose record
    or cell is not there is an error, before anything is written."""
    operands = arena, int32(layer), expert, row, version, int32(count)
    said = versions(formats, stores)
    return call("fill", arena, *operands, *stores, aliases={0: 0}, **said)
