"""Reading what XLA made of a program on the CPU with the tools that tests/aot has for the H200."""

import dataclasses

import jax

from tests.aot.aot_h200 import Compiled, Memory


def read_executable(executable: jax.stages.Compiled) -> Compiled:
    """The optimized HLO and the memory figures of an executable of this machine's device.

    A CPU has one memory: transfers from and to `pinned_host` count as copies, host_* are zero.
    """
    statistics = executable.memory_analysis()
    fields = (field.name for field in dataclasses.fields(Memory))
    memory = Memory(*(getattr(statistics, f.replace("_bytes", "_size_in_bytes")) for f in fields))
    return Compiled(executable.as_text() or "", memory, "")
