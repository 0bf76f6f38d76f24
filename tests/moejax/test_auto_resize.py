"""Without numbers, where not everything fits, the line between experts and KV moves by itself."""

from __future__ import annotations

import dataclasses

import pytest

import host_offload.device_memory
from host_offload.policies.lfru import LFRU
from host_offload.policies.mv_wsa import MvWsa
from host_offload.policies.peak_headroom import PeakHeadroom
from host_offload.split import miss_costs
from moejax import LLM
from moejax.budget_options import parse_budget_options
from moejax.calibration import cost_file, identity, write_cost_model
from moejax.control import spec_of_engine
from moejax.precision import parse_precision
from moejax.startup import Limits
from tests.moejax.budget_workload import COSTS, LIMITS, SLOT, cells_now, converse

MiB = 1 << 20
DENSE = parse_precision(None, seed=0, cells=("fixed", "uniform"))


@pytest.fixture(autouse=True)
def small_device(tmp_path, monkeypatch):
    """Free memory for about half of what demo can use, and no costs from elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_offload.device_memory, "host_available_bytes", lambda: 6 * MiB)
    monkeypatch.setattr("moejax.activations.activation_bytes", lambda runner: 2 * MiB)


def where_cut(limits=None, policies=(), precision=DENSE, budget="fixed", resize="auto", cells=None):
    options = parse_budget_options(budget, resize, cells or "uniform", limits or Limits())
    return options.where_cut(policies, precision)


def test_only_where_nobody_said_anything():
    assert where_cut() is not None and where_cut(policies=[LFRU()]) is not None
    for limits in (Limits(memory=MiB), Limits(expert_budget=MiB), Limits(kv_budget=MiB)):
        assert where_cut(limits) is None
    assert where_cut(resize="none") is None and where_cut(resize="mv_wsa") is None
    assert where_cut(budget="mv_wsa=t") is None and where_cut(cells="marginal") is None
    assert where_cut(cells=[3, 3]) is None and where_cut(policies=[PeakHeadroom()]) is None
    mixed = parse_precision("dynaexq", seed=0, cells=("fixed", "uniform"))
    assert where_cut(precision=mixed) is None


@pytest.mark.slow
def test_the_line_moves_and_no_bit_changes():
    with LLM("demo", memory="5MiB", progress=False, **LIMITS) as whole:
        wanted = converse(whole)
        assert whole.stats()["budget"]["resize"] == "none"
    with LLM("demo", progress=False, **LIMITS) as llm:
        before, arena = cells_now(llm), llm.engine.scheduler.arena.slots
        assert arena * SLOT < 4 * MiB and sum(before) < 64
        assert converse(llm) == wanted
        stats = llm.stats()
        assert stats["budget"]["resize"] == "mv_wsa"
        assert stats["control"]["policies"][-1] == "MvWsa"
        assert stats["budget"]["slots_moved"] > 0 and cells_now(llm) != before
        assert stats["budget"]["failed"] == 0
        assert "resize mv_wsa: the line moves while requests run" in str(llm.explain())
    with LLM("demo", progress=False, resize="none", **LIMITS) as llm:
        assert cells_now(llm) == before
        assert converse(llm) == wanted and cells_now(llm) == before
        assert llm.stats()["budget"]["resize"] == "none"
        assert "resize" not in str(llm.explain())


def live_policy(llm: LLM, kv_overflow: str = "swap") -> MvWsa | None:
    """What a start with this runner gets."""
    options = parse_budget_options("fixed", "auto", "uniform", Limits(kv_overflow=kv_overflow))
    make = options.where_cut((), DENSE)
    assert make is not None
    made = make(llm.engine.runner, LIMITS["max_model_len"], LIMITS["max_num_seqs"])
    (policy,) = made or (None,)
    assert policy is None or isinstance(policy, MvWsa)
    return policy


def test_what_misses_are_priced_by(caplog):
    """By bytes where nothing was measured: a page that has no room crosses the link twice."""
    with LLM("demo", memory="3MiB", progress=False, **LIMITS) as llm:
        runner = llm.engine.runner
        spec = spec_of_engine(runner, max_model_len=256, max_num_seqs=4, seed=0)
        by_bytes = live_policy(llm)
        assert by_bytes is not None and not by_bytes.calibrate and by_bytes.costs is not None
        assert by_bytes.costs.expert_s / by_bytes.costs.page_s == SLOT / (2 * spec.page_bytes)
        assert live_policy(llm, "recompute") is None, "what computing costs no number of bytes says"
        about = identity(runner)
        model = dataclasses.replace(COSTS, about=about)
        write_cost_model(cost_file(about), model)
        for overflow in ("swap", "recompute"):
            measured = live_policy(llm, overflow)
            assert measured is not None and measured.calibrate and measured.kv_miss == overflow
            assert measured.costs == miss_costs(model.costs(), spec, overflow)
        write_cost_model(cost_file(about), dataclasses.replace(model, kv_swap_per_byte=0.0))
        assert live_policy(llm) == by_bytes, "costs by which KV is worth nothing are none"
        cost_file(about).write_text("{")
        assert live_policy(llm) == by_bytes and str(cost_file(about)) in caplog.text


def test_an_arena_with_nothing_to_divide():
    """The rule is not asked where KV's floor takes all there is."""
    with LLM("demo", memory=3 * SLOT, progress=False, **LIMITS) as llm:
        assert sum(cells_now(llm)) == 0
        policy = live_policy(llm)
        assert policy is not None
        state = policy.init(spec_of_engine(llm.engine.runner, max_model_len=256, seed=0))
        assert state.division.largest_cap == 0
        runner = llm.engine.runner
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "slots", 2)
            assert live_policy(llm) is None
