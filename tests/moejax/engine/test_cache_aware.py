"""Routers that favour residents (`cache_aware_routing`): a choice that changes outputs, by exactly
the rule that is said, and says so."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, UserError
from moejax.checkpoints.random_model import shape
from moejax.commands.main import main
from moejax.evaluate.experiments.definition import read_experiment
from moejax.evaluate.results_file import read_lines
from moejax.serve.cluster.fleet import Generator
from moejax.serve.cluster.workers import Scale, worker_options
from moejax.step import buddies
from moejax.step.buddies import StandIns, read_buddies, substitute
from moejax.step.layer_programs import layer_program
from moejax.step.programs import ProgramKey
from tests.host_offload.traces.traces_of import write_trace
from tests.moejax.engine.scenes import GREEDY, at_rest, open_llm, same_bits
from tests.moejax.engine_runs import Job, mixed_jobs, run
from tests.moejax.models.families import write_checkpoint
from tests.moejax.step.test_constant_memory import abstract_programs, with_steps
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
"""Of models of random weights."""
HALF = 2.0**-11
"""Relative error of a float16, as traces have scores."""


def favouring(delta: float | None, model="demo", **options) -> LLM:
    given = {"expert_budget": "25%", "cache_aware_routing": delta, "enable_prefix_caching": False}
    return open_llm(model, **{**given, **options})


@pytest.mark.slow
def test_it_does_what_it_says(tmp_path):
    """By a trace's own scores: who is left out for a worse one was missing, and at most DELTA
    better; weights are of the scores as they were. Nothing is taken where DELTA is 0; the hit rate
    rises with it. A trace has the routing as it was, and no other is simulated by it."""
    rates, left_out = [], []
    for delta in (0.0, 0.2):
        directory = tmp_path / str(delta)
        options = {"trace": f"{directory},arrays=probs", "eviction": "lfu"}
        with favouring(delta, **options) as llm:
            found, stats = run(llm, mixed_jobs()), llm.stats()
        trace = read_trace(directory)
        assert same_bits(found, at_rest()) == (delta == 0)
        assert stats["cache_aware_routing"] == trace.header.spec["cache_aware_routing"] == delta
        assert any("CHANGES OUTPUTS" in note for note in stats["notes"])
        rates.append(stats["experts"]["hit_rate"])
        left_out.append(sum(_check(step, delta) for step in trace.step_traces()))
        assert replay(trace).hits.sum() == stats["experts"]["hits"]
    assert left_out[0] == 0 < left_out[1] and rates[0] + 0.1 < rates[1]
    with pytest.raises(TraceError, match=r"cache_aware_routing was 0\.2, so what was routed"):
        simulate(trace, eviction="lru")
    plain = {**trace.header.spec, "cache_aware_routing": 0.0}
    trace = dataclasses.replace(trace, header=dataclasses.replace(trace.header, spec=plain))
    assert simulate(trace, eviction="lru").hits.sum() > 0


def _check(step, delta: float) -> int:
    """How many experts were left out for worse ones."""
    count = 0
    for layer, missing in enumerate(step.missed):
        ids, weights = step.ids[:, layer], step.weights[:, layer]
        probs = step.probabilities[:, layer].astype(np.float64)
        rows = np.arange(len(ids))[:, None]
        chosen = probs[rows, ids]
        expected = chosen / chosen.sum(axis=1, keepdims=True)
        assert np.allclose(weights, expected, rtol=8 * HALF, atol=HALF)
        others = probs.copy()
        others[rows, ids] = -np.inf
        best = others.max(axis=1, keepdims=True)
        assert np.all(best - chosen <= delta + 2 * HALF)
        # Whoever was missing was chosen in spite of it: no better one was left out for it.
        assert np.all((best - chosen)[missing[ids]] <= 2 * HALF)
        count += np.count_nonzero(best - chosen > 2 * HALF)
    return count


def test_buddies_stand_in_for_missing_experts():
    """The first of an expert's buddies that has a cell and that the token did not choose, with the
    expert's weight, where the weights' entropy is large enough: expert by expert."""
    rng, experts, most = np.random.default_rng(3), 12, 3
    table = np.array([rng.permutation(experts)[:most] for _ in range(experts)], np.int32)
    table[5], missing, swaps = -1, rng.random(experts) < 0.5, 0
    ids = np.sort([rng.permutation(experts)[:3] for _ in range(40)], axis=1).astype(np.int32)
    ids[0] = experts  # padding
    weights = rng.dirichlet(np.ones(3), 40).astype(np.float32)
    found = jax.tree.map(
        np.asarray, jax.jit(substitute)(ids, weights, StandIns(table, missing, 0.7))
    )
    for own, given, after in zip(ids, weights, zip(*found, strict=True), strict=True):
        want = own.tolist()
        if -np.sum(given * np.log(given)) >= 0.7 * np.log(3) and own[0] < experts:
            for place, expert in enumerate(own.tolist()):
                buddies = [b for b in table[expert].tolist() if b >= 0]
                free = [b for b in buddies if not missing[b] and b not in want]
                if missing[expert] and free:
                    want[place], swaps = free[0], swaps + 1
        order = np.argsort(want, kind="stable")
        assert after[0].tolist() == sorted(want)
        np.testing.assert_array_equal(after[1], given[order])
    assert swaps > 10 and not all(np.array_equal(a, b) for a, b in zip(ids, found[0], strict=True))


def test_a_trace_teaches_buddies_once(tmp_path, monkeypatch):
    """A start asks for them several times; another trace at the same path is read anew."""
    seen, alike = [], buddies._alike
    monkeypatch.setattr(buddies, "_alike", lambda *args: seen.append(1) or alike(*args))
    text = f"buddies={tmp_path / 'a'}"
    for written, pair in enumerate(([0, 1], [0, 3]), 1):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        write_trace(tmp_path / "a", [np.array([[pair]])], 4)
        os.utime(tmp_path / "a/trace.json", ns=(written, written))
        for _ in range(3):
            assert read_buddies(text, 1, 4).table[0][0][0] == pair[1]
        assert len(seen) == written


@pytest.mark.slow
def test_substitution_hits_more_and_says_that_outputs_change(tmp_path):
    """By the buddies that a trace names; where every expert is resident it changes no bit."""
    with favouring(None, trace=str(tmp_path / "routing")) as llm:
        run(llm, mixed_jobs())
        rate = llm.stats()["experts"]["hit_rate"]
    option = f"buddies={tmp_path / 'routing'},spread=0%,cover=100%"
    with favouring(option) as llm:
        found, stats = run(llm, mixed_jobs()), llm.stats()
        assert stats["experts"]["hit_rate"] > rate + 0.05
        assert stats["cache_aware_routing"] == option and not same_bits(found, at_rest())
        said = "residents stand in for missing experts, so tokens and logits depend on"
        assert any(said in note for note in stats["notes"])
    with favouring(option, expert_budget="100%") as llm:
        assert same_bits(run(llm, mixed_jobs()), at_rest())
    with pytest.raises(UserError, match="has no setting 'share=1'"):
        favouring(f"{option},share=1")
    with pytest.raises(UserError, match="learned from a trace: buddies=TRACE"):
        favouring("buddies")
    directory = write_checkpoint(tmp_path / "other", "Qwen3MoeForCausalLM")
    with pytest.raises(UserError, match=r"routing has \d+ layers of 16 experts, and the model"):
        favouring(option, directory, **SMALL)


@pytest.mark.slow
def test_a_step_without_it_is_compiled_as_if_it_did_not_exist():
    """And one in which nobody can be missing."""
    programs = abstract_programs(
        shape("demo", layers=2), 32 << 20, rows=4, max_model_len=256, max_num_batched_tokens=64
    )

    def lowered(key: ProgramKey, **changes) -> tuple[str, int]:
        there = with_steps(programs, **changes)
        program = layer_program(there, key) if key.part else there.program(key)
        text = jax.jit(program.function).lower(*program.args).as_text()
        return text, len(jax.tree.leaves(program.args))

    for key in (ProgramKey("decode"), ProgramKey("decode", part="route", run=0)):
        off = lowered(key, in_place=True)
        assert lowered(key, in_place=True, cache_aware=0.1) == off
        assert lowered(key, cache_aware=0.1)[0] != lowered(key)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.nightly), "Glm4MoeForCausalLM"],
)
def test_routers_with_a_correction_of_their_own_and_layers_between(tmp_path, architecture):
    """GLM-4.5 adds a learned one and chooses groups first; the Qwen3 model has a layer without
    experts between others."""
    directory = write_checkpoint(tmp_path, architecture)
    rng, found = np.random.default_rng(5), {}
    prompts = [tuple(rng.integers(1, 40, n).tolist()) for n in (5, 9, 14)]
    jobs = [Job(prompt, GREEDY, arrival=i) for i, prompt in enumerate(prompts)]
    for driver, delta in (("device", None), ("device", 0.0), ("device", 0.2), ("host", 0.2)):
        options = {"expert_budget": "100%" if delta is None else "50%", "driver": driver}
        with favouring(delta, directory, **SMALL, **options) as llm:
            found[driver, delta] = run(llm, jobs)
    assert same_bits(found["device", None], found["device", 0.0])
    assert not same_bits(found["device", 0.0], found["device", 0.2])
    assert same_bits(found["device", 0.2], found["host", 0.2])


def test_whoever_promises_the_same_outputs_refuses_it(tmp_path, capsys):
    """A job that goes on after a kill, workers that share a job, cells of a grid."""
    prompts = tmp_path / "prompts.jsonl"
    option = {"cache_aware_routing": 0.1}
    prompts.write_text('{"prompt": "The old house"}\n')
    job = ["generate", "--input", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    assert main([*job, "--cache-aware-routing", "0.1"]) == 2
    assert "and a job could not be resumed to the same results" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"a grid's cells compare what equal outputs cost"):
        read_experiment({"policies": ["lru"], "budgets": ["25%"], "options": option})
    with pytest.raises(UserError, match=r"and workers that share a job out must give"):
        worker_options(Generator, "demo", option, Scale())


@pytest.mark.slow
def test_the_command_line_says_so(tmp_path, capsys):
    command = ["generate", "The old house", "--max-tokens", "8", "--temperature", "0"]
    limits = ["--max-model-len", "256", "--max-num-seqs", "4", "--expert-budget", "25%"]
    assert main([*command, *limits, "--cache-aware-routing", "0.2"]) == 0
    said = capsys.readouterr().err
    assert "\ncache_aware_routing 0.2 CHANGES OUTPUTS; 3 + 8 tokens" in said
    assert main([*command, *limits]) == 0
    said = capsys.readouterr().err
    assert "\n3 + 8 tokens" in said and "CHANGES OUTPUTS" not in said


@pytest.mark.slow
def test_an_evaluation_goes_on_with_no_other_budget(tmp_path, capsys):
    """Elsewhere a budget changes no figure; here it does, so lines of both are not of one file."""
    (tmp_path / "text").write_text("The old house stood at the end of the road. " * 8)
    command = ["eval", "demo", "--task", "perplexity", "--data", str(tmp_path / "text"), "--json"]
    command += ["--max-model-len", "256", "--cache-aware-routing", "0.2", "--expert-budget"]
    assert main([*command, "25%", "--output", str(tmp_path / "a.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["cache_aware_routing"] == 0.2
    (line,) = read_lines(str(tmp_path / "a.jsonl"))
    assert {"cache_aware_routing", "expert_budget"} <= line["asked"]["options"].keys()
