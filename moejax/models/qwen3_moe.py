"""Qwen3-MoE (Qwen3MoeForCausalLM in transformers): grouped-query attention with q/k norm, rotary
positions, softmax-top-k experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.config import ModelConfig
from moejax.models.layers import LayerStack
from pallas_kernels import Ops
from pallas_kernels.linear import linear
from pallas_kernels.rms_norm import rms_norm


class Qwen3Moe(nnx.Module):
    """The dense part of the model; experts live in the store and the arena.

    params: the tree that moejax.checkpoint returns. ops: which implementation of each op runs.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Any], ops: Ops):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(params["lm_head"])
        runs, layer, moe_layer = [], 0, 0
        for run in params["runs"]:
            stack = LayerStack(config, run, first_layer=layer, first_moe_layer=moe_layer, ops=ops)
            runs.append(stack)
            layer += stack.size
            moe_layer += stack.size if stack.is_moe else 0
        self.runs = nnx.List(runs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens int32[...] -> [..., D]."""
        return self.embedding[...][tokens]

    def logits(self, x: jax.Array, row_tile: int) -> jax.Array:
        """Hidden states [T, D] after the last layer -> float32 logits [T, V]. row_tile: rows of
        one matrix product."""
        with jax.named_scope("logits"):
            norm = self.final_norm[...][None]
            x = rms_norm(x, norm, 0, self.config.rms_norm_eps, implementation=self.ops.rms_norm)
            head = self.embedding if self.lm_head is None else self.lm_head
            return linear(
                x,
                head[...][None],
                0,
                row_tile=row_tile,
                out_dtype=jnp.float32,
                implementation=self.ops.linear,
            )
