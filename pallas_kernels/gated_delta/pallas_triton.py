"""gated_delta as two Triton-lowered kernels: the convolution, which programs of several columns
share, and the delta rule, by products of matrices where a run has several tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import plgpu
from pallas_kernels.gated_delta.columns import source
from pallas_kernels.short_conv.pallas_triton import Inputs, convolve
from pallas_kernels.state_kernels import (
    TOKENS,
    Cut,
    Decays,
    Matrices,
    OfTile,
    Where,
    advance_matrices,
    column_of,
    product,
    row_of,
    sigmoid,
    softplus,
)
from pallas_kernels.triton import scalar, tile_mask


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
        functools.partial(_of_token, shape=shape),
        functools.partial(_of_tokens, shape=shape),
        (mixed, heads.beta, heads.decay, weights.a_log, weights.dt_bias, stack_layer),
        *(arena, where, page, matrices),
        name="gated_delta",
        out=jax.ShapeDtypeStruct((len(mixed), values), mixed.dtype),
    )


class _Places(NamedTuple):
    """Columns of what a head reads of a token."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    """The place of the head's decay, or of those of its key."""

    @classmethod
    def of(cls, cut: Cut, shape) -> _Places:
        group = cut.head // (shape.value_heads // shape.key_heads)
        key, width = group * shape.key_dim + cut.row, shape.key_heads * shape.key_dim
        value = 2 * width + cut.head * shape.value_dim + cut.column
        decay = cut.head * shape.key_dim + cut.row if shape.each else cut.head
        return cls(key, width + key, value, decay)


def _gates(operands, cut, at, shape):
    """exp(a_log), and what is added to decays."""
    *_, a_log, dt_bias, stack_layer = operands
    layer = stack_layer[0]
    bias = _of_key(dt_bias.at[layer, at.decay], cut) if shape.each else dt_bias[layer, at.decay]
    return jnp.exp(a_log[layer, cut.head].astype(jnp.float32)), bias.astype(jnp.float32)


def _of_key(ref, cut):
    return plgpu.load(ref, mask=cut.held, other=None if cut.held is None else 0)


def _of_token(operands, cut, *, shape):
    mixed, beta, decay, *_ = operands
    at = _Places.of(cut, shape)
    rate, bias = _gates(operands, cut, at, shape)

    def load(token):
        decayed = _of_key(decay.at[token, at.decay], cut) if shape.each else decay[token, at.decay]
        return (
            _of_key(mixed.at[token, at.q], cut).astype(jnp.float32),
            _of_key(mixed.at[token, at.k], cut).astype(jnp.float32),
            plgpu.load(mixed.at[token, at.v]),
            beta[token, cut.head].astype(jnp.float32),
            decayed.astype(jnp.float32),
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


def _of_tokens(operands, cut, *, shape):
    """TOKENS at once. With G the sum of the logarithms of decays, S the state before, e = exp(G),

        u_t = β_t (v_t − (e_t k_t)ᵀ S) − β_t Σ_{i<t} (k_tᵀ exp(G_t − G_i) k_i) u_i
        out_t = (e_t q_t)ᵀ S + Σ_{i≤t} (q_tᵀ exp(G_t − G_i) k_i) u_i

    and the state is e_T S + Σ exp(G_T − G_i) k_i ⊗ u_i (arXiv:2412.06464, equations 8 and 9). No
    exponent is above 0.
    """
    mixed, beta, decay, *_ = operands
    at = _Places.of(cut, shape)
    rate, bias = _gates(operands, cut, at, shape)
    number = jnp.arange(TOKENS)

    def load(token, new):
        keys = tile_mask(new, cut.held, (TOKENS, cut.row.size))
        values = tile_mask(new, None, (TOKENS, cut.column.size))
        if shape.each:
            decays, mask = decay.at[token[:, None], at.decay[None]], keys
        else:
            decays, mask = decay.at[token, at.decay], new
        return (
            plgpu.load(mixed.at[token[:, None], at.q[None]], mask=keys, other=0),
            plgpu.load(mixed.at[token[:, None], at.k[None]], mask=keys, other=0),
            plgpu.load(mixed.at[token[:, None], at.v[None]], mask=values, other=0),
            plgpu.load(beta.at[token, cut.head], mask=new, other=0),
            plgpu.load(decays, mask=mask, other=0),
        )

    def step(state, inputs, new):
        q, k, v, strength, decayed = (x.astype(jnp.float32) for x in inputs)
        q, k = _unit(q) * shape.key_dim**-0.5, _unit(k)
        strength = jnp.where(new, sigmoid(strength), 0)
        # [TOKENS, rows] or [TOKENS, 1].
        decayed, of_bias = (decayed, bias[None]) if shape.each else (decayed[:, None], bias)
        lost = jnp.where(new[:, None], -rate * softplus(decayed + of_bias), 0)
        decays = Decays.of(lost)
        of_keys, of_queries = (_pairs_by_key if shape.each else _pairs)(q, k, decays)
        of_keys = jnp.where(number[:, None] > number[None], of_keys, 0) * strength[:, None]
        of_queries = jnp.where(number[:, None] >= number[None], of_queries, 0)
        changes = strength[:, None] * (v - product(k * decays.kept, state))

        def solve(i, changes):
            return changes - column_of(i, of_keys)[:, None] * row_of(i, changes)[None]

        changes = lax.fori_loop(0, TOKENS - 1, solve, changes)
        out = product(q * decays.kept, state) + product(of_queries, changes)
        return decays.advance(state, k, changes), out

    return OfTile(load, step)


def _pairs(q, k, decays):
    """Of tokens t and i ≤ t: kᵀ exp(G_t − G_i) k and qᵀ exp(G_t − G_i) k, [TOKENS, TOKENS]."""
    kept = decays.between()
    return product(k, k, trans_b=True) * kept, product(q, k, trans_b=True) * kept


def _pairs_by_key(q, k, decays):
    """The same where each value of a key has decays of its own, which are no factors of t and of i:
    their exponents would be above 0."""
    number, lost = jnp.arange(TOKENS), decays.lost

    def of_token(i, pairs):
        kept = row_of(i, k)[None] * jnp.exp(jnp.minimum(lost - row_of(i, lost)[None], 0))
        sums = (jnp.sum(x * kept, axis=1)[:, None] for x in (k, q))
        return tuple(
            jnp.where(number[None] == i, new, old) for new, old in zip(sums, pairs, strict=True)
        )

    zeros = jnp.zeros((TOKENS, TOKENS), jnp.float32)
    return lax.fori_loop(0, TOKENS, of_token, (zeros, zeros))


def _unit(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=x.ndim > 1) + 1e-6)
