"""Grouped-query attention: pages hold the keys and values of each KV head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from moejax.models.attention.kind import AttentionLayer, AttentionNumbers, attention_options
from pallas_kernels.kv_write import KVPage, KVPlaces, ProjectedHeads, WriteOptions, kv_write


def reorders_heads(config: AttentionNumbers) -> bool:
    """Whether the values of q and k are reordered before rotation."""
    return config.rope_interleave or config.rotary_width is not None


def norms_apart(config: AttentionNumbers) -> bool:
    """Whether clipping or reordering comes between the norms of q and k and the rotation. kv_write,
    which does both at once, then cannot compute the norms."""
    return config.clip_qkv is not None or reorders_heads(config)


@dataclasses.dataclass(frozen=True)
class GroupedQueryAttention:
    """Grouped-query attention, an AttentionKind. q, k and v are one product."""

    ops = ("kv_write",)
    products = ()
    takes_squares = True
    xla_only: ClassVar[Mapping[str, str]] = {}

    def for_length(self, max_model_len: int) -> GroupedQueryAttention:
        return self

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        return KVPage(block_size, config.num_key_value_heads, config.head_dim)

    def far_page(self, block_size: int) -> KVPage | None:
        return None

    def kernel_shape(self) -> dict[str, Any]:
        return {}

    def rotary_dim(self, config: AttentionNumbers) -> int:
        return config.rotary_width or config.head_dim

    def project(self, stack: AttentionLayer, i, x, tokens, squares):
        """Normalises and projects x. Returns the heads of q, then k, then v [T, N]."""
        return stack.norm_linear(x, "input_norm", "qkv", i, tokens, squares)

    def frequencies(self, stack: AttentionLayer, i):
        """The frequencies by which kv_write rotates the heads that attend gives it."""
        return stack.frequencies(i)

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        qkv = self.project(stack, i, x, tokens, squares)
        return self.attend_heads(stack, i, qkv, arena, tokens, page, counters)

    def attend_heads(self, stack, i, qkv, arena, tokens, page, counters):
        """attend, of projected heads."""
        config = stack.config
        norms = stack.optional_weight("q_norm"), stack.optional_weight("k_norm")
        whole = norms[0] is not None and norms[0].shape[-1] != page.head_dim
        if whole or (norms[0] is not None and norms_apart(config)):
            qkv, norms = _norm_projections(stack, i, qkv, page), (None, None)
        if config.clip_qkv is not None:
            qkv = jnp.clip(qkv, -config.clip_qkv, config.clip_qkv)
        if reorders_heads(config):
            qkv = _pair_by_halves(stack, qkv, page)
        places = KVPlaces(tokens.positions, tokens.pages, stack.page_layer(i))
        heads = ProjectedHeads(qkv, *norms, i, self.frequencies(stack, i))
        write = WriteOptions(
            page,
            stack.attention_factor,
            config.rms_norm_eps,
            implementation=stack.ops.kv_write,
        )
        read, per_layer = attention_options(stack, page), stack.per_layer(i)
        if tokens.write_and_attend is not None:
            options = {"counters": counters, "write": write, "read": read}
            return tokens.write_and_attend(heads, arena, places, per_layer=per_layer, **options)
        q, arena = kv_write(heads, arena, places, write)
        given = {"layer": places.layer, "options": read, "per_layer": per_layer}
        return tokens.attention(q, arena, **given), arena, counters


@dataclasses.dataclass(frozen=True)
class GatedAttention(GroupedQueryAttention):
    """Grouped-query attention whose heads' outputs are multiplied by the sigmoid of a product of
    the normalised input, `attention_gate`."""

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        given = arena, tokens, page, squares, counters
        attended, arena, counters = super().attend(stack, i, x, *given)
        gate = stack.norm_linear(x, "input_norm", "attention_gate", i, tokens, squares)
        return attended * jax.nn.sigmoid(gate), arena, counters


class HeadGatedAttention(GroupedQueryAttention):
    """Grouped-query attention whose heads have a gate on their output: the projection has q and the
    gate of each head, then k, then v (Qwen3-Next)."""

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        projected = self.project(stack, i, x, tokens, squares)
        heads = stack.config.num_attention_heads
        both, kv = jnp.split(projected, [2 * heads * page.head_dim], axis=1)
        q, gate = jnp.split(both.reshape(len(x), heads, -1), 2, axis=2)
        qkv = jnp.concatenate([q.reshape(len(x), -1), kv], axis=1)
        out, arena, counters = self.attend_heads(stack, i, qkv, arena, tokens, page, counters)
        return out * jax.nn.sigmoid(gate.reshape(out.shape)), arena, counters


GROUPED_QUERY = GroupedQueryAttention()


def _norm_projections(stack: AttentionLayer, i, qkv, page):
    """qkv with q and k normalised, over as many values at once as the norms have weights: all heads
    (OLMoE) or one head."""
    width = page.kv_heads * page.head_dim
    q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * width, qkv.shape[1] - width), axis=1)

    def normalise(x, name):
        parts = x.reshape(x.shape[0], -1, stack.weight(name).shape[-1])
        return stack.norm(parts, name, i).reshape(x.shape)

    return jnp.concatenate([normalise(q, "q_norm"), normalise(k, "k_norm"), v], axis=1)


def _pair_by_halves(stack: AttentionLayer, qkv, page):
    """qkv with the values of each head of q and k in the order that kv_write rotates: pair i is
    values i and i + hd/2, rotated pairs first, then values without an angle. q and k have the same
    order, so scores change only by the order of their sums.

    kv_write multiplies both kinds of values by the factor of cosine and sine, of which those
    without an angle are divided first."""
    config = stack.config
    width, rotated = page.kv_heads * page.head_dim, config.rotary_width or config.head_dim
    qk, v = jnp.split(qkv, [qkv.shape[1] - width], axis=1)
    turned, passed = jnp.split(qk.reshape(len(qk), -1, page.head_dim), [rotated], axis=2)
    if config.rope_interleave:
        halves = turned[..., 0::2], turned[..., 1::2]
    else:
        halves = jnp.split(turned, 2, axis=2)
    if stack.attention_factor != 1:
        passed = (passed.astype(jnp.float32) / stack.attention_factor).astype(passed.dtype)
    rest = jnp.split(passed, 2, axis=2)
    parts = [halves[0], rest[0], halves[1], rest[1]]
    qk = jnp.concatenate(parts, axis=2).reshape(qk.shape)
    return jnp.concatenate([qk, v], axis=1)
