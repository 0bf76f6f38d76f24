"""A trace replayed by the simulator is what the engine did: every count, byte and decision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.interface import Decision, Moment, Policy, Spec, Stage
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import USES
from host_offload.memory.arena import SlotClass
from host_offload.memory.tables import empty_tables, with_contents
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.eviction.static import Static
from host_offload.policies.prefetch.names import PREFETCH
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.writer import TraceWriter
from moejax import LLM, SamplingParams
from moejax.engine.control import control_of, layer_hooks, spec_of_engine
from moejax.traces.tracer import start_trace
from scripts.parts.controllers import start_controller
from tests.faults import Faults, inject
from tests.host_offload.control.erratic_policy import Erratic
from tests.host_offload.control.policy_runs import scripted
from tests.moejax.engine.scenes import LIMITS, at_rest, open_llm, same_bits
from tests.moejax.engine.test_control import NextLayer
from tests.moejax.engine_runs import Job, mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
JOBS = [
    Job(tuple(range(7 * i + 5, 7 * i + 25 + 40 * i)), GREEDY, arrival=(0, 12, 60)[i])
    for i in range(3)
]
"""The last one arrives when nothing is left to do, so a step is read before the next is made."""

OWN: dict[str, tuple[Policy, ...]] = {
    "RecentPrefetch": (RecentPrefetch(),),
    "Static": (Static(warmup=90),),
    "FIFO": (FIFO(), RecentPrefetch(window=2)),
    "Erratic": (Erratic(),),
    "Scripted": (
        scripted(
            {(Moment.STEP_END, 7): Decision(cells=np.array([8, 4, 5, 6]))},
            needs={"cells", "state"},
            writes={"cells"},
        ),
        RecentPrefetch(),
    ),
}
"""Policies beside those that have a name."""

BETWEEN: dict[str, tuple[Policy, ...]] = {
    "NextLayer": (NextLayer(),),
    "Erratic between layers": (Erratic(moments=frozenset(Moment)),),
}

SUBJECTS = [
    *(("device", name) for name in ("lru", *OWN)),
    *(("host", name) for name in ("lfru", "global-lfu", *BETWEEN)),
]


@pytest.fixture(scope="module")
def start():
    """Driver → the demo with half of its experts; prefill steps have two waves."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(driver: str) -> LLM:
            # A policy that stages, so that all executables are there.
            policies, budget = [RecentPrefetch()], {"expert_budget": "40%", "prefill_waves": 2}
            options: dict[str, Any] = {"driver": driver, "policies": policies, **budget, **LIMITS}
            return stack.enter_context(LLM("demo", progress=False, **options))

        yield start


def traced(
    llm: LLM, directory, eviction: str | None, policies=(), jobs=JOBS, by_hand=None
) -> Trace:
    """The trace of jobs on a cold engine under other policies: contents only, nothing compiled.
    by_hand: cells of each layer, for the same jobs once more."""
    engine = llm.engine
    runner = engine.runner
    name, policies = with_eviction(eviction, policies)
    engine.set_budget([6] * 4, engine.scheduler.arena.count(SlotClass.KV))
    layers, experts = runner.tables.address.shape
    cold = empty_tables(layers, experts, experts)._asdict()
    del cold["cell_row"]
    runner.tables = with_contents(runner.tables, cold)
    length = LIMITS["max_model_len"]
    controller = start_controller(runner, policies, max_model_len=length, seed=0)
    engine.control = control_of(runner, controller, engine.resizer)
    engine.hooks = None if engine.control is None else layer_hooks(engine.control, runner)
    engine._steps = itertools.count()
    spec = spec_of_engine(runner, max_model_len=length, seed=0)
    tracer = start_trace(directory, runner, spec, settings={"model": "demo", "eviction": name})
    if engine.control is not None:
        engine.control.controller.listener = tracer.event
    engine.tracer = tracer
    run(llm, jobs, check=False)
    if by_hand is not None:
        engine.set_budget(by_hand, engine.scheduler.arena.count(SlotClass.KV))
        run(llm, jobs, check=False)
    if engine.control is not None:
        engine.control.controller.finish()
    tracer.close()
    engine.tracer = engine.control = None
    return read_trace(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "name"), SUBJECTS)
