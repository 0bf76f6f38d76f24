"""The stream driver: the bits of full residency in the memory of two layers, in the order of
FluxMoE's Algorithm 1, whatever the link does."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import moejax.step.drivers.device
import moejax.step.experts
from host_offload.control.window import PACKED
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.convert import convert
from moejax.checkpoints.random_model import random_model, shape
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.serve.costs import cost_model_for
from moejax.start.build import start_engine
from moejax.start.decide.stream import used_experts
from moejax.start.options import Options
from moejax.start.settings import settings_of
from pallas_kernels.cpu.spans import recorded
from tests.faults import Faults, delay_arena, inject
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LINK = {"link_rate": "500MB/s", "link_latency": "50us", "chunk_bytes": "64KiB"}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 300], list(range(20, 90))]
EXPERTS = 16


def open_llm(**options) -> LLM:
    return LLM("demo", progress=False, **{"driver": "stream", **LIMITS, **options})


@functools.cache
def at_rest(precision: str | None = None):
    """What the jobs give with every expert resident."""
    with open_llm(driver="device", precision=precision) as llm:
        return run(llm, mixed_jobs()[:4], check=False)


def slow(**options):
    return pytest.param(options, marks=pytest.mark.slow)


# ---- bits and memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**LINK},
        slow(link_rate="500MB/s", transfer_threads=1, chunk_bytes=10_000),
        slow(link_latency="200us", transfer_threads=4),
        {"expert_budget": "80%", **LINK},
        slow(expert_budget="100%"),
        slow(memory=35 * 98304),  # three slots of KV for four sequences: pages go out and back
        slow(precision="int8", **LINK),
        pytest.param({"precision": "lossless12"}, marks=pytest.mark.nightly),  # as int8
    ],
    ids=str,
)
def test_the_bits_are_those_of_full_residency(options):
    """Once with all invariants after every step, which waits for what flies, and once with delays
    of up to 200 µs a chunk and no wait but the ops' own."""
    with open_llm(**options) as llm:
        found = [run(llm, mixed_jobs()[:4])]
        inject(llm.engine.runner.queue, Faults(seed=1, delay=2e-4))
        found.append(run(llm, mixed_jobs()[:4], check=False))
        assert not llm.engine.runner.faults()
        stats = llm.stats()
        moved, stream = stats["transfers"], stats["stream"]
        record = llm.engine.runner.layout.records[0].nbytes
        resident = {"80%": 9, "100%": EXPERTS}.get(options.get("expert_budget"), 0)
        streamed = EXPERTS - resident
        assert stream["resident_per_layer"] == resident
        assert stream["bytes_per_step"] == 4 * streamed * record
        assert stream["bytes"] == (4 * resident + 2 * streamed) * record
        # All that was queued came, and a layer ahead of the last step at that.
        before = (4 * resident + streamed) * record
        every = stream["steps"] * stream["bytes_per_step"] + before
        assert sum(moved["bytes"].values()) == every
        assert moved["cancelled"] == moved["failed"] == 0 and (moved["waits"] > 0 or not streamed)
        assert stats["experts"]["hit_rate"] == 1 and 0 < stream["used"] < 1
    want = at_rest(options.get("precision"))
    for one in found:
        assert all(a.same_bits(b) for a, b in zip(one, want, strict=True))


def test_kv_has_what_experts_do_not_need():
    with open_llm(memory="6MiB") as llm:
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


def test_other_memory_than_the_windows_is_found_while_running():
    with open_llm() as llm:
        runner = llm.engine.runner
        rows = np.asarray(runner.tables.cell_row).copy()
        rows[3, 0] = rows.max()
        runner.set_tables({"cell_row": rows})
        with pytest.raises(RuntimeError, match=f"had {33 * 98304} bytes in a step, and their"):
            llm.generate(PROMPTS[0], GREEDY)


@pytest.mark.slow
def test_layers_stream_from_files(demo_dir, tmp_path):
    """With their checksums verified on the way, and integrity by the files' own."""
    files = convert(demo_dir, tmp_path / "demo").directory
    with LLM(files, progress=False, driver="stream", store="file", **LIMITS) as llm:
        assert llm.stats()["store"]["memory_bytes"] == 0
        found = run(llm, mixed_jobs()[:4])
    assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))


# ---- Algorithm 1


