"""Gated delta net (arXiv:2412.06464) and Kimi delta attention (arXiv:2510.26692): linear attention
that keeps a state for each sequence."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moejax.models.attention.kind import AttentionLayer, StateKind, Tokens
from pallas_kernels.gated_delta import (
    DeltaHeads,
    DeltaOptions,
    DeltaShape,
    DeltaWeights,
    gated_delta,
)
from pallas_kernels.state_pages import Shapes, StatePage
from pallas_kernels.verification.check import StateShape


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet(StateKind):
    """A gated delta net, a StateKind, with fields named as in config.json.

    - `by_key_head`: the checkpoint's projection has q, k, v and the gate of each key head together,
      as in Qwen3-Next; otherwise all q, all k, all v, all gates.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    by_key_head: bool = False

    ops = ("gated_delta",)

    @property
    def shape(self) -> DeltaShape:
        return DeltaShape(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    @property
    def values(self) -> int:
        """Columns of v, of the gate and of the output."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def state(self, dtype: str) -> tuple[Shapes, ...]:
        return (self.shape.state(dtype),)

    def kernel_shape(self):
        return {"states": (StateShape("gated_delta", (self.shape, self.by_key_head)),)}

    def attend(self, stack, i, x, arena, tokens, page: StatePage, squares, counters):
        projected = stack.norm_linear(x, "input_norm", "state_in", i, tokens, squares)
        gate, beta, decay = self._split(projected)
        heads = DeltaHeads(projected, beta, decay)
        options = DeltaOptions(self.shape, page, stack.ops.gated_delta, self.by_key_head)
        out, arena = _advance(stack, i, options, heads, arena, tokens)
        return _norm_and_gate(stack, i, out, jax.nn.silu, gate, self.shape), arena, counters

    def _split(self, projected: jax.Array) -> tuple[jax.Array, ...]:
        """The gate [T, V·dv], beta and decay [T, V] of a projection."""
        shape, values, rows = self.shape, self.values, len(projected)
        mixed, gates = jnp.split(projected, [shape.columns + values], axis=1)
        if not self.by_key_head:
            return mixed[:, shape.columns :], *jnp.split(gates, 2, axis=1)
        groups, wide = shape.key_heads, values // shape.key_heads
        gate = mixed.reshape(rows, groups, -1)[:, :, -wide:].reshape(rows, -1)
        beta, decay = jnp.split(gates.reshape(rows, groups, -1), 2, axis=2)
        return gate, beta.reshape(rows, -1), decay.reshape(rows, -1)


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttention(StateKind):
    """A gated delta net, a StateKind, whose keys have a decay for each of their values. Decays and
    the output's gate are products of two matrices.

    - `heads`, `width`: of q, k and v alike, and values of one.
    """

    heads: int
    width: int
    taps: int

    ops = ("gated_delta",)

    @property
    def shape(self) -> DeltaShape:
        width = self.width
        return DeltaShape(self.heads, self.heads, width, width, self.taps, each=True)

    def state(self, dtype: str) -> tuple[Shapes, ...]:
        return (self.shape.state(dtype),)

    def kernel_shape(self):
        return {"states": (StateShape("gated_delta", (self.shape, False)),)}

    def attend(self, stack, i, x, arena, tokens, page: StatePage, squares, counters):
        projected = stack.norm_linear(x, "input_norm", "state_in", i, tokens, squares)
        columns, width = self.shape.columns, self.width
        ends = columns, columns + width, columns + 2 * width
        _, decay, gate, beta = jnp.split(projected, ends, axis=1)
        decay = stack.linear(decay, "decay", i, tokens)
        gate = stack.linear(gate, "state_gate", i, tokens)
        heads = DeltaHeads(projected, beta, decay)
        options = DeltaOptions(self.shape, page, stack.ops.gated_delta)
        out, arena = _advance(stack, i, options, heads, arena, tokens)
        return _norm_and_gate(stack, i, out, jax.nn.sigmoid, gate, self.shape), arena, counters


def _advance(
    stack: AttentionLayer, i, options: DeltaOptions, heads: DeltaHeads, arena, tokens: Tokens
):
    """gated_delta with the layer's weights."""
    assert tokens.sequences is not None
    conv, a_log, dt_bias = (stack.weight(name) for name in ("conv", "a_log", "dt_bias"))
    conv, a_log = conv.reshape(*conv.shape[:2], -1), a_log.reshape(len(a_log), -1)
    weights = DeltaWeights(conv, a_log, dt_bias, i)
    given = arena, tokens.sequences, stack.page_layer(i), options
    return gated_delta(heads, weights, *given)


def _norm_and_gate(stack: AttentionLayer, i, out, activation, gate, shape: DeltaShape):
    """Normalised heads, times the activated gate."""
    normed = stack.norm(out.reshape(len(out), shape.value_heads, -1), "state_norm", i)
    gated = normed * activation(gate.astype(jnp.float32)).reshape(normed.shape)
    return gated.astype(out.dtype).reshape(out.shape)
