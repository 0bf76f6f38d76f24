"""Attention over latent pages as kernels: decode by fixed splits and a merge, prefill by tiles of
queries and heads."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import kernels, latent_kernels
from pallas_kernels.triton import KERNEL_DTYPES, power_of_two_divisor, scalar, triton_call

MAX_LATENT, MAX_ROPE = 512, 64


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    """Rows of a program's tile: query heads; in prefill, of several queries."""
    heads: int
    """Heads of a tile, of the same query."""
    span: int
    """Tokens reduced at once, in ascending order, whatever the page size."""
    part: int
    """Columns of one product: the latent is read in parts of this width, added in ascending
    order."""
    split: int
    """Tokens of a program of decode, a multiple of span. The order of sums depends on it."""
    num_warps: int
    num_stages: int
    """See DecodeConfig."""


def why_not_pallas(page: KVPage) -> str | None:
    """Why the kernels cannot read a latent page; None: they can."""
    rope = page.head_dim - page.latent
    if page.latent <= MAX_LATENT and rope <= MAX_ROPE:
        return None
    return (
        f"paged_attention 'pallas' takes latent pages of up to {MAX_LATENT} + {MAX_ROPE} values, "
        f"not {page.latent} + {rope}; 'xla' takes them"
    )


def decode_configuration(heads: int, page: KVPage, dtype: jax.typing.DTypeLike) -> Config:
    """The tile of decode: sixteen heads of one query, the fewest rows of a product.

    Two spans of 32 rows of 1152 bytes are in flight beside the queries: 92 KiB of shared memory,
    which every GPU has, so one table serves all. With 16 heads a split's partial results are 1/9 of
    its rows' bytes. With many heads (DeepSeek-V3: 128) splits are longer, since each head has
    partial results of its own.

    Raises ValueError for float32 and for wider pages.
    """
    split = 256 if heads <= 32 else 1024
    return Config(16, 16, 32, _part(page, dtype), split, num_warps=4, num_stages=6)


def prefill_configuration(heads: int, page: KVPage, dtype: jax.typing.DTypeLike) -> Config:
    """The tile of prefill: the largest number of heads, up to sixteen, that divides the model's,
    and queries to fill the rows. Otherwise decode's tile.

    Raises as decode_configuration.
    """
    tile = power_of_two_divisor(heads, 16)
    return dataclasses.replace(decode_configuration(heads, page, dtype), heads=tile)


def decode_attention(q, q_rope, arena, block_table, lengths, layer, options, per_layer):
    (tokens, heads, latent), page = q.shape, options.page
    config = decode_configuration(heads, page, q.dtype)
    splits = pl.cdiv(block_table.shape[1] * page.block_size, config.split)
    partial = jax.ShapeDtypeStruct((tokens, heads, splits), jnp.float32)
    (sums,) = triton_call(
        functools.partial(latent_kernels.split, options=options, config=config),
        name="decode_attention_latent_split",
        grid=(tokens, pl.cdiv(heads, config.rows), splits),
        out_shape=(
            kernels.Sums(
                jax.ShapeDtypeStruct((tokens, heads, splits, latent), jnp.float32),
                partial,
                partial,
            ),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(
        (q, q_rope),
        kernels.kv_rows(arena, page, q.dtype),
        block_table,
        lengths,
        scalar(layer),
        per_layer.operand(),
    )
    return triton_call(
        functools.partial(kernels.merge, split=config.split),
        name="decode_attention_latent_merge",
        grid=(tokens, heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=4,
        num_stages=1,
    )(lengths, sums, per_layer.operand()).reshape(tokens, heads * latent)


def prefill_attention(q, q_rope, arena, block_table, chunks, layer, options, per_layer):
    (rows, heads, latent), page, number = q.shape, options.page, chunks.row.shape[0]
    config = prefill_configuration(heads, page, q.dtype)
    tiles = pl.cdiv(rows // number, config.rows // config.heads)
    return triton_call(
        functools.partial(latent_kernels.prefill, options=options, config=config),
        name="prefill_attention_latent",
        grid=(number * tiles, heads // config.heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(
        (q, q_rope),
        kernels.kv_rows(arena, page, q.dtype),
        block_table,
        chunks._replace(count=scalar(chunks.count)),
        scalar(layer),
        per_layer.operand(),
    ).reshape(rows, heads * latent)


def _part(page, dtype):
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(
            f"paged_attention 'pallas' takes 16-bit dtypes, not {dtype}; 'xla' takes it"
        )
    if why := why_not_pallas(page):
        raise ValueError(why)
    return min(max(16, pl.next_power_of_2(page.latent)), 256)
