"""Copies KV pages between the arena and pinned host memory, for preempted requests and evicted
sessions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from host_offload.memory.layout import PageLayout
from pallas_kernels.cpu.arena import OwnedArena, move_rows, read_rows, write_rows

SWAP_PAGES = 8
"""Pages of one transfer, a compiled shape. Each is an array of its own on the host, so that one can
be freed without the others."""


def read_pages(
    arena: jax.Array | OwnedArena, rows: jax.Array, page: PageLayout
) -> tuple[jax.Array, ...]:
    """Reads pages.

    - `arena`: an OwnedArena, or uint16[rows, D].
    - `rows`: int32[S], KV rows of the pages.

    Returns S arrays uint16[page.nbytes / 2].
    """
    if isinstance(arena, OwnedArena):
        return read_rows(arena, rows, page.rows, width=page.row_elements)
    kv = arena.reshape(-1, page.row_elements)
    return tuple(
        lax.dynamic_slice_in_dim(kv, rows[i], page.rows).reshape(-1) for i in range(rows.shape[0])
    )


def write_pages(
    arena: jax.Array | OwnedArena,
    pages: tuple[jax.Array, ...],
    rows: jax.Array,
    count: jax.Array,
    page: PageLayout,
) -> jax.Array | OwnedArena:
    """Writes the first `count` pages to the arena, in place if it is donated. Returns the arena.

    - `pages`: S arrays of uint16[page.nbytes / 2], in device or pinned host memory.
    - `rows`: int32[S], KV rows.
    """
    if isinstance(arena, OwnedArena):
        return write_rows(arena, pages, rows, count, width=page.row_elements)
    kv = arena.reshape(-1, page.row_elements)

    def put(i, values, kv):
        values = jax.device_put(values, jax.memory.Space.Device)
        return lax.dynamic_update_slice_in_dim(kv, values.reshape(page.rows, -1), rows[i], 0)

    for i, values in enumerate(pages):
        # A loop of 0 or 1 trips: a conditional would copy the arena (jax 0.10.2).
        used = (i < count).astype(jnp.int32)
        kv = lax.fori_loop(0, used, lambda _, kv, i=i, values=values: put(i, values, kv), kv)
    return kv.reshape(arena.shape)


def move_pages(
    arena: jax.Array | OwnedArena, source: jax.Array, target: jax.Array, page: PageLayout
) -> jax.Array | OwnedArena:
    """Copies pages within the arena, in place if it is donated. Returns the arena. No target may be
    a source; pairs may repeat.

    - `source`, `target`: int32[S], KV rows.
    """
    if isinstance(arena, OwnedArena):
        rows = jnp.full(source.shape, page.rows, jnp.int32)
        return move_rows(arena, source, target, rows, width=page.row_elements)
    kv = arena.reshape(-1, page.row_elements)

    def move(i, kv):
        values = lax.dynamic_slice_in_dim(kv, source[i], page.rows)
        return lax.dynamic_update_slice_in_dim(kv, values, target[i], 0)

    # A loop: if it were written out, XLA would fuse reads and writes, and copy the arena.
    return lax.fori_loop(0, source.shape[0], move, kv).reshape(arena.shape)
