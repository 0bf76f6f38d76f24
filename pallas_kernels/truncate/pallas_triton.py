"""truncate as Triton-lowered kernels: a launch for each pass of a search over a row's distances.
Several programs share a row, and the last one decides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.triton import is_last, triton_call
from pallas_kernels.truncate.reference import INFINITY_BITS

PASSES = 3, *[4] * 7
"""Bits of a distance (31 in all) that each pass decides. Twice as many bounds would double the work
of a pass for a seventh fewer launches."""

BOUNDS = 16
"""Sums of a pass: for up to 15 bounds, then for all tokens."""

NOWHERE = 0x7FFFFFFF
"""Distance of tokens that min_p drops."""


@dataclasses.dataclass(frozen=True)
class Config:
    columns: int
    """Tokens of a program."""
    lanes: int
    """Tokens that a program compares at once with all bounds."""
    num_warps: int
    num_stages: int


CONFIG = Config(columns=2048, lanes=512, num_warps=4, num_stages=1)
"""Each thread loads four times 128 bits at once and keeps each bound's sums of four tokens in
registers, so one reduction is enough. 75 programs for the 151,936 tokens of Qwen3."""


def truncate(scaled, top_k, top_p, min_p):
    distance = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    distance = jnp.where(jnp.exp(scaled) >= min_p[:, None], distance, NOWHERE)
    by_k, counters = _search(distance, top_k, jnp.zeros(len(scaled), jnp.int32), counts=True)
    by_p, _ = _search(distance, top_p, counters, by_k, counts=False)
    return by_p


class State(NamedTuple):
    """State between passes, updated in place: [R] each."""

    low: Any
    """int32: lower bound of the distance; after the last pass, the distance."""
    target: Any
    """float32: the sum that tokens up to the distance must reach."""
    counters: Any
    """int32 zeros; see is_last."""


DTYPES = State(jnp.int32, jnp.float32, jnp.int32)


def _search(distance, wanted, counters, limit=None, *, counts):
    """Searches like reference.farthest: up to which distance there are `wanted` tokens, int32[R],
    or that share of their mass, float32[R].

    - `limit`: int32[R], the largest distance of a token, which is the result of rows that want all
      tokens; None: infinity.

    Returns (int32[R], counters).
    """
    (rows, vocabulary), left, state = distance.shape, sum(PASSES), counters
    tiles, limits = pl.cdiv(vocabulary, CONFIG.columns), () if limit is None else (limit,)
    for turn, bits in enumerate(PASSES):
        left, place = left - bits, 2 + len(limits)
        state, _ = triton_call(
            functools.partial(_kernel, left=left, bits=bits, counts=counts, first=turn == 0),
            name="truncate_by_count" if counts else "truncate_by_mass",
            grid=(rows, tiles),
            out_shape=(
                State(*(jax.ShapeDtypeStruct((rows,), dtype) for dtype in DTYPES)),
                jax.ShapeDtypeStruct((rows, tiles, BOUNDS), jnp.float32),
            ),
            num_warps=CONFIG.num_warps,
            num_stages=CONFIG.num_stages,
            aliases={place: 2} if turn == 0 else {place + i: i for i in range(len(DTYPES))},
        )(distance, wanted, limits, state)
    return state.low, state.counters


def _kernel(distance, wanted, limits, _, state, parts, *, left, bits, counts, first):
    """Program (r, j) sums tile j of row r up to each bound. The last program of a row adds the
    sums, tile by tile in one tree, and raises `low` to where they reach the target.

    Writes: program (r, j) alone writes parts[r, j]. The last program of row r reads them all and
    alone writes state[r], which the others have read before. For a row that wants all tokens only
    program (r, 0) writes `low`, in the first pass.
    """
    row, tile = pl.program_id(0), pl.program_id(1)
    want = wanted[row]
    searched = want > 0 if counts else want < 1
    limit = limits[0][row] if limits else jnp.int32(INFINITY_BITS)
    search = functools.partial(_pass, row, tile, distance, want, limit, state, parts)
    pl.when(searched)(functools.partial(search, left=left, bits=bits, counts=counts, first=first))

    if first:

        @pl.when(~searched & (tile == 0))
        def _():
            state.low[row] = limit


def _pass(row, tile, distance, want, limit, state, parts, *, left, bits, counts, first):
    low = jnp.int32(0) if first else state.low[row]
    many, n, lane = 2**bits - 1, jnp.arange(BOUNDS), jnp.arange(CONFIG.lanes)
    bounds = jnp.where(n < many, low + ((n + 1) << left) - 1, NOWHERE)

    def load(turn):
        column = tile * CONFIG.columns + turn * CONFIG.lanes + lane
        return plgpu.load(distance.at[row, column], mask=column < distance.shape[1], other=NOWHERE)

    sums = jnp.zeros((BOUNDS, CONFIG.lanes), jnp.float32)
    for far in [load(turn) for turn in range(CONFIG.columns // CONFIG.lanes)]:
        amount = 1.0 if counts else jnp.exp(-lax.bitcast_convert_type(far, jnp.float32))
        amount = jnp.where(far <= limit, amount, 0.0)
        sums += jnp.where(far[None, :] <= bounds[:, None], amount[None, :], 0.0)
    plgpu.store(parts.at[row, tile, n], jnp.sum(sums, axis=1))

    @pl.when(is_last(state.counters, (row,), parts.shape[1]))
    def _():
        every = jnp.arange(pl.next_power_of_2(parts.shape[1]))
        made = jnp.broadcast_to((every < parts.shape[1])[:, None], (len(every), BOUNDS))
        found = plgpu.load(parts.at[row, every[:, None], n[None, :]], mask=made, other=0)
        totals = jnp.sum(found, axis=0)
        if not first:
            target = state.target[row]
        elif counts:  # float32 counts up to 2^24 exactly
            target = jnp.minimum(want, distance.shape[1]).astype(jnp.float32)
        else:
            target = want * jnp.sum(jnp.where(n == BOUNDS - 1, totals, 0.0))
        if first:
            state.target[row] = target
        short = (n < many) & (totals < target)
        after = low + (jnp.sum(short.astype(jnp.int32)) << left)
        state.low[row] = after if left else jnp.minimum(after, limit)
