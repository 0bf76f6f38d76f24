"""A CPU that computes missed experts beside a device with memory of its own: only rows of x and y
cross. Shown on a CPU whose transfers jax carries out; where both processors have one implementation
the bits are those of full residency, elsewhere those of the recorded placement."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import moejax.start.decide.plan
from host_offload.policies.eviction.names import eviction_policy
from host_offload.policies.placement.recorded import recorded_placement
from host_offload.queue.pinned import PinnedRecords
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax import LLM, UserError
from moejax.checkpoints.convert import convert
from moejax.start.second import second_of
from moejax.step.drivers.placed_queued import PlacedQueuedRunner
from tests.moejax.engine.test_device_queue import delay
from tests.moejax.engine.test_placement import COSTS, LIMITS, Anyhow, at_rest
from tests.moejax.engine_runs import mixed_jobs, run
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

STATED = f"prescope,{COSTS},load=1ms"
QUEUE = {"transfers": "queue", "driver": "host"}


def open_llm(**options) -> LLM:
    given = {"placement": None, "ops": "move=xla", "expert_budget": "40%"}
    return LLM("demo", **{**LIMITS, **QUEUE, **given, **options})


def runner_of(llm: LLM) -> PlacedQueuedRunner:
    assert isinstance(llm.engine.runner, PlacedQueuedRunner)
    return llm.engine.runner


@contextlib.contextmanager
def each_once(runner: PlacedQueuedRunner) -> Iterator[Counter]:
    """Asserts after each layer that its active experts were computed once, by one processor.
    Yields how many each of both computed."""
    experts, compute, bind = runner._experts, runner._compute, runner._bind
    device, beside, both = Counter(), Counter(), Counter()

    def bound(step):
        parts = bind(step)

        def listed(*args):
            device.update(np.asarray(args[-2])[: args[-1]].tolist())
            return parts["compute", None](*args)

        def through(*args):
            device.update([int(args[5])])
            return parts["through", None](*args)

        return {**parts, ("compute", None): listed, ("through", None): through}

    def other(step, layer, mine, x, ids):
        beside.update(mine)
        return compute(step, layer, mine, x, ids)

    def layer(parts, step, number, x, normed, routing):
        device.clear(), beside.clear()
        found = experts(bound(step), step, number, x, normed, routing)
        ids = np.asarray(routing.ids)
        assert device + beside == Counter(np.unique(ids[ids < 16]).tolist()), "not each once"
        both.update(device=len(device), beside=len(beside))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_experts", layer)
        patch.setattr(runner, "_compute", other)
        yield both


def same(ours, theirs) -> bool:
    return all(a.same_bits(b) for a, b in zip(ours, theirs, strict=False))


@pytest.mark.parametrize(
    "ops", ["move=xla", pytest.param("xla", marks=[pytest.mark.slow])], ids=str
)
def test_the_bits_are_those_of_full_residency_whoever_computes_what(ops):
    """Prefill in two waves and decode, with copies that are late, with cells for some experts and
    for none. Each expert is computed by one processor."""
    rest = at_rest()
    if ops == "xla":
        with LLM("demo", ops="xla", **LIMITS) as llm:
            rest = run(llm, mixed_jobs()[:3], check=False)
    with open_llm(policies=[Anyhow(0.5)], prefill_waves=2, ops=ops) as llm:
        runner = runner_of(llm)
        assert {a.sharding.memory_kind for a in runner.records.of(0, 0)} == {"pinned_host"}
        for policy, cells, trips in ((Anyhow(0.5), 6, 300), (Anyhow(0.8), 0, 0), (Anyhow(1), 6, 0)):
            llm.engine.begin_anew(llm.plan.spec, [eviction_policy("lru"), policy], [cells] * 4)
            delay(llm, trips)
            before = llm.stats()["placement"]
            with each_once(runner) as computed:
                found = run(llm, mixed_jobs()[:3], check=False)
            assert not runner.faults() and same(found, rest)
            after = llm.stats()["placement"]
            assert after["experts"] - before["experts"] == computed["beside"] > 0
            assert (computed["device"] > 0) == (policy.share < 1)
            paging = llm.engine.statistics.paging
            there = paging["hits"] + paging["fills"] + paging["read_through"]
            assert paging["active"] == there + after["experts"]
        assert after["same_bits"] and after["implementation"] == ("xla" if ops == "xla" else "cpu")
        assert after["gap_s"] >= 0 < after["both_s"] and after["between"] > 0


def test_no_byte_of_a_record_is_copied_for_the_second_processor():
    """It computes with the pinned arrays' own memory, and what crosses to the device is y."""
    with open_llm(policies=[Anyhow(0.5)]) as llm:
        runner = runner_of(llm)
        run(llm, mixed_jobs()[:1], check=False)
        assert runner._seen
        for (layer, expert), seen in runner._seen.items():
            (piece,) = runner.records.of(layer, expert)
            assert seen.unsafe_buffer_pointer() == piece.unsafe_buffer_pointer()


