"""Checks of the ops that read expert records from cells and from the pinned store."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.fill import fill
from pallas_kernels.stage import Entries, stage
from pallas_kernels.verification.check import Check, ModelShape, draw, make_check
from pallas_kernels.verification.dense import empty_tables

EXPERTS_CHECKED = 4
"""Fewest experts in the stores that are made: tiles do not depend on how many there are."""


def record_checks(shape: ModelShape, device: jax.Device, least: int) -> Iterator[Check]:
    """fill, stage and expert_ffn on a store and an arena of at least so many bytes, the records at
    their ends."""
    rows, d = 3 * shape.width, shape.hidden
    experts = max(EXPERTS_CHECKED, shape.rule.top_k)
    record = rows * d * 2
    layers = max(1, -(-least // (experts * record)))
    cells = max(3, -(-least // record))
    layer, first = jnp.int32(layers - 1), (cells - 3) * rows
    what = f"{rows}x{d}{' offsets 64' if least else ''}"
    # Gate and up sum over D, down over I.
    scale = jnp.repeat(jnp.asarray([d**-0.5, d**-0.5, shape.width**-0.5]), shape.width)[:, None]

    def bits():
        values = draw(7, (1, experts, rows, d), shape.dtype, scale)
        return jax.lax.bitcast_convert_type(values, jnp.uint16)

    def store(records):
        return pinned_store(records, layers, device)

    def empty():
        return jnp.zeros((cells * rows, d), jnp.uint16)

    def filled(name, store, arena):
        expert, row = jnp.asarray([2, 0, 3, -1]), first + jnp.asarray([rows, 0, 2 * rows, -1])
        version, count = jnp.zeros(4, jnp.int32), jnp.int32(3)
        arena = fill(arena, (store,), layer, expert, row, version, count, implementation=name)
        return arena[first:]

    yield make_check("fill", what, "uint16", lambda: (store(bits()), empty()), filled)

    def staged(name, store, arena):
        tables = empty_tables(experts, 3, layers)
        cell_row = first + jnp.arange(3, dtype=jnp.int32) * rows
        tables = tables._replace(
            cell_row=jnp.broadcast_to(cell_row, (layers, 3)), clock=jnp.ones(layers, jnp.int32)
        )
        fields = ([layers - 1, layers - 1, -1, layers - 1], [2, 1, 0, 2], [0] * 4, [0, 2, 1, 1])
        entries = Entries._make(jnp.asarray(field, jnp.int32) for field in fields)
        arena, *results = stage(arena, tables, (store,), layer, entries, implementation=name)
        return arena[first:], results

    yield make_check("stage", what, "uint16", lambda: (store(bits()), empty()), staged)

    k = min(shape.rule.top_k, experts)
    for tokens, row_tile in ((16, 16), (32, 16), (64, 16), (192, 64)):

        def inputs_of(tokens=tokens):
            records = bits()
            # Expert 1 has no cell: it is read through.
            arena = empty()
            for cell, expert in enumerate((2, 0, 3)):
                place = (first + cell * rows, 0)
                arena = jax.lax.dynamic_update_slice(arena, records[0, expert], place)
            ids = jnp.sort(jax.lax.top_k(draw(1, (tokens, experts), "float32"), k)[1], axis=1)
            ids = jnp.where(jnp.arange(tokens)[:, None] % 11 == 10, experts, ids)
            return store(records), arena, draw(0, (tokens, d), shape.dtype), ids

        def computed(name, store, arena, x, ids, row_tile=row_tile):
            address = jnp.full((layers, experts), -1, jnp.int32)
            for cell, expert in enumerate((2, 0, 3)):
                address = address.at[layer, expert].set(first + cell * rows)
            return expert_ffn(
                jnp.zeros((ids.size, d), jnp.float32),
                x,
                ids,
                arena,
                (store,),
                layer,
                address,
                jnp.zeros((layers, experts), jnp.int32),
                jnp.arange(experts, dtype=jnp.int32),
                jnp.int32(experts),
                activation=shape.activation,
                row_tile=row_tile,
                implementation=name,
            )

        full = f"{what} {shape.activation} top {k} tokens {tokens} rows {row_tile}"
        yield make_check("expert_ffn", full, shape.dtype, inputs_of, computed)


def pinned_store(records: jax.Array, layers: int, device: jax.Device) -> jax.Array:
    """A store [layers, E, rows, D] in pinned host memory, the records [1, E, rows, D] its last
    layer; the others hold what was there."""
    shape = (layers, *records.shape[1:])
    if device.platform != "gpu":  # the interpreter of jax 0.10 takes no operand on the host
        return jnp.zeros(shape, jnp.uint16).at[-1:].set(records)
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    allocate = jax.jit(lambda: jax.lax.empty(shape, jnp.uint16), out_shardings=sharding)

    def write(store, records):
        records = jax.device_put(records, jax.typeof(store).memory_space)
        return jax.lax.dynamic_update_slice(store, records, (layers - 1, 0, 0, 0))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)(allocate(), records)
