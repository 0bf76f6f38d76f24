"""An arena that the library of native CPU ops owns, and copies within it, out of it and into it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
import weakref
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.finalizer import finalize_here
from pallas_kernels.cpu.gguf import BLOCK_MATRIX
from pallas_kernels.cpu.library import call, int32, library
from pallas_kernels.cpu.sources import PIECES, Sources

TOKEN = jax.ShapeDtypeStruct((2,), np.uint32)
"""A shape that no other array of a step has. If XLA does not see that a write of the arena comes
after all earlier reads, it copies the token, and tests find that copy in the compiled program."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["rows", "hidden"]
)
@dataclasses.dataclass(frozen=True)
class OwnedArena:
    """Stands for an arena uint16[rows, D] whose memory belongs to the native library.

    Programs carry it in place of the array, and ops of implementation "cpu" take it like the array.
    A write returns it with a new token, so data dependence gives the order of reads and writes. By
    the token the library refuses a read that a write has overtaken, and a write that overtakes a
    read (cpu/arena.h).
    """

    token: Any
    """uint32[2]: the arena's handle in this process, and the number of earlier writes."""
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
    """Why the bytes did not arrive, with the name of the file."""


_MOST_TOLD, _TOLD_BYTES = 16, 1024


class _Told(ctypes.Structure):
    """Room for failures that the library reports. Made once, since every step asks."""

    _fields_ = (
        ("layer", ctypes.c_int32 * _MOST_TOLD),
        ("expert", ctypes.c_int32 * _MOST_TOLD),
        ("text", ctypes.c_char * _TOLD_BYTES * _MOST_TOLD),
    )


_ARENAS: weakref.WeakSet[ArenaMemory] = weakref.WeakSet()


def promised_bytes() -> int:
    """Bytes of this process's arenas that the system has yet to give."""
    return sum(memory.promised for memory in list(_ARENAS))


