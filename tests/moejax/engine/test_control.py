"""The border between an engine and its policies: what a control hands over, and when."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.control import Control, Moved
from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Stage
from host_offload.control.step_record import StepRecord, StepRows
from host_offload.memory.tables import empty_tables, snapshot
from moejax.engine.control import layer_hooks
from moejax.step.programs import STAGES, ProgramKey
from moejax.step.runner import Runner
from tests.host_offload.control.policy_runs import (
    EXPERTS,
    LAYERS,
    record,
    scripted,
    seen,
    spec,
    use,
)

NO_ROWS = StepRows(*np.zeros((4, 0), np.int32))


class FakeRunner:
    driver, layer_versions = "device", None
    set_tables, seen = Runner.set_tables, Runner.seen
    prepare, snapshot, stage_list = Runner.prepare, Runner.snapshot, Runner.stage_list
    keep_settled, queue = Runner.keep_settled, None
    hold_maps, maps = Runner.hold_maps, None

    def __init__(self):
        self.transfers = []
        self.tables = empty_tables(LAYERS, EXPERTS, 8)
        rows = jnp.arange(LAYERS * 8, dtype=jnp.int32).reshape(LAYERS, 8)
        self.tables = self.tables._replace(cell_row=rows)
        self.prepared: list[str] = []

    def need(self, *keys):
        self.prepared += map(str, keys)

    def prepare_stages(self):
        self.need("decode_staged", "prefill_staged")

    def _call(self, key, tables):
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


def test_what_a_control_hands_over():
    needs = {"running", "kv_used", "bucket", "compiled", "position", "cells"}
    start = {(Moment.STEP_BEGIN, 0): Decision(stages=(Stage(0, 4), Stage(1, 5)))}
    policy = scripted(
        start, moments={Moment.STEP_BEGIN, Moment.STEP_END}, needs=needs, writes={"stages", "prior"}
    )
    runner: Any = FakeRunner()
    control = Control(runner, Controller(spec(), [policy]))
    assert runner.prepared == ["snapshot", "decode_staged", "prefill_staged"]
    assert layer_hooks(control, runner) is None
    entries = runner.stage_list(control.before_step(0))
    assert entries is not None
    assert all(field.dtype == np.int32 and field.shape == (STAGES,) for field in entries)
    assert entries.layer.tolist() == [0, 1] + [-1] * (STAGES - 2)
    assert entries.expert.tolist()[:2] == [4, 5] and entries.cell.tolist()[:2] == [0, 0]
    # The dispatch failed: the next step gets them.
    again = runner.stage_list(control.before_step(1))
    assert again is not None and again.expert.tolist() == entries.expert.tolist()
    control.after_dispatch(1)
    assert runner.stage_list(control.before_step(2)) is None
    control.after_dispatch(2)
    control.after_read(step_record(1, staged=np.array([1, 0] + [0] * 6)))
    (last,) = [o for o in seen(control.controller) if o.moment == Moment.STEP_END]
    assert (last.step, last.age, last.seconds) == (1, 1, 0.5)
    assert (last.running, last.kv_used, last.bucket, last.compiled) == (2, 3, 4, False)
    assert last.position.tolist() == [7] and (last.cells == 8).all()
    counts = control.controller.stats()["transfers"]["prefetch"]
    assert (counts["done"], counts["skipped"], counts["issued"]) == (1, 1, 2)
    assert set(control._snapshots) == {2}


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


@pytest.mark.parametrize("can", [False, True, None])
def test_a_budget_goes_to_the_engine(can):
    start = {(Moment.STEP_END, 0): Decision(cells=np.array([2, 3]))}
    policy = scripted(start, needs={"cells"}, writes={"cells"})
    runner: Any = FakeRunner()
    asked = []

    class Resizer:
        def move(self, cells, kv_pages) -> Moved:
            asked.append((cells, kv_pages))
            return Moved(bool(can), bool(can))

        def limit(self, max_running): ...

    resizer = None if can is None else Resizer()
    control = Control(runner, Controller(spec(), [policy]), resizer)
    control.before_step(0)
    control.after_dispatch(0)
    control.after_read(step_record(0))
    control.before_step(1)
    assert control.controller.stats()["budget_deferred"] == (0 if can else 1)
    if can is not None:
        ((cells, pages),) = asked
        assert cells.tolist() == [2, 3] and pages is None
