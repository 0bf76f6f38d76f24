"""kv_write as one kernel: a program per token and tile of heads."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.rms_norm.pallas_triton import sum_of_row
from pallas_kernels.triton import power_of_two_divisor, scalar, triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int
    """Heads of a program's tile: all of q, all of k or all of v."""
    num_warps: int
    num_stages: int


def configuration(heads: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike) -> Config:
    """The tile for these numbers of heads of q and of k (and v): eight values of each half a
    thread.

    With one program per token a lone token would use one multiprocessor. With one per head a
    prefill step would spend more on launching programs than on their work.

    Raises ValueError for float32, whose values do not fill the arena's rows one to one.
    """
    if jnp.dtype(dtype).itemsize != 2:
        raise ValueError(f"kv_write 'pallas' takes 16-bit dtypes, not {dtype}; 'xla' takes it")
    tile = power_of_two_divisor(math.gcd(heads, kv_heads), 8)
    half = pl.next_power_of_2(head_dim // 2)
    return Config(tile, num_warps=min(max(tile * half // 256, 1), 4), num_stages=1)


def kv_write(projected, arena, places, options):
    qkv, q_norm, k_norm, stack_layer, inverse_frequencies = projected
    page = options.page
    by_head = qkv.reshape(qkv.shape[0], -1, page.head_dim)
    tokens, all_heads, head_dim = by_head.shape
    heads = all_heads - 2 * page.kv_heads
    config = configuration(heads, page.kv_heads, head_dim, qkv.dtype)
    view = arena.reshape(-1, head_dim)
    norms = () if q_norm is None else (q_norm, k_norm, scalar(stack_layer))
    q, view = triton_call(
        functools.partial(_kernel, options=options, config=config),
        name="kv_write",
        grid=(tokens, all_heads // config.heads),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(view.shape, view.dtype),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={5 + len(norms): 1},
    )(
        *(by_head, *norms, places.positions, inverse_frequencies, places.pages),
        *(scalar(places.layer), view),
    )
    return q, view.reshape(arena.shape)


def _kernel(qkv, *refs, options, config):
    """Norm (if there are weights), rotation and store of one token's tile of heads.

    Writes: program (t, i) of a q tile writes q_out[t, its heads]. A program of a k or v tile writes
    the KV rows of its heads at token t's place in its page. Tiles do not overlap, and no two tokens
    have the same place, since the scheduler gives a page to one sequence. A token without a page
    writes no KV row.
    """
    *norms, positions, inverse_frequencies, pages, layer, _, q_out, kv_out = refs
    t, tile, page = pl.program_id(0), pl.program_id(1), options.page
    heads, head_dim, dtype = q_out.shape[1], page.head_dim, qkv.dtype
    half = head_dim // 2
    first_head = tile * config.heads
    is_q = first_head < heads
    is_v = first_head >= heads + page.kv_heads
    row = jnp.arange(config.heads)[:, None]
    column = jnp.arange(pl.next_power_of_2(half))
    real = column < half  # all of them where half a head is a power of two
    real_tile = jnp.broadcast_to(real, (config.heads, real.size))

    def load_tile(first):
        at = qkv.at[t, first_head + row, first + column[None]]
        return plgpu.load(at, mask=real_tile, other=0)

    def load_weight(first):
        q_norm, k_norm, stack_layer = norms
        at = stack_layer[0], first + column
        q_weight = plgpu.load(q_norm.at[at], mask=real, other=0)
        k_weight = plgpu.load(k_norm.at[at], mask=real, other=0)
        return jnp.where(is_q, q_weight, k_weight).astype(jnp.float32)

    @pl.when(is_q | (pages[t] >= 0))
    def _():
        bits = [load_tile(0), load_tile(half)]
        low, high = (x.astype(jnp.float32) for x in bits)
        if norms:
            scale = head_scale(low, high, head_dim, options.eps)
            low, high = (
                normed(x, load_weight(first), scale, dtype) for x, first in ((low, 0), (high, half))
            )
        frequency = plgpu.load(inverse_frequencies.at[column], mask=real, other=0)
        angles = cosine_and_sine(positions[t], frequency, options.attention_factor, dtype)
        rotated = turned(low, high, -1.0, angles, dtype), turned(high, low, 1.0, angles, dtype)

        @pl.when(is_q)
        def _():
            for first, x in zip((0, half), rotated, strict=True):
                plgpu.store(q_out.at[t, first_head + row, first + column[None]], x, mask=real_tile)

        @pl.when(jnp.logical_not(is_q))
        def _():
            # Keys, then values: the heads of qkv after q, in order.
            place = pages[t] + layer[0] * page.rows_per_layer + positions[t] % page.block_size
            place += (first_head - heads + row) * page.block_size
            for first, x, v in zip((0, half), rotated, bits, strict=True):
                x = jnp.where(is_v, _as_uint16(v), _as_uint16(x))  # v as it is, NaN bits too
                plgpu.store(kv_out.at[place, first + column[None]], x, mask=real_tile)


def head_scale(low, high, head_dim, eps):
    """The factors [R, 1] of a norm, from the halves of heads in float32. Squares of 16-bit values
    are exact, so bits depend only on the order of sums, which all kernels take from
    `sum_of_row`."""
    mean = (sum_of_row(low * low) + sum_of_row(high * high)) / head_dim
    return lax.rsqrt(mean + eps)[:, None]


def normed(x, weight, scale, dtype):
    """Values times scale and weight in float32, rounded where rms_norm rounds."""
    return _rounded(weight * _rounded(x * scale, dtype), dtype)


def cosine_and_sine(position, frequency, factor, dtype):
    """Cosine and sine of a token's angles, rounded to the dtype, in float32."""
    angle = position.astype(jnp.float32) * frequency
    return _rounded(jnp.cos(angle) * factor, dtype), _rounded(jnp.sin(angle) * factor, dtype)


def turned(x, partner, sign, angles, dtype):
    """The rotated values.

    - `partner`: the value half a head away, which rotates with each.
    - `sign`: −1 in a head's first half, 1 in its second.
    """
    cos, sin = angles
    return (_rounded(x * cos, dtype) + sign * _rounded(partner * sin, dtype)).astype(dtype)


def _rounded(x, dtype):
    """Rounds to the dtype where the reference computes in it."""
    return x.astype(dtype).astype(jnp.float32)


def _as_uint16(x):
    return lax.bitcast_convert_type(x, jnp.uint16)
