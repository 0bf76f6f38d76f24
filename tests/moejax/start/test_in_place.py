"""On a CPU experts that are all resident lie in the store alone: one copy, the same bits."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from moejax import LLM, SamplingParams, UserError
from moejax.serve.costs import cost_model_for
from moejax.start.decide.store_choice import why_cells
from moejax.start.options import Config
from moejax.start.settings import settings_of
from tests.moejax.engine.budget_workload import LIMITS, planned
from tests.moejax.start.test_explain import check_sums
from tests.pallas_kernels.contract import NATIVE

PROMPTS = [[5, 6, 7, 300], list(range(20, 120))]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)


def live_bytes() -> int:
    """Of all arrays; jax has two objects for one whose address somebody asked for."""
    return sum({each.unsafe_buffer_pointer(): each.nbytes for each in jax.live_arrays()}.values())


def answers(llm: LLM):
    found = llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.runner.faults()
    return [(one.token_ids, one.logprobs) for request in found for one in request.outputs]


@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"driver": "host"}, marks=pytest.mark.slow),
        pytest.param({"precision": "random", "driver": "device,waves=2"}, marks=pytest.mark.slow),
    ],
)
def test_one_copy_with_the_same_bits(options):
    before = live_bytes()
    with LLM("demo", progress=False, **LIMITS, **options) as llm:
        plan, runner = llm.plan, llm.engine.runner
        assert plan.budget.in_place == 64 and plan.steps.in_place
        assert plan.budget.expert_slots == 0 and plan.budget.slots == plan.budget.kv_slots
        dense = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params))
        kv = plan.budget.slots * plan.steps.layout.slot_bytes
        held = live_bytes() - before
        # Tables and a few small arrays beside; a second copy would be all of the store again.
        assert held <= 1.15 * (runner.store.nbytes + dense) + kv
        ours, stats, sums = answers(llm), llm.stats(), check_sums(llm.explain())
        assert sums["arena"] == sums["KV"] == kv and sums["experts"] == runner.store.nbytes
        said = stats["experts"]
        assert said["hits"] == said["activations"] > 0 and said["hit_rate"] == 1
        assert not any(stats["bytes"].values()) and stats["experts_in_place"] == 64
        assert "one copy" in str(llm.explain()) and "one copy" in stats["notes"][0]
        assert "one copy" in plan.describe()["experts"]
        with pytest.raises(UserError, match="every expert is read where it lies"):
            cost_model_for(llm, force=True)
        with pytest.raises(ValueError, match="start with eviction='lru'"):
            llm.engine.set_budget([1] * 4, plan.budget.kv_slots)
    with LLM("demo", eviction="lru", progress=False, **LIMITS, **options) as llm:
        assert llm.plan.budget.in_place == 0 and llm.plan.budget.expert_slots == 64
        assert "a second copy beside the store: eviction" in str(llm.plan)
        assert answers(llm) == ours


@NATIVE
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"eviction": "lru"}, "eviction is about cells"),
        ({"prefetch": "random"}, "prefetch is about cells"),
        ({"resize": "peak_headroom"}, "resize is about cells"),
        ({"cells": "9,8,6,5"}, "cells is about cells"),
        ({"trace": "no-such-folder"}, "trace is about cells"),
        ({"precision": "lossless12,in_transit=true"}, "decodes experts into cells"),
        ({"precision": "dynaexq"}, "moves experts between cells"),
        ({"ops": "xla"}, "expert_ffn xla does not compute on the store"),
    ],
)
def test_what_needs_cells_says_why(options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_of(Config.of("demo", **options))
    steps = planned().steps
    ops = dataclasses.replace(steps.ops, expert_ffn=options.get("ops", "cpu"))
    steps = dataclasses.replace(steps, ops=ops)
    assert why in (why_cells(settings, steps, "cpu") or "")
    assert why_cells(settings_of(Config.of("demo")), planned().steps, "gpu") is not None


@NATIVE
@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ("fill=xla", "the arena is an array, donated from step to step: fill xla is not native"),
        ("expert_ffn=xla,stage=xla", "expert_ffn xla, stage xla is not native"),
        ("xla", ""),
        ("auto", ""),
    ],
)
def test_one_op_that_is_not_native_keeps_the_arena_an_array(ops, said):
    plan = planned(ops=ops, expert_budget="50%", memory=None)
    assert plan.steps.owned == (ops == "auto")
    assert said in str(plan) and ("donated from step" in str(plan)) == bool(said)
    assert ("memory of the native ops" in plan.describe()["arena"]) == plan.steps.owned
