"""The stream driver beyond its bits (test_drivers.py): layers and loads in the order of FluxMoE's
Algorithm 1, in the native queue and ops and in what the host dispatches where jax copies; memory;
and the planner, by which KV grows into what experts give at once and they come back."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import moejax.start.build
import moejax.step.experts
from host_offload.control.window import HOST, PACKED
from host_offload.memory.arena import SlotClass
from host_offload.queue.device import TransferLost
from host_offload.queue.pinned import PinnedBuilder
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.random_model import random_model, shape
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.residency_planner import ResidencyPlanner
from moejax.serve.costs import cost_model_for
from moejax.start.build import start_engine
from moejax.start.decide.stream import used_experts
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of
from moejax.start.tiers import measure_rates
from moejax.step.copied_stream import CopiedStream
from moejax.step.executor import Executor
from moejax.step.transports.copies import CopyTransport
from pallas_kernels.cpu.spans import recorded
from tests.faults import Faults, delay_arena, inject
from tests.moejax.engine.scenes import (
    EXPERTS,
    GREEDY,
    LAYERS,
    LIMITS,
    PROMPTS,
    RECORD,
    STREAM_QUEUE,
    as_llm,
    open_llm,
    same_bits,
    tokens_of,
)
from tests.moejax.engine_runs import Faulty, mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

PACKED_BYTES = 74752
FLUX = "stream,tiers=flux,packed=50%,planner=none"


def streaming(**options) -> LLM:
    return open_llm(**{"driver": "stream", **options})


# ---- memory


def test_kv_has_what_experts_do_not_need():
    """A batch too small to pay is named."""
    with streaming(memory="6MiB") as llm:
        arena = llm.stats()["arena"]
        assert arena["expert_slots"] == 2 * EXPERTS and arena["free_slots"] == 0
        assert arena["kv_slots"] == arena["slots"] - 2 * EXPERTS
        assert "a window of two of 4 layers" in str(llm.explain())
        for block in llm.explain().blocks:
            assert sum(line.bytes for line in block[:-1]) == block[-1].bytes
        with pytest.raises(ValueError, match="experts stream through a window of two layers"):
            llm.engine.set_budget([0] * 4, 3)
        with pytest.raises(UserError, match="costs are measured with cells of each layer"):
            cost_model_for(llm, force=True)
        notes = " ".join(llm.stats()["notes"])
        assert "a step moves 64 experts, 6 MiB, beside compute" in notes
        assert "4 sequences at once use about 11 of a layer's 16 experts" in notes
        assert "it pays from about 9 on (max_num_seqs)" in notes
    assert used_experts(16, 4, 8) < 0.9 * 16 + 0.1 and used_experts(16, 4, 9) >= 0.9 * 16
    plan, _ = dry_run(Config.of("demo", driver="stream", **{**LIMITS, "max_num_seqs": 16}))
    assert "pays from" not in " ".join(plan.budget.notes)


@pytest.mark.slow
def test_by_the_rates_the_split_is_balanced_and_leaves_kv_its_room(monkeypatch):
    """Rates that were measured: decoding is many times as fast as loading."""
    with streaming(driver=FLUX) as llm:
        rates = measure_rates(llm.engine.runner.steps, select_device())
    assert rates.host > 0 < rates.packed
    slow_host = rates._replace(host=1e8, packed=1e10)
    monkeypatch.setattr(moejax.start.build, "measure_rates", lambda *args: slow_host)
    given = {"driver": "stream,tiers=flux,planner=none"}
    with streaming(**given) as llm:
        stream, notes = llm.stats()["stream"], " ".join(llm.stats()["notes"])
        assert stream["packed_per_layer"] >= EXPERTS - 2
        assert "packed residents in each" in notes and "and decodes" in notes
        kv, wanted = (llm.stats()["arena"][name] for name in ("kv_slots", "slots"))
    with streaming(memory=(32 + 11 + 9) * RECORD, **given) as llm:
        stats = llm.stats()
        assert stats["arena"]["kv_slots"] >= kv and stats["arena"]["slots"] < wanted
        assert stats["stream"]["packed_per_layer"] == 9 * RECORD // (LAYERS * PACKED_BYTES)


# ---- order


def config_of(layers: int):
    """layers: with experts; 5: two others between three of them, so that each is a run of its
    own."""
    config = shape("demo", layers=layers)
    if layers == 5:
        moe = (True, False, True, False, True)
        config = dataclasses.replace(config, moe_layers=moe, intermediate_size=256)
    return config


@functools.cache
def loaded(layers: int, versions: tuple[str, ...], pinned: bool):
    options = {"new_builder": PinnedBuilder} if pinned else {}
    model = random_model(config_of(layers), device=select_device(), **options)
    return model if pinned else with_versions(model, versions)


def started(layers: int, driver: str = "stream", **options):
    made = Config.of("demo", driver=driver, **{**LIMITS, **options})
    model = loaded(layers, settings_of(made).versions, "ops" in options)
    return as_llm(start_engine(model, made, select_device())[0])


def short_jobs():
    params = dataclasses.replace(GREEDY, max_tokens=8)
    return [dataclasses.replace(job, params=params) for job in mixed_jobs()[:2]]


@functools.cache
def at_rest_of(layers: int):
    running = started(layers, "device")
    found = run(running, short_jobs(), check=False)
    running.engine.runner.delete(given=False)
    return found


def out_of_order(layers: int, *, load: float = 0.0, compute: int = 0, **options) -> list[str]:
    """What a run's chunks and ops say against Algorithm 1. Loads are queued an expert after the
    other, so the ticket says whose a chunk is; count: layers so far, over all steps.

    load: most seconds that a chunk takes longer. compute: microseconds that each op on the arena
    does. options: others than the stream's own, whose residents are packed."""
    running = started(layers, transfers="queue,chunk_bytes=32KiB", **options)
    runner = running.engine.runner
    assert not runner.faults()  # and the first layer is there
    residents = int((runner.window.tier == PACKED).sum())  # came before it
    runner.transport.queue.record()
    inject(runner.transport.queue, Faults(seed=layers, delay=load))
    delay_arena(runner.buffers.memory, compute)
    with recorded() as ops:
        found = run(running, short_jobs(), check=False)
        delay_arena(runner.buffers.memory, 0)
        wrong = runner.faults()
    if not same_bits(found, at_rest_of(layers)):
        wrong.append("other bits")
    chunks = runner.transport.queue.spans()
    computed = [span for span in ops if span.op == "expert_ffn"]
    beside = 0
    for chunk in chunks:
        count = (chunk.ticket - 1 - residents) // EXPERTS
        if count >= 2 and chunk.begin < computed[count - 2].end:
            wrong.append(f"load {count} began while layer {count - 2} computed")
        if count < len(computed) and chunk.end > computed[count].end:
            wrong.append(f"layer {count} ended before its load")
        beside += chunk.begin < computed[count - 1].end
    if compute and not beside:
        wrong.append("no chunk began before the layer before had computed")
    loads = {(chunk.ticket - 1 - residents) // EXPERTS for chunk in chunks}
    if loads != {*range(1, len(computed) + 1)}:
        wrong.append("not every layer was loaded")
    runner.delete(given=False)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "driver"),
    [
        *((3, "stream"), (3, FLUX)),
        *(pytest.param(n, "stream", marks=pytest.mark.nightly) for n in (4, 5)),
    ],
)
def test_loads_and_layers_are_in_order_under_random_durations(layers, driver):
    """Checkable property 1 of shared/papers.md 3.7, in the queue and the ops themselves: where
    loading takes longer, and where computing does and hides it. With packed residents there are two
    loading streams."""
    assert not out_of_order(layers, load=2e-4, driver=driver)
    assert not out_of_order(layers, compute=1000, driver=driver)


