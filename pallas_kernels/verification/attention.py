"""Checks of the ops that read and write KV pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import KVPage, KVPlaces, ProjectedHeads, WriteOptions, kv_write
from pallas_kernels.paged_attention import (
    NO_WINDOW,
    AttentionOptions,
    Chunks,
    PerLayer,
    decode_attention,
    prefill_attention,
    write_and_attend,
)
from pallas_kernels.verification.check import (
    Check,
    ModelShape,
    behind,
    draw,
    make_check,
    same_rows,
)

WITHIN = 300
"""A window that is shorter than the contexts of these checks, as real windows are."""


def per_layers(shape: ModelShape) -> tuple[PerLayer, ...]:
    """Sinks and windows as the model has them: with windows one layer with a window that leaves
    out tokens of these contexts, and one that sees all."""
    sinks = draw(7, (2, shape.heads), shape.dtype) if shape.sinks else None
    if shape.window is None:
        return (PerLayer(jnp.int32(1), sinks),)
    windows = jnp.asarray([min(shape.window, WITHIN), NO_WINDOW], jnp.int32)
    return tuple(PerLayer(jnp.int32(i), sinks, windows) for i in range(2))


def described(shape: ModelShape) -> str:
    """The model's window and sinks in words."""
    return f"window {shape.window}" + " sinks" * shape.sinks


def attention_checks(shape: ModelShape, shared_kib: int, least: int) -> Iterator[Check]:
    """Checks of kv_write and attention on an arena of at least `least` bytes, with pages at its
    end."""
    pages = Pages(shape, least)
    yield _kv_write_check(pages)
    yield _writing_check(pages, shared_kib, (0, 64, 999, -1))
    # As many splits as the last program merges, in two turns: the ends of both, and the first
    # position of a split.
    longer = Pages(shape, least, tokens=2048)
    yield _writing_check(longer, shared_kib, (1027, 256, 2047, -1))
    yield from _attention_checks(pages, shared_kib)


