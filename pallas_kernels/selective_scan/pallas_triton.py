"""selective_scan as one Triton-lowered kernel."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.state_kernels import (
    Matrices,
    OfTile,
    Where,
    advance_matrices,
    check_dtype,
    softplus,
)
from pallas_kernels.triton import scalar


def selective_scan(inputs, weights, arena, sequences, layer, options):
    shape, dtype = options.shape, inputs.xbc.dtype
    check_dtype("selective_scan", dtype)
    of_layer = weights.a_log, weights.dt_bias, weights.skip, scalar(weights.stack_layer)
    return advance_matrices(
        functools.partial(_of_tile, shape=shape, limits=options.limits),
        (*inputs, *of_layer),
        *(arena, Where.of(sequences, layer), options.page),
        Matrices(shape.heads, shape.state, shape.head_dim),
        name="selective_scan",
        out=jax.ShapeDtypeStruct((len(inputs.xbc), shape.values), dtype),
    )


def _of_tile(operands, head, row, held, column, *, shape, limits):
    xbc, dt, a_log, dt_bias, skip, stack_layer = operands
    layer, value = stack_layer[0], head * shape.head_dim + column
    group = head // (shape.heads // shape.groups) * shape.state
    first_key, first_read = shape.values, shape.values + shape.groups * shape.state
    other = None if held is None else 0

    def of_step(ref, first):  # of a head, or of each of its values
        found = plgpu.load(ref.at[first, value]) if shape.each else ref[first, head]
        return found.astype(jnp.float32)

    def of_state(ref):
        return plgpu.load(ref, mask=held, other=other).astype(jnp.float32)

    if shape.each:
        at = a_log.at[layer, value[None, :], row[:, None]]
        mask = None
        if held is not None:
            mask = jnp.broadcast_to(held[:, None], (row.size, column.size))
        rates = -jnp.exp(plgpu.load(at, mask=mask, other=other).astype(jnp.float32))
    else:
        rates = -jnp.exp(a_log[layer, head].astype(jnp.float32))
    bias, through = of_step(dt_bias, layer), of_step(skip, layer)

    def load(token):
        return (
            plgpu.load(xbc.at[token, value]).astype(jnp.float32),
            of_state(xbc.at[token, first_key + group + row]),
            of_state(xbc.at[token, first_read + group + row]),
            of_step(dt, token),
        )

    def step(state, inputs):
        x, key, read, time = inputs
        time = jnp.maximum(softplus(time + bias), limits[0])
        if limits[1] < math.inf:
            time = jnp.minimum(time, limits[1])
        kept = jnp.exp(rates * (time[None] if shape.each else time))
        state = state * kept + key[:, None] * (x * time)[None]
        return state, jnp.sum(state * read[:, None], axis=0) + through * x

    return OfTile(load, step)
