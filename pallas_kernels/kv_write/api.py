from __future__ import annotations

import dataclasses
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


class ProjectedHeads(NamedTuple):
    """Queries, keys and values of a layer's tokens before norm and rotation, and what both take."""

    qkv: Float[Array, "T N"]
    """Heads of q, then of k, then of v."""
    q_norm: Float[Array, "L hd"] | None
    """Weights, stacked over the run's layers; both None: q and k are rotated as they are."""
    k_norm: Float[Array, "L hd"] | None
    stack_layer: Int[Array, ""] | int
    """The layer of the norms."""
    inverse_frequencies: Float[Array, " half"]


class KVPlaces(NamedTuple):
    """Where the keys and values of tokens go."""

    positions: Int[Array, " T"]
    """Of the tokens in their sequences; −1 of padding."""
    pages: Int[Array, " T"]
    """KV row of the page that holds each token; −1 writes nothing, and its q means nothing."""
    layer: Int[Array, ""] | int
    """Whose part of the page, counted over all layers."""


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """What decides the program of kv_write and latent_write, besides shapes."""

    page: KVPage
    attention_factor: float
    """Scales cosine and sine (yarn)."""
    eps: float
    """Of the norms."""
    interleave: bool = False
    """As of latent_write; kv_write never pairs values so."""
    implementation: str = "xla"


IMPLEMENTATIONS = implementations("kv_write", ("xla", "pallas", "cpu"))


def kv_write(
    heads: ProjectedHeads,
    arena: UInt16[Array, "rows D"],
    places: KVPlaces,
    options: WriteOptions,
) -> tuple[Float[Array, "T H hd"], UInt16[Array, "rows D"]]:
    """Splits qkv, normalises and rotates q and k, writes k and v to the tokens' pages.

    The rotation is that of transformers' `apply_rotary_pos_emb` (halves, not pairs), its angles
    in float32.

    Returns (q, arena); the arena is updated in place when donated.

    Raises ValueError for shapes that do not fit, a latent page, one norm without the other, or an
    unknown implementation.
    """
    check_operands(heads, options.page)
    fn = pick("kv_write", IMPLEMENTATIONS, options.implementation)
    return fn(heads, arena, places, options)


def check_operands(heads: ProjectedHeads, page: KVPage) -> None:
    """Raises ValueError as kv_write does, for shapes."""
    qkv, q_norm, k_norm, _, inverse_frequencies = heads
    if page.latent:
        raise ValueError("kv_write writes keys and values; latent_write writes latent pages")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are both given or both None")
    queries = qkv.shape[1] // page.head_dim - 2 * page.kv_heads
    if queries < 1 or qkv.shape[1] % page.head_dim:
        raise ValueError(f"qkv has {qkv.shape[1]} columns for {page.kv_heads} KV heads")
    if inverse_frequencies.shape != (page.head_dim // 2,):
        raise ValueError(f"{inverse_frequencies.shape[0]} frequencies for head_dim {page.head_dim}")