def test_a_replay_is_what_the_engine_did(start, driver, name, tmp_path):
    own = {**OWN, **BETWEEN}.get(name, ())
    trace = traced(start(driver), tmp_path / "t", None if own else name, own)
    found = replay(trace, policies=own, config_digest=trace.header.config_digest)
    for field in ("hits", "fills", "read_through"):
        np.testing.assert_array_equal(getattr(found, field), trace.array(f"step.{field}"))
    record = trace.header.spec["version_bytes"]["dense"]
    np.testing.assert_array_equal(found.bytes, found.transfers * record)
    assert found.misses.sum() > 0 and found.of_kind("decode").sum() > 20
    if own and name != "Static":
        assert found.staged.sum() > 0
        assert len(list(trace.transfers())) > 0
    read, dispatched = trace.array("step.read_s"), trace.array("step.start_s")
    late = read[:-1] > dispatched[1:]
    # A step with hooks is read before the next one is dispatched, others mostly after.
    assert not late.all() and late.any() == (name not in BETWEEN)


@pytest.mark.slow
def test_what_differs_is_said(start, tmp_path):
    """Other policies than the run's, and a trace that says something else of a decision."""
    policies = (RecentPrefetch(),)
    trace = traced(start("device"), tmp_path / "t", "lru", policies)
    other = simulate(trace, eviction="lru", policies=(RecentPrefetch(window=1),))
    assert (other.transfers.sum(axis=0) != replay(trace, policies=policies).transfers.sum(0)).any()
    with pytest.raises(TraceError, match=r"the trace has .*, the replay .*; give the policies"):
        replay(trace, policies=(RecentPrefetch(window=1),))
    with pytest.raises(TraceError, match=r"step \d+: bytes: the trace has \d+, the replay 0"):
        replay(trace)
    spec = {**trace.header.spec, "cells": [3, 4, 4, 4]}
    header = dataclasses.replace(trace.header, spec=spec)
    with pytest.raises(TraceError, match=r"step 0 \(prefill\), layer 0: \w+: the trace has"):
        replay(dataclasses.replace(trace, header=header), policies=policies)
    path = tmp_path / "t" / "decisions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(TraceError, match="decision: the trace has None, the replay"):
        replay(trace, policies=policies)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(TraceError, match=r"decision: the trace has .*, the replay none"):
        replay(trace, policies=policies)
    path.write_text("".join(lines).replace("recent", "other", 1))
    with pytest.raises(TraceError, match=r"decision: the trace has .*other.*, the replay .*recent"):
        replay(trace, policies=policies)


def test_what_cannot_be_replayed(start, tmp_path):
    trace = traced(start("device"), tmp_path / "t", None, (FIFO(),))
    with pytest.raises(TraceError, match="eviction was by 'FIFO', which is no policy of moejax"):
        replay(trace)
    with pytest.raises(TraceError, match="is of another model: its configuration is"):
        replay(trace, policies=(FIFO(),), config_digest="0f" * 32)
    with pytest.raises(ValueError, match=r"writes 'kv_pages', and the simulator has no KV"):
        simulate(trace, policies=(scripted(writes={"kv_pages"}),))
    steps = [step._replace(number=step.number + 3) for step in trace.step_traces()]
    with TraceWriter(tmp_path / "late", trace.header) as writer:
        writer.append(*steps)
    late = read_trace(tmp_path / "late")
    with pytest.raises(TraceError, match=r"step 0 is not in the trace .*; use simulate"):
        replay(late, policies=(FIFO(),))
    with pytest.raises(TraceError, match="needs 'probs', which this trace does not have; record"):
        simulate(trace, policies=(scripted(needs={"probs"}),))


