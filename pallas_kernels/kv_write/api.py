from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick


class KVPage(NamedTuple):
    """The layout of a page, in rows of head_dim values: keys before values, a KV head's tokens side
    by side, so that a head's part of a page is one stretch of memory.

    Layer l of a page begins at ``page + l · rows_per_layer``; there, row r of token t is at
    ``r · block_size + t``. A latent page has one row per token, which is both key and value
    (multi-head latent attention, DeepSeek-V2 section 2.1).
    """

    block_size: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    """How many first values of a row are also the value; 0: keys and values have separate rows."""

    @property
    def rows_per_token(self) -> int:
        return 1 if self.latent else 2 * self.kv_heads

    @property
    def value_dim(self) -> int:
        """Values per head that attention sums."""
        return self.latent or self.head_dim

    @property
    def rows_per_layer(self) -> int:
        return self.block_size * self.rows_per_token

    @property
    def rows_to_value(self) -> int:
        """Rows from a token's key to its value."""
        return self.block_size * self.kv_heads


class ProjectedHeads(NamedTuple):
    """Queries, keys and values of a layer's tokens, and the parameters of norm and rotation."""

    qkv: Float[Array, "T N"]
    """Heads of q, then of k, then of v."""
    q_norm: Float[Array, "L hd"] | None
    """Weights, stacked over the run's layers; both None: q and k are not normalised."""
    k_norm: Float[Array, "L hd"] | None
    stack_layer: Int[Array, ""] | int
    """The layer's index in the stacked norms."""
    inverse_frequencies: Float[Array, " half"]


class KVPlaces(NamedTuple):
    """Where the keys and values of tokens go."""

    positions: Int[Array, " T"]
    """Positions of the tokens in their sequences; −1: padding."""
    pages: Int[Array, " T"]
    """KV row of each token's page; −1: nothing is written, and q is undefined."""
    layer: Int[Array, ""] | int
    """The layer whose part of the page is written, counted over all layers."""


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """What decides the program of kv_write and latent_write, beside shapes."""

    page: KVPage
    attention_factor: float
    """Scales cosine and sine (yarn)."""
    eps: float
    """Epsilon of the norms."""
    interleave: bool = False
    """See latent_write; kv_write ignores it."""
    implementation: str = "xla"


IMPLEMENTATIONS = implementations("kv_write", ("xla", "pallas", "cpu"))


def kv_write(
    heads: ProjectedHeads,
    arena: UInt16[Array, "rows D"],
    places: KVPlaces,
    options: WriteOptions,
) -> tuple[Float[Array, "T H hd"], UInt16[Array, "rows D"]]:
    """Splits qkv, normalises and rotates q and k, writes k and v to the tokens' pages.

    The rotation is that of transformers' `apply_rotary_pos_emb` (halves, not pairs), with angles in
    float32.

    Returns (q, arena); the arena is updated in place when donated.

    Raises ValueError for shapes that do not fit, a latent page, one norm without the other, or an
    unknown implementation.
    """
    check_operands(heads, options.page)
    fn = pick("kv_write", IMPLEMENTATIONS, options.implementation)
    return fn(heads, arena, places, options)


def check_operands(heads: ProjectedHeads, page: KVPage) -> None:
    """Raises ValueError for shapes that kv_write refuses."""
    qkv, q_norm, k_norm, _, inverse_frequencies = heads
    if page.latent:
        raise ValueError("kv_write writes keys and values; latent_write writes latent pages")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    queries = qkv.shape[1] // page.head_dim - 2 * page.kv_heads
    if queries < 1 or qkv.shape[1] % page.head_dim:
        raise ValueError(f"qkv has {qkv.shape[1]} columns for {page.kv_heads} KV heads")
    if inverse_frequencies.shape != (page.head_dim // 2,):
        raise ValueError(f"{inverse_frequencies.shape[0]} frequencies for head_dim {page.head_dim}")
