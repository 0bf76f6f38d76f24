"""selective_scan as one Triton-lowered kernel, of Mamba-2 by products of matrices where a run has
several tokens."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import plgpu
from pallas_kernels.state_kernels import (
    TOKENS,
    Decays,
    Matrices,
    OfTile,
    Where,
    advance_matrices,
    check_dtype,
    product,
    softplus,
)
from pallas_kernels.triton import scalar, tile_mask


def selective_scan(inputs, weights, arena, sequences, layer, options):
    shape, dtype = options.shape, inputs.xbc.dtype
    check_dtype("selective_scan", dtype)
    of_layer = weights.a_log, weights.dt_bias, weights.skip, scalar(weights.stack_layer)
    return advance_matrices(
        functools.partial(_of_token, shape=shape, limits=options.limits),
        # The rates of Mamba differ by value and by row: its decays are in no product of matrices.
        None if shape.each else functools.partial(_of_tokens, shape=shape, limits=options.limits),
        (*inputs, *of_layer),
        *(arena, Where.of(sequences, layer), options.page),
        Matrices(shape.heads, shape.state, shape.head_dim),
        name="selective_scan",
        out=jax.ShapeDtypeStruct((len(inputs.xbc), shape.values), dtype),
    )


def _of_token(operands, cut, *, shape, limits):
    head, row, held, column = cut
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
        time = _limited(softplus(time + bias), limits)
        kept = jnp.exp(rates * (time[None] if shape.each else time))
        state = state * kept + key[:, None] * (x * time)[None]
        return state, jnp.sum(state * read[:, None], axis=0) + through * x

    return OfTile(load, step)


def _of_tokens(operands, cut, *, shape, limits):
    """TOKENS at once (Mamba-2, arXiv:2405.21060): with G the sum of the logarithms of decays, S the
    state before,

        out_t = (exp(G_t) C_t)ᵀ S + Σ_{i≤t} exp(G_t − G_i) C_tᵀ B_i dt_i x_i + skip x_t
    """
    xbc, dt, a_log, dt_bias, skip, stack_layer = operands
    layer, number = stack_layer[0], jnp.arange(TOKENS)
    value = cut.head * shape.head_dim + cut.column
    key = shape.values + cut.head // (shape.heads // shape.groups) * shape.state + cut.row
    rate, bias, through = (x[layer, cut.head].astype(jnp.float32) for x in (a_log, dt_bias, skip))
    rate = -jnp.exp(rate)

    def load(token, new):
        keys = tile_mask(new, cut.held, (TOKENS, cut.row.size))
        values = tile_mask(new, None, (TOKENS, cut.column.size))
        columns = (value, values), (key, keys), (key + shape.groups * shape.state, keys)
        return (
            *(
                plgpu.load(xbc.at[token[:, None], at[None]], mask=mask, other=0)
                for at, mask in columns
            ),
            plgpu.load(dt.at[token, cut.head], mask=new, other=0),
        )

    def step(state, inputs, new):
        x, key, read, time = (each.astype(jnp.float32) for each in inputs)
        time = jnp.where(new, _limited(softplus(time + bias), limits), 0)[:, None]
        decays = Decays.of(rate * time)
        pairs = product(read, key, trans_b=True) * decays.between()
        pairs = jnp.where(number[:, None] >= number[None], pairs, 0)
        out = product(read * decays.kept, state) + product(pairs, x * time) + through * x
        return decays.advance(state, key, x * time), out

    return OfTile(load, step)


def _limited(time, limits):
    time = jnp.maximum(time, limits[0])
    return jnp.minimum(time, limits[1]) if limits[1] < math.inf else time
