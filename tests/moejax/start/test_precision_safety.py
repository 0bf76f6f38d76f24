"""Transitions in the engine: whatever they do and when, every entry's bytes are its version's, and
bits follow from the history of versions alone (papers.md 2.7, items 1, 2 and 6)."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec, State, Transition
from host_offload.memory.placement import place, resident_spec
from host_offload.memory.tables import empty_tables, with_contents
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from moejax.engine.control import control_of
from moejax.step.compiler import compiler_options
from moejax.step.programs import ProgramKey
from moejax.traces.tracer import start_trace
from scripts.parts.controllers import start_controller
from tests.hlo import arena_copies, read_executable
from tests.moejax.engine_runs import run
from tests.moejax.start.precision_engines import EXPERTS, JOBS, LAYERS, LIMITS, start_precision
from tests.moejax.step.test_constant_memory import nbytes

pytestmark = pytest.mark.slow
SLOTS = 20
"""Of the slots, 14 experts can be dense while 18 are int4, with a spare cell of each."""

LOW = np.ones((LAYERS, EXPERTS), np.int8)


@dataclasses.dataclass(frozen=True)
class Restless:
    """Wants another random high set every few steps, sometimes more than fit."""

    seed: int = 0
    every: int = 2
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"version", "state"})
    writes: frozenset[str] = frozenset({"transitions"})

    def init(self, spec: Spec) -> tuple[int, int]:
        assert spec.capacity is not None
        return 0, spec.capacity[0]

    def decide(self, state, observation: Observation):
        calls, most = state
        if calls % self.every:
            return (calls + 1, most), Decision()
        rng = np.random.default_rng((self.seed, calls))
        seen: Any = observation
        wanted = np.ones(seen.version.size, int)
        wanted[rng.permutation(wanted.size)[: rng.integers(most + 3)]] = 0
        wanted = wanted.reshape(seen.version.shape)
        heading = np.where(seen.state == State.PROMOTING, 0, seen.version)
        heading = np.where(seen.state == State.DEMOTING, 1, heading)
        queue = [
            Transition(int(layer), int(expert), int(wanted[layer, expert]))
            for layer, expert in rng.permutation(np.argwhere(heading != wanted))
        ]
        return (calls + 1, most), Decision(transitions=tuple(queue))


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Wants, after each step that was read, what was wanted then in another run."""

    queues: tuple[tuple[Transition, ...] | None, ...]
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"transitions"})

    def init(self, spec: Spec) -> int:
        return 0

    def decide(self, state: int, observation: Observation):
        return state + 1, Decision(transitions=self.queues[state])


@dataclasses.dataclass(frozen=True)
class Idle(Restless):
    """Wants, again and again, every expert in the version that it has."""

    def decide(self, state, observation: Observation):
        versions = np.ndenumerate(np.asarray(observation.version))
        queue = tuple(Transition(layer, e, int(version)) for (layer, e), version in versions)
        return state, Decision(transitions=queue)


def started(driver: str, precision: Precision, slots: int = SLOTS):
    return start_precision(driver, precision, LIMITS, layers=LAYERS, slots=slots)


MIXED = precision_of("dynaexq")


@pytest.fixture(scope="module", params=["device", pytest.param("host", marks=pytest.mark.nightly)])
def engine(request):
    engine = started(request.param, MIXED)
    yield engine
    engine.runner.delete()


