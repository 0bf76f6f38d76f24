"""Decoder layers over stacked parameters: what the model families are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.models.config import ModelConfig
from moejax.models.rope import inverse_frequencies
from pallas_kernels import Ops
from pallas_kernels.expert_ffn import ACTIVATIONS
from pallas_kernels.kv_write import KVPage, kv_write
from pallas_kernels.linear import linear
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.route import route

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [T, H, hd], arena, layer) -> [T, H·hd]: decode's or prefill's reading of the pages."""


class Tokens(NamedTuple):
    """The tokens a step computes, T rows of which the first `tiles` · row_tile are in use."""

    positions: jax.Array
    """int32[T]: within their sequences."""
    valid: jax.Array
    """bool[T]: rows that hold a token."""
    pages: jax.Array
    """int32[T]: KV row of the page each token is written to; −1: none."""
    tiles: jax.Array
    """int32: row tiles in use."""
    row_tile: int
    """Rows of one matrix product."""
    attention: Attention


class LayerStack(nnx.Module):
    """A run of consecutive equal layers; parameters have a leading axis over the run's layers.

    Methods take `i`, the layer's index in the run, and pass the stacks whole to the ops, so that a
    scan over i copies nothing where the ops are kernels. `first_layer` counts all layers,
    `first_moe_layer` those with experts.

    params: the run's arrays as moejax.checkpoint returns them, weights in [out, in] order.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, jax.Array],
        *,
        first_layer: int,
        first_moe_layer: int,
        ops: Ops,
    ):
        self.config, self.ops = config, ops
        self.first_layer, self.first_moe_layer = first_layer, first_moe_layer
        self.is_moe = "router" in params
        self.size = params["qkv"].shape[0]
        self.weights = nnx.Dict({name: nnx.Param(array) for name, array in params.items()})
        frequencies, self.attention_factor = inverse_frequencies(config.rope, config.head_dim)
        self.inverse_frequencies = nnx.Variable(jnp.asarray(frequencies, jnp.float32))

    def _weight(self, name: str) -> jax.Array:
        return self.weights[name][...]

    def _linear(self, x, name, i, tokens, out_dtype=None):
        bias = self._weight(f"{name}_bias") if f"{name}_bias" in self.weights else None
        return linear(
            x,
            self._weight(name),
            i,
            bias,
            row_tile=tokens.row_tile,
            tiles=tokens.tiles,
            out_dtype=out_dtype,
            implementation=self.ops.linear,
        )

    def _norm(self, x, name, i):
        weight, eps = self._weight(name), self.config.rms_norm_eps
        return rms_norm(x, weight, i, eps, implementation=self.ops.rms_norm)

    def attend(
        self, i: jax.Array, x: jax.Array, arena: jax.Array, tokens: Tokens, page: KVPage
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, D] plus its attention; keys and values of the tokens go to their pages.

        Returns (x, arena).
        """
        with jax.named_scope("attend"):
            qkv = self._linear(self._norm(x, "input_norm", i), "qkv", i, tokens)
            q, arena = kv_write(
                qkv,
                self._weight("q_norm"),
                self._weight("k_norm"),
                i,
                tokens.positions,
                self.inverse_frequencies[...],
                arena,
                tokens.pages,
                self.first_layer + i,
                page=page,
                attention_factor=self.attention_factor,
                eps=self.config.rms_norm_eps,
                implementation=self.ops.kv_write,
            )
            attended = tokens.attention(q, arena, self.first_layer + i)
            x = x + self._linear(attended, "o", i, tokens)
            # The borders between a layer's parts are fixed points of rounding (contract 1e).
            return lax.optimization_barrier(x), arena

    def route(
        self, i: jax.Array, x: jax.Array, tokens: Tokens
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, D] -> (normalised x, ids [T, K] ascending, weights [T, K])."""
        with jax.named_scope("route"):
            normed = self._norm(x, "post_norm", i)
            logits = self._linear(normed, "router", i, tokens, out_dtype=jnp.float32)
            ids, weights = route(
                logits,
                tokens.valid,
                top_k=self.config.num_experts_per_tok,
                normalize=self.config.norm_topk_prob,
                implementation=self.ops.route,
            )
            return lax.optimization_barrier((normed, ids, weights))

    def feed_forward(self, i: jax.Array, x: jax.Array, tokens: Tokens) -> jax.Array:
        """x [T, D] plus the gated feed-forward of a layer without experts."""
        with jax.named_scope("feed_forward"):
            normed = self._norm(x, "post_norm", i)
            gate_up = self._linear(normed, "gate_up", i, tokens, out_dtype=jnp.float32)
            gate, up = jnp.split(gate_up, 2, axis=-1)
            hidden = (ACTIVATIONS[self.config.hidden_act](gate) * up).astype(x.dtype)
            return lax.optimization_barrier(x + self._linear(hidden, "down", i, tokens))
