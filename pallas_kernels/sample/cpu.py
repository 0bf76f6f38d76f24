import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call
from pallas_kernels.sample.reference import add_noise, folded, greedy, likely
from pallas_kernels.truncate.reference import INFINITY_BITS

CANDIDATES = 16
"""Tokens of a row whose values are too near for another logarithm than XLA's to tell which is the
largest; of more than these the library leaves out the least. kCandidates of kernels.h."""


def sample(logits, choices, wanted, *, truncates, one_row, truncate):
    """sample of the api. Masses are summed as whole numbers of 2^-40. The library draws the random
    bits and leaves a few tokens; XLA's logarithm chooses."""
    rows = logits.shape[0]
    wanted = jnp.ones(rows, bool) if wanted is None else wanted
    draw = jax.vmap(lambda s, p: jax.random.key_data(folded(s, p)))
    keys = draw(choices.seed, choices.position)
    shapes = [
        jax.ShapeDtypeStruct((rows, CANDIDATES), t) for t in (np.int32, np.float32, np.uint32)
    ]
    operands = logits, wanted, choices.temperature, choices.top_k, choices.top_p
    ids, scaled, bits = call("draw", shapes, *operands, _farthest(choices.min_p), keys)
    best = greedy(add_noise(scaled, _gumbel_of(bits)))
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


def logprobs(logits, tokens, n, wanted):
    rows = logits.shape[:1]
    if wanted is not None:
        tokens = jnp.where(wanted, tokens, -1)
    floats, ints = (jax.ShapeDtypeStruct(rows, t) for t in (np.float32, np.int32))
    top = [jax.ShapeDtypeStruct((*rows, n), t) for t in (np.int32, np.float32)]
    return tuple(call("rank", [floats, ints, *top], logits, tokens))


def choose_likeliest(logits, tokens, update):
    return call("likeliest", jax.ShapeDtypeStruct(tokens.shape, np.int32), logits, tokens, update)


def _farthest(min_p):
    """The bits of the largest distance that min_p keeps by XLA's exponential, uint32 [R]."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        scaled = -lax.bitcast_convert_type(middle, jnp.float32)
        keeps = likely(scaled[:, None], min_p)[:, 0]
        return jnp.where(keeps, middle, low), jnp.where(keeps, high, middle - 1)

    low = jnp.zeros(min_p.shape, jnp.int32)
    low, _ = lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, INFINITY_BITS)))
    return lax.bitcast_convert_type(low, jnp.uint32)


def _gumbel_of(bits):
    """What jax.random.gumbel makes of random bits."""
    tiny = jnp.finfo(jnp.float32).tiny
    floats = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(floats, tiny)))