class Pages:
    """An arena of at least `least` bytes, with four sequences at its end."""

    def __init__(self, shape: ModelShape, least: int, tokens: int = 1024):
        self.shape = shape
        self.page = KVPage(shape.block_size, shape.kv_heads, shape.head_dim, shape.latent)
        self.blocks = tokens // shape.block_size
        self.page_rows = 2 * self.page.rows_per_layer  # two layers; the second is used
        self.used = 4 * self.blocks * self.page_rows
        self.unused = max(0, -(-least // (2 * shape.head_dim)) - self.used)
        row = f"{shape.kv_heads}x{shape.head_dim}"
        if shape.latent:
            row = f"{shape.latent}+{shape.head_dim - shape.latent}"
        self.what = f"heads {shape.heads}/{row} block {shape.block_size}"
        self.what += "" if tokens == 1024 else f" context {tokens}"
        self.what += " offsets 64" if least else ""
        self.wide = least > 0

    def seen(self, arena: jax.Array) -> jax.Array:
        """The part of the arena that an op may change."""
        return jax.lax.bitcast_convert_type(arena[self.unused :], jnp.dtype(self.shape.dtype))

    def table(self) -> jax.Array:
        pages = jax.random.permutation(jax.random.key(3), 4 * self.blocks).reshape(4, self.blocks)
        return (self.unused + pages * self.page_rows).astype(jnp.int32)

    def written(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions of 33 tokens to write, and their pages, −1 for some."""
        positions = jnp.arange(33, dtype=jnp.int32) * 29
        at = jnp.where(positions % 7 == 6, -1, table[0][positions // self.shape.block_size])
        return positions, at

    def arena(self) -> jax.Array:
        values = draw(4, (self.used, self.shape.head_dim), self.shape.dtype)
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16)
        whole = jnp.zeros((self.unused + self.used, self.shape.head_dim), jnp.uint16)
        return jax.lax.dynamic_update_slice(whole, bits, (self.unused, 0))


def _projected(shape: ModelShape, tokens: int) -> ProjectedHeads:
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    inverse = 1e4 ** (-jnp.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    q_norm = k_norm = None
    if shape.qk_norm:
        q_norm, k_norm = (draw(i, (2, shape.head_dim), shape.dtype) for i in (1, 2))
    qkv = draw(0, (tokens, columns), shape.dtype)
    return ProjectedHeads(qkv, q_norm, k_norm, jnp.int32(1), inverse)


def _kv_write_check(pages: Pages) -> Check:
    shape = pages.shape

    def operands():
        return _projected(shape, 33), pages.table()

    def written(name, arena, heads, table):
        places = KVPlaces(*pages.written(table), jnp.int32(1))
        options = WriteOptions(pages.page, 1.0, 1e-6, implementation=name)
        q, result = kv_write(heads, arena, places, options)
        return result, q

    what = pages.what if shape.qk_norm else f"{pages.what} no norms"
    changed = {"arena": pages.arena, "seen": pages.seen, "wide": pages.wide}
    return make_check("kv_write", what, shape.dtype, operands, written, **changed)


def _writing_check(pages: Pages, shared_kib: int, positions: tuple[int, ...]) -> Check:
    """Checks decode's attention that writes the new token: its values, and that merging in its last
    programs gives the same bits.

    - `positions`: of the sequences' new tokens; −1: an empty sequence.
    """
    shape = pages.shape

    def operands():
        return _projected(shape, 4), pages.table()

    def attended(name, arena, heads, table):
        results = []
        for per_layer in per_layers(shape):
            arena, out, *counted = within(name, per_layer, arena, heads, table)
            arena = behind(arena, out, name)
            results += [out, *counted]
        return arena, *results

    def within(name, per_layer, arena, heads, table):
        last = jnp.asarray(positions, jnp.int32)
        block = jnp.maximum(last, 0) // shape.block_size
        at = jnp.where(last < 0, -1, table[jnp.arange(4), block])
        where = KVPlaces(last, at, jnp.int32(1)), table, last + 1
        options: dict[str, Any] = {
            "write": WriteOptions(pages.page, 1.0, 1e-6, implementation=name),
            "read": AttentionOptions(pages.page, None, name, shared_kib),
            "per_layer": per_layer,
        }
        counters = jnp.zeros(4 * shape.kv_heads, jnp.int32)
        out, result, _ = write_and_attend(heads, arena, *where, **options)
        # On the first one's result, since XLA would copy an arena that both write.
        arena = behind(result, out, name)
        again, result, after = write_and_attend(heads, arena, *where, counters, **options)
        return result, out, same_rows(again, out), after

    what = f"decode and write {pages.what} {described(shape)} {shared_kib} KiB"
    what += "" if shape.qk_norm else " no norms"
    changed = {"arena": pages.arena, "seen": pages.seen, "wide": pages.wide}
    beside = ("kv_write",)
    return make_check(
        "paged_attention", what, shape.dtype, operands, attended, beside=beside, **changed
    )


def _attention_checks(pages: Pages, shared_kib: int) -> Iterator[Check]:
    shape = pages.shape

    def options(name: str) -> AttentionOptions:
        return AttentionOptions(pages.page, None, name, shared_kib)

    def queries(count: int):
        size = count, shape.heads, shape.head_dim
        return lambda: (draw(5, size, shape.dtype), pages.arena(), pages.table())

    def decoded(name, q, arena, table):
        lengths = jnp.asarray([1, 0, 65, 1000], jnp.int32)
        given = q, arena, table, lengths, jnp.int32(1)
        return [decode_attention(*given, options(name), None, each) for each in per_layers(shape)]

    what = f"decode {pages.what} {described(shape)} {shared_kib} KiB"
    yield make_check("paged_attention", what, shape.dtype, queries(4), decoded, wide=pages.wide)

    def prefilled(name, q, arena, table):
        start, length = jnp.asarray([0, 64, 640, 0]), jnp.asarray([64, 64, 17, 1])
        chunks = Chunks(jnp.asarray([0, 0, 2, 3]), start, length, jnp.int32(4))
        real = (jnp.arange(64) < length[:, None]).reshape(-1)
        every = [
            prefill_attention(q, arena, table, chunks, jnp.int32(1), options(name), None, each)
            for each in per_layers(shape)
        ]
        return [jnp.where(real[:, None], out, 0) for out in every]

    what = f"prefill {pages.what} {described(shape)} {shared_kib} KiB"
    prompts = queries(4 * 64)
    yield make_check("paged_attention", what, shape.dtype, prompts, prefilled, wide=pages.wide)
