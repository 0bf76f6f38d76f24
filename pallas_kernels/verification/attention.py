"""Checks of the ops that read and write KV pages."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import KVPage, kv_write
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from pallas_kernels.verification.check import Check, ModelShape, draw, make_check


def attention_checks(shape: ModelShape, least: int) -> Iterator[Check]:
    """kv_write and attention on an arena of at least so many bytes, the pages at its end; none for
    latent pages, which no kernel reads."""
    if shape.latent:
        return
    page = KVPage(shape.block_size, shape.kv_heads, shape.head_dim)
    blocks = 1024 // shape.block_size
    page_rows = 2 * page.rows_per_layer  # two layers, of which the second is used
    used = 4 * blocks * page_rows
    unused = max(0, -(-least // (2 * shape.head_dim)) - used)
    kv = f"heads {shape.heads}/{shape.kv_heads}x{shape.head_dim} block {shape.block_size}"
    kv += " offsets 64" if least else ""

    def table():
        pages = jax.random.permutation(jax.random.key(3), 4 * blocks).reshape(4, blocks)
        return (unused + pages * page_rows).astype(jnp.int32)

    def arena():
        values = draw(4, (used, shape.head_dim), shape.dtype)
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16)
        whole = jnp.zeros((unused + used, shape.head_dim), jnp.uint16)
        return jax.lax.dynamic_update_slice(whole, bits, (unused, 0))

    def tokens():
        columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        inverse = 1e4 ** (-jnp.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        norms = (None, None)
        if shape.qk_norm:
            norms = (draw(i, (2, shape.head_dim), shape.dtype) for i in (1, 2))
        return draw(0, (33, columns), shape.dtype), *norms, inverse, arena(), table()

    def written(name, qkv, q_norm, k_norm, inverse, arena, table):
        positions = jnp.arange(33, dtype=jnp.int32) * 29
        pages = jnp.where(positions % 7 == 6, -1, table[0][positions // shape.block_size])
        q, result = kv_write(
            qkv,
            q_norm,
            k_norm,
            jnp.int32(1),
            positions,
            inverse,
            arena,
            pages,
            jnp.int32(1),
            page=page,
            attention_factor=1.0,
            eps=1e-6,
            implementation=name,
        )
        return q, jax.lax.bitcast_convert_type(result[unused:], jnp.dtype(shape.dtype))

    what = kv if shape.qk_norm else f"{kv} no norms"
    yield make_check("kv_write", what, shape.dtype, tokens, written)

    def queries(count: int):
        return lambda: (
            draw(5, (count, shape.heads, shape.head_dim), shape.dtype),
            arena(),
            table(),
        )

    def decoded(name, q, arena, table):
        lengths = jnp.asarray([1, 0, 65, 1000], jnp.int32)
        arguments = {"page": page, "window": shape.window, "implementation": name}
        return decode_attention(q, arena, table, lengths, jnp.int32(1), **arguments)

    what = f"decode {kv} window {shape.window}"
    yield make_check("paged_attention", what, shape.dtype, queries(4), decoded)

    def swept(name, q, arena, table):
        start, length = jnp.asarray([0, 64, 640, 0]), jnp.asarray([64, 64, 17, 1])
        out = prefill_attention(
            q,
            arena,
            table,
            jnp.asarray([0, 0, 2, 3]),
            start,
            length,
            jnp.int32(4),
            jnp.int32(1),
            page=page,
            window=shape.window,
            implementation=name,
        )
        real = (jnp.arange(64) < length[:, None]).reshape(-1)
        return jnp.where(real[:, None], out, 0)

    what = f"prefill {kv} window {shape.window}"
    yield make_check("paged_attention", what, shape.dtype, queries(4 * 64), swept)
