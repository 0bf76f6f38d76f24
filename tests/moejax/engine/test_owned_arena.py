"""The native library's arena gives the bits of the donated one, with the same native ops."""

from __future__ import annotations

import pytest

from moejax import LLM
from moejax.engine.statistics import kv_stats
from moejax.step.parts import StepSpec
from tests.moejax.engine_runs import mixed_jobs, run, set_budget
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LAYERS = 4


def played(monkeypatch, owned: bool, options: dict, cells: list[list[int]]):
    """What each budget in turn gives, in one engine, and whether requests were preempted."""
    with monkeypatch.context() as patch:
        if not owned:
            patch.setattr(StepSpec, "owned", False)
        with LLM("demo", progress=False, **LIMITS, **options) as llm:
            assert llm.stats()["arena_owner"] == ("native ops" if owned else "XLA")
            found = []
            for per_layer in cells or [[]]:
                if per_layer:
                    set_budget(llm, per_layer, 3)
                found += run(llm, mixed_jobs(), check=not options.get("dtype"))
            assert not llm.engine.runner.faults()
            return found, kv_stats(llm.engine.scheduler), llm.stats()


def slow(options: dict, *cells: list[int], marks=(pytest.mark.slow,)):
    return pytest.param(options, list(cells), marks=marks)


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        # Pages go to the host and back, cells move: three slots of KV for four sequences.
        slow({"eviction": "lru"}, [3, 9, 16, 0], [12] * LAYERS, marks=()),
        slow({"driver": "host", "eviction": "lfu"}, [3, 9, 16, 0]),
        slow({"prefetch": "random", "expert_budget": "40%"}),
        slow({"prefetch": "coactivation", "driver": "host", "expert_budget": "40%"}),
        slow({"precision": "dynaexq,margin=0", "memory": 4 << 20}),
        slow({"precision": "dynaexq,paged=true", "memory": 4 << 20}),
        slow({"precision": "lossless12,in_transit=true", "expert_budget": "40%"}),
        slow({"precision": "random", "expert_budget": "60%", "eviction": "lru"}),
        slow({"resize": "peak_headroom", "memory": 4 << 20}),
        slow({}),  # every expert in place: KV alone is in the arena
        slow({"dtype": "float32", "eviction": "lru", "expert_budget": "40%"}),
        slow({"prefill_waves": 3, "expert_budget": "30%", "eviction": "lru"}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_a_donated_arena(options, cells, monkeypatch):
    ours, kv, stats = played(monkeypatch, True, options, cells)
    theirs, _, donated = played(monkeypatch, False, options, cells)
    assert all(a.same_bits(b) for a, b in zip(ours, theirs, strict=True))
    assert stats["ops"] == donated["ops"]
    if cells:
        assert kv["swapped_out_bytes"] > 0 and kv["preemptions"] > 0


@pytest.mark.slow
def test_an_op_of_xla_among_them_changes_no_bit(monkeypatch):
    """fill copies: whose it is decides no bit, only whose memory the arena is."""
    options = {"expert_budget": "40%", "eviction": "lru"}
    ours, _, _ = played(monkeypatch, True, options, [])
    with LLM("demo", ops="fill=xla", progress=False, **LIMITS, **options) as llm:
        assert llm.stats()["arena_owner"] == "XLA" and "fill xla" in str(llm.plan)
        theirs = run(llm, mixed_jobs())
    assert all(a.same_bits(b) for a, b in zip(ours, theirs, strict=True))