def played(
    engine,
    start: np.ndarray,
    policy=None,
    directory=None,
    slots: int = SLOTS,
    watch=True,
) -> SimpleNamespace:
    """The jobs from this start under a policy (None: nothing watches), as tokens and logits, with
    the versions after each step. watch: every step is waited for and looked at."""
    runner = engine.runner
    where = resident_spec(runner.layout, slots, start)
    tables = empty_tables(LAYERS, EXPERTS, where.cell_bound)
    runner.tables = with_contents(runner.tables, tables._asdict())
    runner.place(place(where))
    engine.control, engine._steps, versions = None, itertools.count(), []
    control: Any = None
    tracer = None
    if policy is not None:
        controller = start_controller(runner, [policy], max_model_len=192, seed=0, resident=where)
        control = engine.control = control_of(runner, controller)
        dispatched = control.after_dispatch

        def watched(number: int) -> None:
            dispatched(number)
            after = runner.snapshot()()
            versions.append(after.version)
            assert (after.address >= 0).all(), "every expert is resident"
            granted = after.cell_row >= 0
            sizes = np.array([record.nbytes for record in runner.layout.records])
            taken = int(sizes[after.cell_version[granted]].sum())
            said = control.controller.stats()["precision"]
            assert taken <= said["peak_bytes"] <= said["budget_bytes"]
            assert said["budget_bytes"] == slots * runner.layout.slot_bytes

        if watch:
            control.after_dispatch = watched
    if directory is not None:
        settings = {"model": "demo", "eviction": "lru"}
        tracer = start_trace(directory, runner, control.controller.spec, settings=settings)
        control.controller.listener = tracer.event
        engine.tracer = tracer
    llm: Any = SimpleNamespace(engine=engine)
    recorded = run(llm, JOBS, check=watch)
    engine.control = engine.tracer = None
    if tracer is not None:
        control.controller.finish()
        tracer.close()
    stats = None if control is None else control.controller.stats()["precision"]
    return SimpleNamespace(recorded=recorded, versions=versions, stats=stats, control=control)


def same_bits(a, b) -> bool:
    return all(x.same_bits(y) for x, y in zip(a.recorded, b.recorded, strict=True))


def test_every_step_finds_every_expert_complete(engine):
    """run() compares all bytes with the stores after each step."""
    found = played(engine, LOW, Restless())
    assert found.stats["promotions"] > 10 and found.stats["demotions"] > 5
    assert found.stats["deferred"] > 0 and found.stats["moves"] > 0
    assert found.stats["peak_bytes"] <= found.stats["budget_bytes"]
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(found.versions)]
    assert sum(changed) > 5
    # Nor does anything hang on the waiting that looking brings: steps that overlap with what the
    # host does between them have the same bits.
    hurried = played(engine, LOW, Restless(), watch=False)
    assert same_bits(found, hurried) and hurried.stats == found.stats


def test_the_recorded_residency_gives_the_same_bits(engine):
    """What was wanted, played again by a policy that sees nothing."""
    queues: list = []

    @dataclasses.dataclass(frozen=True)
    class Noted(Restless):
        def decide(self, state, observation):
            state, decision = super().decide(state, observation)
            queues.append(decision.transitions)
            return state, decision

    first = played(engine, LOW, Noted(seed=1))
    second = played(engine, LOW, Recorded(tuple(queues)))
    np.testing.assert_array_equal(first.versions, second.versions)
    assert same_bits(first, second)
    other = played(engine, LOW, Restless(seed=2))
    assert not same_bits(first, other)  # int4 is coarse enough to show


@pytest.mark.parametrize("start", ["low", "mixed"])
def test_transitions_that_are_none_give_the_static_bits(engine, start):
    versions = LOW.copy()
    if start == "mixed":
        versions.reshape(-1)[::3] = 0
    static, idle = played(engine, versions), played(engine, versions, Idle())
    assert same_bits(static, idle)
    assert idle.stats["promotions"] == idle.stats["demotions"] == 0
    assert all(np.array_equal(seen, versions) for seen in idle.versions)


def test_a_trace_of_transitions_is_replayed(engine, tmp_path):
    played(engine, LOW, Restless(), directory=tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    found = replay(trace, policies=[Restless()])
    assert found.staged.sum() > 15 and found.misses.sum() == 0
    assert found.control is not None and found.control["precision"]["moves"] > 0


@pytest.mark.parametrize("name", ["move", "populate", "snapshot"])
def test_nothing_of_the_arena_is_copied(engine, name):
    """What runs between steps works in place (contract 3)."""
    runner = engine.runner
    lowered = runner.lower(ProgramKey(name))
    compiled = read_executable(lowered.compile(compiler_options=compiler_options("cpu")))
    assert compiled.copies(runner.arena.nbytes // 2) == arena_copies(compiled, runner.arena) == []
    assert compiled.memory.temp_bytes < runner.arena.nbytes // 2
    if name in ("move", "populate"):
        assert compiled.memory.alias_bytes >= nbytes(runner.arena)
