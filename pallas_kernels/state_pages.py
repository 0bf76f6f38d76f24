"""State of a sequence in pages of the arena, and the walk over a step's tokens that advances it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt16

Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each array of a layer's state."""


class StatePage(NamedTuple):
    """Where states lie. A sequence's state pages, one after the other, are rows; a layer's state is
    `layer_rows` of these, from ``layer · layer_rows``. Where several ops advance it, each has whole
    rows of it."""

    page_rows: int
    """KV rows of a page."""
    row_elements: int
    """uint16 elements of a KV row."""
    layer_rows: int
    first_row: int = 0
    """Rows of the layer's state before those of this op."""

    def pages(self, layers: int) -> int:
        """Pages of a sequence's state."""
        return -(-layers * self.layer_rows // self.page_rows)


class Sequences(NamedTuple):
    """The tokens of a step by sequence: N runs of C rows, of which rows [skip, length) are new
    tokens. A sequence may have several runs, in order."""

    pages: Int[Array, "N P"]
    """KV row of each state page of the run's sequence."""
    start: Int[Array, " N"]
    """Position of the run's row 0 in its sequence. A token at position 0 begins from zeros."""
    skip: Int[Array, " N"]
    length: Int[Array, " N"]
    count: Int[Array, ""]
    """Runs in use."""
    read: Int[Array, "N P"] | None = None
    """The pages from which the run's state comes, which an earlier run may have written; None: its
    own, and no other run is of its sequence."""
    copy: Int[Array, "N P"] | None = None
    """Pages that get a copy of the state after the run; −1: none do."""


def state_rows(shapes: Shapes, row_elements: int) -> int:
    """KV rows of the part of a layer's state that one op advances."""
    return -(-sum(_elements(*each) for each in shapes) // row_elements)


def check_state(shapes: Shapes, page: StatePage, tokens: int, sequences: Sequences) -> None:
    """Raises ValueError where an op's part is not within a layer's rows, or tokens are no runs."""
    if tokens % max(sequences.start.shape[0], 1):
        raise ValueError(f"{tokens} tokens of {sequences.start.shape[0]} runs")
    last = page.first_row + state_rows(shapes, page.row_elements)
    if last > page.layer_rows:
        given = f"{page.first_row} to {last} of a layer's {page.layer_rows}"
        raise ValueError(f"the op's state would be rows {given}")


def run_operands(sequences: Sequences) -> tuple[jax.Array, ...]:
    """The fields of sequences as native CPU ops take them: pages, read, copy, start, skip, length,
    count."""
    pages, read, copy = sequences.pages, sequences.read, sequences.copy
    read = pages if read is None else read
    copy = jnp.full_like(pages, -1) if copy is None else copy
    runs = sequences.start, sequences.skip, sequences.length
    return pages, read, copy, *runs, jnp.asarray(sequences.count, jnp.int32)


def advance(
    token: Callable[[tuple[jax.Array, ...], jax.Array], tuple[tuple[jax.Array, ...], jax.Array]],
    shapes: Shapes,
    out: jax.Array,
    arena: UInt16[Array, "rows D"],
    sequences: Sequences,
    layer: Int[Array, ""] | int,
    page: StatePage,
) -> tuple[jax.Array, UInt16[Array, "rows D"]]:
    """Advances the states of a step's sequences token by token.

    A state and an output depend on the sequence's tokens alone, not on how steps divided them or on
    other sequences: every token runs through one loop body of one shape.

    - `token`: (arrays of the state, the token's row) → (their next values, the row of `out`).
    - `out`: [N·C, ...], rows without a new token stay.
    - `layer`: counted over layers with state.

    Returns (out, arena); the arena is updated in place when donated.
    """
    view, runs = arena.reshape(-1, page.row_elements), sequences.start.shape[0]
    own_rows = state_rows(shapes, page.row_elements)
    size = out.shape[0] // max(runs, 1)

    def of_run(n, carry):
        view, out = carry
        index = layer * page.layer_rows + page.first_row + jnp.arange(own_rows)
        at = index // page.page_rows, index % page.page_rows
        read = sequences.pages if sequences.read is None else sequences.read
        first = sequences.start[n] + sequences.skip[n] == 0
        bits = view[read[n][at[0]] + at[1]]
        state = tuple(jnp.where(first, 0, each) for each in unpack(bits, shapes))

        def of_token(t, carry):
            state, out = carry
            # Barriers, so that the body is compiled alone, whatever is around it.
            state, row = lax.optimization_barrier((state, n * size + t))
            state, y = lax.optimization_barrier(token(state, row))
            return state, lax.dynamic_update_index_in_dim(out, y, row, 0)

        bounds = sequences.skip[n], sequences.length[n]
        state, out = lax.fori_loop(*bounds, of_token, (state, out))
        bits, nowhere = _pack(state, own_rows, page.row_elements), view.shape[0]
        for pages in (sequences.pages, sequences.copy):
            if pages is not None:
                given = (bounds[0] < bounds[1]) & (pages[n, 0] >= 0)
                rows = jnp.where(given, pages[n][at[0]] + at[1], nowhere)
                view = view.at[rows].set(bits, mode="drop", unique_indices=True)
        return view, out

    view, out = lax.fori_loop(0, sequences.count, of_run, (view, out))
    return out, view.reshape(arena.shape)


def _elements(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize // 2


def unpack(rows: jax.Array, shapes: Shapes) -> list[jax.Array]:
    """The arrays of a state that lies in these rows."""
    flat, arrays, at = rows.reshape(-1), [], 0
    for shape, dtype in shapes:
        count = _elements(shape, dtype)
        bits = flat[at : at + count]
        if jnp.dtype(dtype).itemsize == 4:
            bits = bits.reshape(-1, 2)
        arrays.append(lax.bitcast_convert_type(bits, jnp.dtype(dtype)).reshape(shape))
        at += count
    return arrays


def _pack(state: Sequence[jax.Array], rows: int, row_elements: int) -> jax.Array:
    flat = [lax.bitcast_convert_type(each, jnp.uint16).reshape(-1) for each in state]
    bits = jnp.concatenate(flat)
    rest = rows * row_elements - bits.size
    return jnp.pad(bits, (0, rest)).reshape(rows, row_elements)
