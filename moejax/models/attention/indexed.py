"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556): latent attention to tokens that an
indexer chooses. Its keys are in the rows of the pages, behind the latent ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from moejax.models.attention.kind import AttentionNumbers
from moejax.models.attention.latent import NORM_EPS, LatentAttention
from pallas_kernels.kv_write import KVPage
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.paged_attention import Indexer


@dataclasses.dataclass(frozen=True)
class IndexedAttention(LatentAttention):
    """Latent attention in which a query attends to `index_topk` tokens, those with the largest
    Σ_h weight_h · relu(q_h · k), an AttentionKind. Fields are named as in config.json.

    The indexer's keys and queries are rotated by latent_write, as further values of the row and as
    further heads. Each head has zeros where the other kind's values are.

    - `index_interleave`: the indexer's rotated values are pairs (2i, 2i + 1), not halves.
    """

    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_interleave: bool

    xla_only: ClassVar[Mapping[str, str]] = {
        "paged_attention": "attention to tokens that an indexer chooses",
        "latent_write": "rows with an indexer's keys",
    }

    def for_length(self, max_model_len: int) -> LatentAttention:
        """Latent attention for sequences of which the indexer would choose all tokens."""
        if max_model_len > self.index_topk:
            return self
        fields = (field.name for field in dataclasses.fields(LatentAttention))
        return LatentAttention(**{name: getattr(self, name) for name in fields})

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        page = super().page(config, block_size)
        return page._replace(head_dim=page.head_dim + self.index_head_dim)

    def extend(self, stack, i, normed, compressed, kv, tails, tokens):
        queries = stack.linear(compressed, "index_q", i, tokens)
        queries = queries.reshape(len(queries), self.index_n_heads, self.index_head_dim)
        # The kernel of layer_norm is checked for models whose layers have one.
        keys = layer_norm(
            stack.linear(normed, "index_k", i, tokens),
            stack.weight("index_k_norm"),
            stack.weight("index_k_norm_bias"),
            i,
            NORM_EPS,
        )
        weights = stack.linear(normed, "index_weights", i, tokens, out_dtype=jnp.float32)
        weights *= (self.index_n_heads * self.index_head_dim) ** -0.5
        keys, queries = (self._in_pairs(x, stack.attention_factor) for x in (keys, queries))
        none = ((0, 0), (0, 0))
        tails = jnp.concatenate(
            [
                jnp.pad(tails, (*none, (0, self.index_head_dim))),
                jnp.pad(queries, (*none, (self.qk_rope_head_dim, 0))),
            ],
            axis=1,
        )
        frequencies = stack.frequencies(i)
        at_rest = (self.index_head_dim - self.qk_rope_head_dim) // 2
        frequencies = jnp.concatenate([frequencies, frequencies, jnp.zeros(at_rest)])
        return jnp.concatenate([kv, keys], axis=1), tails, frequencies, weights

    def choose(self, tails, weights, per_layer):
        tails, queries = jnp.split(tails, [tails.shape[1] - self.index_n_heads], axis=1)
        return tails, per_layer._replace(indexer=Indexer(queries, weights, self.index_topk))

    def _in_pairs(self, x: jax.Array, factor: float) -> jax.Array:
        """x [T, ..., index_head_dim] with rotated values as latent_write takes them. The others are
        divided by the factor of cosine and sine, which multiplies them too."""
        width = self.qk_rope_head_dim
        turned, passed = jnp.split(x, [width], axis=-1)
        if self.rope_interleave and not self.index_interleave:
            halves = jnp.split(turned, 2, axis=-1)
            turned = jnp.stack(halves, axis=-1).reshape(turned.shape)
        if factor != 1:
            passed = (passed.astype(jnp.float32) / factor).astype(passed.dtype)
        return jnp.concatenate([turned, passed], axis=-1)
