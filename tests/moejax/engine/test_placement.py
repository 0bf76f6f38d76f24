"""Experts that a second processor computes beside the steps' own: the bits of full residency
whoever computes what, and a trace that says who did. Beside native ops over a link, and beside a
device with memory of its own, shown on a CPU whose transfers jax carries out: only rows of x and y
cross. Where the processors' bits differ they are those of the recorded placement."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import moejax.start.decide.start_plan
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.eviction.static import hot_beside_prefetches
from host_offload.policies.placement import placement_names as names
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.policies.recorded import repeat_run
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.start.decide.start_plan import second_of
from moejax.step import processor as processors
from tests.faults import Faults, inject
from tests.moejax.engine.scenes import (
    LINK,
    QUEUE,
    Anyhow,
    at_rest,
    delay,
    open_llm,
    same_bits,
)
from tests.moejax.engine_runs import mixed_jobs, run
from tests.moejax.interpreted_engine import interpreted_llm
from tests.moejax.models.families import write_checkpoint
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

COSTS = "per_token=50us,startup=300us,accelerator=200us,attention=500us"
STATED = f"prescope,{COSTS},load=1ms"
BESIDE = {
    "link": {**LINK, "driver": "host", "expert_budget": "40%"},
    "queue": {**QUEUE, "expert_budget": "40%"},
}
BOTH = pytest.mark.parametrize("beside", ["link", "queue"])


def placed(beside: str, placement: str | None = None, **options) -> LLM:
    given = {"placement": placement, "enable_prefix_caching": False, **BESIDE[beside]}
    return open_llm(**{**given, **options})


@pytest.mark.slow
@BOTH
def test_the_bits_are_those_of_full_residency_whoever_computes_what(beside):
    """Prefill in two waves and decode, with copies that are late, with cells for some experts and
    for none. Each active expert is counted once, by one processor."""
    with placed(beside, policies=[Anyhow(0.5)], driver="host,waves=2") as llm:
        runner = llm.engine.runner
        for policy, cells in ((Anyhow(0.5), 6), (Anyhow(0.8), 0), (Anyhow(1.0), 6)):
            llm.engine.begin_anew(llm.plan.spec, [POLICIES.parse("lru"), policy], [cells] * 4)
            delay(llm, 1e-3 if cells else 0.0)
            paging, before = llm.engine.statistics.paging, llm.stats()["placement"]
            hits, fills = paging["hits"], paging["fills"]
            found = run(llm, mixed_jobs()[:3], check=not cells and beside == "link")
            assert not runner.faults() and same_bits(found, at_rest())
            after = llm.stats()["placement"]
            assert after["experts"] > before["experts"] and after["rows"] > before["rows"]
            # Where all misses are computed beside, nobody comes; elsewhere residents are used.
            some = bool(cells) and policy.share < 1
            assert (paging["hits"] > hits) == (paging["fills"] > fills) == some
            there = paging["hits"] + paging["fills"] + paging["read_through"]
            assert paging["active"] == there + after["experts"]
        assert after["same_bits"] and after["implementation"] == "cpu"
        if beside == "queue":
            # It computes with the pinned arrays' own memory, and what crosses to the device is y.
            assert {a.sharding.memory_kind for a in runner.transport.records.of(0, 0)} == {
                "pinned_host"
            }
            for (layer, expert, _), seen in runner.processor._seen.items():
                (piece,) = runner.transport.records.of(layer, expert)
                assert seen.unsafe_buffer_pointer() == piece.unsafe_buffer_pointer()
        assert runner.processor._seen and after["seconds"] > 0


PAGED = {"precision": "dynaexq,paged=true,interval=2 steps", "prefetch": "random"}
AWARE = {"cache_aware_routing": 0.05}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [PAGED, {"precision": "int8"}, AWARE],
    ids=["two versions", "int8", "cache-aware"],
)
def test_who_computes_is_no_matter_of_how_experts_come(options):
    """Two versions: an expert is computed in the version that its miss would fill. Routers that
    favour residents see the same ones. Ops and jax's copies that are late have the same bits."""
    found, counts = [], []
    for beside in BESIDE:
        with placed(beside, policies=[Anyhow(0.5)], driver="host", **options) as llm:
            delay(llm)
            found.append(run(llm, mixed_jobs(), check=False))
            stats, runner = llm.stats(), llm.engine.runner
            assert not runner.faults() and stats["placement"]["experts"] > 0
            counts.append((stats["experts"], stats["bytes"]))
            if options is PAGED:
                assert {key[2] for key in runner.processor._seen} == {0, 1}
    assert same_bits(found[1], found[0]) and counts[0] == counts[1]


