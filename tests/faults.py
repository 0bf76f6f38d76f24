"""Delays, errors and short reads of the native queue's chunks, and slow ops on its arena, which the
released library cannot have: one of its own has them (faults.h), compiled when first asked for."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import getpass
import hashlib
import tempfile
from pathlib import Path

from host_offload.queue.native import NativeQueue
from pallas_kernels.cpu import build, library
from pallas_kernels.cpu.arena import ArenaMemory

HERE = Path(__file__).resolve().parent
FAULTS = f'-DMOEJAX_FAULTS="{HERE / "faults.h"}"'
"""What tells the compiler that a source has faults."""

OTHERS = ("cpu_transfer_queue.o", "cpu_arena.o")
"""The objects of the library that differ."""


@dataclasses.dataclass(frozen=True)
class Faults:
    """What is put in the way of chunks: up to so many seconds before and after each, the share of
    them that fails, the share of reads that return less than was asked for, the share of places for
    a delay that have one."""

    seed: int = 0
    delay: float = 0.0
    errors: float = 0.0
    short_reads: float = 0.0
    delayed: float = 1.0
    ahead_errors: float = 0.0
    """As errors, of chunks that were not queued as demands, besides."""
    ahead_delayed: float = 0.0
    """As delayed, of the same."""


@dataclasses.dataclass(frozen=True)
class FaultCounts:
    """How often faults were put in the way since the queue was made."""

    delays: int
    errors: int
    short_reads: int
    """Only reads from files have them."""


class _Faults(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("delay", "errors", "short_reads")),
        *((name, ctypes.c_double) for name in ("delayed", "ahead_errors", "ahead_delayed")),
    )


class _FaultCounts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("delays", "errors", "short_reads"))


def inject(queue: NativeQueue, faults: Faults) -> None:
    """From the queue's next chunk on. Raises AttributeError without use_faulty_library."""
    function = library.library().moejax_transfers_inject
    function.restype, function.argtypes = None, (ctypes.c_int32, ctypes.POINTER(_Faults))
    function(queue.handle, _Faults(*dataclasses.astuple(faults)))


def injected(queue: NativeQueue) -> FaultCounts:
    """What `inject` led to so far."""
    function = library.library().moejax_transfers_injected
    function.restype, function.argtypes = None, (ctypes.c_int32, ctypes.POINTER(_FaultCounts))
    counts = _FaultCounts()
    function(queue.handle, counts)
    return FaultCounts(counts.delays, counts.errors, counts.short_reads)


def delay_arena(memory: ArenaMemory, microseconds: int) -> None:
    """Every op holds the arena for so much longer. Raises AttributeError as inject."""
    function = library.library().moejax_cpu_arena_delay
    function.restype, function.argtypes = None, (ctypes.c_uint32, ctypes.c_int64)
    function(memory.handle, microseconds)


def use_faulty_library() -> None:
    """This process's native ops are those of the library with faults; before any is called. The
    released one is taken from where `pip install` kept it. Where it is missing or old, nothing
    changes, and the ops say so. Raises build.BuildError."""
    if library.HERE != build.HERE:
        return
    if not build.is_built(build.HERE) and build.copy_built(build.HERE) is None:
        return
    library.HERE = faulty_library()


def faulty_library() -> Path:
    """The folder of the library with faults, made of these sources once. Raises BuildError."""
    name = hashlib.sha256(build.digest().encode())
    for path in (HERE / "faults.h", HERE / "faults.cc"):
        name.update(path.read_bytes())
    every = Path(tempfile.gettempdir()) / f"moejax-faults-{getpass.getuser()}"
    folder = every / name.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / build.LIBRARY).exists():
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    compiler = build.find_compiler()
    units = build.translation_units(compiler)
    units["faults.o"] = [*units[OTHERS[0]][:-1], str(HERE / "faults.cc")]
    for name in (*OTHERS, "faults.o"):
        units[name] = [*units[name], FAULTS]
    kept = build.kept()
    with tempfile.TemporaryDirectory() as work:
        new = {name: told for name, told in units.items() if name in (*OTHERS, "faults.o")}
        if kept is None:
            new = units
        made = build.compile_units(compiler, new, Path(work))
        rest = [] if kept is None else [kept / name for name in units if name not in new]
        build.link(compiler, [*made, *rest], folder)
