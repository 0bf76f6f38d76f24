"""The window through which the experts of all layers stream, two layers at a time, and the cells of
resident experts (FluxMoE, arXiv 2026, section 4.2: tensor buffers of exactly two layers;
shared/papers.md 3.2)."""

from __future__ import annotations

import dataclasses

import numpy as np

DENSE, PACKED, HOST = range(3)
"""Tiers of experts: resident and dense, resident and compressed without loss, in the store."""

PAYS_FROM = 0.9
"""If steps use at least this share of a layer's experts, moving all of them wastes little."""

PACKED_VERSION = 1
"""Version number of packed records; dense records have 0."""


@dataclasses.dataclass(frozen=True, eq=False)
class WindowSpec:
    """The experts with a cell of their own, and those that pass through the ring.

    In each layer, cell e belongs to expert e if it is resident, and cells from E on are the ring's.
    The ring has two halves, each with as many cells as the most streaming experts of a layer. A
    step passes the cells of a half from layer to layer (host_offload.memory.tables.hand_over). If
    the coming layer waits in memory beside the arena (halves=1), the ring is one half, which passes
    to every layer in turn. Packed residents are decoded from their own cell into the ring, unless
    they are computed in their packed form (direct).

    The cells fill the first rows of the arena: the ring, then dense residents, then packed ones,
    expert by expert, and of each expert layer by layer. So the last expert of every layer can leave
    while all others keep their places.

    Raises ValueError for fewer than three layers, which the window would hold whole, and for packed
    experts without a size.
    """

    tier: np.ndarray
    """int8[L, E]: DENSE, PACKED or HOST."""
    slot_rows: int
    record_rows: int
    """Arena rows of a cell of the ring, and of a dense resident's."""
    packed_rows: int = 0
    """Arena rows of a packed resident's cell; 0: there are none."""
    direct: bool = False
    """Packed residents are computed from their packed records, in registers, and do not stream."""
    halves: int = 2
    """Halves of the ring that are cells of the arena: two, or one."""

    def __post_init__(self):
        if self.layers < 3:
            raise ValueError(
                f"a window of two layers holds all {self.layers} layers of experts, so nothing "
                "would stream"
            )
        if np.any(self.tier == PACKED) and not self.packed_rows:
            raise ValueError("packed residents need a size of their records")

    @property
    def layers(self) -> int:
        return self.tier.shape[0]

    @property
    def experts(self) -> int:
        return self.tier.shape[1]

    @property
    def placement(self) -> np.ndarray:
        """int64[L, 3]: experts of each layer in each tier."""
        return np.stack([(self.tier == tier).sum(axis=1) for tier in (DENSE, PACKED, HOST)], axis=1)

    @property
    def streams(self) -> np.ndarray:
        """bool[L, E]: experts that pass through the ring."""
        return (self.tier == HOST) | ((self.tier == PACKED) & (not self.direct))

    @property
    def half(self) -> int:
        """Cells of one half of the ring: the most experts of a layer that stream."""
        return int(self.streams.sum(axis=1).max())

    @property
    def rows(self) -> int:
        """Arena rows of all cells. This is the paper's `C_exp`: x·P_total + κ·y·P_total and two
        layers of streaming experts (one layer, if the ring is one half)."""
        dense, packed, _ = self.placement.sum(axis=0).tolist()
        ring = self.halves * self.half
        return (ring + dense) * self.record_rows + packed * self.packed_rows

    @property
    def staged_rows(self) -> int:
        """Rows of memory beside the arena for the coming layer's records from the host."""
        return (2 - self.halves) * int(self.placement[:, HOST].max()) * self.record_rows

    @property
    def slots(self) -> int:
        """Slots that hold `rows`."""
        return -(-self.rows // self.slot_rows)

    @property
    def cells(self) -> int:
        return self.halves * self.half + int(self.placement[:, :HOST].sum())

    @property
    def cell_bound(self) -> int:
        """C of the tables."""
        return 2 * self.experts

    def contents(self) -> dict[str, np.ndarray]:
        """Returns contents of tables at the start, int32. The first layer is in one half of the
        ring. The other half, or the only one, belongs to the last layer and is empty."""
        shape, experts, half = (self.layers, self.experts), self.experts, self.half
        cell_row = np.full((self.layers, self.cell_bound), -1, np.int32)
        owner, cell_version = cell_row.copy(), np.zeros_like(cell_row)
        address, version = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        first = self.halves * half * self.record_rows
        for tier, rows in ((DENSE, self.record_rows), (PACKED, self.packed_rows)):
            # Expert after expert, each in all layers: argwhere of the transposed table.
            who = np.argwhere(tier == self.tier.T)
            expert, layer = who[:, 0], who[:, 1]
            cell_row[layer, expert] = first + np.arange(len(who)) * rows
            owner[layer, expert] = expert
            first += len(who) * rows
        cell_version[:, :experts][self.tier == PACKED] = PACKED_VERSION
        stays = ~self.streams
        address[stays] = cell_row[:, :experts][stays]
        version[stays] = cell_version[:, :experts][stays]
        ring = np.arange(self.halves * half, dtype=np.int32).reshape(self.halves, half)
        ring *= self.record_rows
        for layer, rows in zip((self.layers - 1, 0), reversed(ring), strict=False):
            cell_row[layer, experts : experts + half] = rows
        if self.halves > 1:
            there = np.flatnonzero(self.streams[0])
            owner[0, experts : experts + len(there)] = there
            address[0, there] = ring[0][: len(there)]
        return {
            "cell_row": cell_row,
            "cell_version": cell_version,
            "owner": owner,
            "address": address,
            "version": version,
        }

    def seats(self, layer: int) -> list[tuple[int, int]]:
        """Returns (expert, arena row) of a layer's streaming experts in a ring of one half, as
        host_offload.memory.tables.seat_absent places them."""
        there = np.flatnonzero(self.streams[layer]).tolist()
        return [(expert, i * self.record_rows) for i, expert in enumerate(there)]

    def residents(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (arena row, version), int32[L, E], of experts' own cells; row −1: the expert has
        none."""
        contents = self.contents()
        own = slice(0, self.experts)
        return contents["cell_row"][:, own], contents["cell_version"][:, own]


def tiers_of(placement: np.ndarray) -> np.ndarray:
    """Assigns tiers to experts in the order of their ids: dense ones first, then packed ones. The
    order does not matter, since all experts of a layer are there before it runs.

    - `placement`: int[L, 3], experts of each layer in each tier.

    Returns int8[L, E].
    """
    experts = int(placement[0].sum())
    ends = placement[:, :HOST].cumsum(axis=1)
    return (np.arange(experts) >= ends[:, :, None]).sum(axis=1).astype(np.int8)
