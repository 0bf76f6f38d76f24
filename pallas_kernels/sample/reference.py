"""Pure functions over fixed shapes ``[R, V]``. A row's result is a function of that row's logits
and choices alone, never of the other rows: seeds are counters, thresholds are per row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.truncate import truncate as search


def greedy(logits):
    """The most likely token of each row, the lowest id among equals."""
    # argmax, one reduction of pairs, takes half the launches on a GPU, and is three times as slow
    # on a CPU.
    return lax.platform_dependent(logits, cuda=_likeliest, default=_first_of_peak)


def _likeliest(logits):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _first_of_peak(logits):
    vocabulary = logits.shape[-1]
    ids = jnp.arange(vocabulary, dtype=jnp.int32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # The clamp keeps the id legal in a row of NaN.
    return jnp.min(jnp.where(logits == peak, ids, vocabulary - 1), axis=-1)


def truncates_any(top_k, top_p):
    """Whether any row leaves out tokens by top-k or top-p."""
    return ((top_k > 0) | (top_p < 1)).any()


def sample(logits, choices, wanted, *, truncates, one_row, truncate):
    temperature, top_k, top_p, min_p, seed, position = choices
    is_greedy = temperature == 0
    scaled = scale(logits, jnp.where(is_greedy, 1.0, temperature))
    truncation = scaled, top_k, top_p, min_p
    if not truncates:
        keep = likely(scaled, min_p)
    elif one_row:
        searched = functools.partial(kept, implementation=truncate)
        keep = lax.cond(
            *(truncates_any(top_k, top_p), searched, lambda *args: likely(args[0], args[-1])),
            *truncation,
        )
    else:
        keep = kept(*truncation, implementation=truncate)
    noise = jax.vmap(lambda s, p: _gumbel(s, p, logits.shape[-1]))(seed, position)
    drawn = greedy(jnp.where(keep, add_noise(scaled, noise), -jnp.inf))
    return jnp.where(is_greedy, greedy(logits), drawn)


def logprobs(logits, tokens, n, wanted):
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    before = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))
    rank = 1 + jnp.sum(before, axis=-1, dtype=jnp.int32)
    peak = jnp.max(logits, axis=-1)
    # The sums have one fixed order.
    log_total = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1))
    top, top_ids = lax.top_k(logits, n)
    return chosen[:, 0] - log_total, rank, top_ids.astype(jnp.int32), top - log_total[:, None]


def choose_likeliest(logits, tokens, update):
    rows = logits.shape[0]
    chosen = jnp.where(update, greedy(logits), tokens[:rows])
    return jnp.concatenate((chosen, tokens[rows:]))


def scale(logits, temperature):
    """``(logits − max) · (1 / temperature)`` of each row: at most 0, and 0 at the row's maximum,
    which is subtracted first, so that a small temperature cannot overflow to NaN. XLA makes this of
    a division, too."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - peak) * (1.0 / temperature)[:, None]


def add_noise(scaled, noise):
    """Their sum in float32. Without reduce_precision, which changes nothing here, XLA fuses the
    logarithm's last operations with the sum, and bits depend on the program around it."""
    return lax.reduce_precision(scaled, 8, 23) + noise


def kept(scaled, top_k, top_p, min_p, *, implementation="xla"):
    """Which tokens may be drawn, bool [R, V]. scaled: what `scale` returns."""
    distance = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    last = search(scaled, top_k, top_p, min_p, implementation=implementation)
    return likely(scaled, min_p) & (distance <= last[:, None])


def likely(scaled, min_p):
    """The tokens at least min_p times as likely as the likeliest, bool [R, V]."""
    return jnp.exp(scaled) >= min_p[:, None]


def folded(seed, position):
    """The key of a row's draw."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)


def _gumbel(seed, position, size):
    with jax.threefry_partitionable(True):  # whatever the user's setting is
        return jax.random.gumbel(folded(seed, position), (size,), jnp.float32, mode="low")
