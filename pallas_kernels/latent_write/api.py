from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.kv_write import KVPlaces, WriteOptions


class LatentHeads(NamedTuple):
    """A layer's latent KV and the rotary part of its queries, and the parameters of norm and
    rotation. R = page.latent, P = page.head_dim − R."""

    kv: Float[Array, "T hd"]
    """R values c_KV, then P values of the key that carries the position."""
    kv_norm: Float[Array, "L R"]
    stack_layer: Int[Array, ""] | int
    """The layer's index in the stacked norm."""
    q_rope: Float[Array, "T H P"]
    """The values of each query head that carry the position."""
    inverse_frequencies: Float[Array, " half"]
    """P/2."""


IMPLEMENTATIONS = implementations("latent_write", ("xla", "pallas", "cpu"))


def latent_write(
    heads: LatentHeads,
    arena: UInt16[Array, "rows D"],
    places: KVPlaces,
    options: WriteOptions,
) -> tuple[Float[Array, "T H P"], UInt16[Array, "rows D"]]:
    """Normalises and rotates a token's latent KV, writes it to its page, and rotates its queries.

    Multi-head latent attention keeps one row per token for all heads (DeepSeek-V2, equations 41 and
    43): c_KV, normalised by rms_norm, then the key that carries the position, rotated.

    With options.interleave, values 2i and 2i + 1 are rotated together, as in DeepSeek's
    checkpoints, and come out as values i and P/2 + i. Keys and queries are reordered alike, so
    their products stay the same. Otherwise values i and P/2 + i are rotated together.

    Returns (q_rope rotated, arena); the arena is updated in place when donated.

    Raises ValueError for shapes that do not fit, a page that is not latent, or an unknown
    implementation.
    """
    kv, kv_norm, _, q_rope, inverse_frequencies = heads
    page = options.page
    rope = page.head_dim - page.latent
    if not page.latent or page.kv_heads != 1 or rope < 2 or rope % 2:
        raise ValueError(f"latent_write needs a latent page with an even rest, not {page}")
    if kv.shape[1] != page.head_dim or kv_norm.shape[1] != page.latent or q_rope.shape[2] != rope:
        raise ValueError(
            f"kv {kv.shape}, kv_norm {kv_norm.shape}, q_rope {q_rope.shape} for rows of "
            f"{page.latent} + {rope}"
        )
    if inverse_frequencies.shape != (rope // 2,):
        raise ValueError(f"{inverse_frequencies.shape[0]} frequencies for {rope} rotated values")
    fn = pick("latent_write", IMPLEMENTATIONS, options.implementation)
    return fn(heads, arena, places, options)
