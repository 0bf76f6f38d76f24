"""Experts that a second processor computes beside the steps' own: the bits of full residency
whoever computes what, both at work at once, and a trace that says who did."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.eviction.hot_table import beside_prefetches
from host_offload.policies.eviction.names import eviction_policy
from host_offload.policies.placement import names
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.step.programs import ProgramKey
from pallas_kernels.cpu.spans import recorded
from tests.faults import Faults, inject
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LIMITS: dict[str, Any] = {
    **dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256),
    **dict(progress=False, enable_prefix_caching=False),
}
LINK = {"link_rate": "500MB/s", "link_latency": "50us", "chunk_bytes": "16KiB"}
AT_ONCE = {"transfer_threads": 3, "chunk_bytes": "1MiB"}
"""Of a small model a chunk is then a whole part of a record, and there is a thread for each."""
COSTS = "per_token=50us,startup=300us,accelerator=200us,attention=500us"


def open_llm(**options) -> LLM:
    given = {"placement": f"prescope,{COSTS}", "driver": "host", "expert_budget": "40%"}
    return LLM("demo", **{**LIMITS, **LINK, **given, **options})


@functools.cache
def at_rest():
    with LLM("demo", **LIMITS) as llm:
        return run(llm, mixed_jobs(), check=False)


@dataclasses.dataclass(frozen=True)
class Anyhow:
    """Gives experts to either processor by a number drawn from step and layer, residents too, and
    loads the others in a random order."""

    share: float
    moments: frozenset = frozenset({Moment.EXPERTS_BEGIN})
    needs: frozenset = frozenset({"counts"})
    writes: frozenset = frozenset({"execute", "load_order"})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        assert observation.counts is not None
        active = np.count_nonzero(observation.counts[observation.layer])
        rng = np.random.default_rng([observation.step, observation.layer])
        execute = (rng.random(active) < self.share).astype(np.int8)
        return None, Decision(execute=execute, load_order=rng.permutation(active))


def test_the_bits_are_those_of_full_residency_whoever_computes_what():
    """Prefill in two waves and decode, over a link that is late, with cells for some experts and
    for none."""
    with open_llm(placement=None, policies=[Anyhow(0.5)], prefill_waves=2) as llm:
        for policy, cells in ((Anyhow(0.5), 6), (Anyhow(0.8), 0), (Anyhow(1.0), 6)):
            llm.engine.begin_anew(llm.plan.spec, [eviction_policy("lru"), policy], [cells] * 4)
            paging, before = llm.engine.statistics.paging, llm.stats()["placement"]
            hits, fills = paging["hits"], paging["fills"]
            found = run(llm, mixed_jobs()[:3], check=not cells)
            assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=False))
            after = llm.stats()["placement"]
            assert after["experts"] > before["experts"] and after["rows"] > before["rows"]
            # Where all misses are computed beside, nobody comes; elsewhere residents are used.
            assert (
                (paging["hits"] > hits) == (paging["fills"] > fills) == (cells and policy.share < 1)
            )
            computed = paging["hits"] + paging["fills"] + paging["read_through"]
            assert paging["active"] == computed + after["experts"]


def test_a_trace_says_who_computed_what_and_replays(tmp_path):
    """And other placements of the same steps count in the simulator what they do in the engine."""
    options = {"trace": tmp_path / "run", "trace_arrays": "gate_input"}
    with open_llm(**options, placement=f"prescope,{COSTS},predict=gates") as llm:
        assert llm.engine.control is not None
        spec = llm.engine.control.controller.spec
        found = run(llm, mixed_jobs(), check=False)
        stats = llm.stats()
    assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))
    assert sum(stats["transfers"]["prefetches"].values()) > 0
    assert stats["placement"]["placement"] == f"prescope,{COSTS},predict=gates,load=link"
    trace = read_trace(tmp_path / "run")
    steps = [*trace.step_traces()]
    placed = np.stack([step.placed for step in steps])
    assert placed.sum() == stats["placement"]["experts"] > 0
    assert not np.any(placed & ~np.stack([step.missed for step in steps]))
    simulation = replay(trace, spec=spec)
    assert np.array_equal(simulation.placed, placed.sum(axis=2))
    assert simulation.fills.sum() == stats["experts"]["fills"]
    assert simulation.bytes.sum() == sum(stats["bytes"].values()) + np.sum(
        [step.bytes[2] for step in steps]
    )
    for name in ("fiddler-code", "llama.cpp"):
        placement = f"{name},{COSTS},load=1ms"
        simulation = simulate(trace, placement=placement, eviction="lru")
        with open_llm(placement=placement) as other:
            run(other, mixed_jobs(), check=False)
            counted = other.stats()
        assert simulation.placed.sum() == counted["placement"]["experts"] > 0, name
        for what in ("hits", "fills", "read_through"):
            assert getattr(simulation, what).sum() == counted["experts"][what], name


def test_a_replay_finds_a_change_of_who_computed(tmp_path):
    placement = f"fiddler-code,{COSTS},load=1ms"
    with open_llm(trace=tmp_path / "run", placement=placement) as llm:
        run(llm, mixed_jobs()[:2], check=False)
    trace = read_trace(tmp_path / "run")
    header = trace.header
    other = {**header.spec, "placement": placement.replace("fiddler-code", "llama.cpp")}
    trace = dataclasses.replace(trace, header=dataclasses.replace(header, spec=other))
    with pytest.raises(TraceError, match=r"decision"):
        replay(trace)


def test_both_processors_are_at_work_at_once_on_threads_of_their_own():
    """The accelerator's op waits for loads of milliseconds, and the second's runs meanwhile; times
    that are stated are taken."""
    test = "threads=1+1,accelerator=1ms,startup=2ms,per_token=1us,attention=4ms"
    slow = {"link_rate": "20MB/s", "placement_test": test}
    policy = Anyhow(0.5)
    with open_llm(placement=None, policies=[policy], **slow) as llm:
        runner = llm.engine.runner
        for part, number in (("accelerate", 0), ("beside", 1)):
            assert runner.steps.second.threads[number] == 1
            text = runner.lower(ProgramKey("decode", part=part)).as_text()
            assert "threads = 1 : i64" in text
        with recorded() as spans:
            began = time.perf_counter()
            run(llm, mixed_jobs()[:2], check=False)
            took = time.perf_counter() - began
        stats = llm.stats()["placement"]
    experts = [span for span in spans if span.op == "expert_ffn"]
    together = sum(a.end > b.begin for a, b in itertools.pairwise(experts))
    # Where the accelerator has nothing to wait for, its op takes microseconds.
    assert together > stats["layers"] / 20
    assert stats["second_s"] >= 2e-3 * stats["experts"] and stats["both_s"] > 0
    assert stats["accelerator_s"] + stats["second_s"] - stats["both_s"] < took
    assert stats["gap_of_a_layer_s"]["max"] >= stats["gap_of_a_layer_s"]["mean"] > 0
    # Between any two layers of a step, not before the first.
    assert stats["between_s"] > 4e-3 * stats["between"] > 0
    assert 0 < stats["decided_s"] < stats["between_s"] - 4e-3 * stats["between"]
    assert stats["between"] % 3 == 0


def test_slots_are_picked_and_what_the_other_processor_has_there_is_not_looked_at(monkeypatch):
    """Whoever did not compute an expert has NaN in its slots here: a sum would show it."""
    with open_llm() as llm:
        runner = llm.engine.runner
        bind, poisoned = type(runner)._bind, []

        def poison(y, ids, mask):
            poisoned.append(int(np.sum(mask[np.minimum(ids, len(mask) - 1)])))
            slots = jnp.pad(jnp.asarray(mask), (0, 1))[ids].reshape(-1, 1)
            return jnp.where(slots, jnp.nan, y)

        def broken(self, step):
            parts = bind(self, step)

            def accelerate(*args):
                y, *rest = parts["accelerate", None](*args)
                return poison(y, args[4], np.asarray(args[-1].beside)), *rest

            def beside(*args):
                *_, ids, _, listed, count = args
                mine = np.zeros(len(listed), bool)
                mine[listed[:count]] = True
                return poison(parts["beside", None](*args), ids, ~mine)

            return {**parts, ("accelerate", None): accelerate, ("beside", None): beside}

        monkeypatch.setattr(type(runner), "_bind", broken)
        found = run(llm, mixed_jobs(), check=False)
    assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))
    assert sum(poisoned) > 0


def test_a_second_processor_that_fails_ends_the_step_and_no_more(monkeypatch):
    with open_llm() as llm:
        runner = llm.engine.runner
        beside = type(runner)._beside

        def broken(self, parts, *args):
            def fail(*_):
                raise RuntimeError("the second processor broke")

            return beside(self, {**parts, ("beside", None): fail}, *args)

        monkeypatch.setattr(type(runner), "_beside", broken)
        with pytest.raises(RuntimeError, match="the second processor broke"):
            run(llm, mixed_jobs(), check=False)
        monkeypatch.undo()
        for _ in range(3):
            llm.engine.step()
        found = run(llm, mixed_jobs(), check=False)
    assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"driver": "device"}, "Placement asks for EXPERTS_BEGIN, which driver='device' lacks"),
        ({"driver": "stream"}, "which driver='stream' lacks"),
        ({"placement": "cpu"}, "unknown placement 'cpu'; known: prescope"),
        ({"placement": None, "placement_test": "threads=1+1"}, "name one, placement='prescope'"),
        ({"placement_test": "threads=2"}, r"threads=2 is not A\+B"),
        ({"placement_test": "speed=1ms"}, "takes threads, accelerator, startup, per_token, att"),
        ({"precision": "dynaexq,paged=true"}, "knows one version of the experts"),
        ({"placement": "fate", "prefetch": "learned=nowhere"}, "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_second_processor_does_not_go_with_is_refused(options, message):
    with pytest.raises((UserError, ValueError), match=message):
        open_llm(**options).close()


def test_the_command_line_places(capsys):
    limits = ["--max-model-len", "64", "--max-num-seqs", "2", "--expert-budget", "40%"]
    command = ["generate", "The old house", *limits, "--max-tokens", "8", "--temperature", "0"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    placed = ["--driver", "host", "--placement", f"prescope,{COSTS},load=1ms"]
    assert main([*command, *placed]) == 0
    shown = capsys.readouterr()
    assert shown.out == alone
    (line,) = (line for line in shown.err.splitlines() if line.startswith("beside"))
    assert "missed experts (" in line and "done apart by" in line and "prescope" in line
    assert main([*command, *placed, "--json"]) == 0
    beside = capsys.readouterr()
    assert beside.out == alone
    assert json.loads(beside.err[beside.err.index("{") :])["placement"]["experts"] > 0


@pytest.mark.slow
def test_loads_on_demand_pass_two_buffers_beside_a_hot_table(tmp_path, monkeypatch):
    """PreScope's AsyncIO as the engine has it: gate, up and down of an expert are three transfers
    at once; beside a hot table loads on demand pass two buffers in turn and come into no cell; who
    comes ahead gets a cell of its own layer. Whatever is late, the bits are the same."""
    options = {"trace": tmp_path / "run", "trace_arrays": "gate_input", **AT_ONCE}
    placement = f"prescope,{COSTS},predict=gates,buffers=2"
    soon = dataclasses.replace(beside_prefetches(2), warmup=16)
    monkeypatch.setattr(names, "beside_prefetches", {2: soon}.__getitem__)
    with open_llm(placement=placement, **options) as llm:
        queue = llm.engine.runner.queue
        assert queue is not None and llm.engine.control is not None
        run(llm, mixed_jobs()[:1], check=False)  # until the table is known
        before = dict(llm.engine.statistics.paging)
        inject(queue, Faults(seed=1, delay=1e-3))
        found = run(llm, mixed_jobs(), check=False)
        assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))
        after = llm.engine.statistics.paging
        for what in ("read_through", "hits"):
            assert after[what] > before[what]
        stats, spec = llm.stats(), llm.engine.control.controller.spec
        assert stats["placement"]["experts"] > 0 and stats["transfers"]["failed"] == 0
        assert sum(stats["transfers"]["prefetches"].values()) > 0
    replay(read_trace(tmp_path / "run"), spec=spec)
