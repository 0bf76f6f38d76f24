"""An arena that the library of native CPU ops owns, and copies within it, out of it and into it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import weakref
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.library import call, int32, library
from pallas_kernels.cpu.sources import Sources

TOKEN = jax.ShapeDtypeStruct((2,), np.uint32)
"""Unlike any other array of a step, so that a copy of it shows in what XLA compiles: it makes one
where it has not found a write of the arena to come after every read of what was there before."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["rows", "hidden"]
)
@dataclasses.dataclass(frozen=True)
class OwnedArena:
    """What programs carry in the place of an arena uint16[rows, D] whose memory is not XLA's: ops
    of implementation "cpu" take it where they take the array. Writers give it back with another
    token, so that data dependence is order, as with the array. A read that a write has overtaken,
    or a write that overtakes a read, is found by the token and refused (cpu/arena.h)."""

    token: Any
    """uint32[2]: the arena's handle in this process, and the writes before."""
    rows: int
    hidden: int

    dtype = np.dtype(np.uint16)
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.hidden

    @property
    def size(self) -> int:
        return self.rows * self.hidden

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class TransferFailure:
    """An expert that an op could not compute."""

    layer: int
    expert: int
    message: str
    """Why its bytes did not come, with the file's name."""


_MOST_TOLD, _TOLD_BYTES = 16, 1024


class _Told(ctypes.Structure):
    """What the library says of failures: room for it, made once, since every step asks."""

    _fields_ = (
        ("layer", ctypes.c_int32 * _MOST_TOLD),
        ("expert", ctypes.c_int32 * _MOST_TOLD),
        ("text", ctypes.c_char * _TOLD_BYTES * _MOST_TOLD),
    )


class ArenaMemory:
    """The memory of an owned arena: zeros, aligned to 2 MiB, until `close` or until nobody refers
    to this object; then the ops that still run end on it, and others are refused."""

    def __init__(self, rows: int, hidden: int):
        """Raises MemoryError, and ValueError where the library cannot run here."""
        self.rows, self.hidden = rows, hidden
        self.handle = int(_functions().new(rows, hidden))
        if not self.handle:
            gib = rows * hidden * 2 / 2**30
            raise MemoryError(f"there is no memory for an arena of {gib:.1f} GiB")
        self.address = int(_functions().data(self.handle))
        """Where the first row lies; constant."""
        self.sources: Sources | None = None
        """Where a queue brings records from; None: there is no queue."""
        self._told: _Told | None = None
        self.close = weakref.finalize(self, _functions().close, self.handle)
        """Frees the memory. Idempotent."""

    @property
    def nbytes(self) -> int:
        return self.rows * self.hidden * 2

    def token(self) -> np.ndarray:
        """uint32[2]: of OwnedArena, for what comes next. Nothing may be writing."""
        return np.array([self.handle, _functions().writes(self.handle)], TOKEN.dtype)

    def on(self, device: jax.Device) -> OwnedArena:
        """The arena for programs of this device, a CPU."""
        return OwnedArena(jax.device_put(self.token(), device), self.rows, self.hidden)

    def view(self) -> np.ndarray:
        """uint16[rows, D], the memory itself: valid until close, for between two programs."""
        values = (ctypes.c_uint16 * (self.rows * self.hidden)).from_address(self.address)
        return np.ctypeslib.as_array(values).reshape(self.rows, self.hidden)

    def attach(self, queue: int, sources: Sources, *, ahead: int, buffers: int = 2) -> None:
        """From now on a native queue brings records into cells, each named by its first row: `fill`
        and `stage` queue, expert_ffn waits for what it reads. Once, before the first op.

        queue: its handle (host_offload.queue.native), which has no other user. ahead: the number of
        the cause that `stage` queues with. buffers: through which records without a cell are read,
        each of the largest one. Raises ValueError where the arena or the queue is closed, or
        without memory.
        """
        most = max(map(len, sources.parts))
        parts = np.array([[*p, *(0,) * (most - len(p))] for p in sources.parts], np.int64)
        shape, records = (
            np.array(sources.records.shape, np.int64),
            np.ascontiguousarray(sources.records),
        )
        turned = np.array(sources.turned, np.int64)
        pointers = (array.ctypes.data for array in (shape, records, parts))
        operands = *pointers, most, turned.ctypes.data, ahead, buffers
        if not _functions().attach(self.handle, queue, *operands):
            raise ValueError("the arena or the queue is closed, or there is no memory for buffers")
        self.sources = sources
        self._told = _Told()

    def failures(self, writes: int) -> list[TransferFailure]:
        """The experts that ops could not compute because their bytes did not come: of ops that
        began after no more than so many writes, each told once."""
        told = self._told
        if told is None:
            return []
        places = ctypes.addressof(told.layer), ctypes.addressof(told.expert)
        arguments = self.handle, writes, _MOST_TOLD, *places, ctypes.addressof(told.text)
        count = _functions().failures(*arguments, _TOLD_BYTES)
        return [
            TransferFailure(
                told.layer[i], told.expert[i], told.text[i].value.decode(errors="replace")
            )
            for i in range(min(count, _MOST_TOLD))
        ]


