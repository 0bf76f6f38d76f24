"""Reading what XLA made of a program on the CPU with the tools that tests/aot has for the H200."""

import dataclasses
import re

import jax

from moejax.step.compiler import compiler_options
from pallas_kernels.cpu.arena import OwnedArena
from tests.aot.aot_h200 import Compiled, Memory


def read_executable(executable: jax.stages.Compiled) -> Compiled:
    """The optimized HLO and the memory figures of an executable of this machine's device.

    A CPU has one memory: transfers from and to `pinned_host` count as copies, host_* are zero.
    """
    statistics = executable.memory_analysis()
    fields = (field.name for field in dataclasses.fields(Memory))
    memory = Memory(*(getattr(statistics, f.replace("_bytes", "_size_in_bytes")) for f in fields))
    return Compiled(executable.as_text() or "", memory, "")


def compile_to_read(lowered: jax.stages.Lowered) -> Compiled:
    """read_executable of a program that nobody runs: without LLVM's optimizations, which come after
    all that is read and take a third of the time."""
    unoptimized = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = {**compiler_options("cpu"), **unoptimized}
    return read_executable(lowered.compile(compiler_options=options))


def arena_copies(compiled: Compiled, arena: jax.Array | OwnedArena) -> list[str]:
    """Names of the copies of an arena's size; of an owned one, those of its token: XLA makes one
    where a write may come before a read of what was there before, which an array's copy would keep
    and the library's memory would not."""
    if isinstance(arena, OwnedArena):
        return re.findall(r"%(\S+) = u32\[2\]\S* copy\(", compiled.hlo)
    return [name for name, size in compiled.copies(1) if size >= arena.nbytes]
