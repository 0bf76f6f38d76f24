"""Experts that come beside compute give the bits of experts that are all there; what does not come
ends the requests of its step, and no others."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from host_offload.policies.prefetch.expert_map.policy import ExpertMap
from host_offload.queue import native
from moejax import LLM, SamplingParams, UserError
from tests.faults import Faults, inject, injected
from tests.moejax.engine_runs import mixed_jobs, run, set_budget
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LINK = {"link_rate": "500MB/s", "link_latency": "50us", "chunk_bytes": "16KiB"}

ALL_RESIDENT = "dynaexq,margin=0"
"""Every expert has its low version from the start, so that a step may find all it asks for: whether
a promotion of the step before is still in flight is chance."""


def open_llm(**options) -> LLM:
    return LLM("demo", progress=False, **{**LIMITS, **LINK, **options})


@functools.cache
def at_rest(precision: str | None = None, memory: int | None = None):
    """What the jobs give twice without transfers beside compute: with every expert resident from
    the start, or in the versions that a policy gives them."""
    with LLM("demo", progress=False, precision=precision, memory=memory, **LIMITS) as llm:
        assert llm.stats()["transfers"] is None
        return [run(llm, mixed_jobs(), check=False) for _ in range(2)]


def slow(**options):
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "40%"},
        slow(expert_budget=0, transfer_threads=1),
        slow(expert_budget="40%", driver="host", transfer_threads=3, chunk_bytes=1000),
        slow(expert_budget="60%", prefetch="random", link_rate="2GB/s"),
        slow(expert_budget="60%", prefetch="moe-infinity", driver="host", link_rate="50MB/s"),
        slow(expert_budget="40%", prefetch="coactivation", driver="host"),
        slow(expert_budget="40%", prefill_waves=3, eviction="lfu", link_rate=None),
        slow(expert_budget="40%", precision="int8", transfer_threads=4),
        slow(precision="dynaexq,paged=true", memory=4 << 20),
        slow(precision=ALL_RESIDENT, memory=4 << 20),
    ],
    ids=str,
)
def test_the_bits_are_those_of_experts_that_are_there(options):
    """Delays of up to a millisecond a chunk, or a tenth of the chunks where they are many, make
    most transfers late; integrity is checked at the end only, since it waits for what flies."""
    with open_llm(**options) as llm:
        queue = llm.engine.runner.queue
        found = []
        for delay in (1e-3, 0.0):  # some move experts in the first run only
            delayed = 0.1 if options.get("chunk_bytes") == 1000 else 1.0
            inject(queue, Faults(seed=1, delay=delay, delayed=delayed))
            found.append(run(llm, mixed_jobs(), check=False))
            assert not llm.engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert stats["bytes"]["demand"] > 0 and stats["failed"] == 0
        if options.get("precision") != ALL_RESIDENT:
            assert stats["waits"] > 0
        assert stats["busy_s"] > 0 and stats["in_flight"]["transfers"] == 0
        if options.get("prefetch"):
            assert sum(stats["prefetches"].values()) > 0
    want = at_rest(options.get("precision"), options.get("memory"))
    for ours, theirs in zip(found, want, strict=True):
        assert all(a.same_bits(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("driver", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_a_transfer_that_fails_ends_the_requests_of_its_step_only(driver):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7, 300], list(range(20, 90))]
    with open_llm(expert_budget="40%", driver=driver) as llm:
        engine, queue = llm.engine, llm.engine.runner.queue
        want = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
        inject(queue, Faults(seed=1, errors=1.0))
        first, second = (engine.add(p, params) for p in prompts)
        set_budget_to_nothing_resident(engine)
        while first.error is None:
            engine.step()
        assert "expert" in str(first.error) and "an injected error" in str(first.error)
        assert first.finish_reason == "abort"
        inject(queue, Faults())
        while not engine.idle:
            engine.step()
        if second.error is None:  # it was in none of the steps that were under way
            assert second.output == want[1]
        assert not engine.runner.faults()
        assert llm.stats()["transfers"]["failed"] > 0
        # What failed is absent, and comes again.
        assert [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts] == want
        inject(queue, Faults(seed=1, errors=1.0))
        with pytest.raises(UserError, match="could not be read: memory: an injected error"):
            llm.score(list(range(300, 340)))
        inject(queue, Faults())


@pytest.mark.parametrize("delay", [0.0, 2e-3])
def test_a_prefetch_that_failed_is_tried_again_when_it_is_needed(delay):
    """No prefetch comes, before an op asks for it or, where it is slow, while one waits."""
    with open_llm(expert_budget="60%", prefetch="random", link_rate="2GB/s") as llm:
        queue = llm.engine.runner.queue
        faults = Faults(seed=1, delay=delay, delayed=0.0, ahead_errors=1.0, ahead_delayed=1.0)
        inject(queue, faults)
        found = run(llm, mixed_jobs(), check=False)
        assert not llm.engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert stats["tried_again"] > 0 and injected(queue).errors > 0
        assert stats["prefetches"] == {"in_time": 0, "late": 0}
    assert all(a.same_bits(b) for a, b in zip(found, at_rest()[0], strict=True))


def test_what_a_failed_step_led_to_is_nobodys_prefix():
    """A prompt of several steps of which the first fails when the next is dispatched already: that
    one's blocks are wrong too, and no later prompt may share them. Nothing has a cell, so the next
    step itself does not fail."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    prompt = list(range(30, 230))
    with open_llm(expert_budget=0, max_num_batched_tokens=64) as llm:
        engine, queue = llm.engine, llm.engine.runner.queue
        inject(queue, Faults(seed=1, errors=1.0))
        failed = engine.add(prompt, params)
        engine.step()
        jax.block_until_ready(engine._pending.results)
        inject(queue, Faults())
        while not engine.idle:
            engine.step()
        assert failed.error is not None
        found = [llm.generate(prompt, params)[0].outputs[0].logprobs for _ in range(2)]
        assert engine.scheduler.prefixes.hit_tokens > 128
        engine.scheduler.cache.drop_idle()
        want = llm.generate(prompt, params)[0].outputs[0].logprobs
        assert found == [want, want]


