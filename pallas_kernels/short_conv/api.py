from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.state_pages import Sequences, Shapes, StatePage, check_state


class ConvWeights(NamedTuple):
    weights: Float[Array, "L W taps"]
    """Stacked over the run's layers; the newest token's last."""
    stack_layer: Int[Array, ""] | int
    """The layer's index in them."""
    bias: Float[Array, "L W"] | None = None
    """Stacked as the weights; None: there is none."""


@dataclasses.dataclass(frozen=True)
class ConvOptions:
    """What decides the program, beside shapes."""

    page: StatePage
    implementation: str = "xla"
    silu: bool = False
    """Whether silu of the result is returned."""


IMPLEMENTATIONS = implementations("short_conv", ("xla", "pallas", "cpu"))


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
    added from the newest token on, then the bias, in float32. Bits depend on the sequence's tokens
    alone. The sum is rounded to x's dtype before silu, as in transformers.

    - `layer`: counted over layers with state.

    Returns (out, rounded to x's dtype, rows without a new token undefined; arena, updated in place
    when donated). Raises ValueError for shapes that do not fit or an unknown implementation.
    """
    (tokens, width), taps = x.shape, weights.weights.shape[-1]
    bias = weights.bias
    if weights.weights.shape[1:] != (width, taps) or (
        bias is not None and bias.shape != weights.weights.shape[:2]
    ):
        biases = "" if bias is None else f", bias {bias.shape}"
        raise ValueError(f"x {x.shape}, weights {weights.weights.shape}{biases}")
    state = short_conv_state(width, taps, str(x.dtype))
    check_state(state, options.page, tokens, sequences)
    fn = pick("short_conv", IMPLEMENTATIONS, options.implementation)
    return fn(x, weights, arena, sequences, layer, options)
