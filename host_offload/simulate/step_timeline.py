"""Steps on a timeline: what they compute and move, when the device, the link and a miss allow it.

Without a link the experts of a layer move within its step, as an engine without a queue does it:
the device does nothing else meanwhile. With a link they are queued as an engine with a queue does
it: what a layer misses are demands from its router on, what was staged are prefetches, and the
device waits for just the part of an expert that it is about to compute with (docs/transfers.md).
A second processor computes what a placement gives it from the router on, one expert after the
other, and the layer ends when both are done (docs/prescope.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.policies.placement.presched import PlacementCosts, queue_of
from host_offload.queue.transfer import DEMAND, Transfer
from host_offload.simulate.simulated_engine import LayerExperts, SimulatedStep, Staged
from host_offload.simulate.timeline import LayerCost, Link, Need, Timeline
from host_offload.sizing import version_costs
from host_offload.sizing.cost_model import MOVES, CostError, CostModel, Work

LINK = "link"
CPU = "cpu"
"""The second processor."""
PREFETCH = "prefetch"
BUFFERS = 2
"""Through which experts without a cell are read."""


class Looks(NamedTuple):
    """How many moments policies are asked at: behind the embedding, and for each layer before and
    behind its router."""

    embedded: int = 0
    begin: int = 0
    routed: int = 0

    def count(self, layers: int) -> int:
        """In a step."""
        return self.embedded + layers * (self.begin + self.routed)

    def seconds(self, layers: int, models: Sequence[CostModel]) -> float:
        """In a step in which nothing is handed out: the tables are copied at the first moment of
        each layer, the one behind the embedding included."""
        copied = layers if self.begin + self.routed else min(self.embedded, 1)
        look, glance = _look_costs(models)
        return copied * look + (self.count(layers) - copied) * glance


class StepLoad(NamedTuple):
    """What a step computes."""

    work: Work
    """Without experts and tiles."""
    rows: int | None
    """Those of a decode executable; None: a prefill step."""
    routed: np.ndarray
    """int[L, E]: rows of each expert."""
    control: float
    """Seconds of what policies look at, before the step."""
    looks: Looks = Looks()
    """The moments between its layers at which policies are asked."""


class _Fixed(NamedTuple):
    """Seconds of a step that are no expert's."""

    begin: float
    before: float
    """Each layer's, as `after`."""
    after: float
    end: float


