"""gated_delta as two Triton-lowered kernels: the convolution, which programs of several columns
share, and the delta rule."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gated_delta.columns import source
from pallas_kernels.short_conv.pallas_triton import Inputs, convolve
from pallas_kernels.state_kernels import (
    Matrices,
    OfTile,
    Where,
    advance_matrices,
    sigmoid,
    softplus,
)
from pallas_kernels.triton import scalar


def gated_delta(heads, weights, arena, sequences, layer, options):
    shape, page, where = options.shape, options.page, Where.of(sequences, layer)
    matrices = Matrices(shape.value_heads, shape.key_dim, shape.value_dim)
    stack_layer = scalar(weights.stack_layer)
    mixed, arena = convolve(
        "gated_delta_conv",
        Inputs(heads.qkv, weights.conv, stack_layer, None),
        *(arena, where, page),
        silu=True,
        behind=2 * matrices.heads * matrices.rows * matrices.columns,
        source=functools.partial(source, shape=shape) if options.by_key_head else None,
    )
    values = shape.value_heads * shape.value_dim
    return advance_matrices(
        functools.partial(_of_tile, shape=shape),
        (mixed, heads.beta, heads.decay, weights.a_log, weights.dt_bias, stack_layer),
        *(arena, where, page, matrices),
        name="gated_delta",
        out=jax.ShapeDtypeStruct((len(mixed), values), mixed.dtype),
    )


def _of_tile(operands, head, row, held, column, *, shape):
    mixed, beta, decay, a_log, dt_bias, stack_layer = operands
    group = head // (shape.value_heads // shape.key_heads)
    key = group * shape.key_dim + row
    width = shape.key_heads * shape.key_dim
    # The place of a head's decay, or of those of its key.
    at_decay = head * shape.key_dim + row if shape.each else head
    rate = jnp.exp(a_log[stack_layer[0], head].astype(jnp.float32))

    def of_key(ref):
        return plgpu.load(ref, mask=held, other=None if held is None else 0).astype(jnp.float32)

    def of_decay(ref, first):
        if shape.each:
            return of_key(ref.at[first, at_decay])
        return ref[first, at_decay].astype(jnp.float32)

    bias = of_decay(dt_bias, stack_layer[0])

    def load(token):
        return (
            of_key(mixed.at[token, key]),
            of_key(mixed.at[token, width + key]),
            plgpu.load(mixed.at[token, 2 * width + head * shape.value_dim + column]),
            beta[token, head].astype(jnp.float32),
            of_decay(decay, token),
        )

    def step(state, inputs):
        q, k, v, strength, decayed = inputs
        q, k = _unit(q) * shape.key_dim**-0.5, _unit(k)
        kept = jnp.exp(-rate * softplus(decayed + bias))
        state = state * (kept[:, None] if shape.each else kept)
        error = v.astype(jnp.float32) - jnp.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (sigmoid(strength) * error)[None]
        return state, jnp.sum(state * q[:, None], axis=0)

    return OfTile(load, step)


def _unit(x):
    return x * lax.rsqrt(jnp.sum(x * x) + 1e-6)
