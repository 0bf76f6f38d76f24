"""Policies beside a real engine: same bits, transfers carried out, nothing compiled on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from examples.recent_prefetch import RecentPrefetch
from host_offload.control.control import Control, Moved
from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.control.step_record import StepRecord, StepRows
from host_offload.memory.tables import empty_tables, snapshot
from host_offload.policies.eviction.hot_table import HotTable
from moejax import LLM, SamplingParams
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
from tests.moejax.engine_runs import Job, run

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
JOBS = [Job(tuple(range(7 * i + 5, 7 * i + 25 + 40 * i)), GREEDY, arrival=15 * i) for i in range(3)]


# One expert budget for all, the tutorial's: one set of compiled executables.
def make_llm(**options) -> LLM:
    return LLM("demo", dtype="float32", progress=False, **{**LIMITS, **options})


# ---- the device driver


@pytest.fixture(scope="module")
def llm():
    """FIFO and the tutorial's policy, half of the experts."""
    policies = [RecentPrefetch()]
    with make_llm(expert_budget="40%", eviction="fifo", policies=policies) as llm:
        yield llm


@pytest.mark.slow
def test_policies_change_no_bit_and_break_no_table(llm):
    """Against the same engine without control; every invariant is checked after every step."""
    engine = llm.engine
    control, engine.control = engine.control, None
    alone = run(llm, JOBS, check=False)
    engine.control = control
    compiled = set(engine.runner.executables())
    for got, want in zip(run(llm, JOBS), alone, strict=True):
        assert got.same_bits(want)
    transfers = llm.stats()["control"]["transfers"]["recent"]
    assert transfers["done"] > 0 and transfers["issued"] == transfers["done"] + transfers["skipped"]
    assert transfers["bytes"] == transfers["done"] * llm.engine.runner.layout.records[0].nbytes
    np.testing.assert_array_equal(engine.runner.tables.victim_weights, [0, 0, 1])
    assert np.asarray(engine.runner.tables.prior).max() == llm.config.num_experts
    # The integrity check belongs to this test, all else was there before.
    assert set(engine.runner.executables()) - compiled <= {ProgramKey("integrity")}
    assert {"decode_staged", "prefill_staged", "snapshot"} <= {*map(str, compiled)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"driver": "host", "placement": "fiddler-code,STATED"}])
def test_a_hot_table_in_the_engine(options):
    """One layer's experts are used more than all others': its cells become more, no bit changes,
    and nobody else comes in."""
    stated = "per_token=1us,startup=1us,load=4us,accelerator=1us,attention=1us"
    options = {k: v.replace("STATED", stated) for k, v in options.items()}
    counts = np.ones((4, 16), int)
    counts[2] += 9
    table = HotTable(counts=tuple(tuple(c) for c in counts.tolist()))
    params = dataclasses.replace(GREEDY, max_tokens=24)
    with make_llm() as llm:
        (wanted,) = llm.generate([[5, 6, 7]], params)
    with make_llm(expert_budget="40%", policies=[table], **options) as llm:
        before = cells_of(llm)
        for _ in range(3):
            (found,) = llm.generate([[5, 6, 7]], params)
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert cells_of(llm)[2] == 16 > before[2] and cells_of(llm).sum() == before.sum()
        runner = llm.engine.runner
        assert (np.asarray(runner.tables.address)[2] >= 0).all() and not runner.faults()


def cells_of(llm) -> np.ndarray:
    return np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1)


# ---- the host driver


@dataclasses.dataclass(frozen=True)
class NextLayer:
    """Stages in the layer after the one just routed the experts of the same ids."""

    layers: int = 4

    moments: frozenset = frozenset({Moment.ROUTED, Moment.TRANSFER, Moment.STEP_END})
    needs: frozenset = frozenset({"ids", "finished", "in_flight"})
    writes: frozenset = frozenset({"stages"})

    def init(self, spec: Spec) -> tuple:
        return ()

    def decide(self, state: tuple, observation: Observation):
        state = (*state, (observation.moment, observation.layer, observation.finished))
        if observation.moment != Moment.ROUTED or observation.layer == self.layers - 1:
            return state, Decision()
        assert observation.ids is not None and observation.ids.shape[1] == 1
        wanted = (Stage(observation.layer + 1, int(e)) for e in np.unique(observation.ids))
        return state, Decision(stages=tuple(wanted))


# ---- the border itself


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


def test_the_tutorial_shows_the_file_that_runs(repository):
    page = (repository / "docs" / "write_a_policy.md").read_text()
    source = (repository / "examples" / "recent_prefetch.py").read_text()
    (shown,) = re.findall(r"```python\n(import dataclasses.*?)```", page, re.DOTALL)
    body = source[source.index("import dataclasses") : source.index('if __name__ == "__main__"')]
    assert shown.strip() == body.strip()


def test_the_tutorials_file_runs_as_a_script(llm, repository, capsys, monkeypatch):
    """On the engine at hand, which has the same policy and budget."""
    path, asked = repository / "examples" / "recent_prefetch.py", {}

    def at_hand(model, **options):
        asked.update(options, model=model)
        return contextlib.nullcontext(llm)

    monkeypatch.setattr(moejax, "LLM", at_hand)
    monkeypatch.setitem(sys.modules, "example", module := types.ModuleType("example"))
    module.__dict__["__name__"] = "__main__"
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    assert asked["model"] == "demo" and asked["expert_budget"] == "40%"
    assert [type(policy).__name__ for policy in asked["policies"]] == ["RecentPrefetch"]
    assert "'recent': {'issued'" in capsys.readouterr().out