def recycled_too_early(monkeypatch) -> None:
    """The cells of the layer that computes next are taken: a write after a read is not waited
    for."""
    original = moejax.step.experts.hand_over

    def hand_over(tables, giver, taker, cells):
        layers = tables.clock.shape[0]
        return original(tables, (giver + 1) % layers, taker, cells)

    monkeypatch.setattr(moejax.step.experts, "hand_over", hand_over)


@pytest.mark.nightly
@pytest.mark.usefixtures("own_programs")
def test_an_order_with_a_mistake_is_found(monkeypatch):
    at_rest_of(3)
    recycled_too_early(monkeypatch)
    try:
        found = out_of_order(3, compute=1000)
    except (AssertionError, IndexError) as error:  # by the checks before, or a layer too few
        found = [str(error)]
    assert found


def dispatched(runner: Executor, monkeypatch) -> list[tuple[str, int]]:
    """What is dispatched, in order: `copy`, a record's layer; `seat`, the cells'; `land`, -1,
    for each record; `compute`, a layer."""
    events: list[tuple[str, int]] = []
    records, queue, call = (
        runner.transport.records,
        runner.transport.device_queue,
        runner.compiler.call,
    )
    layer_of = {
        id(piece): layer
        for layer, experts in enumerate(records.pieces)
        for piece in itertools.chain.from_iterable(experts)
    }
    put, computed = queue.put, CopyTransport.compute

    def begun(pieces):
        events.append(("copy", layer_of[id(pieces[0])]))
        return put(pieces)

    def called(key, *args):
        if key.kind == "seat":
            events.append(("seat", int(args[2])))
        if key.kind.startswith("land"):
            events.extend([("land", -1)] * np.size(args[1]))
        return call(key, *args)

    def compute(self, parts, inputs):
        def experts(*operands):
            events.append(("compute", inputs.layer))
            return parts["experts", None](*operands)

        return computed(self, {("experts", None): experts}, inputs)

    monkeypatch.setattr(queue, "put", begun)
    monkeypatch.setattr(runner.compiler, "call", called)
    monkeypatch.setattr(CopyTransport, "compute", compute)
    return events


