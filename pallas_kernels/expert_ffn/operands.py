"""Operands of expert_ffn and fill_ffn except the arena and y. An array that is updated in place is
an argument of its own, since jax.jit donates whole arguments."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn.activation import Activation
from pallas_kernels.expert_ffn.many_tokens import Pairs
from pallas_kernels.records.versions import Formats


class ExpertPlaces(NamedTuple):
    """Where the experts of a layer are."""

    stores: tuple[UInt16[Array, "L E _ D"], ...]
    """Per version, all records, in pinned host memory. AbsentRecords are never read."""
    layer: Int[Array, ""] | int
    """The layer of stores and tables."""
    address: Int[Array, "L E"]
    """Arena row of each expert's record; −1: the expert is read through, from its version's
    store."""
    version: Int[Array, "L E"]


class ExpertBatch(NamedTuple):
    """Tokens and the experts that compute them, or a kernel's refs to them."""

    active: Int[Array, " A"]
    """The experts to compute, ascending."""
    active_count: Int[Array, ""]
    """How many entries of `active` count; later ones are ignored. int32[1] in kernels."""
    ids: Int[Array, "T K"]
    """The experts of each token, ascending; E marks a padding row."""
    x: Float[Array, "T D"]
    pairs: Pairs | None = None
    """What sorted_pairs returned for ids, if several calls share it; None: each call computes
    it."""


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """What decides the program of expert_ffn and fill_ffn, beside shapes."""

    activation: Activation
    row_tile: int
    """Rows of one product; constant for an engine, since the shape of a product decides its bits.
    The native op ignores it: it sums every row in the same order, whatever their number."""
    formats: Formats | None = None
    """Formats of the versions; None: one dense version."""
    implementation: str = "xla"
    shared_kib: int = CLASSES[-1]
    """The device's `cards.shared_class`, for the kernels."""
    arithmetic: str = "exact"
    """One of pallas_kernels.records.integers.ARITHMETICS."""


CELL_ROWS = 8
"""Cells that the Mosaic kernels read begin at multiples of so many rows."""


def why_not_mosaic(formats: Formats, activation: Activation, step: int = CELL_ROWS) -> str | None:
    """Why the Mosaic kernels do not compute these experts; None: they do.

    - `step`: cells begin at multiples of so many rows.
    """
    records = [fmt for cell, held, _ in formats for fmt in (cell, held)]
    if len(formats) > 1 or any(fmt.version != "dense" for fmt in records):
        return "its Mosaic kernels read dense experts of one version"
    if any(fmt.biases for fmt in records):
        return "its Mosaic kernels add no biases"
    if not all(fmt.gated for fmt in records):
        return "its Mosaic kernels read experts of three matrices"
    if not isinstance(activation, str):
        return "its Mosaic kernels do not clamp"
    if step % CELL_ROWS:
        return f"its Mosaic kernels read cells at multiples of {CELL_ROWS} rows, not of {step}"
    return None
