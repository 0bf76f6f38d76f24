"""Multi-head latent attention (DeepSeek-V2, section 2.1): a page has one row a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from moejax.models.attention.kind import AttentionLayer, AttentionNumbers, attention_options
from pallas_kernels.head_linear import head_linear
from pallas_kernels.kv_write import KVPage, KVPlaces, WriteOptions
from pallas_kernels.latent_write import LatentHeads, latent_write

NORM_EPS = 1e-6
"""Epsilon of the inner norms: transformers' default, independent of rms_norm_eps."""


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention, an AttentionKind, with fields named as in config.json.

    The products of queries and outputs with kv_b's halves are moved out of the sum over keys
    ("absorbed"), so pages hold the latent. Several products read the normalised input, so the norm
    is a kernel of its own.

    - `q_lora_rank`: None: queries are not compressed.
    - `rope_interleave`: the checkpoint's rotated values are pairs (2i, 2i + 1), not halves.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool

    ops = ("latent_write", "head_linear")
    products = ("head_linear",)
    takes_squares = False
    xla_only: ClassVar[Mapping[str, str]] = {}

    def for_length(self, max_model_len: int) -> LatentAttention:
        return self

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return KVPage(block_size, 1, width, self.kv_lora_rank)

    def far_page(self, block_size: int) -> KVPage | None:
        return None

    def kernel_shape(self) -> dict[str, Any]:
        up_projection = self.qk_nope_head_dim, self.v_head_dim
        return {"up_projection": up_projection, "interleave": self.rope_interleave}

    def rotary_dim(self, config: AttentionNumbers) -> int:
        return self.qk_rope_head_dim

    def scale_queries(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Queries [T, H, hd] times a factor of their positions int32[T]: here none."""
        return q

    def latent_norm(self, stack: AttentionLayer) -> jax.Array:
        """[L, latent], the weights of the latent values' norm."""
        return stack.weight("kv_a_norm")

    def extend(self, stack, i, normed, compressed, kv, tails, tokens):
        """What latent_write takes: (kv [T, page.head_dim], tails of queries [T, heads, head_dim −
        latent], frequencies), and what `choose` takes."""
        return kv, tails, stack.frequencies(i), None

    def choose(self, tails, weights, per_layer):
        """(rotated tails of queries, what attention reads beside pages)."""
        return tails, per_layer

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        normed = stack.norm(x, "input_norm", i)
        heads, nope = stack.config.num_attention_heads, self.qk_nope_head_dim
        if "q_a" in stack.weights:
            compressed = stack.norm(stack.linear(normed, "q_a", i, tokens), "q_a_norm", i, NORM_EPS)
            q = stack.linear(compressed, "q_b", i, tokens)
        else:
            compressed, q = None, stack.linear(normed, "q", i, tokens)
        q = self.scale_queries(q.reshape(q.shape[0], heads, -1), tokens.positions)
        kv, tails = stack.linear(normed, "kv_a", i, tokens), q[..., nope:]
        kv, tails, frequencies, weights = self.extend(
            stack, i, normed, compressed, kv, tails, tokens
        )
        latent = LatentHeads(kv, self.latent_norm(stack), i, tails, frequencies)
        places = KVPlaces(tokens.positions, tokens.pages, stack.page_layer(i))
        write = WriteOptions(
            page, stack.attention_factor, NORM_EPS, self.rope_interleave, stack.ops.latent_write
        )
        tails, arena = latent_write(latent, arena, places, write)
        q_rope, per_layer = self.choose(tails, weights, stack.per_layer(i))
        kv_b = stack.weight("kv_b")  # of each head, rows of its keys, then of its values
        kv_b = kv_b.reshape(kv_b.shape[0], heads, -1, self.kv_lora_rank)

        def by_head(x, part, transposed):
            return head_linear(
                x,
                kv_b,
                i,
                part=part,
                transposed=transposed,
                row_tile=tokens.row_tile,
                tiles=tokens.tiles,
                implementation=stack.ops.head_linear,
            )

        layer = stack.page_layer(i)
        out = tokens.attention(
            by_head(q[..., :nope], (0, nope), True),
            arena,
            q_rope=q_rope,
            layer=layer,
            options=attention_options(stack, page),
            per_layer=per_layer,
        )
        out = by_head(out.reshape(out.shape[0], heads, -1), (nope, kv_b.shape[2]), False)
        return out.reshape(out.shape[0], -1), arena, counters
