from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick


class KVPage(NamedTuple):
    """How KV lies in a page, in rows of head_dim values: token-major, keys before values.

    Layer l of a page begins at ``page + l · rows_per_layer``. A latent page has one row per token,
    which is key and value at once (multi-head latent attention, DeepSeek-V2 section 2.1).
    """

    block_size: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    """First values of a row that are the value too; 0: keys and values are rows of their own."""

    @property
    def rows_per_token(self) -> int:
        return 1 if self.latent else 2 * self.kv_heads

    @property
    def value_dim(self) -> int:
        """Values that attention sums up, per head."""
        return self.latent or self.head_dim

    @property
    def rows_per_layer(self) -> int:
        return self.block_size * self.rows_per_token


IMPLEMENTATIONS = implementations("kv_write", ("xla", "pallas", "cpu"))


def kv_write(
    qkv: Float[Array, "T N"],
    q_norm: Float[Array, "L hd"] | None,
    k_norm: Float[Array, "L hd"] | None,
    stack_layer: Int[Array, ""] | int,
    positions: Int[Array, " T"],
    inverse_frequencies: Float[Array, " half"],
    arena: UInt16[Array, "rows D"],
    pages: Int[Array, " T"],
    layer: Int[Array, ""] | int,
    *,
    page: KVPage,
    attention_factor: float,
    eps: float,
    implementation: str = "xla",
) -> tuple[Float[Array, "T H hd"], UInt16[Array, "rows D"]]:
    """Splits qkv, normalises and rotates q and k, writes k and v to the tokens' pages.

    qkv: heads of q, then of k, then of v. q_norm, k_norm: stacked over the run's layers, indexed by
    stack_layer; both None: q and k are rotated as they are. positions: of the tokens. pages: KV
    row of the page that holds each token, −1 writes nothing, and its q means nothing (padding).
    layer: which layer's part of the page, counted over all layers. attention_factor: scales cosine
    and sine (yarn).
    The rotation is that of transformers' `apply_rotary_pos_emb` (halves, not pairs), its angles
    in float32.

    Returns (q, arena); the arena is updated in place when donated.

    Raises ValueError for shapes that do not fit, a latent page, one norm without the other, or an
    unknown implementation.
    """
    check_operands(qkv, q_norm, k_norm, inverse_frequencies, page)
    return pick("kv_write", IMPLEMENTATIONS, implementation)(
        qkv,
        q_norm,
        k_norm,
        stack_layer,
        positions,
        inverse_frequencies,
        arena,
        pages,
        layer,
        page=page,
        attention_factor=attention_factor,
        eps=eps,
    )


def check_operands(qkv, q_norm, k_norm, inverse_frequencies, page: KVPage) -> None:
    """Raises ValueError as kv_write does, for shapes."""
    if page.latent:
        raise ValueError("kv_write writes keys and values; latent_write writes latent pages")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are both given or both None")
    heads = qkv.shape[1] // page.head_dim - 2 * page.kv_heads
    if heads < 1 or qkv.shape[1] % page.head_dim:
        raise ValueError(f"qkv has {qkv.shape[1]} columns for {page.kv_heads} KV heads")
    if inverse_frequencies.shape != (page.head_dim // 2,):
        raise ValueError(f"{inverse_frequencies.shape[0]} frequencies for head_dim {page.head_dim}")
