"""Checks of the ops that read expert records from cells and from the pinned store."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.fill import fill
from pallas_kernels.move import Moves, move
from pallas_kernels.records import RecordFormat, decode
from pallas_kernels.records.versions import VersionFormats
from pallas_kernels.stage import Entries, stage
from pallas_kernels.verification.check import Check, ModelShape, draw, make_check
from pallas_kernels.verification.dense import empty_tables
from pallas_kernels.verification.random_records import random_records

EXPERTS_CHECKED = 4
"""Fewest experts in the stores that are made: tiles do not depend on how many there are."""


def record_checks(shape: ModelShape, device: jax.Device, least: int) -> Iterator[Check]:
    """fill, stage, move and expert_ffn on stores and an arena of at least so many bytes, the
    records at their ends. Of each version one expert has a cell and one is read through."""
    d = shape.hidden
    size = d, shape.width, shape.dtype
    formats = tuple(
        VersionFormats(RecordFormat(cell, *size), RecordFormat(held, *size))
        for cell, held in shape.versions
    )
    given = None if shape.versions == (("dense", "dense"),) else formats
    count = len(formats)
    experts = max(EXPERTS_CHECKED, shape.rule.top_k, 2 * count)
    rows = max(f.cell.rows for f in formats)
    layers = max(1, -(-least // (experts * min(f.store.nbytes for f in formats))))
    # Three cells and a free place for each version.
    places = 4 * count
    total = max(places, -(-least // (rows * d * 2)))
    layer, first = jnp.int32(layers - 1), (total - places) * rows
    cell_row = first + jnp.arange(3 * count, dtype=jnp.int32) * rows
    cell_version = jnp.arange(3 * count, dtype=jnp.int32) % count
    what = f"{formats[0].cell.rows}x{d}{' offsets 64' if least else ''}"
    if given is not None:
        names = (cell if cell == held else f"{held} to {cell}" for cell, held in shape.versions)
        what = f"{3 * shape.width}x{d} {', '.join(names)}{' offsets 64' if least else ''}"

    def bits() -> list[jax.Array]:
        return [random_records(7 + 64 * v, experts, f.store) for v, f in enumerate(formats)]

    def stores(records: list[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(pinned_store(each, layers, device) for each in records)

    def empty():
        return jnp.zeros((total * rows, d), jnp.uint16)

    # Experts v and v + count are of version v; 2·count … are of the first versions again.
    version_of = jnp.arange(experts, dtype=jnp.int32) % count

    def filled(name, stores, arena):
        expert = jnp.append(jnp.arange(count, dtype=jnp.int32)[::-1], jnp.asarray([count, -1]))
        row = jnp.append(cell_row[: count + 1], -1)
        version = jnp.append(version_of[expert[:-1]], 0)
        counted = jnp.int32(count + 1)
        options = {"formats": given, "implementation": name}
        return fill(arena, stores, layer, expert, row, version, counted, **options)[first:]

    yield make_check("fill", what, "uint16", lambda: (stores(bits()), empty()), filled)

    def tables():
        def all_layers(row):
            return jnp.broadcast_to(row, (layers, 3 * count))

        return empty_tables(experts, 3 * count, layers)._replace(
            cell_row=all_layers(cell_row),
            cell_version=all_layers(cell_version),
            clock=jnp.ones(layers, jnp.int32),
        )

    def staged(name, stores, arena):
        last, version = layers - 1, count - 1
        fields = (
            [last, last, -1, last],
            [2, 1, 0, 2],
            [0, version, 0, 0],
            [0, count + version, 1, 2 * count],
        )
        entries = Entries._make(jnp.asarray(field, jnp.int32) for field in fields)
        options = {"formats": given, "implementation": name}
        arena, *results = stage(arena, tables(), stores, layer, entries, **options)
        return arena[first:], results

    yield make_check("stage", what, "uint16", lambda: (stores(bits()), empty()), staged)

    def moved(name, arena):
        used = jax.random.bits(jax.random.key(5), (places * rows, d), jnp.uint16)
        arena = jax.lax.dynamic_update_slice(arena, used, (first, 0))
        cells = [0, count - 1, 3 * count]
        targets = [first + (3 * count + i) * rows for i in range(3)]
        fields = ([layers - 1] * 3, cells, [targets[0], targets[-1] if count > 2 else -1, 0])
        moves = Moves._make(jnp.asarray(field, jnp.int32) for field in fields)
        record_rows = tuple(f.cell.rows for f in formats)
        arena, *results = move(arena, tables(), moves, record_rows=record_rows, implementation=name)
        return arena[first:], results

    yield make_check("move", what, "uint16", lambda: (empty(),), moved)

    k = min(shape.rule.top_k, experts)
    for tokens, row_tile in ((16, 16), (32, 16), (64, 16), (192, 64)):

        def inputs_of(tokens=tokens):
            records = bits()
            arena = empty()
            for v, f in enumerate(formats):
                weights = decode(records[v][0, v], f.store)
                record = jax.lax.bitcast_convert_type(weights, jnp.uint16)
                record = record if f.cell.version == "dense" else records[v][0, v]
                place = (first + v * rows, 0)
                arena = jax.lax.dynamic_update_slice(arena, record, place)
            ids = jnp.sort(jax.lax.top_k(draw(1, (tokens, experts), "float32"), k)[1], axis=1)
            ids = jnp.where(jnp.arange(tokens)[:, None] % 11 == 10, experts, ids)
            return stores(records), arena, draw(0, (tokens, d), shape.dtype), ids

        def computed(name, stores, arena, x, ids, row_tile=row_tile):
            cells = jnp.full(experts, -1, jnp.int32).at[:count].set(cell_row[:count])
            return expert_ffn(
                jnp.zeros((ids.size, d), jnp.float32),
                x,
                ids,
                arena,
                stores,
                layer,
                jnp.full((layers, experts), -1, jnp.int32).at[layer].set(cells),
                jnp.zeros((layers, experts), jnp.int32).at[layer].set(version_of),
                jnp.arange(experts, dtype=jnp.int32),
                jnp.int32(experts),
                activation=shape.activation,
                row_tile=row_tile,
                formats=given,
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
