"""A device in plain Python whose steps run layer by layer under a controller: what the simulator
must do with policies that look between layers."""

from __future__ import annotations

import numpy as np

from host_offload.control.control import Control
from host_offload.control.controller import Controller
from host_offload.control.interface import Moment
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import LayerRouting, StepRecord, StepRows
from host_offload.traces.reader import Trace
from tests.host_offload.control.policy_runs import MemoryDevice


class LayeredDevice:
    """Routes what a trace of traces_of.write_trace says. A step is read when `age` others were
    dispatched, or before the next one where policies look between layers, as engines do.

    missed: bool[L, E] of each step. staged: how many experts each step was brought ahead.
    """

    def __init__(self, controller: Controller, cells: int, *, age: int = 1):
        told = controller.spec
        self.device = MemoryDevice(told.layers, told.experts, told.stage_entries, cells)
        self.control = Control(self.device, controller)
        self.missed: list[np.ndarray] = []
        self.staged: list[int] = []
        self._pending: list[StepRecord] = []
        self._age = age
        self._between = bool(controller.moments & BETWEEN_LAYERS)

    def resident(self, layer: int) -> set[int]:
        return {*np.flatnonzero(self.device.tables.address[layer] >= 0).tolist()}

    def run(self, trace: Trace) -> None:
        for step in trace.step_traces():
            while self._pending and (
                self._between or self._pending[0].number < step.number - self._age
            ):
                self.control.after_read(self._pending.pop(0))
            self._dispatch(step)
        while self._pending:
            self.control.after_read(self._pending.pop(0))
        self.control.controller.finish()

    def _dispatch(self, step: StepRecord) -> None:
        control, device = self.control, self.device
        entries = control.before_step(step.number)
        self.staged.append(0)
        missed, done = [], np.zeros(len(entries), np.int32)
        for layer in range(step.ids.shape[1]):
            if self._between:
                self._look(step, layer)
            missed.append(device.reference(layer, step.ids[:, layer].ravel().tolist()))
            done |= device.stage(layer, entries)
        self.missed.append(np.array(missed))
        self.staged[-1] += int(done.sum())
        control.after_dispatch(step.number)
        found = step._replace(missed=self.missed[-1], staged=done if entries else None)
        self._pending.append(found._replace(start_s=0.0))

    def _look(self, step: StepRecord, layer: int) -> None:
        """The three moments of a layer, of the first also EMBEDDED; a list is carried out at
        once."""
        if layer == 0:
            self._ask(Moment.EMBEDDED, -1, step, None)
        rows = slice(layer, layer + 1)
        assert step.gate_input is not None and step.probabilities is not None
        scores = step.probabilities[:, rows]
        parts = step.ids[:, rows], step.weights[:, rows], scores, step.gate_input[:, rows]
        for moment in (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN):
            routing = None if moment == Moment.LAYER_BEGIN else LayerRouting(*parts)
            self._ask(moment, layer, step, routing)

    def _ask(
        self, moment: Moment, layer: int, step: StepRecord, routing: LayerRouting | None
    ) -> None:
        rows = StepRows(*(getattr(step, name) for name in StepRows._fields))
        if entries := self.control.between_layers(moment, layer, rows, routing):
            self.staged[-1] += self.device.carry_out(entries, coming=max(layer, 0))
