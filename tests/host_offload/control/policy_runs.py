"""Policies over a simulated pager: what tests of controller and policies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.memory.tables import Residency
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


def facts(*sets: Sequence[int]) -> dict:
    """Facts of a step with one row whose layers were routed to these sets, nothing missed."""
    ids = np.array(sets, np.int16)[None]
    return {
        "ids": ids,
        "weights": np.ones(ids.shape, np.float32),
        "missed": np.zeros((LAYERS, EXPERTS), bool),
        "request": np.array([5], np.int32),
        "phase": np.array([1], np.uint8),
        "running": 1,
    }


class Simulation:
    """Steps of the device in plain Python under a controller, results read `age` steps late."""

    def __init__(self, controller: Controller, cells: int, *, age: int = 1):
        self.controller, self.age = controller, age
        shape = specs.Spec(CELLS, EXPERTS, controller.spec.stage_entries, (1, 1), LAYERS)
        stores = [np.zeros((LAYERS, EXPERTS, 1, shape.hidden), np.uint16) for _ in range(2)]
        self.memory = Memory(shape, [0] * CELLS, stores)
        self.weights = np.array([1, 0, 0], np.int32)
        for layer in range(LAYERS):
            self.memory.regrant(layer, [0 if c < cells else -1 for c in range(CELLS)])
        self.pending: list[dict] = []
        self.missed: list[np.ndarray] = []
        """Per step bool[L, E]."""
        if controller.needs_residency:
            controller.see(self.tables)

    @property
    def tables(self) -> Residency:
        return Residency(*tables_of(self.memory.pagers, self.weights))

    def resident(self, layer: int) -> set[int]:
        return set(np.flatnonzero(self.tables.address[layer] >= 0).tolist())

    def step(self, *sets: Sequence[int]) -> None:
        """One step, each layer routed to its set of as many experts."""
        number, controller = len(self.missed), self.controller
        controller.begin_step(number, seconds=float(number))
        entries = controller.stages(number)
        for name, values in controller.take_update().items():
            if name == "victim_weights":
                self.weights = values
            else:
                for layer, pager in enumerate(self.memory.pagers):
                    setattr(pager, name, values[layer].tolist())
        before, now = self.tables.address, facts(*sets)
        done = np.zeros(len(entries), np.int32)
        for layer, active in enumerate(sets):
            self.memory.pagers[layer].reference(set(map(int, active)), self.weights)
            done |= np.array(self.memory.stage(layer, entries), np.int32)
            needed = np.isin(np.arange(EXPERTS), active)
            now["missed"][layer] = needed & (before[layer] < 0)
        self.missed.append(now["missed"])
        self.pending.append(dict(step=number, facts=now, tables=self.tables, staged=done))
        if len(self.pending) > self.age:
            self.read()

    def read(self) -> None:
        """Reads the oldest step that is under way."""
        step = self.pending.pop(0)
        age = len(self.pending)
        self.controller.end_step(**step, age=age, seconds=float(step["step"]))


def random_sets(rng: np.random.Generator, steps: int, size: int = 2) -> list[list[list[int]]]:
    """Per step and layer so many experts, a few of them popular."""
    popular = 1 / np.arange(1, EXPERTS + 1)
    p = popular / popular.sum()
    return [
        [rng.choice(EXPERTS, size, replace=False, p=p).tolist() for _ in range(LAYERS)]
        for _ in range(steps)
    ]
