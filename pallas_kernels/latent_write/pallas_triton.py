"""latent_write as one kernel: a program per token for its KV row, and per tile of query heads."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.triton import KERNEL_DTYPES, power_of_two_divisor, scalar, triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int
    """Query heads of a program's tile."""
    num_warps: int
    num_stages: int


def configuration(heads: int, latent: int, rope: int, dtype: jax.typing.DTypeLike) -> Config:
    """The tile for this number of query heads and KV rows of `latent` + `rope` values: at most 16
    values a thread of the larger of both.

    Raises ValueError for float32, whose values do not fill the arena's rows one to one.
    """
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise ValueError(
            f"latent_write 'pallas' takes {KERNEL_DTYPES}, not {dtype}; 'xla' takes it"
        )
    tile = power_of_two_divisor(heads, 8)
    values = max(pl.next_power_of_2(latent), tile * pl.next_power_of_2(rope))
    return Config(tile, num_warps=min(max(values // 512, 1), 4), num_stages=1)


def latent_write(projected, arena, places, options):
    kv, kv_norm, stack_layer, q_rope, inverse_frequencies = projected
    tokens, heads, rope = q_rope.shape
    page = options.page
    dtype = jnp.promote_types(jnp.promote_types(kv.dtype, q_rope.dtype), kv_norm.dtype)
    config = configuration(heads, page.latent, rope, dtype)
    view = arena.reshape(-1, page.head_dim)
    q_rope, view = triton_call(
        functools.partial(_kernel, options=options, config=config),
        name="latent_write",
        grid=(tokens, 1 + heads // config.heads),
        out_shape=(
            jax.ShapeDtypeStruct(q_rope.shape, q_rope.dtype),
            jax.ShapeDtypeStruct(view.shape, view.dtype),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={8: 1},
    )(
        (kv, kv_norm, scalar(stack_layer), q_rope),
        (places.positions, inverse_frequencies, places.pages, scalar(places.layer)),
        view,
    )
    return q_rope, view.reshape(arena.shape)


def _kernel(projected, where, _, q_out, kv_out, *, options, config):
    """Normalises and rotates the KV row of one token, or rotates a tile of its queries.

    Writes: program (t, 0) writes token t's row in its page, or nothing if the token has no page;
    program (t, 1 + i) writes q_out[t, head tile i]. No two tokens have the same place, since the
    scheduler gives a page to one sequence.
    """
    kv, kv_norm, stack_layer, q_rope = projected
    positions, inverse_frequencies, pages, layer = where
    t, tile, page = pl.program_id(0), pl.program_id(1), options.page
    half, dtype = q_rope.shape[2] // 2, kv.dtype
    column = jnp.arange(pl.next_power_of_2(half))
    real = column < half

    def rounded(x):  # to the dtype, where the reference's arithmetic in that dtype rounds
        return x.astype(dtype).astype(jnp.float32)

    frequency = plgpu.load(inverse_frequencies.at[column], mask=real, other=0)
    angle = positions[t].astype(jnp.float32) * frequency
    cos = rounded(jnp.cos(angle) * options.attention_factor)
    sin = rounded(jnp.sin(angle) * options.attention_factor)
    # The places of the two values of a pair in what is read; written as halves.
    pairs = (2 * column, 2 * column + 1) if options.interleave else (column, half + column)

    def rotated(first, second):
        first, second = first.astype(jnp.float32), second.astype(jnp.float32)
        return (
            (rounded(first * cos) - rounded(second * sin)).astype(dtype),
            (rounded(second * cos) + rounded(first * sin)).astype(dtype),
        )

    @pl.when(tile > 0)
    def _():
        head = ((tile - 1) * config.heads + jnp.arange(config.heads))[:, None]
        mask = jnp.broadcast_to(real, (config.heads, real.size))
        parts = [plgpu.load(q_rope.at[t, head, at[None]], mask=mask, other=0) for at in pairs]
        for first, x in zip((0, half), rotated(*parts), strict=True):
            plgpu.store(q_out.at[t, head, first + column[None]], x, mask=mask)

    @pl.when((tile == 0) & (pages[t] >= 0))
    def _():
        place = pages[t] + layer[0] * page.rows_per_layer + positions[t] % page.block_size
        of_latent = jnp.arange(pl.next_power_of_2(page.latent))
        held = of_latent < page.latent
        x = plgpu.load(kv.at[t, of_latent], mask=held, other=0).astype(jnp.float32)
        weight = plgpu.load(kv_norm.at[stack_layer[0], of_latent], mask=held, other=0)
        scale = lax.rsqrt(jnp.sum(x * x) / page.latent + options.eps)
        normed = (weight.astype(jnp.float32) * rounded(x * scale)).astype(dtype)
        plgpu.store(kv_out.at[place, of_latent], _as_uint16(normed), mask=held)
        parts = [plgpu.load(kv.at[t, page.latent + at], mask=real, other=0) for at in pairs]
        for first, x in zip((0, half), rotated(*parts), strict=True):
            at = kv_out.at[place, page.latent + first + column]
            plgpu.store(at, _as_uint16(x), mask=real)


def _as_uint16(x):
    return lax.bitcast_convert_type(x, jnp.uint16)
