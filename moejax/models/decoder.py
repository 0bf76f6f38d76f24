"""The decoder of every family: embedding, runs of layers, final norm and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.layers import LayerStack, norm
from moejax.models.model_config import ModelConfig
from pallas_kernels import Ops
from pallas_kernels.linear import linear


class Decoder(nnx.Module):
    """The dense part of a model; routed experts live in the store and the arena.

    params: the tree that moejax.checkpoints.load returns. ops: which implementation of each op
    runs.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Any], ops: Ops):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.final_norm_bias = _optional(params, "final_norm_bias")
        self.lm_head = _optional(params, "lm_head")
        self.lm_head_bias = _optional(params, "lm_head_bias")
        runs, moe_layer = [], 0
        for run, of_run in zip(config.runs, params["runs"], strict=True):
            stack = LayerStack(
                config,
                of_run,
                first_layer=run.start,
                first_moe_layer=moe_layer,
                window=run.window,
                ops=ops,
            )
            runs.append(stack)
            moe_layer += stack.size if stack.is_moe else 0
        self.runs = nnx.List(runs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens int32[...] -> [..., D]."""
        return self.embedding[...][tokens]

    def logits(self, x: jax.Array, row_tile: int) -> jax.Array:
        """Hidden states [T, D] after the last layer -> float32 logits [T, V]. row_tile: rows of
        one matrix product."""
        with jax.named_scope("logits"):
            weight, bias = self.final_norm[...][None], self.final_norm_bias
            bias = None if bias is None else bias[...][None]
            x = norm(x, weight, bias, 0, self.config.rms_norm_eps, self.ops)
            head = self.embedding if self.lm_head is None else self.lm_head
            return linear(
                x,
                head[...][None],
                0,
                None if self.lm_head_bias is None else self.lm_head_bias[...][None],
                row_tile=row_tile,
                out_dtype=jnp.float32,
                implementation=self.ops.linear,
            )


def _optional(params: dict[str, Any], key: str) -> nnx.Param | None:
    return nnx.Param(params[key]) if key in params else None
