"""The arithmetic `int8`: codes of weights times activations that are quantized to 8 bits.

Activations x are quantized in groups of GROUP along the summed axis, in float32. With a the
largest |x| of a group, q = round(x · (127/a)), to nearest even, and the group's scale is
a · (1/127). A group whose a is below 2^-100 or not finite has q = 0.

A product is summed in units of 16 or 32 (RecordFormat.integer_unit), in which x and the weights
have one scale each: s = Σ q · (integer − zero), an exact int32. Its term is s · (scale of the
weights · scale of x), each product rounded to float32. Formats with minimums have another term,
Σ q · (minimum · scale of x). Terms of unit u are added to sum u mod LANES, in order, and these sums
are added pairwise: the order depends on the length of the sum alone.

Weights that are no integers with scales (dense, lossless12, float8) are multiplied exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.records.format import MATRICES, RecordFormat
from pallas_kernels.records.reference import decode, read_codes, split_weights

ARITHMETICS = ("exact", "int8")

GROUP = 32
LANES = 8

_INVERSE = np.float32(1) / np.float32(127)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (int32[T, K], float32[T, K / GROUP]): the integers of x [T, K] and their scales."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=2, keepdims=True)
    used = (largest >= 2.0**-100) & (largest < jnp.inf)
    scaled = groups * (jnp.float32(127) / jnp.where(used, largest, 1))
    integers = jnp.where(used, jnp.round(scaled), 0).astype(jnp.int32)
    return integers.reshape(x.shape), largest[..., 0] * _INVERSE


def multiply(x: jax.Array, record: jax.Array, fmt: RecordFormat, matrix: str) -> jax.Array:
    """float32[T, N]: x [T, K] times a matrix of a record, "gate", "up" or "down", by integers where
    the matrix has them."""
    unit = fmt.integer_unit(matrix)
    if not unit:
        weights = split_weights(decode(record, fmt), fmt)[0][MATRICES.index(matrix)]
        contract = ((1,), (0,)) if matrix == "down" else ((1,), (1,))
        return lax.dot_general(
            x,
            weights,
            (contract, ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    coded = [
        None if each is None else each.T if matrix == "down" else each
        for each in read_codes(record, fmt, matrix)
    ]
    codes, scales, zeros, mins = coded
    assert codes is not None and scales is not None
    found = fmt.encodings[matrix].integers
    assert found is not None
    integers = jnp.asarray(found[0])[codes.astype(jnp.int32)]
    if zeros is not None:
        integers -= zeros.astype(jnp.int32)
    q, x_scales = quantize(x)
    q = q.reshape(len(x), -1, unit)
    sums = jnp.einsum("tuk,nuk->tnu", q, integers.reshape(len(integers), -1, unit))
    of_x = jnp.repeat(x_scales, GROUP // unit, axis=1)[:, None]
    terms = [sums.astype(jnp.float32) * (scales[None, :, ::unit] * jnp.float32(found[1]) * of_x)]
    if mins is not None:
        terms.append(q.sum(axis=2).astype(jnp.float32)[:, None] * (mins[None, :, ::unit] * of_x))
    return _sum_units(terms)


def _sum_units(terms: list[jax.Array]) -> jax.Array:
    """The sum [...] of terms [..., units], in the order that the arithmetic has. A loop, since a
    sum beside its product would be one operation, rounded once; of two turns, since XLA writes out
    one of a single turn."""
    units = terms[0].shape[-1]
    padding = [(0, 0)] * (terms[0].ndim - 1) + [(0, max(-units % LANES, 2 * LANES - units))]
    rows = [jnp.pad(each, padding).reshape(*each.shape[:-1], -1, LANES) for each in terms]
    rows = lax.optimization_barrier([jnp.moveaxis(each, -2, 0) for each in rows])

    def add(i, lanes):
        for each in rows:
            lanes = lanes + each[i]
        return lanes

    lanes = lax.fori_loop(0, len(rows[0]), add, jnp.zeros_like(rows[0][0]))
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]
