"""What the contracts of ops share that advance states of sequences: their pages, and steps."""

import dataclasses

import numpy as np

from pallas_kernels.state_kernels import TOKENS
from pallas_kernels.state_pages import Sequences
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import close, draw, same_bits

STACK_LAYER = 1

ROWS = 32
"""Of a run of several tokens."""


def stacked(rng, *shape):
    """Weights float32[2, *shape], NaN but for those of STACK_LAYER."""
    weights = np.full((2, *shape), np.nan, np.float32)
    weights[STACK_LAYER] = draw(rng, shape, "float32", 0.5)
    return weights


def new_pages(rng, spec, page, columns):
    """(arena of poison with rows of so many columns, pages int32[sequences, P]) of new
    sequences."""
    count = page.pages(spec.layers)
    pages = rng.permutation(len(spec.lengths) * count) * page.page_rows + 1  # an odd row before
    rows = -(-(pages.max() + page.page_rows) * page.row_elements // columns)
    rows += -rows % page.row_elements  # whole KV rows
    arena = np.full((rows, columns), contract.POISON, np.uint16)
    return arena, np.int32(pages.reshape(len(spec.lengths), count))


def one_run(pages, tokens):
    """The first tokens of one sequence."""
    zero = np.zeros(1, np.int32)
    return Sequences(pages, zero, zero, zero + tokens, np.int32(1))


def by_steps(spec, implementation, inputs, arena, pages, sizes, *, run, names):
    """Runs all tokens in steps of so many tokens a sequence, chunk after chunk as the engine does.

    - `run`: of the op: (spec, implementation, inputs, arena, sequences) → (out, arena).
    - `names`: of the inputs that have a row a token.

    Returns (out [T, values], arena)."""
    ends = np.cumsum(spec.lengths)
    starts, out, done = ends - spec.lengths, {}, np.zeros(len(ends), int)
    for size in sizes:
        runs = [s for s in range(len(ends)) if done[s] < spec.lengths[s]]
        if not runs:
            break
        width = ROWS if size > 1 else 1
        begin = done[runs] // width * width
        stop = np.minimum(np.minimum(done[runs] + size, begin + width), np.take(spec.lengths, runs))
        place = np.minimum(starts[runs][:, None] + begin[:, None] + np.arange(width), ends[-1] - 1)
        given = {name: inputs[name][place.reshape(-1)] for name in names}
        where = Sequences(
            pages[runs], np.int32(begin), np.int32(done[runs] - begin), np.int32(stop - begin),
            np.int32(len(runs)),
        )  # fmt: skip
        got, arena = run(spec, implementation, inputs | given, arena, where)
        got = np.asarray(got).reshape(len(runs), width, -1)
        for i, s in enumerate(runs):
            for t in range(done[s], stop[i]):
                out[starts[s] + t] = got[i, t - begin[i]]
        done[runs] = stop
    return np.stack([out[t] for t in range(ends[-1])]), np.asarray(arena)


def check_steps(op, spec, implementation, case, steps, recurrence):
    """Compares an op with its recurrence in float64, in steps of many tokens, of some and of one.

    - `case`: (spec, seed) → (inputs, arena, pages).
    - `steps`: `by_steps` of the op.
    - `recurrence`: (spec, inputs) → float64[T, values].
    """
    for seed in contract.SEEDS:
        inputs, arena, pages = case(spec, seed)
        for sizes in ([ROWS] * 2, [5] * 9, [1] * 40):
            got, _ = steps(spec, implementation, inputs, arena, pages, sizes)
            close(op, spec.dtype, got, recurrence(spec, inputs))


def check_splits(spec, implementation, case, steps, by_token, names):
    """Asserts the bits of outputs and states, whatever the steps and the other sequences.

    - `by_token`: whether the implementation takes runs of several tokens one by one. If not, their
      steps may end within TOKENS at the end of a prompt only, and tokens that are decoded have bits
      of their own.
    - `names`: of the inputs that have a row a token.

    Returns (pages, the arena after, the arena after the last sequence alone).
    """
    inputs, arena, pages = case(spec, 0)
    ones, wide = [1] * max(spec.lengths), [ROWS] * 8
    groups = [[wide, [TOKENS] * 16, [TOKENS, *wide]], [ones]]
    if by_token:
        groups = [[wide, ones, [3, 1, 5, 8] * 10, [8, *ones]]]
    last = len(spec.lengths) - 1
    alone = dataclasses.replace(spec, lengths=spec.lengths[-1:])
    first = sum(spec.lengths[:-1])
    own = inputs | {name: inputs[name][first:] for name in names}
    for sizes, *others in groups:
        want, after = steps(spec, implementation, inputs, arena, pages, sizes)
        for other in others:
            got, states = steps(spec, implementation, inputs, arena, pages, other)
            same_bits(got, want)
            same_bits(states, after)
        given = own, arena, pages[last:], [sizes, *others][-1]
        got, of_one = steps(alone, implementation, *given)
        same_bits(got, want[first:])
    return pages, after, of_one
