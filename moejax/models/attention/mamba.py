"""Mamba-2 (arXiv:2405.21060) and Mamba (arXiv:2312.00752): layers whose state is that of a state
space model, behind a short convolution."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from moejax.models.attention.kind import AttentionLayer, StateKind, Tokens
from pallas_kernels.rms_norm import rms_norm, tile_squares
from pallas_kernels.selective_scan import (
    ScanInputs,
    ScanOptions,
    ScanShape,
    ScanWeights,
    selective_scan,
)
from pallas_kernels.short_conv import ConvOptions, ConvWeights, short_conv, short_conv_state
from pallas_kernels.state_pages import Shapes, StatePage, state_rows
from pallas_kernels.verification.check import StateShape

WIDE = frozenset({"a_log", "dt_bias", "skip"})
"""Parameters that stay in float32."""


@dataclasses.dataclass(frozen=True)
class StateSpace(StateKind):
    """A StateKind: `shape` of the recurrence, and the tokens that the convolution sees.

    - `bias`, `conv_bias`: whether both projections, and the convolution, have one.
    - `limits`: of time steps.
    """

    shape: ScanShape
    taps: int
    bias: bool
    conv_bias: bool
    limits: tuple[float, float] = (0.0, math.inf)

    ops = ("selective_scan", "short_conv")

    @property
    def mixed(self) -> int:
        """Columns that the convolution mixes."""
        return self.shape.columns

    def state(self, dtype: str) -> tuple[Shapes, ...]:
        return self.shape.arrays(), short_conv_state(self.mixed, self.taps, dtype)

    def kernel_shape(self):
        scan = StateShape("selective_scan", (self.shape, self.limits))
        return {"states": (scan, StateShape("short_conv", (self.mixed, self.taps, True)))}

    def _convolve(self, stack: AttentionLayer, i, x, arena, tokens: Tokens, page: StatePage):
        """(silu of the convolution of x [T, mixed], arena)."""
        assert tokens.sequences is not None
        conv = stack.weight("conv")
        conv = conv.reshape(*conv.shape[:2], -1)
        before = state_rows(self.shape.arrays(), page.row_elements)
        options = ConvOptions(page._replace(first_row=before), stack.ops.short_conv, silu=True)
        weights = ConvWeights(conv, i, stack.optional_weight("conv_bias"))
        given = arena, tokens.sequences, stack.page_layer(i), options
        return short_conv(x, weights, *given)

    def _scan(self, stack: AttentionLayer, i, inputs, arena, tokens: Tokens, page: StatePage):
        """(out [T, values], arena)."""
        assert tokens.sequences is not None
        a_log, dt_bias, skip = (stack.weight(name) for name in ("a_log", "dt_bias", "skip"))
        weights = ScanWeights(a_log, dt_bias, skip, i)
        options = ScanOptions(self.shape, page, stack.ops.selective_scan, self.limits)
        given = arena, tokens.sequences, stack.page_layer(i), options
        return selective_scan(inputs, weights, *given)


@dataclasses.dataclass(frozen=True)
class Mamba2(StateSpace):
    """The projection has the gate, then x, B and C, then time steps. The gated output is normalised
    in as many groups as B and C have."""

    def attend(self, stack, i, x, arena, tokens, page: StatePage, squares, counters):
        shape = self.shape
        projected = stack.norm_linear(x, "input_norm", "state_in", i, tokens, squares)
        ends = shape.values, shape.values + shape.columns
        gate, xbc, dt = jnp.split(projected, ends, axis=1)
        xbc, arena = self._convolve(stack, i, xbc, arena, tokens, page)
        out, arena = self._scan(stack, i, ScanInputs(xbc, dt), arena, tokens, page)
        gated = _gate(out, gate).reshape(len(x), shape.groups, -1)
        normed = unit_rms(gated, stack.config.rms_norm_eps, stack.ops.rms_norm)
        normed = normed.reshape(out.shape).astype(x.dtype) * stack.weight("state_norm")[i]
        return normed, arena, counters


def unit_rms(x: jax.Array, eps: float, implementation: str) -> jax.Array:
    """x / rms(x) over the last axis, in float32."""
    width = x.shape[-1]
    if implementation in ("xla", "cpu"):
        ones = jnp.ones((1, width), x.dtype)
        return rms_norm(x, ones, 0, eps, implementation=implementation)
    # Kernels take no float32. These sums have the same order for any number of rows.
    squares = tile_squares(x.reshape(-1, width), 1 << (width - 1).bit_length())
    return x * lax.rsqrt(squares.reshape(*x.shape[:-1], 1) / width + eps)


def _gate(out: jax.Array, gate: jax.Array) -> jax.Array:
    return out.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Mamba(StateSpace):
    """The projection has x, then the gate; B, C and the time steps are a product of the convolved
    x. They are normalised, and time steps go through a second product, as in Jamba.

    - `rank`: values of a token's time steps before the second product.
    """

    rank: int = 0

    @property
    def mixed(self) -> int:
        return self.shape.values

    def attend(self, stack, i, x, arena, tokens, page: StatePage, squares, counters):
        projected = stack.norm_linear(x, "input_norm", "state_in", i, tokens, squares)
        x, gate = jnp.split(projected, 2, axis=1)
        x, arena = self._convolve(stack, i, x, arena, tokens, page)
        parts = stack.linear(x, "selection", i, tokens)
        parts = jnp.split(parts, (self.rank, self.rank + self.shape.state), axis=1)
        names = "step_norm", "key_norm", "read_norm"
        dt, *keys = (stack.norm(part, name, i) for part, name in zip(parts, names, strict=True))
        dt = stack.linear(dt, "step", i, tokens)
        inputs = ScanInputs(jnp.concatenate([x, *keys], axis=1), dt)
        out, arena = self._scan(stack, i, inputs, arena, tokens, page)
        return _gate(out, gate).astype(x.dtype), arena, counters
