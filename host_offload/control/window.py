"""The window through which the experts of all layers stream, two layers at a time, and where those
lie that are resident (FluxMoE, arXiv 2026, section 4.2: tensor buffers of exactly two layers;
shared/papers.md 3.2)."""

from __future__ import annotations

import dataclasses

import numpy as np

DENSE, PACKED, HOST = range(3)
"""Tiers: resident as they are computed, resident and compressed without loss, in the store."""

PAYS_FROM = 0.9
"""Share of a layer's experts that a step uses from which on moving all of them wastes little."""

PACKED_VERSION = 1
"""Version number of packed records; 0: dense ones, or the only version."""


@dataclasses.dataclass(frozen=True, eq=False)
class WindowSpec:
    """Which experts have a cell of their own for good, and which pass through the ring.

    A layer's cells are numbered: expert e has number e of its own, if it is resident; those from E
    on are the ring's, of which a layer has some or none. The ring is two halves of as many cells as
    any layer has experts that stream; a step hands the cells of one half from layer to layer
    (host_offload.memory.tables.hand_over). Where the coming layer waits in memory beside the arena
    (halves=1), the ring is one half of cells, which go on with every layer. Packed residents have a
    cell of their own and stream as well, out of it, but where they are computed as they are
    (direct). Raises ValueError for fewer than three layers, which the window would hold whole, and
    for packed experts without a size.

    All lie in the first rows of the arena, one after the other: the ring, then the dense residents
    and then the packed ones, expert by expert and of each expert layer by layer, so that the last
    expert of every layer can go without another one moving.
    """

    tier: np.ndarray
    """int8[L, E]: DENSE, PACKED or HOST."""
    slot_rows: int
    record_rows: int
    """Arena rows of a cell of the ring, and of a dense resident's."""
    packed_rows: int = 0
    """Those of a packed resident; 0: there are none."""
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
        """bool[L, E]: who passes through the ring."""
        return (self.tier == HOST) | ((self.tier == PACKED) & (not self.direct))

    @property
    def half(self) -> int:
        """Cells of one half of the ring: the most experts of a layer that stream."""
        return int(self.streams.sum(axis=1).max())

    @property
    def rows(self) -> int:
        """Arena rows of all cells, all that experts ever have: the paper's `C_exp`,
        x·P_total + κ·y·P_total and two layers of what streams (one, of a ring of one half)."""
        dense, packed, _ = self.placement.sum(axis=0).tolist()
        ring = self.halves * self.half
        return (ring + dense) * self.record_rows + packed * self.packed_rows

    @property
    def staged_rows(self) -> int:
        """Rows of memory beside the arena in which what the coming layer gets from the host
        waits."""
        return (2 - self.halves) * int(self.placement[:, HOST].max()) * self.record_rows

    @property
    def slots(self) -> int:
        """Slots that those rows are in."""
        return -(-self.rows // self.slot_rows)

    @property
    def cells(self) -> int:
        return self.halves * self.half + int(self.placement[:, :HOST].sum())

    @property
    def cell_bound(self) -> int:
        """C of the tables."""
        return 2 * self.experts

    def contents(self) -> dict[str, np.ndarray]:
        """Tables of a start, int32. The first layer is in one half of the ring; the other one is
        the last layer's, where nothing is. So is the only one of a ring of one half."""
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
        """(expert, arena row) of a layer's experts that stream, in a ring of one half: where
        host_offload.memory.tables.seat_absent puts them."""
        there = np.flatnonzero(self.streams[layer]).tolist()
        return [(expert, i * self.record_rows) for i, expert in enumerate(there)]

    def residents(self) -> tuple[np.ndarray, np.ndarray]:
        """(arena row, version) int32[L, E] of those with a cell of their own; row −1: it has
        none."""
        contents = self.contents()
        own = slice(0, self.experts)
        return contents["cell_row"][:, own], contents["cell_version"][:, own]


def tiers_of(placement: np.ndarray) -> np.ndarray:
    """int8[L, E] with so many experts of each layer in each tier, int[L, 3]: the dense ones first,
    then the packed ones. Nothing says which are worth more, where all of a layer are there before
    it runs."""
    experts = int(placement[0].sum())
    ends = placement[:, :HOST].cumsum(axis=1)
    return (np.arange(experts) >= ends[:, :, None]).sum(axis=1).astype(np.int8)
