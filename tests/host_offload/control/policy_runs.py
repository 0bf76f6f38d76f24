"""Policies over a simulated pager: what tests of controller and policies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, MapRows, Moment, Observation, Spec
from host_offload.control.step_record import USES, LinkUse, PageUse, StepRecord
from host_offload.memory.tables import Entry, Move, Residency
from pallas_kernels.stage import specs
from tests.pallas_kernels.pager import tables_of
from tests.pallas_kernels.staged_memory import Memory

LAYERS, EXPERTS, CELLS = 2, 8, 8


def spec(**changes) -> Spec:
    """Two layers of eight experts of 100 bytes (`small`: 40), eight cells at most, pages of 10."""
    values = dict(
        layers=LAYERS,
        experts=EXPERTS,
        top_k=2,
        hidden=4,
        page_bytes=10,
        page_tokens=16,
        budget_bytes=1000,
        kv_floor_bytes=50,
        staging_bytes=400,
        seed=0,
        driver="device",
        version_bytes={"dense": np.full(LAYERS, 100), "small": np.full(LAYERS, 40)},
        min_cells=np.zeros(LAYERS, np.int32),
        cell_bound=CELLS,
        stage_entries=4,
    )
    return Spec(**{**values, **changes})


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Decides what a dict says for each (moment, step), and records what it saw as its state."""

    script: dict = dataclasses.field(default_factory=dict)
    moments: frozenset = frozenset({Moment.STEP_END})
    needs: frozenset = frozenset()
    writes: frozenset = frozenset()
    interval: str | None = None
    victim_weights: tuple | None = None

    def init(self, spec: Spec) -> tuple[Observation, ...]:
        return ()

    def decide(self, state, observation: Observation):
        decision = self.script.get((observation.moment, observation.step), Decision())
        return (*state, observation), decision


def scripted(script=None, **fields) -> Scripted:
    names = ("moments", "needs", "writes")
    return Scripted(
        script or {}, **{k: frozenset(v) if k in names else v for k, v in fields.items()}
    )


def seen(controller: Controller, policy: int = 0) -> tuple[Observation, ...]:
    """What a Scripted policy of the controller saw so far."""
    return controller._seats[policy].state


def record(number: int = 0, *sets: Sequence[int], **fields: Any) -> StepRecord:
    """Of a step with one row whose layers were routed to these sets, nothing missed; what is not
    said is not known."""
    ids = np.array(sets or ((0, 1), (2, 3)), np.int16)[None]
    known = dict(
        number=number,
        ids=ids,
        weights=np.ones(ids.shape, np.float32),
        missed=np.zeros((LAYERS, EXPERTS), bool),
        request=np.array([5], np.int32),
        phase=np.array([1], np.uint8),
        use=use(running=1),
        finished=(),
    )
    return StepRecord(**{**dict.fromkeys(StepRecord._fields), **known, **fields})


def use(**known: int) -> np.ndarray:
    """StepRecord.use."""
    return np.array(dataclasses.astuple(PageUse(**{**dict.fromkeys(USES, -1), **known})))


class MemoryDevice:
    """A host_offload.control.control.Device in plain Python: tables and bytes of every cell."""

    def __init__(self, layers: int, experts: int, entries: int, cells: int):
        shape = specs.Spec(experts, experts, entries, (1, 1), layers)
        stores = [np.zeros((layers, experts, 1, shape.hidden), np.uint16) for _ in range(2)]
        self.memory = Memory(shape, [0] * experts, stores)
        self.weights = np.array([1, 0, 0], np.int32)
        for layer in range(layers):
            self.memory.regrant(layer, [0 if c < cells else -1 for c in range(experts)])
        self._done = np.zeros(0, np.int32)

    @property
    def tables(self) -> Residency:
        return Residency(*tables_of(self.memory.pagers, self.weights))

    def prepare(self, controller: Controller) -> None: ...

    def link_use(self) -> LinkUse:
        return LinkUse()

    def snapshot(self) -> Callable[[], Residency]:
        tables = self.tables
        return lambda: tables

    def look(self) -> Residency:
        return self.tables

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        for name, values in contents.items():
            if name == "victim_weights":
                self.weights = values
            else:
                for layer, pager in enumerate(self.memory.pagers):
                    setattr(pager, name, values[layer].tolist())

    def write_maps(self, rows: MapRows) -> None:
        raise AssertionError("no step searches maps")

    def move_cells(self, moves: Sequence[Move]) -> None:
        raise AssertionError("experts are paged")

    def carried_out(self) -> np.ndarray:
        return self._done

    def carry_out(self, entries: Sequence[Entry], coming: int) -> int:
        """At once, for layers to come as if their next reference had begun; how many were."""
        self._done = np.zeros(len(entries), np.int32)
        for layer, pager in enumerate(self.memory.pagers):
            pager.clock += layer >= coming
            self._done |= np.array(self.memory.stage(layer, entries), np.int32)
            pager.clock -= layer >= coming
        return int(self._done.sum())

    def reference(self, layer: int, active: Iterable[int]) -> np.ndarray:
        """A layer's experts are computed; bool[E]: who of them was missing."""
        pager, active = self.memory.pagers[layer], {int(e) for e in active}
        missing = np.array(
            [e in active and e not in pager.where for e in range(len(pager.version))]
        )
        pager.reference(active, self.weights)
        return missing

    def stage(self, layer: int, entries: Sequence[Entry]) -> np.ndarray:
        """A layer's part of a list, behind its experts."""
        return np.array(self.memory.stage(layer, entries), np.int32)
