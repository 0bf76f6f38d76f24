"""Which forms of copies beside compute XLA compiles for an H200: its launches with what each waits
for, and its graphs. docs/kernels.md, "Overlap", has what they say.

    JAX_PLATFORMS=cpu python -m tests.aot.copy_forms
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moejax.step.runner import ONE_GRAPH
from pallas_kernels.triton import triton_call
from tests.aot.aot_h200 import Compiled, compile_for

ROWS, HIDDEN, RECORD, TURNS = 1 << 16, 2048, 4096, 4
"""Of the arena, of a cell, and of the loop. An arena of 256 MiB, cells of 16 MiB."""

Array = jax.ShapeDtypeStruct
ARENA, CELL = Array((ROWS, HIDDEN), jnp.uint16), Array((RECORD, HIDDEN), jnp.uint16)
SUMS = Array((HIDDEN,), jnp.uint16)


def filled(arena: jax.Array, record: jax.Array) -> jax.Array:
    """The arena with a record in its first rows, by a kernel that changes it in place."""

    def copy(record, _, arena):
        row = pl.program_id(0)
        arena[row, :] = record[row, :]

    return triton_call(
        copy,
        name="copies",
        grid=(RECORD,),
        out_shape=jax.ShapeDtypeStruct(arena.shape, arena.dtype),
        num_warps=4,
        num_stages=1,
        aliases={1: 0},
    )(record, arena)


def computed(arena: jax.Array, before: jax.Array) -> jax.Array:
    """What a kernel makes of the last rows of an arena."""

    def add(arena, before, out):
        out[...] = before[...] + arena[ROWS - 1, :]

    return triton_call(add, name="computes", grid=(1,), out_shape=SUMS, num_warps=4, num_stages=1)(
        arena, before
    )


def one_arena(arena, sums, record):
    """Both kernels on one arena: the second reads what the first does not write."""

    def turn(_, carry):
        arena, sums = carry
        return filled(arena, record), computed(arena, sums)

    return lax.fori_loop(0, TURNS, turn, (arena, sums))


def two_buffers(arena, sums, record, cell):
    """The copies go into another buffer than that which is read."""

    def turn(_, carry):
        cell, sums = carry
        return filled(cell, record), computed(arena, sums)

    return lax.fori_loop(0, TURNS, turn, (cell, sums))


def device_put(arena, sums, record):
    """A whole pinned array, beside a kernel."""
    return jax.device_put(record, jax.memory.Space.Device), computed(arena, sums)


def device_put_in_a_loop(arena, sums, record):
    """The same in each turn."""

    def turn(_, carry):
        _, sums = carry
        # What depends on the turn, so that the copy is made in each.
        later, _ = lax.optimization_barrier((record, sums))
        return jax.device_put(later, jax.memory.Space.Device), computed(arena, sums)

    return lax.fori_loop(0, TURNS, turn, (jnp.zeros(CELL.shape, CELL.dtype), sums))


def sliced_in_a_loop(arena, sums, records):
    """A layer's part of a stacked pinned store, in each turn."""

    def turn(i, carry):
        _, sums = carry
        part = lax.dynamic_index_in_dim(records, i, keepdims=False)
        return jax.device_put(part, jax.memory.Space.Device), computed(arena, sums)

    return lax.fori_loop(0, TURNS, turn, (jnp.zeros(CELL.shape, CELL.dtype), sums))


def chosen_in_a_loop(arena, sums, records, ids):
    """The same, of an index that the device computes."""

    def turn(i, carry):
        _, sums = carry
        part = lax.dynamic_index_in_dim(records, ids[i], keepdims=False)
        return jax.device_put(part, jax.memory.Space.Device), computed(arena, sums)

    return lax.fori_loop(0, TURNS, turn, (jnp.zeros(CELL.shape, CELL.dtype), sums))


STACKED = Array((TURNS, *CELL.shape), CELL.dtype)
FORMS: dict[Callable[..., Any], tuple[tuple[Any, ...], tuple[int, ...]]] = {
    one_arena: ((ARENA, SUMS, CELL), (0, 1)),
    two_buffers: ((ARENA, SUMS, CELL, ARENA), (1, 3)),
    device_put: ((ARENA, SUMS, CELL), (1,)),
    device_put_in_a_loop: ((ARENA, SUMS, CELL), (1,)),
    sliced_in_a_loop: ((ARENA, SUMS, STACKED), (1,)),
    chosen_in_a_loop: ((ARENA, SUMS, STACKED, Array((TURNS,), jnp.int32)), (1,)),
}
"""Form → its arguments, of which the third is in pinned memory, and the donated ones."""


def compiled(form: Callable[..., Any]) -> Compiled:
    """As a decode step is, but that graphs may be as small as these programs."""
    arguments, donated = FORMS[form]
    options = {"xla_gpu_enable_command_buffer": ONE_GRAPH, "xla_gpu_graph_min_graph_size": "1"}
    return compile_for(
        "h200",
        form,
        *arguments,
        donate_argnums=donated,
        host_argnums=2,
        compiler_options=options,
    )


def main() -> None:
    for form in FORMS:
        program = compiled(form)
        print(f"\n## {form.__name__}: {form.__doc__}")
        print("arena copied:", program.copies(1 << 20), "from the host:", program.host_copies(1))
        print("one graph:", program.graphs() == [True])
        for name, text in (("launches", program.thunks), ("graphs", program.captured)):
            print(f"{name}:")
            for line in text.splitlines():
                if re.match(r" *\d+: |.*(body|condition):", line):
                    print("   ", line[:110].rstrip())


if __name__ == "__main__":
    main()
