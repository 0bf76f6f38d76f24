from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.state_pages import Sequences, Shapes, StatePage, state_rows


class ConvWeights(NamedTuple):
    weights: Float[Array, "L W taps"]
    """Stacked over the run's layers; the newest token's last."""
    stack_layer: Int[Array, ""] | int
    """The layer's index in them."""


@dataclasses.dataclass(frozen=True)
class ConvOptions:
    """What decides the program, beside shapes."""

    page: StatePage
    implementation: str = "xla"


IMPLEMENTATIONS = implementations("short_conv", ("xla", "cpu"))


def short_conv_state(width: int, taps: int, dtype: str) -> Shapes:
    """A layer's state: the convolution's last inputs."""
    return (((taps - 1, width), dtype),)


def short_conv(
    x: Float[Array, "T W"],
    weights: ConvWeights,
    arena: UInt16[Array, "rows D"],
    sequences: Sequences,
    layer: Int[Array, ""] | int,
    options: ConvOptions,
) -> tuple[Float[Array, "T W"], UInt16[Array, "rows D"]]:
    """The sum over `taps` tokens up to each one of the sequence, times the weights of each column,
    added from the newest token on, in float32. Bits depend on the sequence's tokens alone.

    - `layer`: counted over layers with state.

    Returns (out, rounded to x's dtype, rows without a new token undefined; arena, updated in place
    when donated). Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    (tokens, width), taps = x.shape, weights.weights.shape[-1]
    if weights.weights.shape[1:] != (width, taps):
        raise ValueError(f"x {x.shape}, weights {weights.weights.shape}")
    if tokens % max(sequences.start.shape[0], 1):
        raise ValueError(f"{tokens} tokens of {sequences.start.shape[0]} runs")
    rows = state_rows(short_conv_state(width, taps, str(x.dtype)), options.page.row_elements)
    if options.page.layer_rows != rows:
        raise ValueError(f"a layer's state has {rows} rows, not {options.page.layer_rows}")
    fn = pick("short_conv", IMPLEMENTATIONS, options.implementation)
    return fn(x, weights, arena, sequences, layer, options)
