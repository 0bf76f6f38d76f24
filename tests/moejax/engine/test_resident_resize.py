"""The line between KV and experts moves while experts change versions: nothing is lost, and bits
follow from the history of versions alone."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec, State, Transition
from host_offload.control.rules import PolicyError
from host_offload.memory.arena import SlotClass
from host_offload.memory.placement import place, resident_spec
from host_offload.memory.tables import empty_tables, with_contents
from host_offload.policies.precision.names import precision_of
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import SamplingParams
from moejax.engine.control import control_of
from moejax.engine.resize import ResidentResizer
from moejax.start.options import Options
from moejax.traces.tracer import start_trace
from scripts.parts.controllers import start_controller
from tests.moejax.engine_runs import Job, Recorded, run
from tests.moejax.start.precision_engines import start_precision

LAYERS, EXPERTS, LENGTH = 2, 16, 1024
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
JOBS = [
    Job(tuple(range(7 * i + 5, 7 * i + 25 + 30 * i)), GREEDY, arrival=(0, 2, 5, 9)[i])
    for i in range(4)
]
LOW = np.ones((LAYERS, EXPERTS), np.int8)
MIXED = precision_of("dynaexq", hi="dense", lo="int4")
LIMITS = Options(
    "demo",
    max_model_len=LENGTH,
    max_num_seqs=4,
    max_num_batched_tokens=192,
    # A shared prefix was computed in the versions of an earlier run.
    enable_prefix_caching=False,
)
EXPERT_SLOTS = 22
"""Of 10 that all int4 experts take with the spares, so up to 16 of 32 can be dense."""


@dataclasses.dataclass(frozen=True)
class Restless:
    """Wants another random high set every few steps, as many as there is room for; n follows the
    room at once."""

    seed: int = 0
    every: int = 3
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"version", "state", "capacity"})
    writes: frozenset[str] = frozenset({"transitions"})

    def init(self, spec: Spec) -> int:
        return 0

    def decide(self, state: int, observation: Observation):
        seen: Any = observation
        order = np.random.default_rng((self.seed, state // self.every)).permutation(LOW.size)
        wanted = np.ones(LOW.size, int)
        wanted[order[: seen.capacity]] = 0
        wanted = wanted.reshape(LOW.shape)
        heading = np.where(seen.state == State.PROMOTING, 0, seen.version)
        heading = np.where(seen.state == State.DEMOTING, 1, heading)
        queue = [
            Transition(int(layer), int(expert), int(wanted[layer, expert]))
            for layer, expert in np.argwhere(heading != wanted)
        ]
        return state + 1, Decision(transitions=tuple(queue))


@dataclasses.dataclass(frozen=True)
class Line:
    """Wants another number of KV pages every few steps, from the floor to all but the least of
    experts; often before the last wish was carried out."""

    seed: int = 0
    every: int = 4
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"kv_pages"})

    def init(self, spec: Spec) -> tuple[int, int, int, int]:
        assert spec.slot_bytes is not None and spec.resident is not None
        per_slot = spec.slot_bytes // spec.page_bytes
        floor = -(-spec.kv_floor_bytes // (per_slot * spec.page_bytes))
        most = spec.budget_bytes // spec.slot_bytes - spec.resident.least_slots()
        return 0, per_slot, floor, most

    def decide(self, state, observation: Observation):
        calls, per_slot, floor, most = state
        state = calls + 1, per_slot, floor, most
        if calls % self.every:
            return state, Decision()
        slots = np.random.default_rng((self.seed, calls)).choice([floor, (floor + most) // 2, most])
        return state, Decision(kv_pages=int(slots) * per_slot)


def started(driver: str, expert_slots: int = EXPERT_SLOTS):
    return start_precision(driver, MIXED, LIMITS, layers=LAYERS, slots=expert_slots)


@pytest.fixture(scope="module", params=["device", pytest.param("host", marks=pytest.mark.nightly)])
def engine(request):
    engine = started(request.param)
    yield engine
    engine.runner.delete()


def check(engine, control) -> None:
    """The arena is whole: each slot has one owner, experts' cells lie in theirs, within bytes."""
    arena, runner = engine.scheduler.arena, engine.runner
    transitions = control.controller.transitions
    tables = runner.snapshot()()
    assert (tables.address >= 0).all(), "every expert is resident"
    experts = np.flatnonzero(arena.slot_class == SlotClass.EXPERT)
    assert set(transitions.pools.slots) == set(experts.tolist())
    assert len(experts) + arena.count(SlotClass.KV) == arena.slots
    rows = tables.cell_row[tables.cell_row >= 0]
    assert np.isin(rows // arena.layout.slot_rows, experts).all()
    sizes = np.array([record.nbytes for record in runner.layout.records])
    taken = int(sizes[tables.cell_version[tables.cell_row >= 0]].sum())
    said = control.controller.stats()["precision"]
    assert taken <= transitions.used_bytes <= said["budget_bytes"]
    assert said["budget_bytes"] == len(experts) * runner.layout.slot_bytes


def played(engine, policies, *, slots=EXPERT_SLOTS, spares=1, directory=None) -> SimpleNamespace:
    """The jobs from all low under these policies: tokens and logits, versions after each step."""
    runner, arena = engine.runner, engine.scheduler.arena
    kv_slots = arena.slots - slots
    arena.slot_class[arena.slot_class == SlotClass.EXPERT] = SlotClass.FREE
    arena.grant_kv_slots(0)
    arena.grant_expert_slots(slots)
    arena.grant_kv_slots(kv_slots)
    where = resident_spec(runner.layout, slots, LOW, spares=spares)
    tables = empty_tables(LAYERS, EXPERTS, runner.tables.cell_row.shape[1])
    where = dataclasses.replace(where, columns=runner.tables.cell_row.shape[1] - EXPERTS)
    runner.tables = with_contents(runner.tables, tables._asdict())
    runner.place(place(where))
    controller = start_controller(runner, policies, max_model_len=LENGTH, seed=0, resident=where)
    transitions: Any = controller.transitions
    engine.resizer = ResidentResizer(runner, engine.scheduler, transitions=transitions)
    control: Any = control_of(runner, controller, engine.resizer)
    engine.control, engine._steps = control, itertools.count()
    versions, slots_seen, dispatched = [], [], control.after_dispatch

    def watched(number: int) -> None:
        dispatched(number)
        after = runner.snapshot()()
        versions.append(after.version)
        slots_seen.append(control.controller.transitions.slots)
        check(engine, control)

    control.after_dispatch = watched
    tracer = None
    if directory is not None:
        settings = {"model": "demo", "eviction": "lru"}
        tracer = start_trace(directory, runner, control.controller.spec, settings=settings)
        control.controller.listener, engine.tracer = tracer.event, tracer
    recorded = run(SimpleNamespace(engine=engine), JOBS)  # pyright: ignore[reportArgumentType]
    engine.control = engine.tracer = None
    if tracer is not None:
        control.controller.finish()
        tracer.close()
    return SimpleNamespace(
        recorded=recorded,
        versions=versions,
        slots=slots_seen,
        stats=control.controller.stats()["precision"],
        moved=engine.resizer.stats(),
    )


def same_bits(one: list[Recorded], other: list[Recorded]) -> bool:
    return all(a.same_bits(b) for a, b in zip(one, other, strict=True))


@pytest.mark.nightly
def test_versions_and_slots_move_at_once(engine, tmp_path):
    """All bytes are compared with the stores after each step, all books in `check`; the same wishes
    give the same bits, and a replay finds every transfer again."""
    policies = [Restless(), Line()]
    first = played(engine, policies, directory=tmp_path / "t")
    assert first.moved["resizes"] > 1 and first.moved["deferred"] > 2, first.moved
    assert min(first.slots) < EXPERT_SLOTS - 3 and len(set(first.slots)) > 4
    assert first.stats["demotions"] > 8 and first.stats["promotions"] > 8
    shrinks, grows = (np.diff(first.slots) < 0).sum(), (np.diff(first.slots) > 0).sum()
    assert shrinks > 2 and grows > 0
    again = played(engine, policies)
    np.testing.assert_array_equal(first.versions, again.versions)
    assert first.slots == again.slots and same_bits(first.recorded, again.recorded)

    trace = read_trace(tmp_path / "t")
    found = replay(trace, policies=policies)
    assert found.staged.sum() == first.stats["promotions"] + first.stats["demotions"]
    assert found.control is not None
    for name in ("slots", "hi", "moves", "deferred", "budget_bytes"):
        assert found.control["precision"][name] == first.stats[name]
    with pytest.raises(TraceError, match=r"experts come to have|the trace has|no policy wanted"):
        replay(trace, policies=[Restless(), Line(seed=9)])


@pytest.mark.slow
def test_what_experts_cannot_give_is_the_policys_mistake(engine):
    played_once = played(engine, [Restless()])
    assert set(played_once.slots) == {EXPERT_SLOTS}
    arena = engine.scheduler.arena
    with pytest.raises(PolicyError, match="KV slots leave 9 for experts, who need 10"):
        engine.resizer.move(None, (arena.slots - 9) * arena.layout.pages_per_slot)
    with pytest.raises(PolicyError, match="layers have no cells of their own"):
        engine.resizer.move(np.ones(LAYERS, np.int32), None)
