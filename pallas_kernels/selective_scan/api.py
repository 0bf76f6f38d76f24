from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.state_pages import Sequences, Shapes, StatePage, check_state


class ScanShape(NamedTuple):
    """The heads of a state space model. Each group's B and C serve heads / groups heads in a
    row."""

    heads: int
    head_dim: int
    groups: int
    state: int
    """Values of B and of C."""
    each: bool = False
    """Whether every value of a head has a time step and rates of its own, as in Mamba; otherwise a
    head has one of both, as in Mamba-2."""

    @property
    def values(self) -> int:
        """Columns of x and of the output."""
        return self.heads * self.head_dim

    @property
    def columns(self) -> int:
        """Columns of x, B and C together."""
        return self.values + 2 * self.groups * self.state

    @property
    def steps(self) -> int:
        """Time steps of a token."""
        return self.values if self.each else self.heads

    def arrays(self) -> Shapes:
        """A layer's state."""
        return (((self.heads, self.state, self.head_dim), "float32"),)


class ScanInputs(NamedTuple):
    """What projections and convolution made of a layer's tokens."""

    xbc: Float[Array, "T columns"]
    """x of each head, then B of each group, then C."""
    dt: Float[Array, "T steps"]
    """Before dt_bias and the softplus."""


class ScanWeights(NamedTuple):
    """Weights, stacked over the run's layers."""

    a_log: Float[Array, "L steps"] | Float[Array, "L steps state"]
    """With an axis over the state where `each`."""
    dt_bias: Float[Array, "L steps"]
    skip: Float[Array, "L steps"]
    """D in the papers."""
    stack_layer: Int[Array, ""] | int
    """The layer's index in them."""


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """What decides the program, beside shapes."""

    shape: ScanShape
    page: StatePage
    implementation: str = "xla"
    limits: tuple[float, float] = (0.0, math.inf)
    """Of time steps, behind the softplus."""


IMPLEMENTATIONS = implementations("selective_scan", ("xla", "pallas", "cpu"))


def selective_scan(
    inputs: ScanInputs,
    weights: ScanWeights,
    arena: UInt16[Array, "rows D"],
    sequences: Sequences,
    layer: Int[Array, ""] | int,
    options: ScanOptions,
) -> tuple[Float[Array, "T values"], UInt16[Array, "rows D"]]:
    """Advances the state S [heads, state, head_dim] of each sequence by its tokens, and reads it:

        dt = clip(softplus(dt + dt_bias), limits)
        S = exp(−exp(a_log) · dt) · S + B ⊗ (dt · x),  out = Cᵀ S + skip · x

    in float32 and in this order for each token, so bits depend on the sequence's tokens alone.
    'pallas' advances runs of several tokens of Mamba-2 as gated_delta does.

    - `layer`: counted over layers with state.

    Returns (out, rounded to the inputs' dtype, rows without a new token undefined; arena, updated
    in place when donated). Raises ValueError for shapes that do not fit or an unknown
    implementation.
    """
    shape, tokens = options.shape, inputs.xbc.shape[0]
    if inputs.xbc.shape[1] != shape.columns or inputs.dt.shape != (tokens, shape.steps):
        raise ValueError(f"xbc {inputs.xbc.shape}, dt {inputs.dt.shape} for {shape}")
    a_log = (shape.steps, shape.state) if shape.each else (shape.steps,)
    if weights.a_log.shape[1:] != a_log:
        raise ValueError(f"a_log {weights.a_log.shape} for {shape}")
    if shape.heads % shape.groups:
        raise ValueError(f"{shape.heads} heads for {shape.groups} groups")
    check_state(shape.arrays(), options.page, tokens, sequences)
    fn = pick("selective_scan", IMPLEMENTATIONS, options.implementation)
    return fn(inputs, weights, arena, sequences, layer, options)
