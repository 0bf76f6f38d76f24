"""The border between an engine and its policies: what a control hands over, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from host_offload.control.control import Control
from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Stage
from host_offload.control.step_record import StepRecord, StepRows
from host_offload.memory.tables import empty_tables, snapshot
from moejax.step.executor import Executor
from moejax.step.programs import ProgramKey
from moejax.step.transports.transport import Transport
from tests.host_offload.control.policy_runs import (
    EXPERTS,
    LAYERS,
    record,
    scripted,
    spec,
    use,
)

NO_ROWS = StepRows(*np.zeros((4, 0), np.int32))


class FakeRunner:
    driver, maps = "device", None
    buffers = SimpleNamespace(layer_versions=None)
    set_tables, seen, hold_maps = Executor.set_tables, Executor.seen, Executor.hold_maps
    prepare, snapshot, stage_list = Executor.prepare, Executor.snapshot, Executor.stage_list
    look = Executor.look

    def __init__(self):
        self.transport, self.compiler = Transport(*3 * [None]), self
        self.walk = SimpleNamespace(transfers=[])
        self.tables = empty_tables(LAYERS, EXPERTS, 8)
        rows = jnp.arange(LAYERS * 8, dtype=jnp.int32).reshape(LAYERS, 8)
        self.tables = self.tables._replace(cell_row=rows)
        self.prepared: list[str] = []

    def need(self, *keys):
        self.prepared += map(str, keys)

    def prepare_stages(self):
        self.need("decode_staged", "prefill_staged")

    def call(self, key, tables):
        assert key == ProgramKey("snapshot")
        return snapshot(tables)


def step_record(number: int, staged=None) -> StepRecord:
    return record(
        number,
        start_s=100.0 + number,
        read_s=100.5 + number,
        rows=4,
        compiled=number == 0,
        position=np.array([7]),
        staged=staged,
        use=use(kv_used=3, running=2, waiting=1, waiting_tokens=30),
    )


def test_a_step_that_failed_behind_a_hook_leaves_nothing_to_settle():
    """A hook had returned transfers when the step failed; the next step has none of its own yet."""
    start = {(Moment.LAYER_BEGIN, 0): Decision(stages=(Stage(0, 4),))}
    runner: Any = FakeRunner()
    policy = scripted(start, moments={Moment.LAYER_BEGIN}, writes={"stages"})
    control = Control(runner, Controller(spec(driver="host"), [policy]))
    control.before_step(0)
    (entry,) = control.between_layers(Moment.LAYER_BEGIN, 0, NO_ROWS)
    assert entry.expert == 4
    (again,) = control.before_step(1)
    assert again.expert == 4  # it waited again, and is this step's
    assert control.between_layers(Moment.LAYER_BEGIN, 0, NO_ROWS) == []
    counts = control.controller.stats()["transfers"]["prefetch"]
    assert (counts["issued"], counts["deferred"], counts["skipped"]) == (1, 1, 0)
