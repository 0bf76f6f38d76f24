from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.kv_write import KVPage

IMPLEMENTATIONS = implementations("latent_write", ("xla", "pallas", "cpu"))


def latent_write(
    kv: Float[Array, "T hd"],
    kv_norm: Float[Array, "L R"],
    stack_layer: Int[Array, ""] | int,
    q_rope: Float[Array, "T H P"],
    positions: Int[Array, " T"],
    inverse_frequencies: Float[Array, " half"],
    arena: UInt16[Array, "rows D"],
    pages: Int[Array, " T"],
    layer: Int[Array, ""] | int,
    *,
    page: KVPage,
    attention_factor: float,
    eps: float,
    interleave: bool,
    implementation: str = "xla",
) -> tuple[Float[Array, "T H P"], UInt16[Array, "rows D"]]:
    """Normalises and rotates a token's latent KV, writes it to its page, and rotates its queries.

    Multi-head latent attention keeps one row per token for all heads (DeepSeek-V2, equations 41 and
    43): R = page.latent values c_KV, normalised by rms_norm with kv_norm[stack_layer] and `eps`,
    then P = page.head_dim − R values of the key that carries the position, rotated.

    kv: c_KV and the key before both. q_rope: the P values of each query head that carry the
    position. interleave: values 2i and 2i + 1 are rotated together, as in DeepSeek's checkpoints,
    and come out as i and P/2 + i, in keys and queries alike, so that their products stay the same;
    else i and P/2 + i are. inverse_frequencies: P/2. The other arguments are those of kv_write.

    Returns (q_rope rotated, arena); the arena is updated in place when donated.

    Raises ValueError for shapes that do not fit, a page that is not latent, or an unknown
    implementation.
    """
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
    return pick("latent_write", IMPLEMENTATIONS, implementation)(
        kv,
        kv_norm,
        stack_layer,
        q_rope,
        positions,
        inverse_frequencies,
        arena,
        pages,
        layer,
        page=page,
        attention_factor=attention_factor,
        eps=eps,
        interleave=interleave,
    )