def config_of(layers: int):
    """layers: with experts; 5: two others between three of them, so that each is a run of its
    own."""
    config = shape("demo", layers=layers)
    if layers == 5:
        moe = (True, False, True, False, True)
        config = dataclasses.replace(config, moe_layers=moe, intermediate_size=256)
    return config


@functools.cache
def loaded(layers: int, versions: tuple[str, ...] = ("dense",)):
    return with_versions(random_model(config_of(layers), device=select_device()), versions)


@dataclasses.dataclass(frozen=True)
class Running:
    """What engine_runs.run takes of an LLM."""

    engine: Engine


def started(layers: int, driver: str = "stream", **options) -> Running:
    made = Options("demo", driver=driver, **{**LIMITS, **options})
    model = loaded(layers, settings_of(made).versions)
    return Running(start_engine(model, made, select_device())[0])


def out_of_order(layers: int, *, load: float = 0.0, compute: int = 0, **options) -> list[str]:
    """What a run's chunks and ops say against Algorithm 1. Loads are queued an expert after the
    other, so the ticket says whose a chunk is; count: layers so far, over all steps.

    load: most seconds that a chunk takes longer. compute: microseconds that each op on the arena
    does. options: others than the stream's own, whose residents are packed."""
    running = started(layers, chunk_bytes=32 << 10, **options)
    runner = running.engine.runner
    assert not runner.faults()  # and the first layer is there
    residents = int((runner.window.tier == PACKED).sum())  # came before it
    runner.queue.record()
    inject(runner.queue, Faults(seed=layers, delay=load))
    delay_arena(runner.memory, compute)
    with recorded() as ops:
        found = run(running, short_jobs(), check=False)
        delay_arena(runner.memory, 0)
        wrong = runner.faults()
    if not all(a.same_bits(b) for a, b in zip(found, at_rest_of(layers), strict=True)):
        wrong.append("other bits")
    chunks = runner.queue.spans()
    computed = [span for span in ops if span.op == "expert_ffn"]
    early = 0
    for chunk in chunks:
        count = (chunk.ticket - 1 - residents) // EXPERTS
        if count >= 2 and chunk.begin < computed[count - 2].end:
            wrong.append(f"load {count} began while layer {count - 2} computed")
        if count < len(computed) and chunk.end > computed[count].end:
            wrong.append(f"layer {count} ended before its load")
        early += chunk.end < computed[count - 1].end
    loads = {(chunk.ticket - 1 - residents) // EXPERTS for chunk in chunks}
    if loads != {*range(1, len(computed) + 1)}:
        wrong.append("not every layer was loaded")
    if compute and early < 0.9 * len(chunks):
        wrong.append(f"{early} of {len(chunks)} chunks came while the layer before computed")
    runner.delete(given=False)
    return wrong


def short_jobs(tokens: int = 8):
    params = dataclasses.replace(GREEDY, max_tokens=tokens)
    return [dataclasses.replace(job, params=params) for job in mixed_jobs()[:2]]


@functools.cache
def at_rest_of(layers: int):
    running = started(layers, "device")
    found = run(running, short_jobs(), check=False)
    running.engine.runner.delete(given=False)
    return found


@pytest.mark.parametrize("layers", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_loads_and_layers_are_in_order_under_random_durations(layers):
    """Checkable property 1 of shared/papers.md 3.7, in the queue and the ops themselves: where
    loading takes longer, and where computing does and hides it."""
    assert not out_of_order(layers, load=2e-4)
    assert not out_of_order(layers, compute=1000)


def recycled_too_early(monkeypatch) -> None:
    """The cells of the layer that computes next are taken: a write after a read is not waited
    for."""
    original = moejax.step.experts.hand_over

    def hand_over(tables, giver, taker, cells):
        layers = tables.clock.shape[0]
        return original(tables, (giver + 1) % layers, taker, cells)

    monkeypatch.setattr(moejax.step.experts, "hand_over", hand_over)


def loaded_late(monkeypatch) -> None:
    """A layer is materialized when it is needed, in series with compute."""
    original = moejax.step.drivers.device.materialize

    def materialize(memory, layer, after, context):
        # The layer before is the one that is about to compute.
        layers = memory.tables.clock.shape[0]
        return original(memory, (layer - 1) % layers, after, context)

    monkeypatch.setattr(moejax.step.drivers.device, "materialize", materialize)


def only_what_is_used(monkeypatch) -> None:
    """Experts that no token chose are not waited for, and taken back when the cells go on."""
    original = moejax.step.experts.expert_ffn

    def expert_ffn(y, x, ids, arena, stores, layer, address, version, active, count, **said):
        used = (ids.reshape(-1)[:, None] == active).any(axis=0)
        first = (~used).argsort(stable=True).astype(np.int32)
        return original(
            *(y, x, ids, arena, stores, layer, address, version, first),
            used.sum().astype(np.int32),
            **said,
        )

    monkeypatch.setattr(moejax.step.experts, "expert_ffn", expert_ffn)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [recycled_too_early, loaded_late, only_what_is_used])
def test_an_order_with_a_mistake_is_found(mistake, monkeypatch):
    at_rest_of(3)
    mistake(monkeypatch)
    try:
        found = out_of_order(3, load=2e-4) or out_of_order(3, compute=1000)
    except RuntimeError as error:  # by the check of every step
        found = [str(error)]
    assert found


@pytest.mark.parametrize("layers", [3, 4])
def test_a_layer_changes_halves_with_each_pass_where_their_number_is_odd(layers):
    running = started(layers)
    runner, seen = running.engine.runner, []
    running.engine.add(PROMPTS[0], GREEDY)
    for _ in range(6):
        running.engine.step()
        address = np.asarray(runner.tables.address)
        assert np.all(address[0] >= 0) and np.all(address[-1] >= 0)
        assert np.all(address[1:-1] < 0)
        seen.append(int(address[0].min() >= EXPERTS * runner.layout.slot_rows))
    assert seen == [(pass_ + 1) * layers % 2 for pass_ in range(6)]
    while not running.engine.idle:
        running.engine.step()
    runner.delete(given=False)


# ---- failures and refusals


def test_a_layer_that_does_not_come_ends_the_requests_of_its_step_only():
    with open_llm(**LINK) as llm:
        engine, queue = llm.engine, llm.engine.runner.queue
        want = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
        first = engine.add(PROMPTS[0], GREEDY)
        inject(queue, Faults(seed=1, errors=1.0))
        while first.error is None:
            engine.step()
        assert "could not be read: memory: an injected error" in str(first.error)
        inject(queue, Faults())
        while not engine.idle:
            engine.step()
        assert not engine.runner.faults()
        # What failed is absent, is read through where its layer is mapped already, and comes again.
        assert [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS] == want
        assert [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS] == want
        assert not engine.runner.faults()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ops": "kv_write=xla"},
            "kv_write xla is not native beside ops that are, for which exper",
        ),
        ({"precision": "dynaexq"}, "which driver='stream' lacks"),
        ({"precision": "random"}, "driver=stream has experts of one version"),
        ({"precision": "lossless12,in_transit=true"}, "as they lie in the store, not precision"),
        ({"eviction": "lfu"}, "so eviction says nothing; leave eviction out, or use driver="),
        ({"prefetch": "random"}, "which driver='stream' lacks"),
        ({"resize": "mv_wsa"}, "which driver='stream' lacks"),
        ({"cells": "9,9,9,9"}, "so cells says nothing"),
        ({"prefill_waves": 2}, "so prefill_waves says nothing"),
        ({"expert_budget": "25%"}, "two layers of experts, 3 MiB (3145728 bytes), and expert_b"),
        ({"trace": "nowhere"}, "so trace says nothing"),
        ({"memory": "3MiB"}, "arena too small"),
        ({"hooks": object()}, "which no hook can enter; use driver='host'"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_cannot_be_is_refused_with_what_to_write(options, message):
    with pytest.raises((UserError, ValueError)) as refused:
        open_llm(**options).close()
    assert message in str(refused.value)


def test_a_model_that_the_window_holds_whole_is_refused():
    with pytest.raises(UserError, match="holds two layers of experts, and this model has 2"):
        started(2)


def test_a_batch_too_small_to_pay_is_named():
    with open_llm() as llm:
        notes = " ".join(llm.stats()["notes"])
        assert "a step moves 64 experts, 6 MiB, beside compute" in notes
        assert "4 sequences at once use about 11 of a layer's 16 experts" in notes
        assert "it pays from about 9 on (max_num_seqs)" in notes
    assert used_experts(16, 4, 8) < 0.9 * 16 + 0.1 and used_experts(16, 4, 9) >= 0.9 * 16
    with open_llm(max_num_seqs=16) as llm:
        assert "pays from" not in " ".join(llm.stats()["notes"])
