"""Checks of the ops of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.head_linear import head_linear
from pallas_kernels.kv_write import KVPlaces, WriteOptions
from pallas_kernels.latent_write import LatentHeads, latent_write
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Chunks,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.verification.attention import Pages, described, per_layers
from pallas_kernels.verification.check import Check, ModelShape, draw, make_check
from pallas_kernels.verification.dense import ROW_TILES, product_rows


def head_checks(shape: ModelShape) -> Iterator[Check]:
    """Checks of head_linear with both parts of a head's weights; none without latent attention."""
    if not shape.latent:
        return
    keys, values = shape.up_projection
    for part, transposed in (((0, keys), True), ((keys, keys + values), False)):
        for row_tile in ROW_TILES:
            every = product_rows(row_tile)

            def operands(part=part, transposed=transposed, most=every[0]):
                inputs = part[1] - part[0] if transposed else shape.latent
                stack = (2, shape.heads, keys + values, shape.latent)
                return (
                    draw(0, (most, shape.heads, inputs), shape.dtype),
                    draw(1, stack, shape.dtype, inputs**-0.5),
                )

            def product(
                name, x, weights, part=part, transposed=transposed, tile=row_tile, every=every
            ):
                options = {"part": part, "transposed": transposed, "implementation": name}
                return tuple(
                    head_linear(
                        *(x[:rows], weights, jnp.int32(1)), row_tile=min(rows, tile), **options
                    )
                    for rows in every
                )

            what = f"{shape.heads}x{part[1] - part[0]}x{shape.latent} rows {row_tile}"
            what += " transposed" if transposed else f" behind {part[0]}"
            yield make_check("head_linear", what, shape.dtype, operands, product)


def latent_checks(shape: ModelShape, least: int) -> Iterator[Check]:
    """Checks of latent_write and attention on an arena of at least `least` bytes, pages at its
    end."""
    pages = Pages(shape, least)
    yield _latent_write_check(pages)
    yield _decode_check(pages)
    yield _prefill_check(pages)


def _latent_write_check(pages: Pages) -> Check:
    shape = pages.shape
    rope = shape.head_dim - shape.latent

    def operands():
        heads = LatentHeads(
            draw(0, (33, shape.head_dim), shape.dtype),
            draw(1, (2, shape.latent), shape.dtype),
            jnp.int32(1),
            draw(2, (33, shape.heads, rope), shape.dtype),
            1e4 ** (-jnp.arange(rope // 2) / (rope // 2)),
        )
        return heads, pages.table()

    def written(name, arena, heads, table):
        places = KVPlaces(*pages.written(table), jnp.int32(1))
        options = WriteOptions(pages.page, 1.1, 1e-6, shape.interleave, name)
        q, result = latent_write(heads, arena, places, options)
        return result, q

    what = f"{pages.what} {'pairs' if shape.interleave else 'halves'}"
    changed = {"arena": pages.arena, "seen": pages.seen, "wide": pages.wide}
    return make_check("latent_write", what, shape.dtype, operands, written, **changed)


def _queries(pages: Pages, count: int):
    """Operands of attention: both parts of `count` queries, arena, table."""
    shape = pages.shape
    size, rope = (count, shape.heads), shape.head_dim - shape.latent
    return lambda: (
        draw(5, (*size, shape.latent), shape.dtype),
        draw(6, (*size, rope), shape.dtype),
        pages.arena(),
        pages.table(),
    )


def _options(pages: Pages, name: str) -> AttentionOptions:
    scale = pages.shape.head_dim**-0.5
    return AttentionOptions(pages.page, scale, name)


def _decode_check(pages: Pages) -> Check:
    def decoded(name, q, q_rope, arena, table):
        lengths = jnp.asarray([1, 0, 65, 1000], jnp.int32)
        options = _options(pages, name)
        given = q, arena, table, lengths, jnp.int32(1), options, q_rope
        return [decode_attention(*given, each) for each in per_layers(pages.shape)]

    what = f"decode {pages.what} {described(pages.shape)}"
    queries, dtype = _queries(pages, 4), pages.shape.dtype
    return make_check("paged_attention", what, dtype, queries, decoded, wide=pages.wide)


def _prefill_check(pages: Pages) -> Check:
    def prefilled(name, q, q_rope, arena, table):
        row, start, length = (
            jnp.asarray(numbers) for numbers in ([0, 0, 2, 3], [0, 64, 640, 0], [64, 64, 17, 1])
        )
        chunks = Chunks(row, start, length, jnp.int32(4))
        options = _options(pages, name)
        given = q, arena, table, chunks, jnp.int32(1), options, q_rope
        every = [prefill_attention(*given, each) for each in per_layers(pages.shape)]
        real = (jnp.arange(64) < length[:, None]).reshape(-1)
        return [jnp.where(real[:, None], out, 0) for out in every]

    what = f"prefill {pages.what} {described(pages.shape)}"
    queries, dtype = _queries(pages, 4 * 64), pages.shape.dtype
    return make_check("paged_attention", what, dtype, queries, prefilled, wide=pages.wide)
