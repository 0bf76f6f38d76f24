"""Attention over pages as kernels: decode by fixed splits and a merge, prefill by row tiles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.cards import CLASSES
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import kernels, latent
from pallas_kernels.triton import power_of_two_divisor, scalar, triton_call

MAX_HEAD_DIM = 256

SPLIT_STAGES = {99: (6, 4), 163: (8, 4), 227: (8, 4)}
"""Class of GPU → stages of decode's splits, for heads up to 128 and for wider ones."""

PREFILL_STAGES = {99: (4, 4), 163: (6, 4), 227: (6, 4)}
"""The same for prefill."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    rows: int
    """Rows of a program's tile: the query heads that share a KV head, padded."""
    split: int
    """Tokens of a program, a multiple of SPAN. Constant, since the order of sums depends on it."""
    num_warps: int
    num_stages: int
    """2 + 2·n for n spans in flight: half of the stages go to loads of the block table, which give
    the addresses of keys and values."""


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    queries: int
    """Queries of a program's tile."""
    heads: int
    """Heads of a program's tile; they share a KV head."""
    num_warps: int
    num_stages: int
    """See DecodeConfig."""


def why_not_pallas(page: KVPage) -> str | None:
    """Why the kernels cannot read the page, for a message; None: they can."""
    if page.latent:
        return latent.why_not_pallas(page)
    return _too_wide(page.head_dim) if page.head_dim > MAX_HEAD_DIM else None


def decode_configuration(
    groups: int, head_dim: int, dtype: jax.typing.DTypeLike, shared_kib: int = CLASSES[-1]
) -> DecodeConfig:
    """The tile for `groups` query heads per KV head, on a class of GPU (`cards`).

    With a head_dim of at most 128, three of the four spans of a split of 256 tokens are in flight
    (two with 99 KiB). Its partial results are, per query head, 1/256 of the bytes of its keys and
    values.

    Raises ValueError for float32 and for a head_dim above 256.
    """
    _check(head_dim, dtype)
    rows = max(16, pl.next_power_of_2(groups))
    stages = SPLIT_STAGES[shared_kib][head_dim > 128]
    return DecodeConfig(rows, split=256, num_warps=4, num_stages=stages)


def prefill_configuration(
    groups: int, head_dim: int, dtype: jax.typing.DTypeLike, shared_kib: int = CLASSES[-1]
) -> PrefillConfig:
    """The tile for `groups` query heads per KV head, on a class of GPU (`cards`). If heads come in
    pairs it has 128 rows, so a span of keys is read half as often.

    Raises as decode_configuration.
    """
    _check(head_dim, dtype)
    stages = PREFILL_STAGES[shared_kib][head_dim > 128]
    if head_dim > 128:
        return PrefillConfig(queries=64, heads=1, num_warps=8, num_stages=stages)
    heads = power_of_two_divisor(groups, 2)
    return PrefillConfig(queries=64, heads=heads, num_warps=4 * heads, num_stages=stages)


def decode_attention(q, arena, block_table, lengths, layer, options, q_rope, per_layer):
    page = options.page
    if page.latent:
        where = arena, block_table, lengths, layer
        return latent.decode_attention(q, q_rope, *where, options, per_layer)
    tokens, heads, head_dim = q.shape
    groups = heads // page.kv_heads
    config = decode_configuration(groups, head_dim, q.dtype, options.shared_kib)
    splits = pl.cdiv(block_table.shape[1] * page.block_size, config.split)
    (sums,) = triton_call(
        functools.partial(kernels.split, options=options, config=config),
        name="decode_attention_split",
        grid=(tokens, page.kv_heads, splits),
        out_shape=(shapes_of_sums(tokens, heads, splits, head_dim),),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(
        q,
        kernels.kv_rows(arena, page, q.dtype),
        block_table,
        lengths,
        scalar(layer),
        per_layer.operand(),
    )
    return merge_splits(lengths, sums, q.dtype, per_layer, split=config.split)


def shapes_of_sums(tokens, heads, splits, head_dim):
    partial = jax.ShapeDtypeStruct((tokens, heads, splits), jnp.float32)
    total = jax.ShapeDtypeStruct((*partial.shape, head_dim), jnp.float32)
    return kernels.Sums(total, partial, partial)


def merge_splits(lengths, sums, dtype, per_layer, *, split):
    """Merges the sums of splits of `split` tokens to [T, H·hd]."""
    tokens, heads, _, head_dim = sums.totals.shape
    return triton_call(
        functools.partial(kernels.merge, split=split),
        name="decode_attention_merge",
        grid=(tokens, heads),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype),
        num_warps=1,
        num_stages=1,
    )(lengths, sums, per_layer.operand()).reshape(tokens, heads * head_dim)


def prefill_attention(q, arena, block_table, chunks, layer, options, q_rope, per_layer):
    page = options.page
    if page.latent:
        where = arena, block_table, chunks, layer
        return latent.prefill_attention(q, q_rope, *where, options, per_layer)
    rows, heads, head_dim = q.shape
    groups, number = heads // page.kv_heads, chunks.row.shape[0]
    config = prefill_configuration(groups, head_dim, q.dtype, options.shared_kib)
    tiles = pl.cdiv(rows // number, config.queries)
    return triton_call(
        functools.partial(kernels.prefill, options=options, config=config),
        name="prefill_attention",
        grid=(number * tiles, heads // config.heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(
        q,
        kernels.kv_rows(arena, page, q.dtype),
        block_table,
        chunks._replace(count=scalar(chunks.count)),
        scalar(layer),
        per_layer.operand(),
    ).reshape(rows, heads * head_dim)


def _check(head_dim, dtype):
    if jnp.dtype(dtype).itemsize != 2:
        raise ValueError(
            f"paged_attention 'pallas' takes 16-bit dtypes, not {dtype}; 'xla' takes it"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(_too_wide(head_dim))


def _too_wide(head_dim):
    return (
        f"paged_attention 'pallas' takes head_dim up to {MAX_HEAD_DIM}, not {head_dim}; "
        "'xla' takes it"
    )