def set_budget_to_nothing_resident(engine) -> None:
    """Every expert is missed once more."""
    runner = engine.runner
    tables = runner.tables
    nobody = {
        "owner": np.full(tables.owner.shape, -1),
        "address": np.full(tables.address.shape, -1),
    }
    runner.set_tables(nobody)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": "xla"}, "link_rate needs native CPU ops, which wait for transfers; op kv_write"),
        ({"ops": "fill=xla"}, "op fill is xla: leave link_rate out, or use ops='cpu'"),
        ({"precision": "lossless12,in_transit=true"}, "decodes experts on their way"),
        ({"link_rate": "fast"}, "'fast' is not a rate; write bytes per second, such as"),
        ({"link_latency": "20"}, "'20' is not a time; write it with a unit, such as \"20us\""),
        ({"link_latency": -1.0}, "is not a time"),
        ({"link_rate": 0}, "0 is not a rate"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1"),
        ({"transfer_threads": 0}, "transfer_threads must be at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_to_write(options, message):
    with pytest.raises(UserError) as refused:
        open_llm(expert_budget="40%", **options).close()
    assert message in str(refused.value)


def test_results_name_the_link():
    with open_llm(expert_budget="40%") as llm:
        stats = llm.stats()
        assert stats["transfers"]["link_rate"] == 5e8
        assert stats["transfers"]["chunk_bytes"] == 16 << 10
        said = "experts pass a link of 0.5 GB/s, 50 us, beside compute"
        assert said in stats["notes"] and said in str(llm.explain())


@pytest.mark.slow
def test_budgets_move_while_experts_fly():
    with open_llm(expert_budget="100%", prefetch="random", eviction="lru") as llm:
        inject(llm.engine.runner.queue, Faults(seed=2, delay=2e-3, delayed=0.25))
        for cells in ([3, 9, 16, 0], [12] * 4, [1, 1, 1, 1]):
            set_budget(llm, cells, 3)
            found = run(llm, mixed_jobs(), check=False)
            assert not llm.engine.runner.faults()
            assert all(a.same_bits(b) for a, b in zip(found, at_rest()[0], strict=True))


SUBMIT, REORDER, START, END = 0, 2, 3, 4
"""Kinds of the queue's events, in the order in which they happened."""


def begun_under_a_demand(events: list[tuple[int, int, int, int, str]]) -> list[int]:
    """Places of chunks of other causes that began while a demand was there and not complete.
    events: (kind, ticket, first byte, bytes, cause)."""
    left: dict[int, int] = {}
    for kind, ticket, _, size, _ in events:
        if kind == START:
            left[ticket] = left.get(ticket, 0) + size
    sizes = {(t, first): size for kind, t, first, size, _ in events if kind == START}
    demands: set[int] = set()
    found = []
    for place, (kind, ticket, first, _, cause) in enumerate(events):
        if kind in (SUBMIT, REORDER) and cause == "demand" and left.get(ticket):
            demands.add(ticket)
        elif kind == START and ticket not in demands and demands:
            found.append(place)
        elif kind == END:
            left[ticket] -= sizes[ticket, first]
            if not left[ticket]:
                demands.discard(ticket)
    return found


def test_a_chunk_that_begins_under_a_demand_is_seen():
    ahead, demand = [(SUBMIT, 1, 0, 0, "prefetch")], [(SUBMIT, 2, 0, 0, "demand")]
    chunks = {t: [(START, t, 0, 5, ""), (END, t, 0, 0, "")] for t in (1, 2)}
    more = [(START, 1, 5, 5, ""), (END, 1, 5, 0, "")]
    assert not begun_under_a_demand(ahead + chunks[1][:1] + demand + chunks[1][1:] + chunks[2])
    assert not begun_under_a_demand(ahead + chunks[1] + demand + chunks[2] + more)
    assert begun_under_a_demand(ahead + chunks[1] + demand + more + chunks[2]) == [4]
    became = [(REORDER, 1, 0, 0, "demand")]
    assert not begun_under_a_demand(ahead + demand + became + chunks[1] + chunks[2])


@pytest.mark.slow
def test_no_prefetched_byte_begins_to_move_while_a_miss_waits():
    """fMoE's property 6, in an engine whose transfers run beside compute: from the arrival of a
    miss until it has landed no chunk of a prefetch begins (what had begun ends)."""
    options: dict = dict(expert_budget="40%", driver="host", transfer_threads=1)
    with open_llm(**options, policies=[ExpertMap(distance=1)], link_rate="100MB/s") as llm:
        queue = llm.engine.runner.queue
        assert queue is not None
        queue.record()
        run(llm, mixed_jobs(), check=False)
        raw = (native._Event * (1 << 16))()
        count = queue._calls.moejax_transfers_events(queue.handle, raw, len(raw))
        assert count < len(raw)
        causes = queue._causes
        events = [
            (e.kind, e.ticket, e.a, e.b, causes[e.a] if e.kind in (SUBMIT, REORDER) else "")
            for e in raw[:count]
        ]
        said = llm.stats()
    begun = dict.fromkeys(causes, 0)
    last: dict[int, str] = {}
    for kind, ticket, _, _, cause in events:
        if kind in (SUBMIT, REORDER):
            last[ticket] = cause
        elif kind == START:
            begun[last[ticket]] += 1
    assert begun["demand"] > 20 and sum(begun.values()) - begun["demand"] > 20
    assert not begun_under_a_demand(events)
    assert said["control"]["transfers"]["expert_map"]["done"] > 0