def abstract_arena(rows: int, hidden: int) -> OwnedArena:
    """An owned arena as programs are traced with, without memory."""
    return OwnedArena(TOKEN, rows, hidden)


def move_rows(arena, source, target, rows, *, width: int):
    """The arena with rows[i] rows from source[i] copied to target[i], for each entry of int32[S];
    rows are of `width` elements. No target is a source, entries may repeat. A place outside of the
    arena is an error, before anything is written."""
    return call("move", arena, arena, source, target, rows, aliases={0: 0}, width=np.int64(width))


def drain(arena, cell_row):
    """The arena once nothing flies into it, and of cell_row int32[...] an int32[...], 1 where the
    cell from that row on was to be filled and was not: its bytes are nobody's. These are told
    once. Without a queue nothing flies."""
    failed = jax.ShapeDtypeStruct(cell_row.shape, np.int32)
    return call("drain", (arena, failed), arena, cell_row, aliases={0: 0})


def read_rows(arena, first, rows: int, *, width: int) -> tuple[jax.Array, ...]:
    """The `rows` rows from each of first int32[S] on, as S arrays of uint16[rows · width]. Errors
    as of move_rows."""
    part = jax.ShapeDtypeStruct((rows * width,), np.uint16)
    parts = (part,) * first.shape[0]
    return call("read", parts, arena, first, width=np.int64(width), rows=np.int64(rows))


def write_rows(arena, values, first, count, *, width: int):
    """The arena with the first `count` of S values, uint16[rows · width] each, at the rows from
    first int32[S] on; entries may repeat. Errors as of move_rows."""
    rows = math.prod(values[0].shape) // width
    operands = arena, first, int32(count), *values
    sizes: dict[str, Any] = {"width": np.int64(width), "rows": np.int64(rows)}
    return call("write", arena, *operands, aliases={0: 0}, **sizes)


@dataclasses.dataclass(frozen=True)
class _Functions:
    new: ctypes._NamedFuncPointer
    data: ctypes._NamedFuncPointer
    writes: ctypes._NamedFuncPointer
    attach: ctypes._NamedFuncPointer
    failures: ctypes._NamedFuncPointer
    close: ctypes._NamedFuncPointer


@functools.cache
def _functions() -> _Functions:
    loaded = library()
    found = {f.name: loaded[f"moejax_cpu_arena_{f.name}"] for f in dataclasses.fields(_Functions)}
    found["new"].argtypes = [ctypes.c_int64, ctypes.c_int64]
    for name in ("data", "writes", "close"):
        found[name].argtypes = [ctypes.c_uint32]
    found["new"].restype = found["writes"].restype = ctypes.c_uint32
    found["data"].restype = ctypes.c_void_p
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    found["attach"].argtypes = [
        *(ctypes.c_uint32, ctypes.c_int32, pointer, pointer, pointer),
        *(number, pointer, ctypes.c_int32, number),
    ]
    found["failures"].argtypes = [
        *(ctypes.c_uint32, ctypes.c_uint32, number, pointer, pointer),
        *(pointer, number),
    ]
    found["attach"].restype, found["failures"].restype = ctypes.c_int32, number
    found["close"].restype = None
    return _Functions(**found)
