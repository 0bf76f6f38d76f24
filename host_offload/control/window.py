"""The window through which the experts of all layers stream, two layers at a time (FluxMoE,
arXiv 2026, section 4.2: tensor buffers of exactly two layers; shared/papers.md 3.2)."""

from __future__ import annotations

import dataclasses

import numpy as np

PAYS_FROM = 0.9
"""Share of a layer's experts that a step uses from which on moving all of them wastes little."""


@dataclasses.dataclass(frozen=True, eq=False)
class WindowSpec:
    """Which experts have a cell of their own for good, and which pass through the ring.

    A layer's cells are numbered: expert e has number e of its own, if it is resident; those from E
    on are the ring's, of which a layer has some or none. The ring is two halves of as many cells as
    a layer has experts that stream; a step hands the cells of one half from layer to layer
    (host_offload.memory.tables.hand_over). Raises ValueError for fewer than three layers, which the
    window would hold whole, and where layers differ in how many stream.
    """

    resident: np.ndarray
    """bool[L, E]."""
    slot_rows: int

    def __post_init__(self):
        if self.layers < 3:
            raise ValueError(
                f"a window of two layers holds all {self.layers} layers of experts, so nothing "
                "would stream"
            )
        if len({*self.resident.sum(axis=1).tolist()}) > 1:
            raise ValueError(
                f"layers have {self.resident.sum(axis=1).tolist()} residents; each needs as many"
            )

    @property
    def layers(self) -> int:
        return self.resident.shape[0]

    @property
    def experts(self) -> int:
        return self.resident.shape[1]

    @property
    def streamed(self) -> int:
        """Experts of a layer that pass through the ring."""
        return self.experts - int(self.resident[0].sum())

    @property
    def slots(self) -> int:
        """Slots, of one expert each, that residents and ring take: all that experts ever have."""
        return window_slots(self.layers, self.experts, self.experts - self.streamed)

    @property
    def cell_bound(self) -> int:
        """C of the tables."""
        return 2 * self.experts

    def contents(self) -> dict[str, np.ndarray]:
        """Tables of a start, int32: the residents in the first slots, then the ring. The first
        layer is in one half; the other one is the last layer's, where nothing is."""
        layers, experts, streamed = self.layers, self.experts, self.streamed
        cell_row = np.full((layers, self.cell_bound), -1, np.int32)
        owner, address = cell_row.copy(), np.full((layers, experts), -1, np.int32)
        slot = np.arange(self.slots, dtype=np.int32) * self.slot_rows
        own = slot[: layers * (experts - streamed)]
        cell_row[:, :experts][self.resident] = address[self.resident] = own
        owner[:, :experts] = np.where(self.resident, np.arange(experts), -1)
        halves = slot[len(own) :].reshape(2, streamed)
        for layer, half in zip((0, layers - 1), halves, strict=True):
            cell_row[layer, experts : experts + streamed] = half
        owner[0, experts : experts + streamed] = np.flatnonzero(~self.resident[0])
        address[0, ~self.resident[0]] = halves[0]
        return {
            "cell_row": cell_row,
            "cell_version": np.zeros_like(cell_row),
            "owner": owner,
            "address": address,
        }


def window_slots(layers: int, experts: int, resident: int) -> int:
    """Slots of so many resident experts in each layer and of two layers' others: the paper's
    `C_exp` with a dense tier and nothing compressed, x·P_total + 2·(1 − x)·P_layer, in experts."""
    return layers * resident + 2 * (experts - resident)
