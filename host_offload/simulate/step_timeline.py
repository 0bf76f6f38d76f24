"""Steps on a timeline: what they compute and move, when the device, the link and a miss allow it.

Without a link the experts of a layer move within its step, as in an engine without a queue: the
device does nothing else meanwhile. With a link they are queued, as in an engine with a queue.
Misses of a layer are demands from its router on, staged experts are prefetches, and the device
waits only for the part of an expert that it computes with next (docs/explanation/transfers.md). A
second processor computes its experts from the router on, one after the other, and the layer ends
when both processors are done (docs/explanation/prescope.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from host_offload.policies.placement.presched import PlacementCosts, queue_of
from host_offload.queue.transfer import DEMAND, Transfer
from host_offload.simulate.simulated_engine import SimulatedStep, Staged
from host_offload.simulate.timeline import CPU, Link, Need, Timeline
from host_offload.sizing.cost_model import CostError, RunCosts, Work
from host_offload.traces.step_sets import in_waves

PREFETCH = "prefetch"

OUTSIDE = 0.25
"""Share of StepCost.step before the first layer and after the last one. It is assumed, not
measured."""


class StepLoad(NamedTuple):
    """The load of a step."""

    work: Work
    """Work of the step, without experts and tiles."""
    rows: int | None
    """Rows of a decode executable; None: a prefill step."""
    routed: np.ndarray
    """int[L, E]: rows of each expert."""
    control: float
    """Seconds for what policies look at before the step."""
    look: float
    """Seconds for what policies look at between layers, in each layer."""


class StepTimeline:
    """Plays one step after the other from time 0 on.

    - `link`: of the engine's queue; None: it has no queue.
    - `second`: costs that a placement uses, whose β and C are the second processor's, t_g and
      t_attn the least that the device takes; None: no second processor.
    - `record`: whether the timeline keeps its events.

    Raises QueueError for an impossible link.
    """

    def __init__(
        self, costs: RunCosts, link: Link | None, *, second: PlacementCosts | None, record: bool
    ):
        self.timeline = Timeline(link, record=record)
        self._costs, self._queued, self._second = costs, link is not None, second
        self._flying: dict[int, int] = {}
        """Ticket of the transfer that writes a cell, by the cell's arena row."""

    def play(self, load: StepLoad, step: SimulatedStep) -> float:
        """Returns the seconds of a step from the end of the previous one, in whole nanoseconds."""
        timeline, began = self.timeline, self.timeline.now
        layers, costs = len(load.routed), self._costs
        cost = costs.fixed_cost(load.work, load.rows, step.version[step.active])
        outside = cost.step * OUTSIDE
        attend = (cost.seconds(load.work) - outside) / layers
        products = self._products(load, step)
        moves = np.zeros((3, layers))
        if not self._queued:
            moves = costs.moves_s(step.moves, load.rows)
        ended = None
        timeline.compute("policies", load.control)
        timeline.compute("begin", outside / 2)
        for layer in range(layers):
            queued = [move for move in step.stages if move.coming == layer]
            self._prefetch(move for move in queued if not move.routed)
            timeline.compute(f"layer {layer}", attend, layer)
            if self._second is not None and ended is not None:
                timeline.wait_until(ended + self._second.attention)
            timeline.compute("policies", load.look, layer)
            self._prefetch(move for move in queued if move.routed)
            done = self._begin_beside(layer, load, step)
            for name, seconds in zip(("fill", "read_through"), moves[:2, layer], strict=True):
                timeline.compute(f"layer {layer} {name}", float(seconds), layer)
            here = (step.active & ~step.placed)[[layer]]
            for wave in in_waves(here, step.waves if self._queued else 1):
                self._compute_wave(layer, wave[0], step, products[layer])
            timeline.wait_until(done)
            ended = timeline.now
            after = (move for move in step.stages if move.coming is None and move.layer == layer)
            self._prefetch(after)
            timeline.compute(f"layer {layer} stage", float(moves[2, layer]), layer)
        timeline.compute("end", outside / 2)
        settled = [row for row, ticket in self._flying.items() if timeline.is_there(ticket)]
        for row in settled:
            del self._flying[row]
        timeline.drop_settled()
        return round(timeline.now - began, 9)

    def _products(self, load: StepLoad, step: SimulatedStep) -> np.ndarray:
        """Returns the device's seconds for each expert, float64[L, E]."""
        routed = np.where(step.placed, 0, load.routed)
        found = self._costs.products(routed, step.version, load.rows)
        if self._second is None:
            return found
        return np.where(routed > 0, np.maximum(found, self._second.accelerator), 0.0)

    def _begin_beside(self, layer: int, load: StepLoad, step: SimulatedStep) -> float:
        """Starts the second processor on its experts of a layer; returns when it is done."""
        now, rows = self.timeline.now, np.where(step.placed[layer], load.routed[layer], 0)
        if not rows.any():
            return now
        if self._second is None:
            raise CostError(
                "a second processor computes experts, and nothing says what it takes: name the "
                "placement with its costs (placement=...)"
            )
        done = now + self._second.on_cpu(queue_of(layer, rows, np.zeros(len(rows), bool)))
        self.timeline.add_event(CPU, f"layer {layer}", now, done)
        return done

    # ---- with a queue

    def _prefetch(self, staged: Iterable[Staged]) -> None:
        if self._queued:
            for move in staged:
                self._submit(move.layer, move.expert, move.version, move.row, PREFETCH)

    def _compute_wave(
        self, layer: int, due: np.ndarray, step: SimulatedStep, products: np.ndarray
    ) -> None:
        """Queues a wave's misses and computes its experts (bool[E]) as they come: first those in
        memory, including arrived prefetches."""
        seconds, needs = 0.0, []
        if not self._queued:
            return self.timeline.compute_experts(layer, float(products[due].sum()), ())
        for expert in np.flatnonzero(due).tolist():
            row = int(step.row[layer, expert])
            ticket = self._flying.get(row) if row >= 0 else None
            if step.missed[layer, expert]:
                version = int(step.version[layer, expert])
                # An expert without a cell passes through its own buffer.
                place = row if row >= 0 else -1 - expert
                ticket = self._submit(layer, expert, version, place, DEMAND)
            if ticket is None or self.timeline.is_there(ticket):
                seconds += float(products[expert])
            else:
                needs.append(Need(ticket, float(products[expert])))
        self.timeline.compute_experts(layer, seconds, needs)

    def _submit(self, layer: int, expert: int, version: int, row: int, cause: str) -> int:
        """Queues a transfer into a cell. An earlier transfer into that cell is cancelled, or
        awaited if it has begun."""
        timeline = self.timeline
        if (ticket := self._flying.get(row)) is not None and not timeline.cancel(ticket):
            timeline.wait(ticket, layer=layer)
        transfer = Transfer(layer, expert, version, row, cause)
        ticket = timeline.submit(transfer, self._costs.models[version].expert_bytes)
        self._flying[row] = ticket
        return ticket
