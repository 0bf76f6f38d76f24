"""From logits to tokens: penalties and biases, greedy, truncated sampling, log-probabilities.

Pure functions over fixed shapes ``[R, V]`` in float32. A row's result is a function of that row's
logits and parameters alone, never of the other rows: seeds are counters, thresholds are per row.
The engine compiles each function on its own with ``xla_allow_excess_precision`` off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from moejax.requests.sampling_params import GREEDY_BELOW
from pallas_kernels.truncate import truncate


def greedy(logits: Array) -> Array:
    """The most likely token of each row, the lowest id among equals.

    logits: float32 ``[R, V]``. Returns int32 ``[R]``.
    """
    # argmax, one reduction of pairs, takes half the launches on a GPU, and is three times as slow
    # on a CPU.
    return lax.platform_dependent(logits, cuda=_likeliest, default=_first_of_peak)


def _likeliest(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _first_of_peak(logits: Array) -> Array:
    vocabulary = logits.shape[-1]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # The clamp keeps the id legal in a row of NaN.
    return jnp.min(jnp.where(logits == peak, ids, vocabulary - 1), axis=-1)


def sample(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    *,
    truncates: bool = True,
    one_row: bool = False,
    implementation: str = "xla",
) -> Array:
    """One token per row, drawn after temperature, min-p, top-k and top-p, in vLLM's order.

    logits: float32 ``[R, V]``. temperature: float32 ``[R]``, below `GREEDY_BELOW` the row equals
    `greedy`. top_k: int32 ``[R]``, 0 or less for all tokens. top_p: float32 ``[R]``, 1 for all
    tokens. min_p: float32 ``[R]``, 0 for all tokens. seed: uint32 ``[R]``. position: int32 ``[R]``,
    the index of the token that is drawn. Returns int32 ``[R]``.

    The draw is Gumbel-max: the same seed, position and logits give the same token.

    truncates: False promises that no row truncates (`truncates_any`), and leaves out the two
    searches, which are most of the launches. one_row: the shapes have R = 1, and the program itself
    checks whether the row truncates. Neither changes a bit. implementation: of truncate.
    """
    is_greedy = temperature < GREEDY_BELOW
    scaled = scale(logits, jnp.where(is_greedy, 1.0, temperature))
    truncation = scaled, top_k, top_p, min_p
    if not truncates:
        keep = _likely(scaled, min_p)
    elif one_row:
        searched = functools.partial(kept, implementation=implementation)
        keep = lax.cond(
            *(truncates_any(top_k, top_p), searched, lambda *args: _likely(args[0], args[-1])),
            *truncation,
        )
    else:
        keep = kept(*truncation, implementation=implementation)
    noise = jax.vmap(lambda s, p: _gumbel(s, p, logits.shape[-1]))(seed, position)
    drawn = greedy(jnp.where(keep, scaled + noise, -jnp.inf))
    return jnp.where(is_greedy, greedy(logits), drawn)


def truncates_any(top_k: Array, top_p: Array) -> Array:
    """bool ``[]``: whether any row leaves out tokens by top-k or top-p."""
    return ((top_k > 0) | (top_p < 1)).any()


def scale(logits: Array, temperature: Array) -> Array:
    """``(logits − max) / temperature`` of each row: at most 0, and 0 at the row's maximum.

    logits: float32 ``[R, V]``. temperature: float32 ``[R]``, positive. Returns float32 ``[R, V]``.
    The maximum is subtracted first, so that a small temperature cannot overflow to NaN.
    """
    peak = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - peak) / temperature[:, None]


def kept(
    scaled: Array, top_k: Array, top_p: Array, min_p: Array, *, implementation: str = "xla"
) -> Array:
    """Which tokens may be drawn. scaled: what `scale` returns. implementation: of truncate. Returns
    bool ``[R, V]``.

    - min_p keeps tokens at least min_p times as likely as the likeliest.
    - top_k keeps, of those, the top_k likeliest and whatever equals the last of them.
    - top_p keeps, of those, each token such that the likelier ones together have less than top_p of
      the mass that is left; equals stay or go together, so the result does not depend on a sort.

    The likeliest token is always kept.
    """
    distance = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    last = truncate(scaled, top_k, top_p, min_p, implementation=implementation)
    return _likely(scaled, min_p) & (distance <= last[:, None])


def logprobs(logits: Array, tokens: Array, n: int) -> tuple[Array, Array, Array, Array]:
    """Log-probabilities of raw logits, before temperature and truncation (vLLM's raw_logprobs).

    logits: float32 ``[R, V]``. tokens: int32 ``[R]``, the chosen ones. n: a static int, how many of
    the likeliest tokens to return, at most V.

    Returns (chosen, rank, top_ids, top): float32 ``[R]``; int32 ``[R]``, 1 for the likeliest;
    int32 ``[R, n]`` and float32 ``[R, n]``, the likeliest first, the lower id first among equals.
    Rank follows the same order, so ``top_ids[r, rank[r] − 1] == tokens[r]`` where rank ≤ n.
    """
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    before = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))
    rank = 1 + jnp.sum(before, axis=-1, dtype=jnp.int32)
    peak = jnp.max(logits, axis=-1)
    log_total = peak + jnp.log(_row_sum(jnp.exp(logits - peak[:, None])))
    top, top_ids = lax.top_k(logits, n)
    return chosen[:, 0] - log_total, rank, top_ids.astype(jnp.int32), top - log_total[:, None]


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


def _likely(scaled: Array, min_p: Array) -> Array:
    """Returns bool ``[R, V]``, the tokens at least min_p times as likely as the likeliest."""
    return jnp.exp(scaled) >= min_p[:, None]


def _row_sum(values: Array) -> Array:
    """Row sums ``[R, V] -> [R]`` in one fixed order, which keeps them monotone in every value."""
    return jnp.sum(values, axis=-1)


def _gumbel(seed: Array, position: Array, size: int) -> Array:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
