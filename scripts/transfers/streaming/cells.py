"""Cells of the grid of streamed experts, played on the timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from host_offload.queue.transfer import Transfer
from host_offload.simulate.stream_timeline import StreamedLayer, stream_passes
from host_offload.simulate.timeline import LayerCost, Link, Need, Timeline
from host_offload.sizing.tiers import StorageModel

PASSES = 3
"""The last one counts: the first one begins with an empty window."""

KAPPA = 0.754
"""A packed expert's bytes by a dense one's: lossless12 of 2048 × 768."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates as stated, in bytes and multiplications and additions a second."""

    memory_rate: float
    flops: float
    decode_rate: float
    """Dense bytes out of packed ones."""


HERE = Machine(25e9, 1e12, 5e9)
"""About this project's CPU; a grid depends on its ratios alone."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model times depend on."""

    layers: int
    experts: int
    top_k: int
    record_bytes: int
    kv_bytes: int
    """A token's, in all layers."""
    other_bytes: int
    """Weights of a layer beside experts."""

    def used(self, batch: int) -> float:
        """Experts of a layer that a step of so many rows uses."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch)


QWEN3_30B = Shape(48, 128, 8, 3 * 2048 * 768 * 2, 98304, 38 << 20)


def before_experts(machine: Machine, shape: Shape, batch: int, context: int) -> float:
    """Seconds of a layer before its experts: weights and KV read once."""
    kv = batch * context * shape.kv_bytes / shape.layers
    return (shape.other_bytes + kv) / machine.memory_rate


def of_expert(machine: Machine, shape: Shape, batch: int) -> float:
    """Seconds of one expert that is used."""
    rows = batch * shape.top_k / shape.used(batch)
    return max(shape.record_bytes / machine.memory_rate, rows * shape.record_bytes / machine.flops)


def compute_seconds(machine: Machine, shape: Shape, batch: int, context: int) -> float:
    """A layer's, with everything resident."""
    experts = shape.used(batch) * of_expert(machine, shape, batch)
    return before_experts(machine, shape, batch, context) + experts


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    machine: Machine
    shape: Shape
    batch: int
    context: int
    link_rate: float
    cells: float
    """Experts of each layer that the memory of experts beyond the window of two layers holds
    dense; the window is two layers' in every arm."""

    def layer(self, dense: int, packed: int, direct: bool = False) -> StreamedLayer:
        """A layer with so many residents of each tier."""
        shape, part = self.shape, of_expert(self.machine, self.shape, self.batch)
        mean = part * shape.used(self.batch) / shape.experts
        own = dense + (packed if direct else 0)
        before = before_experts(self.machine, shape, self.batch, self.context)
        cost = LayerCost(before, mean * own * 2 / 3, mean * own / 3)
        streamed = shape.experts - own
        return StreamedLayer(cost, [(mean * 2 / 3, mean / 3)] * streamed, 0 if direct else packed)

    def play(self, layers: Sequence[StreamedLayer]) -> float:
        """Seconds of a layer in the last pass."""
        part = self.shape.record_bytes // 3
        decoder = Link(self.machine.decode_rate, chunk_bytes=part)
        links = {"link": Link(self.link_rate, chunk_bytes=part), "decoder": decoder}
        timeline = Timeline(links, record=False)
        seconds = stream_passes(timeline, "link", (part,) * 3, [layers] * PASSES, "decoder")
        return seconds[-1] / len(layers)

    def paged(self) -> float:
        """Seconds of a layer where experts have cells of layers: the same bytes, none of them a
        window's."""
        shape, part = self.shape, self.shape.record_bytes // 3
        used, one = shape.used(self.batch), of_expert(self.machine, shape, self.batch)
        misses = round(self.missed())
        # No expert that a step uses makes room, so only cells of the others are filled.
        fills = min(misses, round(self.paging_cells * (1 - used / shape.experts)))
        timeline = Timeline({"link": Link(self.link_rate, chunk_bytes=part)}, record=False)
        hits = max(used - misses, 0.0) * one
        cost = LayerCost(
            before_experts(self.machine, shape, self.batch, self.context), hits * 2 / 3, hits / 3
        )

        def need(i: int) -> Need:
            ticket = timeline.submit("link", Transfer(0, i, 0, i), (part,) * 3)
            return Need(ticket, one * 2 / 3, one / 3)

        timeline.compute("attention", cost.before, 0)
        filled = [need(i) for i in range(fills)]
        through = (need(i) for i in range(fills, misses))
        timeline.experts(0, cost, "link", filled, through)
        return timeline.now

    @property
    def paging_cells(self) -> float:
        """Experts of each layer that have a cell where there is no window."""
        shape = self.shape
        return min(self.cells + 2 * (shape.experts - self.cells) / shape.layers, shape.experts)

    def missed(self) -> float:
        """Experts of a layer that a step misses there."""
        return self.shape.used(self.batch) * (1 - self.paging_cells / self.shape.experts)


def arm_seconds(cell: Cell) -> dict[str, float]:
    """Arm → seconds of a layer; those that the memory holds."""
    shape, layers = cell.shape, 8
    dense = int(cell.cells)
    # Beyond two whole layers, in dense experts of each layer: what fewer of them stream gives back.
    extra = dense * (1 - 2 / shape.layers)
    packed = min(int(extra / KAPPA), shape.experts)
    model = StorageModel(
        layers=shape.layers,
        experts=shape.experts,
        record_bytes=shape.record_bytes,
        host_rate=cell.link_rate,
        packed_rate=cell.machine.decode_rate,
        kappa=KAPPA,
    )
    found = {
        "resident": compute_seconds(cell.machine, shape, cell.batch, cell.context),
        "stream": cell.play([cell.layer(dense, 0)] * 4),
        "paging": cell.paged(),
    }
    if packed:
        found["flux"] = cell.play([cell.layer(0, min(packed, model.most_packed))] * 4)
        direct = min(int(extra / (KAPPA - 2 / shape.layers)), shape.experts)
        found["flux-direct"] = cell.play([cell.layer(0, direct, direct=True)] * 4)
    for name, share in (("vllm-o", extra / shape.experts), ("flux-h", packed / shape.experts)):
        if whole := min(int(share * layers), layers):
            kept = cell.layer(*((shape.experts, 0) if name == "vllm-o" else (0, shape.experts)))
            found[name] = cell.play([kept] * whole + [cell.layer(0, 0)] * (layers - whole))
    return found
