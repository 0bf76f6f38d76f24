"""From logits to tokens, around the op `sample`: penalties and biases, and rows that are replaced.

Pure functions over fixed shapes ``[R, V]`` in float32. A row's result is a function of that row's
logits and parameters alone, never of the other rows. The engine compiles each function on its own
with ``xla_allow_excess_precision`` off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from moejax.requests.sampling_params import GREEDY_BELOW
from pallas_kernels import sample as ops
from pallas_kernels.sample import Choices


def sample(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    wanted: Array | None = None,
    **options: Any,
) -> Array:
    """One token per row; below `GREEDY_BELOW` a temperature is 0. See pallas_kernels.sample."""
    temperature = jnp.where(temperature < GREEDY_BELOW, 0.0, temperature)
    choices = Choices(temperature, top_k, top_p, min_p, seed, position)
    return ops.sample(logits, choices, wanted, **options)


def add_bias(logits: Array, ids: Array, bias: Array) -> Array:
    """Adds to some tokens' logits; −inf bans a token.

    logits: float32 ``[R, V]``. ids: int32 ``[R, B]``, padded with −1. bias: float32 ``[R, B]``.
    Returns float32 ``[R, V]``. A row without ids keeps its bits. No id may occur twice in a row,
    since additions have no order on a GPU.
    """
    # A scatter counts negative indices from the end, and drops indices beyond the end.
    ids = jnp.where(ids < 0, logits.shape[-1], ids)
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, ids].add(bias, mode="drop")


def allow(logits: Array, words: Array) -> Array:
    """Sets the logits of tokens that may not come to −inf.

    logits: float32 ``[R, V]``. words: int32 ``[R, W]``, bit t % 32 of word t // 32 is set if
    token t may come. Returns float32 ``[R, V]``.
    """
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    may_come = (words[:, token >> 5] >> (token & 31)) & 1
    return jnp.where(may_come == 1, logits, -jnp.inf)


def adjust(
    logits: Array,
    counts: Array,
    repetition: Array,
    presence: Array,
    frequency: Array,
    bias_ids: Array,
    bias: Array,
) -> Array:
    """Logits after biases, then penalties, in vLLM's order and by its formulas (OpenAI's for
    presence and frequency; Keskar et al., CTRL, section 4.1 for repetition).

    logits: float32 ``[R, V]``. counts: int32 ``[R, V]``, bit 0: the token is in the row's prompt;
    the bits above it: how often the row has generated it. repetition, presence, frequency: float32
    ``[R]``, neutral at 1, 0, 0. bias_ids, bias: the ids and bias of `add_bias`. Returns
    float32 ``[R, V]``; a neutral row without biases keeps its bits.
    """
    biased = add_bias(logits, bias_ids, bias)
    count = (counts >> 1).astype(jnp.float32)
    factor = repetition[:, None]
    repeated = jnp.where(biased > 0, biased / factor, biased * factor)
    penalized = jnp.where(counts > 0, repeated, biased)
    penalized -= frequency[:, None] * count
    penalized -= presence[:, None] * (count > 0)
    # x / 1 − 0 may lose a subnormal x.
    neutral = (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
    return jnp.where(neutral[:, None], biased, penalized)


def tally(counts: Array, tokens: Array, update: Array) -> Array:
    """Counts tokens as generated in the counts of `adjust`.

    tokens: int32 ``[R]``. update: bool ``[R]``, the rows that count. Returns int32 ``[R, V]``.
    """
    row = jnp.arange(counts.shape[0])
    return counts.at[row, tokens].add(jnp.where(update, 2, 0))


def recount(counts: Array, row: Array, ids: Array, is_output: Array) -> Array:
    """Counts one row of the counts of `adjust` from scratch.

    counts: int32 ``[R, V]``. row: int32 ``[]``. ids: int32 ``[M]``, prompt and generated tokens in
    any order, padded with −1. is_output: bool ``[M]``, the generated ones. Returns int32
    ``[R, V]``.
    """
    none = jnp.zeros(counts.shape[1], jnp.int32)
    ids = jnp.where(ids < 0, counts.shape[1], ids)
    prompt = none.at[ids].max(jnp.where(is_output, 0, 1), mode="drop")
    output = none.at[ids].add(jnp.where(is_output, 2, 0), mode="drop")
    return counts.at[row].set(prompt + output)


def update_rows(
    draw: Callable, logits: Array, tokens: Array, update: Array, *params: Array, by_row: bool
) -> Array:
    """Replaces the tokens of some rows by ``draw(logits, *params)``.

    logits: float32 ``[R, V]``, or of the first rows only, which are then the only ones to update.
    tokens: int32 ``[R]``. update: bool ``[R]``, the rows to replace. params: ``[R]`` each. by_row:
    draws one row after the other, and no more rows than needed, for processors that compute rows
    one after the other anyway; a row's sums then have the shape of one row. Returns int32 ``[R]``.
    """
    if not by_row:
        rows = logits.shape[0]
        drawn = draw(logits, *(values[:rows] for values in params))
        return jnp.concatenate((jnp.where(update[:rows], drawn, tokens[:rows]), tokens[rows:]))

    def one(i, tokens):
        drawn = draw(*(lax.dynamic_slice_in_dim(values, i, 1) for values in (logits, *params)))
        return tokens.at[i].set(jnp.where(update[i], drawn[0], tokens[i]))

    last = jnp.max(jnp.where(update, jnp.arange(update.shape[0]) + 1, 0))
    return lax.fori_loop(0, last, one, tokens)
