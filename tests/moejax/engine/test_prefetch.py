"""Prefetch policies beside an engine: no bit changes, transfers are carried out and used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.interface import Policy
from host_offload.memory.tables import empty_tables, with_contents
from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.prefetch.expert_map import policy as expert_map
from host_offload.policies.prefetch.expert_map.policy import ExpertMap
from host_offload.policies.prefetch.expertflow import training as forests
from host_offload.policies.prefetch.llapor import online, training
from host_offload.policies.prefetch.llapor.online import LearnedOnline, Learning, Tuning
from host_offload.policies.prefetch.llapor.training import Training
from host_offload.simulate.replay import replay
from host_offload.traces.reader import Trace, read_trace
from moejax import LLM, SamplingParams
from moejax.engine.control import control_of, layer_hooks, spec_of_engine
from moejax.traces.tracer import start_trace
from scripts.parts.controllers import start_controller
from tests.moejax.engine_runs import Job, Recorded, run

LIMITS: dict[str, Any] = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=128)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
JOBS = [Job(tuple(range(9 * i + 5, 9 * i + 25)), GREEDY, arrival=6 * i) for i in range(3)]


def use(llm: LLM, policies: Sequence[Policy], router: np.ndarray | None = None) -> None:
    """These policies in an engine that is as new: contents only, nothing is compiled."""
    engine, runner = llm.engine, llm.engine.runner
    layers, experts = runner.tables.address.shape
    cold = empty_tables(layers, experts, experts)._asdict()
    del cold["cell_row"]
    runner.tables = with_contents(runner.tables, cold)
    routers = [] if router is None else [jnp.asarray(np.swapaxes(router, 1, 2))]
    controller = start_controller(runner, policies, max_model_len=256, seed=0, routers=routers)
    engine.control = control_of(runner, controller, engine.resizer)
    engine.hooks = None if engine.control is None else layer_hooks(engine.control, runner)
    engine._steps = itertools.count()


def recorded(
    llm: LLM, directory: Path, policies: Sequence[Policy], router: np.ndarray | None
) -> tuple[list[Recorded], Trace]:
    """What JOBS produce under these policies, and the trace of that."""
    eviction, policies = with_eviction(None, policies)
    use(llm, policies, router)
    engine, runner = llm.engine, llm.engine.runner
    spec, arrays = spec_of_engine(runner, max_model_len=256, seed=0), runner.steps.trace_arrays
    settings = {"eviction": eviction}
    tracer = start_trace(directory, runner, spec, settings=settings, arrays=arrays)
    if engine.control is not None:
        engine.control.controller.listener = tracer.event
    engine.tracer = tracer
    results = run(llm, JOBS, check=bool(policies))
    if engine.control is not None:
        engine.control.controller.finish()
    tracer.close()
    engine.tracer = None
    return results, read_trace(directory)


@pytest.mark.slow
def test_searches_beside_inference_change_no_bit_and_are_replayed(tmp_path):
    """Whatever came in time: the tokens are those of no prefetch at all, and a replay that takes
    the recorded decisions does what the engine did."""
    policy = ExpertMap(distance=2, asynchronous=True)
    options: dict[str, Any] = dict(expert_budget="40%", driver="host", progress=False)
    options |= dict(policies=[policy], enable_prefix_caching=False)
    with LLM("demo", **options, **LIMITS) as llm:
        alone, _ = recorded(llm, tmp_path / "alone", [], None)
        results, trace = recorded(llm, tmp_path / "beside", [policy], None)
        for got, want in zip(results, alone, strict=True):
            assert got.same_bits(want)
        control = llm.engine.control
        assert control is not None
        said = control.controller.stats()["said"]["ExpertMap"]
        # A search of each step's embedding and of its four layers; what was learned is bounded.
        assert said["searches"] == 5 * trace.steps and said["late"] <= said["searches"]
        again = expert_map.recorded(trace, policy)
        found = replay(trace, policies=[again], spec=control.controller.spec)
        assert found.control is not None
        assert found.control["said"] == {"ExpertMap": {"decisions": 5 * trace.steps}}


@pytest.mark.slow
def test_networks_learn_on_beside_an_engine(tmp_path):
    """Networks that were trained on a run learn on in the next one, swapped between steps: the same
    tokens, and a replay of the trace takes the run's decisions again."""
    prompts = [list(range(7 * i, 7 * i + 30)) for i in range(8)]
    options: dict[str, Any] = dict(driver="host", progress=False, **LIMITS)
    first = {**options, "trace": tmp_path / "first", "trace_arrays": "gate_input"}
    with LLM("demo", **first) as llm:
        wanted = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
    quick = Training(width=16, epochs=1)
    fitted = training.fit(read_trace(tmp_path / "first"), training=quick).fitted
    policy = LearnedOnline(fitted, tuning=Tuning(rows=32, iterations=2))
    second = {**options, "expert_budget": "40%", "policies": [policy]}
    second |= {"trace": tmp_path / "second", "trace_arrays": "gate_input"}
    with LLM("demo", **second) as llm:
        for _ in range(2):
            found = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
            assert found == wanted
            for seat in llm.engine.control.controller._seats:
                if isinstance(seat.state, Learning):
                    seat.state.tuner.wait()  # the next run finds what it learned
        (said,) = llm.stats()["control"]["said"].values()
        assert said["rounds"] >= 1
        bytes_moved = llm.stats()["experts"]["fills"]
    trace = read_trace(tmp_path / "second")
    again = replay(trace, policies=[online.recorded(trace, policy)])
    assert again.fills.sum() == bytes_moved


@pytest.mark.slow
def test_forests_of_an_earlier_run_bring_experts_ahead(tmp_path):
    """ExpertFlow in an engine, its pool of cells too: the same tokens, experts that came ahead and
    were used, a step size that follows; a replay of the trace decides the same."""
    prompts = [list(range(7 * i, 7 * i + 30)) for i in range(8)]
    options: dict[str, Any] = dict(driver="host", progress=False, **LIMITS)
    first = {**options, "trace": tmp_path / "first", "trace_arrays": "gate_input"}
    with LLM("demo", **first, prefetch="fate") as llm:
        wanted = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
        router = llm.engine.control.controller.spec.router
    quick = forests.Training(trees=3, leaves=32)
    forests.fit(read_trace(tmp_path / "first"), router, training=quick).fitted.write(
        tmp_path / "forest"
    )
    given = f"expertflow={tmp_path / 'forest'}"
    second = {**options, "expert_budget": "40%", "prefetch": given}
    second |= {"trace": tmp_path / "second", "trace_arrays": "gate_input"}
    with LLM("demo", **second) as llm:
        assert wanted == [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
        spec = llm.engine.control.controller.spec
        (seat,) = llm.engine.control.controller._seats
        assert 1 <= seat.state.horizon.steps <= 3
        assert llm.stats()["control"]["transfers"]["expertflow"]["used"] > 0
        fills = llm.stats()["experts"]["fills"]
    trace = read_trace(tmp_path / "second")
    assert replay(trace, spec=spec).fills.sum() == fills
