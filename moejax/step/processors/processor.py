"""A second processor, which computes missed experts that a policy gives it, beside the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from moejax.step.buffers import Buffers
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import Routing
from pallas_kernels.cpu.arena import TransferFailure

Parts = dict[tuple[str | None, int | None], Callable]
"""(part of a step, run of equal layers) → its executable."""


class LayerInputs(NamedTuple):
    """What a layer's experts are computed from."""

    step: ProgramKey
    layer: int
    x: jax.Array
    """[T, D]: the residual stream after attention."""
    normed: jax.Array
    """[T, D]: what the experts compute on."""
    routing: Routing


@dataclasses.dataclass
class PlacementTotals:
    """What both processors did so far. Seconds are from when a layer's experts begin on both."""

    layers: int = 0
    """Those in which the second processor had experts, in all steps."""
    experts: int = 0
    rows: int = 0
    """What they computed."""
    accelerator_s: float = 0.0
    """Until the accelerator was done, in those layers."""
    second_s: float = 0.0
    """Until the second processor was."""
    both_s: float = 0.0
    """While both were at work."""
    gap_s: float = 0.0
    """From when one was done to when the other was."""
    most_gap_s: float = 0.0
    between: int = 0
    """Pairs of layers, one after the other in a step, and below what passed between them."""
    between_s: float = 0.0
    """From when both were done to when the next layer's experts began."""
    decided_s: float = 0.0
    """The part of it in which policies were asked, and both were told."""

    def add(self, experts: int, rows: int, began: float, ended: tuple[float, float]) -> None:
        """A layer. ended: when the accelerator and the second processor were done."""
        accelerator, second = (end - began for end in ended)
        gap = abs(accelerator - second)
        self.layers += 1
        self.experts += experts
        self.rows += rows
        self.accelerator_s += accelerator
        self.second_s += second
        self.both_s += min(accelerator, second)
        self.gap_s += gap
        self.most_gap_s = max(self.most_gap_s, gap)

    def pass_between(self, passed: float, decided: float) -> None:
        """Two layers, one after the other, in seconds."""
        self.between += 1
        self.between_s += passed
        self.decided_s += decided


class LayerShare(NamedTuple):
    """What the second processor gets of a layer."""

    rows: np.ndarray
    """int[E]: of each expert."""
    beside: np.ndarray
    """bool[E]: the experts that it computes."""
    order: np.ndarray
    """int32[E]: in which the others are brought, lowest first."""

    @property
    def experts(self) -> Sequence[int]:
        return np.flatnonzero(self.beside).tolist()

    @property
    def row_count(self) -> int:
        """Of its experts."""
        return int(self.rows[self.beside].sum())


class Assignments:
    """What policies gave the second processor in the running step, and what it computed."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._assigned: tuple[int, np.ndarray, np.ndarray] | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self._assigned = None
        self.placed = np.zeros(self._buffers.tables.address.shape, bool)
        """[L, E]: experts that the second processor computed."""

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """As of host_offload.control.control.Device."""
        self._assigned = layer, beside, order

    def share(self, parts: Parts, layer: int, ids: np.ndarray) -> LayerShare:
        """What it gets of a layer. Waits for the tables where a policy gave it any.

        - `ids`: int[T, K], the layer's routing.
        """
        experts = self.placed.shape[1]
        rows = np.bincount(ids.ravel(), minlength=experts + 1)[:experts]
        beside, order = np.zeros(experts, bool), np.zeros(experts, np.int32)
        if self._assigned is not None and self._assigned[0] == layer:
            _, wanted, order = self._assigned
            # What is resident stays where it is, also what came since the policy looked.
            if np.any(wanted):
                number = self._buffers.numbers[layer]
                absent = parts["absent", None](self._buffers.tables, number)
                beside = wanted & (rows > 0) & np.asarray(absent)
        return LayerShare(rows, beside, order.astype(np.int32))


class Processor(Protocol):
    """Computes experts beside the device."""

    assignments: Assignments

    @property
    def totals(self) -> PlacementTotals: ...

    def begin_step(self) -> None: ...

    def dispatch_routing(self, normed: jax.Array) -> None:
        """A layer's routing was dispatched.

        - `normed`: [T, D], what the layer's experts will compute on.
        """
        ...

    def see_routing(self) -> None:
        """The host has a layer's routing, which no hook has seen."""
        ...

    def failures(self, writes: int) -> list[TransferFailure]:
        """As of Transport, of experts that it could not compute."""
        ...

    def wait(self) -> None:
        """Blocks until what it compiles itself is there."""
        ...

    def stop(self) -> None:
        """Before buffers are freed: nobody computes any more."""
        ...

    def close(self) -> None:
        """After that."""
        ...


def settled(future: Future) -> Callable[[], Any]:
    """Waits for it; what gives its result or raises what it raised."""
    future.exception()
    return future.result