def into_wrong_slots(runner: PlacedQueuedRunner, compute: Callable[..., Any]):
    def mutant(*args):
        made = compute(*args)
        return made._replace(slots=[np.roll(slots, 1) for slots in made.slots])

    return "_compute", mutant


def with_stale_rows(runner: PlacedQueuedRunner, compute: Callable[..., Any]):
    """x of the layer before."""
    held: dict[Any, np.ndarray] = {}

    def mutant(step, layer, mine, x, ids):
        held[ids.shape], x = np.array(x), held.get(ids.shape, np.zeros(x.shape, x.dtype))
        return compute(step, layer, mine, x, ids)

    return "_compute", mutant


def with_another_record(runner: PlacedQueuedRunner, compute: Callable[..., Any]):
    record = runner._record
    return "_record", lambda layer, expert: record((layer + 1) % 4, expert)


def left_to_the_device_too(runner: PlacedQueuedRunner, compute: Callable[..., Any]):
    plan = runner._plan

    def mutant(*args):
        runner._elsewhere = np.zeros(16, bool), runner._elsewhere[1]
        return plan(*args)

    return "_plan", mutant


def left_out(runner: PlacedQueuedRunner, compute: Callable[..., Any]):
    def mutant(step, layer, mine, x, ids):
        made = compute(step, layer, mine, x, ids)
        return made._replace(rows=made.rows[:0], slots=made.slots[:0])

    return "_compute", mutant


@pytest.mark.parametrize(
    "mutate",
    [into_wrong_slots, with_stale_rows, with_another_record, left_to_the_device_too, left_out],
)
def test_mistakes_are_seen(mutate, monkeypatch):
    """What the tests above would say of them."""
    with open_llm(policies=[Anyhow(0.7)]) as llm:
        runner = runner_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(runner, *mutate(runner, runner._compute))
            try:
                with each_once(runner):
                    seen = not same(run(llm, mixed_jobs()[:2], check=False), at_rest())
            except AssertionError as error:
                seen = "not each once" in str(error)
            assert seen


def test_a_trace_says_who_computed_what_and_replays(tmp_path):
    """With prefetches by gates, over copies that are late."""
    options = {"trace": tmp_path / "run", "trace_arrays": "gate_input"}
    with open_llm(**options, placement=f"{STATED},predict=gates") as llm:
        assert llm.engine.control is not None
        spec = llm.engine.control.controller.spec
        delay(llm, 100)
        found = run(llm, mixed_jobs(), check=False)
        stats = llm.stats()
    assert same(found, at_rest())
    assert sum(stats["transfers"]["prefetches"].values()) > 0
    trace = read_trace(tmp_path / "run")
    placed = np.stack([step.placed for step in trace.step_traces()])
    assert placed.sum() == stats["placement"]["experts"] > 0
    assert trace.header.spec["placement_same_bits"]
    simulation = replay(trace, spec=spec)
    assert np.array_equal(simulation.placed, placed.sum(axis=2))
    assert simulation.fills.sum() == stats["experts"]["fills"]


def other_bits(*args):
    """A second processor of another implementation than the steps' own."""
    second = second_of(*args)
    return second and dataclasses.replace(second, implementation="xla", same_bits=False)


def test_where_bits_differ_a_recorded_placement_repeats_them(tmp_path, monkeypatch):
    """Prefetches depend on how fast copies are, so a run alone need not place as another did."""
    monkeypatch.setattr(moejax.start.decide.plan, "second_of", other_bits)
    recorded = tmp_path / "run"
    with open_llm(trace=recorded, placement=f"{STATED},predict=gates") as llm:
        delay(llm, 200)
        wanted = run(llm, mixed_jobs()[:3], check=False)
        stats = llm.stats()["placement"]
        assert not stats["same_bits"] and stats["experts"] > 0
        assert any("a function of the placement" in note for note in llm.plan.budget.notes)
    assert not same(wanted, at_rest())
    assert not read_trace(recorded).header.spec["placement_same_bits"]
    for again, trips in ((tmp_path / "again", 0), (None, 500)):
        with open_llm(trace=again, placement=f"recorded={recorded}") as llm:
            delay(llm, trips)
            assert same(run(llm, mixed_jobs()[:3], check=False), wanted)
            assert llm.stats()["placement"]["experts"] == stats["experts"]
    # What repeats a recording is a recorded run as well.
    replay(read_trace(tmp_path / "again"))
    with open_llm(placement=f"recorded={recorded}") as llm:
        run(llm, mixed_jobs()[:3], check=False)
        with pytest.raises(ValueError, match="this run has other requests than the recorded one"):
            run(llm, mixed_jobs()[:1], check=False)