def moving(cells: list[int], kv_pages: int) -> Policy:
    """Moves both sides of the budget after step 9, and cells alone later."""
    script = {
        (Moment.STEP_END, 9): Decision(cells=np.array(cells), kv_pages=kv_pages),
        (Moment.STEP_END, 60): Decision(cells=np.array([6, 5, 4, 3])),
    }
    return scripted(script, needs={"cells", "state"}, writes={"cells", "kv_pages"})


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["device", pytest.param("host", marks=pytest.mark.nightly)])
def test_budgets_that_wait_are_replayed(start, driver, tmp_path):
    """KV in use is in the way of a policy that moves cells and pages at once; the replay waits as
    long. Then a budget is moved by hand, between two requests."""
    llm, params = start(driver), dataclasses.replace(GREEDY, max_tokens=30)
    arena = llm.engine.scheduler.arena
    jobs = [Job(tuple(range(5, 95)), params), Job(tuple(range(8, 98)), params, arrival=1)]
    jobs += [Job(tuple(range(3, 93)), dataclasses.replace(params, max_tokens=60), arrival=2)]
    least = -(-LIMITS["max_model_len"] // arena.layout.page.block_size)
    policies = (moving([7, 3, 8, 5], least), RecentPrefetch())
    trace = traced(llm, tmp_path / "t", "lfu", policies, jobs, by_hand=[2, 9, 4, 7])
    *moved, last, by_hand = trace.budgets()
    # A decision is read a step late, so step 11 is the first that could have it.
    assert moved[0].step == 11 and not moved[0].settled and moved[-1].settled
    assert moved[-1].step > 12 and moved[-1].cells == (7, 3, 8, 5) and last.cells == (6, 5, 4, 3)
    assert least <= moved[-1].kv_pages < trace.array("step.use")[0, USES.index("kv_pages")]
    assert by_hand.by_hand and by_hand.cells == (2, 9, 4, 7)
    assert not any(budget.by_hand for budget in (*moved, last))
    found = replay(trace, policies=policies)
    assert found.control is not None
    assert found.control["budget_deferred"] == moved[-1].step - 11
    path = trace.directory / "decisions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"budget"' in line)

    def refused(changed: list[str], match: str) -> None:
        path.write_text("".join(changed))
        with pytest.raises(TraceError, match=match):
            replay(read_trace(trace.directory), policies=policies)

    # Later, never, or by hand in place of a policy: each is another run.
    late = lines[first].replace('"step": 11', '"step": 16')
    refused([*lines[:first], late, *lines[first + 1 :]], "the trace has .*, the replay")
    refused(lines[:first] + lines[first + 1 :], "the trace has .*, the replay")
    early = lines[first].replace('"step": 11', '"step": 4')
    refused([*lines[:first], early, *lines[first + 1 :]], "before step 4 a budget was .* no policy")


@pytest.mark.nightly
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_prefetch_by_name(prefetch, tmp_path):
    """Through the front door, with what the policies need of the model: no bit changes, and what
    the header says is what policies were told, except for the routers."""
    moments, needs = PREFETCH[prefetch]().moments, PREFETCH[prefetch]().needs
    driver = "host" if moments & BETWEEN_LAYERS else "device"
    arrays = sorted({"probs", "gate_input", "embedding"} & needs)
    options = {"driver": driver, "expert_budget": "40%", "trace": tmp_path / "t"}
    with open_llm(prefetch=prefetch, trace_arrays=arrays, **options) as llm:
        assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
        assert llm.engine.control is not None
        told = llm.engine.control.controller.spec
    trace = read_trace(tmp_path / "t")
    said = spec_of(trace.header)
    for field in dataclasses.fields(told):
        if field.name not in ("router", "costs", "moved_bytes"):
            assert repr(getattr(said, field.name)) == repr(getattr(told, field.name))
    assert repr(said.link_bytes) == repr(told.link_bytes)  # None of moved_bytes: the same
    assert replay(trace, spec=told).staged.sum() > 0


@dataclasses.dataclass(frozen=True)
class WhenTheLinkIsFree:
    """Stages where little is in flight, and says what it saw in priors: a policy that decides by
    the progress of transfers."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset(
        {"link_flying", "link_bytes_left", "link_arrived", "link_failed", "link_busy_us"}
    )
    writes: frozenset[str] = frozenset({"stages", "prior"})

    def init(self, spec: Spec) -> tuple[int, int, int]:
        return 0, spec.layers, spec.experts

    def decide(self, state, observation):
        step, layers, experts = state
        seen = np.array([getattr(observation, name) for name in sorted(self.needs)])
        assert (seen >= 0).all()
        prior = np.zeros((layers, experts), np.int32)
        prior[0, : len(seen)] = seen % 1000
        free = observation.link_bytes_left < 1 << 17
        wanted = [Stage(step % layers, (3 * step + i) % experts) for i in range(4)] if free else []
        return (step + 1, layers, experts), Decision(stages=tuple(wanted), prior=prior)


@dataclasses.dataclass(frozen=True)
class ByWhatFlies:
    """Stages between layers what is not on its way, the more the fewer bytes are left of what is
    brought ahead, and says what it saw of each transfer in priors."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED, Moment.TRANSFER})
    needs: frozenset[str] = frozenset({"progress"})
    writes: frozenset[str] = frozenset({"stages", "prior"})

    def init(self, spec: Spec) -> tuple[int, np.ndarray]:
        return 0, np.zeros((spec.layers, spec.experts), np.int32)

    def decide(self, state, observation):
        asked, prior = state
        progress = observation.progress
        assert progress is not None and progress.busy_seconds >= 0
        layers, experts = prior.shape
        prior = prior.copy()
        for each in progress.settled:
            t = each.transfer
            prior[t.layer, t.expert] = 1 + each.ticket % 7 + 10 * (t.cause == "demand")
            assert each.state in ("done", "cancelled") and each.message == ""
        left = 0
        for each in progress.flying:
            t = each.transfer
            assert 0 <= each.bytes_left <= each.bytes
            prior[t.layer, t.expert] = 100 + each.bytes_left % 97
            left += 0 if t.demand else each.bytes_left
        flying = {(each.transfer.layer, each.transfer.expert) for each in progress.flying}
        target = (observation.layer + 1) % layers
        some = [(target, (3 * asked + i) % experts) for i in range(1 + 4 * (left < 1 << 16))]
        stages = tuple(Stage(*place) for place in some if place not in flying)
        return (asked + 1, prior), Decision(stages=stages, prior=prior)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_decisions_by_single_transfers_are_made_again(tmp_path, separate):
    """With the native queue, and with one of copies by jax."""
    policies = [ByWhatFlies()]
    link = {"link_rate": "200MB/s", "chunk_bytes": "16KiB"}
    if separate:
        link = {"transfers": "queue"}
    options: dict[str, Any] = {"driver": "host", "expert_budget": "40%", **link, **LIMITS}
    with LLM("demo", progress=False, policies=policies, **options) as llm:
        if (queue := llm.engine.runner.queue) is not None:
            inject(queue, Faults(seed=3, delay=1e-3, delayed=0.2))
        trace = traced(llm, tmp_path / "t", "lru", policies)
        assert llm.stats()["transfers"]["prefetches"]["in_time"] > 0
    seen = [each.progress for each in trace.progress()]
    flying = [each for progress in seen for each in progress.flying]
    ended = [each for progress in seen for each in progress.settled]
    assert {each.transfer.cause for each in ended} == {"demand", "prefetch"}
    assert {each.transfer.cause for each in flying} >= {"prefetch"}
    assert any(0 < each.bytes_left < each.bytes for each in flying) or separate
    tickets = [each.ticket for each in ended]
    assert len({*tickets}) == len(tickets) > 100, "each settles once"
    replay(trace, policies=policies)
    # With other progress it decides otherwise: what it saw is what makes the replay equal.
    for chunk in (tmp_path / "t").glob("chunk-*"):
        arrays = load_file(chunk)
        with safe_open(chunk, framework="numpy") as file:
            metadata = file.metadata()
        arrays["settled.ticket"] = arrays["settled.ticket"] + 1
        save_file(arrays, chunk, metadata)
    with pytest.raises(TraceError, match="decision: the trace has"):
        replay(read_trace(tmp_path / "t"), policies=policies)


@NATIVE
def test_decisions_by_the_progress_of_transfers_are_made_again(tmp_path):
    """Delays make the progress another one in every run; the trace says which it was."""
    policies = [WhenTheLinkIsFree()]
    link = {"link_rate": "300MB/s", "chunk_bytes": "16KiB", "expert_budget": "40%"}
    with LLM("demo", progress=False, policies=policies, **link, **LIMITS) as llm:
        queue = llm.engine.runner.queue
        inject(queue, Faults(seed=3, delay=1e-3, delayed=0.2))
        trace = traced(llm, tmp_path / "t", "lru", policies)
    decided = list(trace.decided())
    staged = [bool(d["decision"]["stages"]) for d in decided]
    assert any(staged) and len({str(d["decision"]["prior"][0][:5]) for d in decided}) > 10
    simulation = replay(trace, policies=policies)
    assert simulation is not None
    # What the policy saw is in the trace, and matters: with other numbers it decides otherwise.
    steps = [step for chunk in trace.chunks for step in chunk.step_traces()]
    busy = [int(step.use[USES.index("link_busy_us")]) for step in steps]
    assert busy == sorted(busy) and busy[-1] > busy[0]
