"""Router probabilities, gate inputs and embeddings: what they are, and that they change no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from host_offload.control.interface import Decision, Moment, Observation, Spec
from moejax import LLM, SamplingParams
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import TRACE_ARRAYS, TraceArrays
from moejax.traces import read_trace
from tests.moejax.engine.scenes import open_llm, same_bits
from tests.moejax.engine_runs import Job, Recorded, run
from tests.moejax.models.families import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
JOBS = [Job(tuple(range(7 * i + 5, 7 * i + 15 + 40 * i)), GREEDY, arrival=3 * i) for i in range(3)]
COLUMNS = dict(zip(TraceArrays._fields, ("probabilities", "gate_input", "embedding"), strict=True))


@dataclasses.dataclass(frozen=True)
class Watching:
    """Keeps every observation as its state, and changes nothing."""

    moments: frozenset = frozenset({Moment.STEP_END})
    needs: frozenset = TRACE_ARRAYS | {"ids", "request", "position", "phase"}
    writes: frozenset = frozenset()

    def init(self, spec: Spec) -> tuple[Observation, ...]:
        return ()

    def decide(self, state: tuple, observation: Observation):
        return (*state, observation), Decision()


@dataclasses.dataclass(frozen=True)
class Traced:
    """A run with all arrays, whose bits are those of one without, of the same engine."""

    directory: Path
    found: list[Recorded]
    seen: tuple[Observation, ...]

    @property
    def steps(self):
        return {step.number: step for step in read_trace(self.directory).step_traces()}


def traced(directory: Path, driver: str) -> Traced:
    """The trace is complete; the policy of the host driver looks between layers as well."""
    inside = {Moment.EMBEDDED, Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN}
    between = inside if driver == "host" else set()
    watching = Watching(moments=frozenset({Moment.STEP_END, *between}))
    options = {"driver": driver, "expert_budget": "40%", "policies": [watching]}
    with open_llm(**options, trace=f"{directory},arrays={'+'.join(TRACE_ARRAYS)}") as llm:
        engine = llm.engine
        found = run(llm, JOBS)
        assert llm.stats()["trace_arrays"] == ["embedding", "gate_input", "probs"]
        seen = engine.control.controller._seats[1].state
        executables = {*map(str, engine.runner.executables())}
        steps = {"device": {"decode_traced", "prefill_traced"}, "host": {"decode/traced_output"}}
        assert steps[driver] <= executables
        assert not {"decode", "prefill", "decode/output"} & executables
    with open_llm(driver=driver, expert_budget="40%") as llm:
        assert same_bits(found, run(llm, JOBS, check=False))
        assert llm.stats()["trace_arrays"] == []
        plain = ProgramKey("decode", part="output" if driver == "host" else None)
        assert plain in set(llm.engine.runner.executables())
    return Traced(directory, found, seen)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    return traced(tmp_path_factory.mktemp("device") / "t", "device")


@pytest.mark.slow
def test_what_they_are(device, demo_dir):
    header = read_trace(device.directory).header
    assert (header.probabilities, header.gate_input, header.embedding) == (True, 128, 128)
    tokens = [[*job.prompt, *each.tokens] for job, each in zip(JOBS, device.found, strict=True)]
    table = load_file(demo_dir / "model.safetensors")["model.embed_tokens.weight"]
    kinds = set()
    for step in device.steps.values():
        kinds.add(step.kind)
        assert step.probabilities is not None and step.gate_input is not None
        probs, ids = step.probabilities.astype(np.float32), step.ids.astype(np.int64)
        assert np.allclose(probs.sum(axis=-1), 1, atol=2e-3)
        # The weights are those of the chosen ones, and nobody else is likelier.
        chosen = np.take_along_axis(probs, ids, axis=-1)
        weights = chosen / chosen.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights, step.weights, atol=1e-3)
        np.put_along_axis(probs, ids, 0, axis=-1)
        assert (probs.max(axis=-1) <= chosen.min(axis=-1) * 1.001).all()
        # A norm's output, so of the size of its weights whatever came in.
        size = np.sqrt(np.mean(step.gate_input.astype(np.float32) ** 2, axis=-1))
        assert (size > 0.1).all() and (size < 10).all()
        assert step.embedding is not None
        fed = [tokens[r][p] for r, p in zip(step.request, step.position, strict=True)]
        np.testing.assert_array_equal(step.embedding, table[fed].astype(np.float16))
    assert kinds == {"prefill", "decode"}


@pytest.mark.slow
def test_policies_see_them_at_the_end_of_a_step(device):
    ends = [seen for seen in device.seen if seen.moment == Moment.STEP_END]
    steps = device.steps
    assert len(ends) == len(steps)
    for seen in ends:
        for name, column in COLUMNS.items():
            np.testing.assert_array_equal(getattr(seen, name), getattr(steps[seen.step], column))


@pytest.mark.slow
def test_policies_see_them_while_the_host_driver_makes_the_step(tmp_path):
    """Rows and embeddings before the first layer, what was routed after it; in the trace's words
    and order, prompts and decoded tokens."""
    host = traced(tmp_path / "t", "host")
    steps, kinds, moments = host.steps, set(), set()
    layers = [-1, *np.repeat(range(4), 3).tolist()]
    order = [seen.layer for seen in host.seen if seen.moment != Moment.STEP_END]
    assert order == layers * len(steps)
    for seen in host.seen:
        step, layer = steps[seen.step], [seen.layer]
        kinds.add(step.kind)
        moments.add(seen.moment)
        for name in ("request", "position", "phase", "embedding"):
            np.testing.assert_array_equal(getattr(seen, name), getattr(step, name))
        if seen.moment in (Moment.ROUTED, Moment.EXPERTS_BEGIN):
            np.testing.assert_array_equal(seen.ids, step.ids[:, layer])
            np.testing.assert_array_equal(seen.probs, step.probabilities[:, layer])
            np.testing.assert_array_equal(seen.gate_input, step.gate_input[:, layer])
        elif seen.moment != Moment.STEP_END:
            assert seen.ids is seen.probs is seen.gate_input is None
    assert len(moments) == 5 and kinds == {"prefill", "decode"}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Gemma4", "LongcatFlash"])
def test_where_experts_read_something_else(family, tmp_path):
    """They are what routers read, by both drivers, and change no bit."""
    directory = write_checkpoint(tmp_path / "model", f"{family}ForCausalLM")

    def record(name: str, **options):
        with LLM(
            directory, progress=False, expert_budget="50%", max_model_len=64, **options
        ) as llm:
            found = run(llm, JOBS[:1])
        traced = list(read_trace(tmp_path / name).step_traces()) if "trace" in options else []
        return found[0], [step.gate_input for step in traced]

    plain, _ = record("")
    both = []
    for driver in ("device", "host"):
        traced, inputs = record(
            driver, driver=driver, trace=f"{tmp_path / driver},arrays=gate_input"
        )
        assert traced.same_bits(plain) and inputs
        both.append(inputs)
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)