class StepTimeline:
    """One step after the other from time 0 on. models: by version number. link: of the engine's
    queue; None: it has none. second: what a placement goes by, whose β and C are the second
    processor's, t_g and t_attn the least that the device takes; None: there is no such processor.
    record: whether the timeline keeps its events.

    Raises QueueError for a link that cannot be.
    """

    def __init__(
        self,
        models: Sequence[CostModel],
        link: Link | None,
        *,
        second: PlacementCosts | None = None,
        record: bool,
    ):
        self._second = second
        self._ended: float | None = None
        """When the experts of the layer before were done; None: it is the step's first."""
        self.timeline = Timeline({} if link is None else {LINK: link}, record=record)
        self._models, self._queued = models, link is not None
        self._flying: dict[int, int] = {}
        """Arena row of a cell that a transfer writes → ticket. Row −1 − i is buffer i."""

    def play(self, load: StepLoad, simulated: SimulatedStep) -> float:
        """The seconds that a step takes from the end of the one before it, in whole nanoseconds."""
        timeline, began = self.timeline, self.timeline.now
        fixed, counts = self._fixed(load, simulated), simulated.versions
        prefill = load.rows is None
        timeline.compute("policies", load.control)
        ahead = [move for move in simulated.moves if isinstance(move, Staged)]
        # Lists from between layers cost what they cost there.
        between = load.looks.count(1) or ahead
        listed = not between or any(move.coming is None for move in ahead)
        lists_s = version_costs.list_s(self._models, counts) if listed else 0.0
        timeline.compute("begin", fixed.begin + lists_s)
        if self._queued:
            self._queued_layers(load, simulated, fixed)
        else:
            moves = version_costs.moves_s(self._models, counts, prefill=prefill)
            products = self._products(load, simulated)
            looks = load.looks
            self._look(looks.embedded, 0)
            self._ended = None
            for layer, (gate_up, down) in enumerate(products.sum(axis=1)):
                unseen = bool(layer) or not looks.embedded
                self._look(looks.begin, layer, unseen)
                self._attend(layer, fixed)
                self._look(looks.routed, layer, unseen and not looks.begin)
                if not listed and counts.staged[layer].any():
                    self._list(layer)
                beside = self._beside(layer, load, simulated)
                for kind, seconds in zip(MOVES, moves[:, layer].tolist(), strict=True):
                    if kind != "stage":
                        timeline.compute(f"layer {layer} {kind}", seconds, layer)
                timeline.experts(layer, LayerCost(0.0, gate_up, down), LINK, ())
                self._end(beside)
                timeline.compute(f"layer {layer} after", fixed.after, layer)
                staged = moves[MOVES.index("stage"), layer]
                timeline.compute(f"layer {layer} stage", float(staged), layer)
        timeline.compute("end", fixed.end)
        return round(timeline.now - began, 9)

    # ---- seconds

    def _fixed(self, load: StepLoad, simulated: SimulatedStep) -> _Fixed:
        models, version, (layers, _) = self._models, simulated.versions.version, load.routed.shape
        used = np.bincount(version[load.routed > 0], minlength=len(models))
        cost, shares = (
            version_costs.fixed_cost(models, load.work, used, load.rows),
            models[0].shares,
        )
        outside = cost.step * shares.outside
        after = (cost.step - outside) * shares.after / layers
        inside = cost.seconds(load.work) - outside - after * layers
        return _Fixed(outside / 2, inside / layers, after, outside / 2)

    def _beside(self, layer: int, load: StepLoad, simulated: SimulatedStep) -> float:
        """The second processor begins its experts of a layer; returns when it is done."""
        rows = np.where(simulated.placed[layer], load.routed[layer], 0)
        if not rows.any():
            return self.timeline.now
        if self._second is None:
            raise CostError(
                "a second processor computes experts, and nothing says what it takes: name the "
                "placement with its costs (placement=...)"
            )
        works = queue_of(layer, rows, np.zeros(len(rows), bool))
        return self.timeline.give(CPU, f"layer {layer}", self._second.on_cpu(works))

    def _end(self, beside: float) -> None:
        """A layer's experts are done when both processors are."""
        self.timeline.wait_until(beside)
        self._ended = self.timeline.now

    def _attend(self, layer: int, fixed: _Fixed) -> None:
        """What comes before a layer's routing."""
        self.timeline.compute(f"layer {layer}", fixed.before, layer)
        if self._second is not None and self._ended is not None:
            self.timeline.wait_until(self._ended + self._second.attention)

    def _products(self, load: StepLoad, simulated: SimulatedStep) -> np.ndarray:
        """float64[L, E, 2]: the device's seconds with gate and up, and with down, of each
        expert."""
        version = simulated.versions.version
        found = np.zeros((*load.routed.shape, 2))
        for number, model in enumerate(self._models):
            mine = (load.routed > 0) & (version == number) & ~simulated.placed
            tile = model.chunk if load.rows is None else model.row_tile
            cost = model.step_cost(load.rows)
            seconds = cost.expert + cost.tile * (-(-load.routed[mine] // tile) - 1)
            if self._second is not None:
                seconds = np.maximum(seconds, self._second.accelerator)
            gate_up = seconds * model.shares.gate_up
            found[mine] = np.stack([gate_up, seconds - gate_up], axis=1)
        return found

    # ---- with a queue

    def _queued_layers(self, load: StepLoad, simulated: SimulatedStep, fixed: _Fixed) -> None:
        timeline = self.timeline
        products = self._products(load, simulated)
        moves, looks = _by_layer(simulated.moves), load.looks
        self._look(looks.embedded, 0)
        self._ended = None
        for layer in range(len(products)):
            before, routed, waves, after = moves.get(layer, ((), (), (), ()))
            unseen = bool(layer) or not looks.embedded
            self._look(looks.begin, layer, unseen)
            self._hand(before, looks)
            self._attend(layer, fixed)
            # A list changes the tables.
            self._look(looks.routed, layer, bool(before) or (unseen and not looks.begin))
            self._hand(routed, looks)
            beside = self._beside(layer, load, simulated)
            for wave in waves:
                self._wave(wave, products[layer])
            self._end(beside)
            self._prefetch(after)
            timeline.compute(f"layer {layer} after", fixed.after, layer)
        settled = [row for row, ticket in self._flying.items() if timeline.there(LINK, ticket)]
        for row in settled:
            del self._flying[row]
        timeline.forget(LINK)

    def _look(self, moments: int, layer: int, unseen: bool = True) -> None:
        """Policies are asked while the device waits, and transfers go on. unseen: the tables are
        others than at the moment before, so that the first moment copies them."""
        if moments:
            look, glance = _look_costs(self._models)
            seconds = (look if unseen else glance) + (moments - 1) * glance
            self.timeline.compute("policies", seconds, layer)

    def _hand(self, staged: Sequence[Staged], looks: Looks) -> None:
        """A list from between layers, or none; where nobody looks the step made it itself."""
        if staged:
            if looks.count(1):
                self._list(staged[0].coming)
            self._prefetch(staged)

    def _list(self, layer: int | None) -> None:
        self.timeline.compute("list", max(model.hand for model in self._models), layer)

    def _prefetch(self, staged: Sequence[Staged]) -> None:
        for entry in staged:
            self._submit(entry.layer, entry.expert, entry.version, entry.row, PREFETCH)

    def _wave(self, wave: LayerExperts, products: np.ndarray) -> None:
        """A wave's misses are queued, and its experts computed as they come."""
        layer, hits, needs, through = wave.layer, np.zeros(2), [], []
        each = zip(*(values.tolist() for values in wave[1:]), strict=True)
        for expert, missing, row, version in each:
            if row < 0:
                through.append((expert, version))
                continue
            if missing:
                self._submit(layer, expert, version, row, DEMAND)
            if row in self._flying:
                needs.append(Need(self._flying[row], *products[expert].tolist()))
            else:
                hits += products[expert]
        needs = [need for need in needs if not self._come(need, hits)]
        cost = LayerCost(0.0, *hits.tolist())
        read = self._read(layer, through, products)
        self.timeline.experts(layer, cost, LINK, needs, read, BUFFERS)

    def _come(self, need: Need, hits: np.ndarray) -> bool:
        """Whether a prefetch is there; then it is one of the hits."""
        if there := self.timeline.there(LINK, need.ticket):
            hits += need.gate_up, need.down
        return there

    def _read(
        self, layer: int, through: Sequence[tuple[int, int]], products: np.ndarray
    ) -> Iterator[Need]:
        """Experts (and their versions) without a cell, queued into the next buffer when taken."""
        for i, (expert, version) in enumerate(through):
            row = -1 - i % BUFFERS
            self._submit(layer, expert, version, row, DEMAND)
            yield Need(self._flying[row], *products[expert].tolist())

    def _submit(self, layer: int, expert: int, version: int, row: int, cause: str) -> None:
        """Queues a transfer into a cell. One that flies there already is taken back, or awaited
        where it has begun."""
        timeline = self.timeline
        if (ticket := self._flying.get(row)) is not None and not timeline[LINK].cancel(ticket):
            timeline.wait(LINK, ticket, layer=layer)
        third = self._models[version].expert_bytes // 3
        parts = third, third, self._models[version].expert_bytes - 2 * third
        transfer = Transfer(layer, expert, version, row, cause)
        self._flying[row] = timeline.submit(LINK, transfer, parts)


def _look_costs(models: Sequence[CostModel]) -> tuple[float, float]:
    """Seconds of a moment that sees a copy of the tables, and of one that sees them as before."""
    return max(model.look for model in models), max(model.glance for model in models)


def _by_layer(
    moves: Sequence[LayerExperts | Staged],
) -> Mapping[int, tuple[list[Staged], list[Staged], list[LayerExperts], list[Staged]]]:
    """Layer → what was queued before it, behind its router, its waves, what was queued after it."""
    found: dict[int, tuple[list, list, list, list]] = {}
    for move in moves:
        if isinstance(move, LayerExperts):
            layer, place = move.layer, 2
        elif move.coming is None:
            layer, place = move.layer, 3
        else:
            layer, place = move.coming, 1 if move.routed else 0
        found.setdefault(layer, ([], [], [], []))[place].append(move)
    return found
