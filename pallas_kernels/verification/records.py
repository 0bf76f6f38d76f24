"""Checks of the ops that read expert records from cells and from the pinned store."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.combine import combine_and_count, combine_with_squares
from pallas_kernels.dispatch import Ops
from pallas_kernels.expert_ffn import (
    Combined,
    Epilogue,
    ExpertBatch,
    ExpertOptions,
    ExpertPlaces,
    counters_size,
    expert_ffn,
)
from pallas_kernels.fill import Fills, fill
from pallas_kernels.fill_ffn import fill_ffn, why_not_pallas
from pallas_kernels.linear import LinearOptions, normalises_within
from pallas_kernels.move import Moves, move
from pallas_kernels.plan import Tables
from pallas_kernels.records import RecordFormat, decode
from pallas_kernels.records.versions import VersionFormats
from pallas_kernels.stage import Entries, stage
from pallas_kernels.verification.check import (
    DECODE_ROWS,
    Check,
    ModelShape,
    Stores,
    behind,
    draw,
    make_check,
    same_rows,
    together,
)
from pallas_kernels.verification.dense import empty_tables
from pallas_kernels.verification.random_records import random_records

KINDS = 4
"""Least number of experts of a version; tiles do not depend on the number. The first and the third
expert of each version have a cell, the second gets one if a check fills, and the others are read
through."""

DECODED = 8, DECODE_ROWS, 32, 64
"""Rows of decode steps, smaller ones `together` with others. Up to 16 rows are one program for each
expert; more rows are two or more."""


def record_checks(shape: ModelShape, ops: Ops, least: int) -> Iterator[Check]:
    """Checks of fill, stage, move, expert_ffn and fill_ffn on stores and an arena of at least
    `least` bytes."""
    records, shared_kib = _Records(shape, least), ops.shared_kib
    yield from _copy_checks(records)
    yield _move_check(records)
    yield _expert_ffn_check(records, shared_kib, 192, 64)
    product = LinearOptions(implementation=ops.linear, norm_implementation=ops.rms_norm)
    for tokens in DECODED:
        yield _expert_ffn_check(records, shared_kib, tokens, DECODE_ROWS)
        squares = shape.squares and normalises_within(tokens, product)
        yield _combined_check(records, shared_kib, tokens, squares)
        if why_not_pallas(shape.versions) is None:
            yield _fill_ffn_check(records, shared_kib, tokens)
            yield _fill_combined_check(records, shared_kib, tokens, squares)


class _Records:
    """Stores and an arena of at least `least` bytes, with records at their ends.

    Experts have all versions in turn. In the arena a version has three cells, a free place, and
    before them a place for its second expert with a cell (KINDS).
    """

    def __init__(self, shape: ModelShape, least: int):
        size = shape.hidden, shape.width, shape.dtype, shape.biases, shape.gated
        self.shape, self.wide = shape, least > 0
        self.formats = tuple(
            VersionFormats(RecordFormat(cell, *size), RecordFormat(held, *size))
            for cell, held in shape.versions
        )
        dense = shape.versions == (("dense", "dense"),) and shape.gated and not shape.biases
        self.given = None if dense else self.formats
        """The ops' argument `formats`."""
        self.count = count = len(self.formats)
        self.experts = max(KINDS * count, 2 * shape.rule.top_k)
        self.rows = max(f.cell.rows for f in self.formats)
        smallest = min(f.store.nbytes for f in self.formats)
        self.layers = max(1, -(-least // (self.experts * smallest)))
        self.layer = jnp.int32(self.layers - 1)
        self.total = max(5 * count, -(-least // (self.rows * shape.hidden * 2)))
        self.first = (self.total - 4 * count) * self.rows
        self.cell_row = self.first + jnp.arange(3 * count, dtype=jnp.int32) * self.rows
        self.before_row = self.first - jnp.arange(count, 0, -1, dtype=jnp.int32) * self.rows
        self.free_row = self.first + (3 * count + jnp.arange(count, dtype=jnp.int32)) * self.rows
        self.cell_version = jnp.arange(3 * count, dtype=jnp.int32) % count
        self.version_of = jnp.arange(self.experts, dtype=jnp.int32) % count
        d, offsets = shape.hidden, " offsets 64" if least else ""
        names = (cell if cell == held else f"{held} to {cell}" for cell, held in shape.versions)
        self.what = f"{self.formats[0].cell.rows}x{d}{offsets}"
        if not dense:
            more = " biases" * shape.biases + " two matrices" * (not shape.gated)
            self.what = f"{3 * shape.width}x{d} {', '.join(names)}{more}{offsets}"

    def bits(self) -> tuple[jax.Array, ...]:
        """The records of each version."""
        return tuple(
            random_records(7 + 64 * v, self.experts, f.store) for v, f in enumerate(self.formats)
        )

    @property
    def stores(self) -> Stores:
        return Stores(self.layers, self.bits)

    def empty(self) -> jax.Array:
        """An arena of zeros."""
        return jnp.zeros((self.total * self.rows, self.shape.hidden), jnp.uint16)

    def held(self) -> jax.Array:
        """An arena with the experts that have a cell before any fill."""
        bits, arena, count = self.bits(), self.empty(), self.count
        for v, f in enumerate(self.formats):
            for place, row in ((v, self.cell_row[v]), (2 * count + v, self.before_row[v])):
                weights = decode(bits[v][0, place], f.store)
                record = jax.lax.bitcast_convert_type(weights, jnp.uint16)
                record = record if f.cell.version == "dense" else bits[v][0, place]
                arena = jax.lax.dynamic_update_slice(arena, record, (row, 0))
        return arena

    def cells(self) -> jax.Array:
        """int32[E]: each expert's row in that arena; −1: it is only in its store."""
        first, third = slice(self.count), slice(2 * self.count, 3 * self.count)
        cells = jnp.full(self.experts, -1, jnp.int32).at[first].set(self.cell_row[first])
        return cells.at[third].set(self.before_row)

    def routed(self, tokens: int) -> jax.Array:
        """ids of `tokens` tokens, some of them padding.

        The first token has an expert with a cell, one that checks fill and, with three experts, one
        that is read through. With one version and 32 or 64 tokens, half of the experts have more
        than 16 tokens and the others fewer, since other code computes those. Both halves have
        experts with and without a cell.
        """
        experts, count = self.experts, self.count
        kind = jnp.arange(experts) // count
        # Filled experts have fewer tokens; with 64 tokens they have more.
        often = ((kind % 4 == 0) | (kind % 4 == 3)) != (tokens == 64)
        scores = draw(1, (tokens, experts), "float32") + jnp.where(often, 0.9, -0.9)
        first = jnp.asarray([0, count, 3 * count])
        scores = scores.at[0, first].add(jnp.asarray([40.0, 30.0, 20.0]))
        ids = jax.lax.top_k(scores, self.shape.rule.top_k)[1]
        return jnp.where(jnp.arange(tokens)[:, None] % 5 == 3, experts, ids)

    def options(self, name: str, shared_kib: int, row_tile: int) -> ExpertOptions:
        """The options of an implementation."""
        return ExpertOptions(self.shape.activation, row_tile, self.given, name, shared_kib)

    def places(self, stores: tuple[jax.Array, ...], cells: jax.Array) -> ExpertPlaces:
        """The places of experts. cells: see `cells`."""
        table, layer = (self.layers, self.experts), self.layer
        address = jnp.full(table, -1, jnp.int32).at[layer].set(cells)
        version = jnp.zeros(table, jnp.int32).at[layer].set(self.version_of)
        return ExpertPlaces(stores, layer, address, version)

    def changed(self) -> dict[str, Any]:
        """Keywords of make_check for an op that changes an empty arena."""
        seen = lambda arena: arena[self.first :]  # noqa: E731
        return {"arena": self.empty, "seen": seen, "wide": self.wide}

    def tables(self) -> Tables:
        """All cells granted, and empty."""
        cells = 3 * self.count

        def all_layers(values):
            return jnp.broadcast_to(values, (self.layers, cells))

        return empty_tables(self.experts, cells, self.layers)._replace(
            cell_row=all_layers(self.cell_row),
            cell_version=all_layers(self.cell_version),
            clock=jnp.ones(self.layers, jnp.int32),
        )


def _copy_checks(records: _Records) -> Iterator[Check]:
    """Checks of fill and stage."""
    count, cell_row = records.count, records.cell_row

    def filled(name, arena, stores):
        expert = jnp.append(jnp.arange(count, dtype=jnp.int32)[::-1], jnp.asarray([count, -1]))
        row = jnp.append(cell_row[: count + 1], -1)
        version = jnp.append(records.version_of[expert[:-1]], 0)
        fills = Fills(expert, row, version, jnp.int32(count + 1))
        options = {"formats": records.given, "implementation": name}
        return (fill(arena, stores, records.layer, fills, **options),)

    given: dict[str, Any] = records.changed() | {"stores": records.stores}
    yield make_check("fill", records.what, "uint16", tuple, filled, **given)

    def staged(name, arena, stores):
        last, version = records.layers - 1, count - 1
        fields = (
            [last, last, -1, last],
            [2, 1, 0, 2],
            [0, version, 0, 0],
            [0, count + version, 1, 2 * count],
        )
        entries = Entries._make(jnp.asarray(field, jnp.int32) for field in fields)
        options = {"formats": records.given, "implementation": name}
        tables = records.tables()
        return stage(arena, tables, stores, records.layer, entries, **options)

    yield make_check("stage", records.what, "uint16", tuple, staged, **given)


def _move_check(records: _Records) -> Check:
    count, rows, first, last = records.count, records.rows, records.first, records.layers - 1

    def used() -> jax.Array:
        size = 4 * count * rows, records.shape.hidden
        bits = jax.random.bits(jax.random.key(5), size, jnp.uint16)
        return jax.lax.dynamic_update_slice(records.empty(), bits, (first, 0))

    def moved(name, arena):
        cells = [0, count - 1, 3 * count]
        targets = [first + (3 * count + i) * rows for i in range(3)]
        fields = ([last] * 3, cells, [targets[0], targets[-1] if count > 2 else -1, 0])
        moves = Moves._make(jnp.asarray(field, jnp.int32) for field in fields)
        options = {"record_rows": tuple(f.cell.rows for f in records.formats)}
        return move(arena, records.tables(), moves, **options, implementation=name)

    given: dict[str, Any] = records.changed() | {"arena": used}
    return make_check("move", records.what, "uint16", tuple, moved, **given)


def _expert_ffn_check(records: _Records, shared_kib: int, tokens: int, row_tile: int) -> Check:
    shape, k = records.shape, records.shape.rule.top_k

    def operands():
        x = draw(0, (tokens, shape.hidden), shape.dtype)
        return records.held(), x, records.routed(tokens)

    def computed(name, stores, arena, x, ids):
        return tuple(
            _experts(
                records,
                records.options(name, shared_kib, min(n, row_tile)),
                *(stores, arena, x[:n], ids[:n]),
            )
            for n in together(tokens)
        )

    rows = together(tokens) if row_tile == DECODE_ROWS else ()
    what = f"{records.what} {shape.activation} top {k} tokens {tokens} rows {row_tile}"
    what += f" {shared_kib} KiB"
    given = {"stores": records.stores, "wide": records.wide, "rows": rows}
    return make_check("expert_ffn", what, shape.dtype, operands, computed, **given)


def _combined_check(records: _Records, shared_kib: int, tokens: int, squares: bool) -> Check:
    """Checks experts whose last product combines: its values, and that it has the bits of the two
    kernels that prefill and other drivers run.

    - `squares`: whether it also returns squares.
    """
    shape, k = records.shape, records.shape.rule.top_k

    def operands():
        x, ids, residual, weights = _combined_operands(records, tokens)
        return records.held(), x, ids, residual, weights

    def computed(name, stores, arena, *few):
        return tuple(
            of(name, stores, arena, *(array[:n] for array in few)) for n in together(tokens)
        )

    def of(name, stores, arena, x, ids, residual, weights):
        options = records.options(name, shared_kib, min(len(x), DECODE_ROWS))
        experts = functools.partial(_experts, records, options, stores, arena, x, ids)
        epilogue = _epilogue(records, residual, weights, squares)
        both, y = experts(epilogue), experts()
        return *both[:4], same_rows(both.y, y), *_as_combined(name, both, y, epilogue)

    what = f"{records.what} {_combined_name(shape, k, squares)} tokens {tokens} {shared_kib} KiB"
    given = {"stores": records.stores, "wide": records.wide, "rows": together(tokens)}
    return make_check(
        "expert_ffn", what, shape.dtype, operands, computed, **given, beside=("combine",)
    )


def _combined_operands(records: _Records, tokens: int) -> tuple[jax.Array, ...]:
    """x, ids, residual and weights of `tokens` tokens."""
    shape, ids = records.shape, records.routed(tokens)
    weights = jax.nn.softmax(draw(2, ids.shape, "float32"))
    x, residual = (draw(seed, (tokens, shape.hidden), shape.dtype) for seed in (0, 3))
    return x, ids, residual, weights


def _combined_name(shape: ModelShape, k: int, squares: bool) -> str:
    return f"{shape.activation} top {k} combined" + ("" if squares else " without squares")


def _epilogue(
    records: _Records, residual: jax.Array, weights: jax.Array, squares: bool
) -> Epilogue:
    counters = jnp.zeros(counters_size(*residual.shape), jnp.int32)
    index = jnp.zeros(1, jnp.int32)
    return Epilogue(residual, weights, index, counters, records.layers - 1, squares)


def _as_combined(
    name: str, both: Combined, y: jax.Array, epilogue: Epilogue
) -> Iterator[jax.Array]:
    """int32: 1 for rows of out, and of its squares if given, with the bits of combine after the
    experts, whose rows are y."""
    residual, weights, index = epilogue[:3]
    operands = residual, y.reshape(*weights.shape, -1), weights, index
    if both.squares is None:
        out, _ = combine_and_count(*operands, implementation=name)
        yield same_rows(both.out, out)
        return
    out, squares, _ = combine_with_squares(*operands, implementation=name)
    yield same_rows(both.out, out)
    yield same_rows(both.squares, squares)


def _experts(
    records: _Records,
    options: ExpertOptions,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    epilogue: Epilogue | None = None,
) -> Any:
    """expert_ffn of the used experts."""
    used = _used(ids, records.experts)
    y = jnp.zeros((ids.size, x.shape[1]), jnp.float32)
    places = records.places(stores, records.cells())
    batch = ExpertBatch(_listed(used), jnp.sum(used, dtype=jnp.int32), ids, x)
    return expert_ffn(y, arena, batch, places, options, epilogue)


def _used(ids: jax.Array, experts: int) -> jax.Array:
    """bool[E]: experts that occur in ids."""
    return jnp.any(jnp.arange(experts)[:, None] == ids.reshape(1, -1), axis=1)


def _listed(used: jax.Array) -> jax.Array:
    """int32[E]: the used experts, ascending, then −1. Computed by comparisons, since XLA's scatter
    uses atomics that tests/ptx does not know."""
    expert = jnp.arange(used.size, dtype=jnp.int32)
    rank = jnp.sum(used & (expert < expert[:, None]), axis=1)
    chosen = used & (rank == expert[:, None])
    return jnp.where(jnp.any(chosen, axis=1), jnp.sum(jnp.where(chosen, expert, 0), axis=1), -1)


def _fill_ffn_check(records: _Records, shared_kib: int, tokens: int) -> Check:
    shape, k = records.shape, records.shape.rule.top_k

    def operands():
        return draw(0, (tokens, shape.hidden), shape.dtype), records.routed(tokens)

    def computed(name, arena, stores, x, ids):
        results = []
        for place, rows in enumerate(together(tokens), 1):
            options = records.options(name, shared_kib, min(rows, DECODE_ROWS))
            given = x[:rows], ids[:rows], place
            arena, y = _fill_experts(records, options, arena, stores, *given)
            arena = behind(arena, y, name)
            results.append(y)
        return arena, *results

    what = f"{records.what} {shape.activation} top {k} tokens {tokens} rows {DECODE_ROWS}"
    what += f" {shared_kib} KiB"
    given = records.changed() | {"arena": records.held, "stores": records.stores}
    few = together(tokens)
    return make_check("fill_ffn", what, shape.dtype, operands, computed, **given, rows=few)


def _fill_combined_check(records: _Records, shared_kib: int, tokens: int, squares: bool) -> Check:
    """Checks fill_ffn whose last product combines: its values, and that it has the bits of combine
    after it.

    - `squares`: see _combined_check.
    """
    shape, k = records.shape, records.shape.rule.top_k

    def operands():
        return _combined_operands(records, tokens)

    def computed(name, arena, stores, *every):
        results = []
        for place, rows in enumerate(together(tokens), 1):
            x, ids, residual, weights = (array[:rows] for array in every)
            epilogue = _epilogue(records, residual, weights, squares)
            options = records.options(name, shared_kib, min(rows, DECODE_ROWS))
            given = x, ids, place, epilogue
            arena, both = _fill_experts(records, options, arena, stores, *given)
            arena = behind(arena, both.y, name)
            results += *both[:4], *_as_combined(name, both, both.y, epilogue)
        return arena, *results

    what = f"{records.what} {_combined_name(shape, k, squares)} tokens {tokens} {shared_kib} KiB"
    given = records.changed() | {"arena": records.held, "stores": records.stores}
    more: dict[str, Any] = {"rows": together(tokens), "beside": ("combine",)}
    return make_check("fill_ffn", what, shape.dtype, operands, computed, **given, **more)


def _fill_experts(
    records: _Records,
    options: ExpertOptions,
    arena: jax.Array,
    stores: tuple[jax.Array, ...],
    x: jax.Array,
    ids: jax.Array,
    place: int,
    epilogue: Epilogue | None = None,
) -> Any:
    """fill_ffn of the used experts. The second expert of each version gets an empty cell, at the
    place `place` of the arena."""
    experts, count = records.experts, records.count
    row = records.cell_row[place * count : (place + 1) * count] if place < 3 else records.free_row
    expert, used = jnp.arange(experts), _used(ids, experts)
    filled = used & (expert // count == 1)
    moved = _listed(filled)[:count]
    rows = row[jnp.clip(expert - count, 0, count - 1)]
    cells = jnp.where(filled, rows, records.cells())

    def padded(listed):
        return jnp.append(listed, jnp.full(experts - count, -1, jnp.int32))

    y = jnp.zeros((ids.size, x.shape[1]), jnp.float32)
    places = records.places(stores, cells)
    batch = ExpertBatch(_listed(used), jnp.sum(used, dtype=jnp.int32), ids, x)
    listed = padded(moved), padded(rows[moved]), padded(records.version_of[moved])
    fills = Fills(*listed, jnp.sum(filled, dtype=jnp.int32))
    return fill_ffn(y, arena, batch, places, fills, options, epilogue)
