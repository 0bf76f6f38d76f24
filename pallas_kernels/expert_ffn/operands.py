"""What expert_ffn and fill_ffn take, but for the arena and y: what an op updates in place is an
argument of its own, since jax.jit donates whole arguments."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn.many_tokens import Pairs
from pallas_kernels.records.versions import Formats


class ExpertPlaces(NamedTuple):
    """Where the experts of a layer are."""

    stores: tuple[UInt16[Array, "L E _ D"], ...]
    """Per version all records, in pinned host memory. One that is AbsentRecords is not read."""
    layer: Int[Array, ""] | int
    """The layer of stores and tables."""
    address: Int[Array, "L E"]
    """Arena row of each expert's record; −1: it is read through, from the store of its version."""
    version: Int[Array, "L E"]


class ExpertBatch(NamedTuple):
    """Tokens and the experts that compute them, or a kernel's refs to them."""

    active: Int[Array, " A"]
    """The experts to compute, ascending."""
    active_count: Int[Array, ""]
    """How many of `active` count; the entries behind them are ignored. int32[1] in kernels."""
    ids: Int[Array, "T K"]
    """The experts of each token, ascending; E marks a padding row."""
    x: Float[Array, "T D"]
    pairs: Pairs | None = None
    """What sorted_pairs made of ids, where several calls share it; None: each makes its own."""


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """What decides the program of expert_ffn and fill_ffn, besides shapes."""

    activation: str
    """One of ACTIVATIONS."""
    row_tile: int
    """Rows of one product; constant for an engine, since the shape of a product decides its bits.
    The native op has none: its rows are summed alike, however many there are."""
    formats: Formats | None = None
    """Of the versions; None: there is one, dense."""
    implementation: str = "xla"
    shared_kib: int = CLASSES[-1]
    """The device's `cards.shared_class`, for the kernels."""