def into_wrong_slots(compute):
    def mutant(*args):
        made = compute(*args)
        return made._replace(slots=[np.roll(slots, 1) for slots in made.slots])

    return mutant


@pytest.mark.nightly
def test_a_mistake_is_seen(monkeypatch):
    """What the test above would say of them."""
    with placed("queue", policies=[Anyhow(0.7)]) as llm:
        runner = llm.engine.runner
        processor = runner.processor
        monkeypatch.setattr(processor, "_compute", into_wrong_slots(processor._compute))
        assert not same_bits(run(llm, mixed_jobs()[:2], check=False), at_rest())


@BOTH
@pytest.mark.slow
def test_a_trace_says_who_computed_what_and_replays(beside, tmp_path):
    """With prefetches by gates. Other placements of the same steps count in the simulator what
    they do in the engine; a replay finds a change of who computed."""
    load = "" if beside == "link" else ",load=1ms"
    options = {"trace": f"{tmp_path / 'run'},arrays=gate_input"}
    with placed(beside, f"prescope,{COSTS}{load},predict=gates", **options) as llm:
        assert llm.engine.control is not None
        spec = llm.engine.control.controller.spec
        found = run(llm, mixed_jobs(), check=False)
        stats = llm.stats()
    assert same_bits(found, at_rest())
    assert stats["transfers"]["ahead"] > 0
    trace = read_trace(tmp_path / "run")
    steps = [*trace.step_traces()]
    by_second = np.stack([step.placed for step in steps])
    assert by_second.sum() == stats["placement"]["experts"] > 0
    assert trace.header.spec["placement_same_bits"]
    assert not np.any(by_second & ~np.stack([step.missed for step in steps]))
    simulation = replay(trace, spec=spec)
    assert np.array_equal(simulation.placed, by_second.sum(axis=2))
    assert simulation.fills.sum() == stats["experts"]["fills"]
    if beside == "queue":
        return
    assert stats["placement"]["placement"] == f"prescope,{COSTS},predict=gates,load=link"
    assert simulation.bytes.sum() == sum(stats["bytes"].values()) + np.sum(
        [step.bytes[2] for step in steps]
    )
    placement = f"fiddler-code,{COSTS},load=1ms"
    simulation = simulate(trace, placement=placement, eviction="lru")
    with placed(beside, placement, trace=tmp_path / "other") as other:
        run(other, mixed_jobs(), check=False)
        counted = other.stats()
    assert simulation.placed.sum() == counted["placement"]["experts"] > 0
    for what in ("hits", "fills", "read_through"):
        assert getattr(simulation, what).sum() == counted["experts"][what]
    trace = read_trace(tmp_path / "other")
    changed = {**trace.header.spec, "placement": placement.replace("fiddler-code", "llama.cpp")}
    header = dataclasses.replace(trace.header, spec=changed)
    with pytest.raises(TraceError, match=r"decision"):
        replay(dataclasses.replace(trace, header=header))


def other_bits(*args):
    """A second processor of another implementation than the steps' own."""
    second = second_of(*args)
    return second and dataclasses.replace(second, implementation="xla", same_bits=False)


def other_rows(compute):
    """Rows so unlike the device's that no rounding hides a single expert of them."""

    def scaled(*args):
        rows, slots, seconds = compute(*args)
        return rows * np.float32(1.25), slots, seconds

    return scaled