def dispatched_wrongly(layers: int, monkeypatch) -> list[str]:
    """What a run says against the order: layer by layer its cells, its records into them, the next
    layer's copies, and it computes. So no copy waits for a layer beside which it should run, and
    no more than one layer is in staging."""
    running = started(layers, ops="move=xla")
    runner = running.engine.runner
    try:
        streamed, wrong = runner.window.half, []
        count = len(runner.window.tier)
        events = dispatched(runner, monkeypatch)
        found = run(running, short_jobs(), check=False)
        if not same_bits(found, at_rest_of(layers)):
            wrong.append("other bits")
        wrong += runner.faults()
        expected: list[tuple[str, int]] = []
        for number in range(sum(what == "compute" for what, _ in events)):
            layer = number % count
            expected += [("seat", layer), *[("land", -1)] * streamed]
            expected += [("copy", (layer + 1) % count)] * streamed
            expected += [("compute", layer)]
        if events != expected:
            wrong.append("another order")
        return wrong
    except (Faulty, RuntimeError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        runner.delete(given=False)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_layers_are_dispatched_in_order(layers, monkeypatch):
    assert dispatched_wrongly(layers, monkeypatch) == []


@pytest.mark.nightly
def test_a_dispatch_with_a_mistake_is_found(monkeypatch):
    """A layer's copies begin when the one before has been dispatched, in series with it."""
    at_rest_of(3)
    monkeypatch.setattr(CopiedStream, "materialize", CopiedStream._seat)
    assert dispatched_wrongly(3, monkeypatch)


def test_a_model_that_the_window_holds_whole_is_refused():
    with pytest.raises(UserError, match="driver=stream and a model of 2 layers do not go together"):
        started(2)


@pytest.mark.slow
def test_a_step_that_ends_in_the_middle_leaves_the_next_one_whole(monkeypatch):
    """Also where records that failed ahead of need are brought again."""
    with open_llm(**STREAM_QUEUE) as llm:
        want = tokens_of(llm)
        materialize = CopiedStream.materialize

        def broken(self, layer, routed):
            materialize(self, layer, routed)
            if layer == 2:
                raise RuntimeError("in the middle")

        monkeypatch.setattr(CopiedStream, "materialize", broken)
        with pytest.raises(RuntimeError, match="in the middle"):
            llm.generate(PROMPTS[1], GREEDY)
        monkeypatch.undo()
        assert tokens_of(llm) == want and not llm.engine.runner.faults()
        queue = llm.engine.runner.transport.device_queue
        put, begin, calls = queue.put, queue._begin, itertools.count()

        def refused(pieces):
            raise MemoryError("no staging")

        def refusing(ticket, chunks):
            demand = queue._staged[ticket].transfer.demand
            queue.put = put if demand or next(calls) % 7 else refused
            begin(ticket, chunks)

        queue._begin = refusing
        assert tokens_of(llm) == want and not llm.engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert stats["failed"] >= stats["retried"] > 20 and stats["demands"] > 20


# ---- the planner


LEAST_KV = 3
"""Slots of one sequence of max_model_len."""
MEMORY = (45 + LEAST_KV) * RECORD
"""The window, a quarter of the experts packed (or, computed as they are, three), and KV of one
sequence."""
COMES = (0, 4, 6, 30)
"""The step before which each request comes."""


def planning(tiers: str, **options) -> LLM:
    driver = f"stream,tiers={tiers}"
    given = {"memory": MEMORY, "driver": driver, "enable_prefix_caching": False}
    return streaming(**{**given, **options})


def requests() -> list[tuple[list[int], SamplingParams]]:
    """A batch that grows and shrinks: one sequence runs throughout, others come and go."""
    greedy = dataclasses.replace(GREEDY, max_tokens=90, logprobs=3)
    short = dataclasses.replace(greedy, max_tokens=20)
    drawn = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    long = [*range(3, 163)]
    return [([5, 6, 7, 300], greedy), (long, short), (long[::-1], drawn), (long[20:], short)]


def answers(llm: LLM, *, check: bool = False, seen=None) -> list[tuple[list[int], list]]:
    """Token ids and log-probabilities of each request. check: all invariants after every step.
    seen: called then."""
    engine, added, step = llm.engine, [], 0
    while len(added) < len(COMES) or not engine.idle:
        while len(added) < len(COMES) and COMES[len(added)] <= step:
            added.append(engine.add(*requests()[len(added)]))
        engine.step()
        step += 1
        if seen is not None:
            seen(engine)
        if check:
            assert not engine.runner.faults()
    engine.drain()
    assert all(request.error is None for request in added)
    return [(request.output, request.logprobs) for request in added]


@functools.cache
def answers_at_rest(**options):
    with open_llm(enable_prefix_caching=False, **options) as llm:
        return answers(llm)


def as_if(planner: ResidencyPlanner, seconds: float) -> None:
    """Loading that the model thinks so fast, or so slow, that ρ is far from its dead zone: seconds
    of an expert."""
    rate = planner.model.record_bytes / seconds
    planner.model = dataclasses.replace(planner.model, host_rate=rate, packed_rate=3 * rate)


FAST, SLOWLY = 1e-12, 1.0


def kv_grows(tiers: str, memory: int = MEMORY, **options) -> None:
    """Loading is modelled as slow, so experts take all that KV leaves, and give it at once."""
    kept: list[tuple[int, int]] = []

    def seen(engine) -> None:
        arena, planner = engine.scheduler.arena, engine.planner
        window = engine.runner.window
        kept.append((arena.count(SlotClass.KV), int(window.placement[0, HOST])))
        # The hard constraint, after every call: what KV uses, it has.
        taken = planner.model.experts_bytes(window.placement)
        assert taken == window.rows * arena.layout.hidden * 2
        assert taken <= (arena.slots - arena.count(SlotClass.KV)) * RECORD
        used = -(-(arena.pages - engine.scheduler.cache.available) // arena.layout.pages_per_slot)
        assert max(used, LEAST_KV) <= arena.count(SlotClass.KV)

    with planning(f"{tiers},interval=2", memory=memory, **options) as llm:
        as_if(llm.engine.planner, SLOWLY)
        found = answers(llm, check=True, seen=seen)
        stats = llm.stats()
        assert stats["planner"]["deferred"] == 0 < stats["transfers"]["wait_seconds"]
        moves = stats["planner"]["moves"]
        assert stats["kv"]["preemptions"] == 0 and stats["kv"]["swapped_out_bytes"] == 0
        assert {move["why"] for move in moves} == {"kv", "rho"}
        # Staggered: all layers have as many in each tier, after every move.
        assert all(move[tier] % LAYERS == 0 for move in moves for tier in ("packed", "dense"))
        assert all(move["expert_bytes"] + move["kv_slots"] * RECORD <= memory for move in moves)
    slots, hosts = zip(*kept, strict=True)
    # KV began with the least, grew by what came, and gave back; experts the other way around.
    assert LEAST_KV == slots[0] < max(slots) > slots[-1] and max(slots) >= 2 * LEAST_KV
    assert hosts[int(np.argmax(slots))] > hosts[-1]
    assert found == answers_at_rest(**options)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["flux,packed=25%", "flux-direct,packed=75%"])
def test_kv_grows_into_what_experts_give_and_they_come_back(tiers):
    kv_grows(tiers)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tiers", "memory"),
    [
        ("flux,packed=25%", MEMORY),
        # Staging is kept for a layer of which nobody is packed, as that may come.
        ("flux-direct,packed=75%", MEMORY + 12 * RECORD),
    ],
)
def test_over_jax_copies_they_do_too(tiers, memory):
    """Within a donated arena, and what the device waited for is known."""
    kv_grows(tiers, memory, ops="xla")


