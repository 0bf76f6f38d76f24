"""A device in plain Python whose steps run layer by layer under a controller: what the simulator
must do with policies that look between layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Moment
from host_offload.control.step_record import StepRecord
from host_offload.memory.tables import Residency
from host_offload.traces.reader import Trace
from pallas_kernels.stage import specs
from tests.pallas_kernels.pager import tables_of
from tests.pallas_kernels.staged_memory import Memory


class LayeredDevice:
    """Routes what a trace of traces_of.write_trace says, whose steps are read after the next one
    was dispatched. missed: bool[L, E] of each step. staged: how many experts each step was brought
    ahead."""

    def __init__(self, controller: Controller, cells: int):
        self.controller, told = controller, controller.spec
        experts = told.experts
        shape = specs.Spec(experts, experts, told.stage_entries, (1,), told.layers)
        stores = [np.zeros((told.layers, experts, 1, shape.hidden), np.uint16)]
        self.memory = Memory(shape, [0] * experts, stores)
        for layer in range(told.layers):
            self.memory.regrant(layer, [0 if c < cells else -1 for c in range(experts)])
        self.weights = np.array([1, 0, 0], np.int32)
        self.missed: list[np.ndarray] = []
        self.staged: list[int] = []
        self._pending: list[tuple[StepRecord, dict[str, Any]]] = []
        self._seconds, self._handed = 0.0, None
        self._take(controller.take_update())

    def run(self, trace: Trace) -> None:
        for step in trace.step_traces():
            while self._pending and self._pending[0][0].number < step.number - 1:
                self._read(step.number - 1)
            self._dispatch(step)
        last = step.number
        while self._pending:
            self._read(last)
        self.controller.finish()

    @property
    def tables(self) -> Residency:
        return Residency(*tables_of(self.memory.pagers, self.weights))

    def _dispatch(self, step: StepRecord) -> None:
        controller, pagers = self.controller, self.memory.pagers
        if controller.tables is None:
            controller.see(self.tables)
        controller.begin_step(step.number, seconds=self._seconds)
        entries = controller.stages(step.number)
        self._take(controller.take_update())
        self.missed.append(np.zeros((len(pagers), controller.spec.experts), bool))
        self.staged.append(0)
        done = [False] * len(entries)
        for layer, pager in enumerate(pagers):
            self._look(step, layer)
            active = set(step.ids[:, layer].ravel().tolist())
            self.missed[-1][layer, [e for e in active if e not in pager.where]] = True
            pager.reference(active, self.weights)
            here = self.memory.stage(layer, entries)
            done = [a or b for a, b in zip(done, here, strict=True)]
        self.staged[-1] += sum(done)
        if self._handed is not None:
            controller.settle_between_layers(self._handed)
            self._handed = None
        told = {"tables": self.tables, "staged": np.array(done, np.int32) if entries else None}
        self._pending.append((step, told))

    def _look(self, step: StepRecord, layer: int) -> None:
        """The three moments of a layer; a list is carried out at once, for layers to come as if
        their next reference had begun."""
        rows = slice(layer, layer + 1)
        routed = {"ids": step.ids[:, rows], "weights": step.weights[:, rows]}
        routed["gate_input"] = step.gate_input[:, rows]  # type: ignore[index]
        for moment in (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN):
            if moment not in self.controller.moments and self._handed is None:
                continue
            settled, self._handed = self._handed, None
            entries = self.controller.between_layers(
                moment,
                step.number,
                layer,
                seconds=self._seconds,
                facts={} if moment == Moment.LAYER_BEGIN else routed,
                tables=self.tables,
                done=settled,
            )
            self._take(self.controller.take_update())
            if not entries:
                continue
            done = np.zeros(len(entries), np.int32)
            for of, pager in enumerate(self.memory.pagers):
                pager.clock += of >= layer
                done |= np.array(self.memory.stage(of, entries), np.int32)
                pager.clock -= of >= layer
            self._handed = done
            self.staged[-1] += int(done.sum())

    def _read(self, dispatched: int) -> None:
        step, told = self._pending.pop(0)
        self._seconds = step.read_s
        names = ("request", "user", "position", "phase", "ids", "weights", "compiled")
        facts = {name: getattr(step, name) for name in names}
        facts |= {"missed": self.missed[step.number], "bucket": step.rows}
        self.controller.end_step(
            step.number,
            age=dispatched - step.number,
            seconds=self._seconds,
            facts={**facts, "gate_input": step.gate_input},
            finished=step.finished,
            **told,
        )

    def _take(self, contents: dict[str, np.ndarray]) -> None:
        for name, values in contents.items():
            if name == "victim_weights":
                self.weights = values
            else:
                for layer, pager in enumerate(self.memory.pagers):
                    setattr(pager, name, values[layer].tolist())