class ArenaMemory:
    """The memory of an owned arena, zeros at first and aligned to 2 MiB. The system gives a page of
    it when it is first written.

    It lives until `close`, or until no reference to this object is left. Ops that run at that time
    finish on it, and later ones are refused.
    """

    def __init__(self, rows: int, hidden: int):
        """Raises MemoryError, and ValueError where the library cannot run here."""
        self.rows, self.hidden = rows, hidden
        self.handle = int(_functions().new(rows, hidden))
        if not self.handle:
            gib = rows * hidden * 2 / 2**30
            raise MemoryError(f"there is no memory for an arena of {gib:.1f} GiB")
        self.address = int(_functions().data(self.handle))
        """Address of the first row; it never changes."""
        self.sources: Sources | None = None
        """The sources from which a queue copies records; None: there is no queue."""
        self._told: _Told | None = None
        self.close = finalize_here(self, _functions().close, self.handle)
        """Frees the memory. Idempotent."""
        _ARENAS.add(self)

    @property
    def nbytes(self) -> int:
        return self.rows * self.hidden * 2

    @property
    def promised(self) -> int:
        """Bytes that the system has yet to give; 0 where it does not say."""
        if not self.close.alive:
            return 0
        given = np.zeros(-(-self.nbytes // mmap.PAGESIZE), np.uint8)
        arena, pages = ctypes.c_void_p(self.address), ctypes.c_void_p(given.ctypes.data)
        if ctypes.CDLL(None).mincore(arena, ctypes.c_size_t(self.nbytes), pages):
            return 0
        return int(np.sum(given & 1 == 0)) * mmap.PAGESIZE

    def token(self) -> np.ndarray:
        """uint32[2]: the token for the next program. No op may be writing."""
        return np.array([self.handle, _functions().writes(self.handle)], TOKEN.dtype)

    def on(self, device: jax.Device) -> OwnedArena:
        """The arena as programs of this CPU device take it."""
        return OwnedArena(jax.device_put(self.token(), device), self.rows, self.hidden)

    def view(self) -> np.ndarray:
        """The memory itself, uint16[rows, D]: for use between two programs, valid until close."""
        values = (ctypes.c_uint16 * (self.rows * self.hidden)).from_address(self.address)
        return np.ctypeslib.as_array(values).reshape(self.rows, self.hidden)

    def attach(self, queue: int, sources: Sources, *, ahead: int, buffers: int = 2) -> None:
        """Lets a native queue copy records into cells: `fill` and `stage` queue them, and
        expert_ffn waits for those that it reads. Call it once, before the first op.

        - `queue`: handle of a queue (host_offload.queue.native) that nothing else uses.
        - `sources`: where records are.
        - `ahead`: the number of the cause that `stage` queues with.
        - `buffers`: how many buffers, each as large as the largest record, records without a cell
          are read through.

        Raises ValueError if the arena or the queue is closed, or there is no memory for buffers.
        """
        most = max(map(len, sources.parts))
        parts = np.array([[*p, *(0,) * (most - len(p))] for p in sources.parts], np.int64)
        shape, records = (
            np.array(sources.records.shape, np.int64),
            np.ascontiguousarray(sources.records),
        )
        turned = np.array(sources.turned, np.int64)
        blocks = np.zeros((len(parts), PIECES), BLOCK_MATRIX)
        for mine, each in zip(blocks, sources.blocks, strict=False):  # none, or all
            mine[:] = each
        pointers = (array.ctypes.data for array in (shape, records, parts))
        operands = *pointers, most, turned.ctypes.data, blocks.ctypes.data, ahead, buffers
        if not _functions().attach(self.handle, queue, *operands):
            raise ValueError("the arena or the queue is closed, or there is no memory for buffers")
        self.sources = sources
        self._told = _Told()

    def failures(self, writes: int) -> list[TransferFailure]:
        """The experts that ops could not compute because their bytes did not arrive. Each is
        reported once.

        - `writes`: reports failures of ops that began after at most so many writes.
        """
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
    """An owned arena without memory, to trace programs with."""
    return OwnedArena(TOKEN, rows, hidden)


def move_rows(arena, source, target, rows, *, width: int):
    """Copies rows[i] rows from source[i] to target[i] within the arena, for each entry of int32[S].

    - `width`: elements of a row.

    No target may be a source; entries may repeat. A place outside the arena is an error, before
    anything is written. Returns the arena.
    """
    return call("move", arena, arena, source, target, rows, aliases={0: 0}, width=np.int64(width))


def drain(arena, cell_row):
    """Waits until no transfer into the arena is in flight.

    - `cell_row`: int32[...], first rows of cells.

    Returns (arena, failed), failed int32[...] with 1 for each cell whose transfer failed, so that
    its bytes are undefined. Each failure is reported once. Without a queue nothing is in flight.
    """
    failed = jax.ShapeDtypeStruct(cell_row.shape, np.int32)
    return call("drain", (arena, failed), arena, cell_row, aliases={0: 0})


def read_rows(arena, first, rows: int, *, width: int) -> tuple[jax.Array, ...]:
    """Reads `rows` rows from each place of `first`, int32[S], as S arrays uint16[rows · width].
    Errors as in move_rows."""
    part = jax.ShapeDtypeStruct((rows * width,), np.uint16)
    parts = (part,) * first.shape[0]
    return call("read", parts, arena, first, width=np.int64(width), rows=np.int64(rows))


def write_rows(arena, values, first, count, *, width: int):
    """Writes the first `count` of S values, uint16[rows · width] each, at the rows `first`,
    int32[S]. Entries may repeat. Errors as in move_rows. Returns the arena."""
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
        *(number, pointer, pointer, ctypes.c_int32, number),
    ]
    found["failures"].argtypes = [
        *(ctypes.c_uint32, ctypes.c_uint32, number, pointer, pointer),
        *(pointer, number),
    ]
    found["attach"].restype, found["failures"].restype = ctypes.c_int32, number
    found["close"].restype = None
    return _Functions(**found)