@pytest.mark.slow
def test_over_jax_copies_a_move_that_fails_changes_nothing():
    driver, memory = "flux,dense=25%,packed=25%,planner=none", 120 * RECORD
    with planning(driver, ops="xla", memory=memory) as llm:
        runner = llm.engine.runner
        stream, queue, before = runner.stream, runner.transport.device_queue, runner.window
        put = queue.put

        def refused(pieces):
            raise MemoryError("no staging")

        queue.put = refused
        with pytest.raises(TransferLost, match="no staging"):
            stream.change(dataclasses.replace(before, tier=np.zeros_like(before.tier)))
        queue.put = put
        assert runner.window is before and not runner.faults()
        assert answers(llm) == answers_at_rest(ops="xla") and not runner.faults()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiers", "seconds"),
    [
        *(("flux,packed=50%,dense=25%", seconds) for seconds in (FAST, SLOWLY)),
        pytest.param("flux-direct,packed=50%", SLOWLY, marks=pytest.mark.nightly),
    ],
)
def test_residents_of_both_tiers_go_and_come(tiers, seconds):
    """No KV in the way: ρ alone, to the one bound or the other, one expert of each layer every two
    steps, in the other bits' place."""
    with planning(f"{tiers},interval=2", memory=120 * RECORD) as llm:
        planner = llm.engine.planner
        as_if(planner, seconds)
        before = llm.engine.runner.window.placement
        found = answers(llm, check=True)
        after = llm.engine.runner.window.placement
        assert {move["why"] for move in planner.stats()["moves"]} == {"rho"}
        assert np.all(after == after[0]) and len(planner.moves) >= 4
    more = after[:, HOST] > before[:, HOST]
    fewer = after[:, HOST] < before[:, HOST]
    assert np.all(more if seconds == FAST else fewer)
    assert found == answers_at_rest()