@pytest.mark.slow
def test_where_bits_differ_a_recorded_placement_repeats_them(tmp_path, monkeypatch):
    """Prefetches depend on how fast copies are, so a run alone need not place as another did."""
    monkeypatch.setattr(moejax.start.decide.start_plan, "second_of", other_bits)
    compute_rows = processors.Processor._compute_rows
    monkeypatch.setattr(processors.Processor, "_compute_rows", other_rows(compute_rows))
    run_before = tmp_path / "run"
    with placed("queue", f"{STATED},predict=gates", trace=run_before) as llm:
        delay(llm, 4e-3)
        wanted = run(llm, mixed_jobs()[:3], check=False)
        stats = llm.stats()["placement"]
        assert not stats["same_bits"] and stats["experts"] > 0
        assert any("a function of the placement" in note for note in llm.plan.budget.notes)
    assert not same_bits(wanted, at_rest())
    assert not read_trace(run_before).header.spec["placement_same_bits"]
    with placed("queue", f"recorded={run_before}", trace=tmp_path / "again") as llm:
        assert same_bits(run(llm, mixed_jobs()[:3], check=False), wanted)
        assert llm.stats()["placement"]["experts"] == stats["experts"]
        with pytest.raises(ValueError, match="this run has other requests than the recorded one"):
            run(llm, mixed_jobs()[:1], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("defer", [2, 4])
def test_deferred_experts_are_added_a_layer_later(defer, tmp_path, monkeypatch):
    """KTransformers' rule, by hand: without cells all experts are the CPU's, and a token's two of
    least weight, or all four, come after the next layer's; in decode steps alone, and in the last
    layer none. A repeat of the run has its bits."""
    seen: list = []
    compute = processors.Processor.compute

    def watched(self, parts, inputs):
        x = np.asarray(inputs.x)
        after, counts = compute(self, parts, inputs)
        seen.append((self, inputs._replace(x=x), np.asarray(after)))
        return after, counts

    monkeypatch.setattr(processors.Processor, "compute", watched)
    nobody = {"expert_budget": 0, "trace": tmp_path / "run"}
    with placed("queue", f"ktransformers,{COSTS},load=1ms,defer={defer}", **nobody) as llm:
        wanted = run(llm, mixed_jobs()[:2], check=False)
        stats, notes = llm.stats()["placement"], llm.plan.budget.notes
        rows = [of_layer(*each) for each in seen]
    assert not same_bits(wanted, at_rest()) and not stats["same_bits"]
    assert any(f"placement defer={defer} CHANGES OUTPUTS" in note for note in notes)
    left, deferred = 0.0, 0
    for step, layer, x, after, y, weights in rows:
        late = np.zeros(weights.shape, bool)
        left = left if layer else 0.0
        if step == "decode" and layer < 3:
            np.put_along_axis(late, np.argsort(weights, axis=1)[:, :defer], True, axis=1)
        late &= np.abs(y).max(axis=2) > 0  # not of padding
        parts = weights[:, :, None] * y
        expected = x + np.where(late[:, :, None], 0, parts).sum(axis=1) + left
        np.testing.assert_allclose(after, expected, rtol=0.02, atol=0.02)
        left = np.where(late[:, :, None], parts, 0).sum(axis=1)
        deferred += int(late.sum())
    assert stats["deferred"] == deferred > 50
    nobody["trace"] = tmp_path / "again"
    with placed("queue", f"recorded={tmp_path / 'run'}", **nobody) as llm:
        assert same_bits(run(llm, mixed_jobs()[:2], check=False), wanted)
    for name in ("run", "again"):
        with pytest.raises(TraceError, match="other experts would have been routed; replay"):
            simulate(read_trace(tmp_path / name), eviction="lru", cells=4)


def test_experts_are_not_deferred_where_a_layer_norms_what_they_add(tmp_path):
    checkpoint = write_checkpoint(tmp_path, "AfmoeForCausalLM")
    placement = f"ktransformers,{COSTS},load=1ms,defer=1"
    with pytest.raises(UserError, match="norms or projects what experts add"):
        LLM(checkpoint, placement=placement, driver="host", transfers="queue", progress=False)


def of_layer(processor, inputs, after):
    """(kind, layer, x, x after the experts, float32[T, K, D] rows of experts, weights), of a layer
    whose experts are all the second processor's."""
    step, layer, x, normed, routing = inputs
    ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
    given = step, layer, dict.fromkeys(range(16), 0), normed
    rows, slots, _ = processor._thread.submit(processor._compute_rows, *given, ids).result()
    y = np.zeros((ids.size, rows.shape[1]), np.float32)
    y[slots] = rows
    numbers = (each.astype(np.float32) for each in (x, after))
    return step.kind, layer, *numbers, y.reshape(*ids.shape, -1), weights


@pytest.mark.slow
def test_a_recording_without_a_placement_is_refused(tmp_path):
    with placed("queue", trace=tmp_path / "run") as llm:
        run(llm, mixed_jobs()[:1], check=False)
    with pytest.raises(TraceError, match="has no decisions of PlacementPolicy"):
        repeat_run(read_trace(tmp_path / "run"), PlacementPolicy)
    with pytest.raises(UserError, match="has no decisions of PlacementPolicy"):
        placed("queue", f"recorded={tmp_path / 'run'}").close()


@pytest.mark.slow
def test_a_second_processor_that_fails_ends_the_step_and_no_more(monkeypatch):
    def fail(*args):
        raise RuntimeError("the second processor broke")

    with placed("queue", policies=[Anyhow(0.5)]) as llm:
        monkeypatch.setattr(llm.engine.runner.processor, "_compute", fail)
        with pytest.raises(RuntimeError, match="the second processor broke"):
            run(llm, mixed_jobs()[:2], check=False)
        monkeypatch.undo()
        for _ in range(3):
            llm.engine.step()
        assert same_bits(run(llm, mixed_jobs()[:2], check=False), at_rest())


def other_bytes(records, host, layer, expert):
    return jax.device_put(np.zeros(records.shape[2:], np.uint16), host)


@pytest.mark.slow
def test_memory_that_the_cpu_cannot_read_in_place_is_refused(monkeypatch):
    monkeypatch.setattr(processors, "view_record", other_bytes)
    with pytest.raises(UserError, match="computes experts where the store has them, and"):
        placed("queue", STATED).close()


def test_a_device_with_memory_of_its_own_takes_the_queue():
    """Kernels (here none are interpreted, as the start is refused) beside a CPU's op."""
    with (
        pytest.raises(UserError, match="add transfers='queue'"),
        interpreted_llm("demo", placement=STATED, driver="host", max_model_len=64, max_num_seqs=2),
    ):
        pass


@pytest.mark.slow
def test_the_command_line_places(capsys):
    limits = ["--max-model-len", "64", "--max-num-seqs", "2", "--expert-budget", "40%"]
    command = ["generate", "The old house", *limits, "--max-tokens", "8", "--temperature", "0"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    beside = ["--driver", "host", "--placement", STATED, "--verbose"]
    assert main([*command, *beside]) == 0
    shown = capsys.readouterr()
    assert shown.out == alone
    (line,) = (line for line in shown.err.splitlines() if line.startswith("beside"))
    assert "missed experts and" in line and "by the second processor" in line and "prescope" in line


@pytest.mark.slow
def test_loads_on_demand_pass_two_buffers_beside_a_hot_table(tmp_path, monkeypatch):
    """PreScope's AsyncIO as the engine has it: gate, up and down of an expert are three transfers
    at once; beside a hot table loads on demand pass two buffers in turn and come into no cell; who
    comes ahead gets a cell of its own layer. Whatever is late, the bits are the same."""
    # Of a small model a chunk is then a whole part of a record, and there is a thread for each.
    transfers = "queue,rate=500MB/s,latency=50us,threads=3,chunk_bytes=1MiB"
    options = {"transfers": transfers, "trace": f"{tmp_path / 'run'},arrays=gate_input"}
    soon = dataclasses.replace(hot_beside_prefetches(2), warmup=16)
    monkeypatch.setattr(names, "hot_beside_prefetches", {2: soon}.__getitem__)
    with placed("link", f"prescope,{COSTS},predict=gates,buffers=2", **options) as llm:
        assert llm.engine.runner.transport.queue is not None and llm.engine.control is not None
        run(llm, mixed_jobs()[:1], check=False)  # until the table is known
        before = dict(llm.engine.statistics.paging)
        inject(llm.engine.runner.transport.queue, Faults(seed=1, delay=1e-3))
        assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
        after = llm.engine.statistics.paging
        for what in ("read_through", "hits"):
            assert after[what] > before[what]
        stats, spec = llm.stats(), llm.engine.control.controller.spec
        assert stats["placement"]["experts"] > 0 and stats["transfers"]["failed"] == 0
        assert stats["transfers"]["ahead"] > 0
    replay(read_trace(tmp_path / "run"), spec=spec)