def test_a_recording_without_a_placement_is_refused(tmp_path):
    with open_llm(trace=tmp_path / "run") as llm:
        run(llm, mixed_jobs()[:1], check=False)
    with pytest.raises(TraceError, match="a run without a placement"):
        recorded_placement(read_trace(tmp_path / "run"))
    with pytest.raises(UserError, match="a run without a placement"):
        open_llm(placement=f"recorded={tmp_path / 'run'}").close()


@pytest.mark.nightly
def test_kernels_beside_the_native_op_repeat_a_recorded_placement(tmp_path):
    """Every op of the steps a Triton-lowered kernel, interpreted; missed experts by the native
    op."""
    limits = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 192}
    given = {**limits, **QUEUE, "prefill_waves": 1, "expert_budget": "40%"}
    jobs, found = three_jobs(vocabulary=4096), []
    for placement in (STATED, f"recorded={tmp_path / 'run0'}", None):
        trace = tmp_path / f"run{len(found)}" if placement else None
        with interpreted_llm("demo", placement=placement, trace=trace, **given) as llm:
            found.append(run(llm, jobs, check=False))
            assert not llm.engine.runner.faults()
            stats = llm.stats()
            assert stats["ops"]["expert_ffn"] == "pallas"
            if placement:
                assert stats["placement"]["experts"] > 0
                assert stats["placement"]["implementation"] == "cpu"
                assert not stats["placement"]["same_bits"]
    assert same(found[1], found[0]) and not same(found[2], found[0])


def test_a_second_processor_that_fails_ends_the_step_and_no_more(monkeypatch):
    with open_llm(policies=[Anyhow(0.5)]) as llm:
        runner = runner_of(llm)

        def broken(*args):
            raise RuntimeError("the second processor broke")

        monkeypatch.setattr(runner, "_compute", broken)
        with pytest.raises(RuntimeError, match="the second processor broke"):
            run(llm, mixed_jobs()[:2], check=False)
        monkeypatch.undo()
        for _ in range(3):
            llm.engine.step()
        assert same(run(llm, mixed_jobs()[:2], check=False), at_rest())


def not_in_place(self, *args):
    raise ValueError("jax copies pinned arrays to the CPU")


def other_bytes(self, host, layer, expert):
    return jax.device_put(np.zeros(self.shape[2:], np.uint16), host)


@pytest.mark.parametrize("seen_by", [not_in_place, other_bytes])
def test_memory_that_the_cpu_cannot_read_in_place_is_refused(seen_by, monkeypatch):
    monkeypatch.setattr(PinnedRecords, "seen_by", seen_by)
    with pytest.raises(UserError, match="computes experts where the store has them, and"):
        open_llm(placement=STATED).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "prescope"}, "(a placement takes stated ones: per_token=TIME,startup=TIME,"),
        ({"placement_test": "threads=1+1"}, "two groups of a CPU's cores, which transfers='queue'"),
        ({"chunk_bytes": "16KiB"}, "in one piece, and chunk_bytes cuts it"),
        ({"driver": "device"}, "Placement asks for EXPERTS_BEGIN, which driver='device' lacks"),
        ({"placement": "recorded=nowhere"}, "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises((UserError, ValueError)) as refused:
        open_llm(**{"placement": STATED, **options}).close()
    assert message in str(refused.value)


def test_a_cache_of_files_in_pinned_arrays_is_refused(demo_dir, tmp_path):
    model = convert(demo_dir, tmp_path / "demo").directory
    options = {**LIMITS, **QUEUE, "ops": "move=xla", "store": "file", "host_memory": "4MiB"}
    with pytest.raises(UserError, match="not of a cache of files in them; take store='memory'"):
        LLM(model, **{**options, "expert_budget": "40%", "placement": STATED}).close()


def test_a_device_with_memory_of_its_own_takes_the_queue():
    """Kernels (here none are interpreted, as the start is refused) beside a CPU's op."""
    with (
        pytest.raises(UserError, match="add transfers='queue'"),
        interpreted_llm("demo", placement=STATED, driver="host", max_model_len=64, max_num_seqs=2),
    ):
        pass