@pytest.mark.slow
def test_moves_that_are_not_staggered_are_of_one_layer():
    with planning("flux,packed=50%,planner=one-layer,interval=2", memory=120 * RECORD) as llm:
        as_if(llm.engine.planner, FAST)
        seen: list[np.ndarray] = []
        found = answers(llm, check=True, seen=lambda e: seen.append(e.runner.window.placement))
        assert llm.stats()["planner"]["staggered"] is False
    changes = [after - before for before, after in itertools.pairwise(seen)]
    moves = [change for change in changes if change.any()]
    assert moves and all(np.any(change, axis=1).sum() == 1 for change in moves)
    assert {int(change[:, HOST].sum()) for change in moves} == {LAYERS}
    assert found == answers_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["live", "one-layer"])
def test_what_kv_takes_is_of_the_planners_kind_too(planner):
    """Exp#3's arm without balance releases experts of one layer, and the others one of each."""
    with planning(f"flux,packed=75%,planner={planner}", memory=(69 + LEAST_KV) * RECORD) as llm:
        answers(llm)
        moves = [move["by_layer"] for move in llm.stats()["planner"]["moves"]]
    assert len(moves) > 1 and (max(map(np.ptp, moves)) > 0) == (planner == "one-layer")


@pytest.mark.slow
def test_compute_is_profiled_by_bucket():
    with planning("flux,packed=50%,interval=1000", memory=120 * RECORD) as llm:
        answers(llm)
        stats = llm.stats()
        compute = stats["planner"]["compute_s"]
        assert set(compute) == {1, 2, 4}
        rho = stats["planner"]["rho"]
        assert all(rho[rows] > 0 for rows in compute) and not stats["planner"]["moves"]


@pytest.mark.nightly
def test_a_planner_that_does_not_ask_what_kv_needs_is_found(monkeypatch):
    answers_at_rest()
    monkeypatch.setattr(ResidencyPlanner, "kv_needs", lambda self: self.least_kv_slots)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):  # whichever check sees it
        kv_grows("flux,packed=25%")
