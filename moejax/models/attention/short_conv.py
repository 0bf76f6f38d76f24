"""Gated short convolution (LFM2): a layer whose state is the last inputs of a convolution."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from moejax.models.attention.kind import StateKind
from pallas_kernels.short_conv import ConvOptions, ConvWeights, short_conv, short_conv_state
from pallas_kernels.state_pages import Shapes, StatePage
from pallas_kernels.verification.check import StateShape


@dataclasses.dataclass(frozen=True)
class ShortConvolution(StateKind):
    """A StateKind: the product of two projections goes through the convolution, and a third one
    multiplies the result.

    - `width`: columns, the model's hidden_size.
    - `taps`: tokens that the convolution sees, conv_L_cache in config.json.
    """

    width: int
    taps: int

    ops = ("short_conv",)

    def state(self, dtype: str) -> tuple[Shapes, ...]:
        return (short_conv_state(self.width, self.taps, dtype),)

    def kernel_shape(self):
        return {"states": (StateShape("short_conv", (self.width, self.taps, False)),)}

    def attend(self, stack, i, x, arena, tokens, page: StatePage, squares, counters):
        projected = stack.norm_linear(x, "input_norm", "state_in", i, tokens, squares)
        before, after, values = jnp.split(projected, 3, axis=1)
        conv = stack.weight("conv")
        weights = ConvWeights(conv.reshape(*conv.shape[:2], -1), i)
        options = ConvOptions(page, stack.ops.short_conv)
        given = weights, arena, tokens.sequences, stack.page_layer(i), options
        mixed, arena = short_conv(before * values, *given)
        return after * mixed, arena, counters
