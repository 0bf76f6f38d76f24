"""The end of a decode layer: combine_and_count, after the last product or within its kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.combine import combine_and_count, combine_with_squares
from pallas_kernels.triton import check_counters

LEAST_COLUMNS = 16
"""Columns of the narrowest tile of a kernel."""

MOST_SLOTS = 31
"""Most experts of a token: each has a bit of an int32 counter."""


class Epilogue(NamedTuple):
    """Operands of combine_and_count except y, and the counters of its kernel."""

    residual: jax.Array
    """[T, D]."""
    weights: jax.Array
    """float32[T, K]."""
    index: jax.Array
    """int32[1], updated in place."""
    counters: jax.Array
    """int32[counters_size or more], zeros before and after."""
    first_layer: int
    """The layer is index[0] plus this. A kernel that reads the layer and increments the index must
    get one operand for both; with two, XLA would copy the index."""
    with_squares: bool = False
    """Whether to return squares, as combine_with_squares does."""


class Combined(NamedTuple):
    """The results of an op with an Epilogue."""

    y: jax.Array
    out: jax.Array
    """[T, D]: the residual and the weighted rows of y."""
    index: jax.Array
    counters: jax.Array
    squares: jax.Array | None = None
    """row_squares of out, if they are wanted."""


def counters_size(tokens: int, hidden: int) -> int:
    """Counters: one for every token and tile of columns, and one for all of them."""
    return tokens * -(-hidden // LEAST_COLUMNS) + 1


def check_epilogue(y: jax.Array, ids: jax.Array, epilogue: Epilogue) -> None:
    """Raises ValueError for operands that do not fit y [T·K, D] and ids [T, K]."""
    residual, weights, index, counters, *_ = epilogue
    tokens, hidden = ids.shape[0], y.shape[1]
    if residual.shape != (tokens, hidden) or weights.shape != ids.shape or index.shape != (1,):
        raise ValueError(
            f"residual {residual.shape}, weights {weights.shape} and index {index.shape} do not "
            f"fit ids {ids.shape} and y {y.shape}"
        )
    check_counters(counters, counters_size(tokens, hidden), f"{tokens} tokens of {hidden}")


def combine_behind(y: jax.Array, epilogue: Epilogue, implementation: str) -> Combined:
    """Combines y by the op combine."""
    residual, weights, index, counters, *_ = epilogue
    operands, squares = (residual, y.reshape(*weights.shape, -1), weights, index), None
    if epilogue.with_squares:
        out, squares, after = combine_with_squares(*operands, implementation=implementation)
        assert after is not None
    else:
        out, after = combine_and_count(*operands, implementation=implementation)
    return Combined(y, out, after, counters, squares)
