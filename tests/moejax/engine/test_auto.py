"""policy="auto" beside an engine: whatever it chooses no bit changes and nothing compiles, a replay
makes the same choices, and the next start begins with what was learned."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment
from host_offload.policies.precision.precision_names import precision_of
from host_offload.simulate import auto
from host_offload.simulate.auto import EVICTIONS, Auto
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import TraceError, read_trace
from moejax.engine.snapshot import RoutingCounts, snapshot
from moejax.start import auto as start
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from tests.moejax.engine.scenes import (
    EXPERTS,
    LAYERS,
    LIMITS,
    LINK,
    Known,
    at_rest,
    open_llm,
    same_bits,
)
from tests.moejax.engine.test_drafts import NGRAM
from tests.moejax.engine.test_placement import COSTS
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = [NATIVE, pytest.mark.slow]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def at_random(monkeypatch):
    """Every 4 decode steps another arm at random, with rests of 3 or 4 steps between."""
    monkeypatch.setattr(auto, "LONGEST", 4)
    monkeypatch.setattr(auto, "AT_ONCE", 0)
    monkeypatch.setattr(auto, "SIMULATE_S", 0.0)
    monkeypatch.setattr(auto, "THINKING", 1e9)
    monkeypatch.setattr(start, "Auto", functools.partial(Auto, window=4, forced=7))


@dataclasses.dataclass(frozen=True)
class Says:
    """A user's policy, asked at the same moment as Auto."""

    moments: frozenset = frozenset({Moment.STEP_END})
    needs: frozenset = frozenset()
    writes: frozenset = frozenset({"note"})

    def init(self, spec):
        return None

    def decide(self, state, seen):
        return state, Decision(note=f"step {seen.step}")


HOST: dict[str, Any] = {**LINK, "expert_budget": "40%", "driver": "host"}
NAMED = {**HOST, "prefetch": "coactivation", "placement": f"hybrimoe,{COSTS},load=1ms"}


@pytest.mark.parametrize(
    ("options", "arms"),
    [
        ({"expert_budget": "40%", "policies": [Says()]}, 3),
        ({"memory": "5MiB", "cells": "marginal"}, 8),
        ({"memory": "5MiB", "max_num_seqs": 8, "speculative_config": NGRAM}, 6),
        ({"expert_budget": "40%", "driver": "host"}, 7),
        ({"expert_budget": "60%", "driver": "host", "prefetch": "fluxmoe"}, 4),
        (NAMED, 6),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_no_bit_depends_on_the_choice(options, arms, at_random, tmp_path, caplog):
    caplog.set_level(logging.INFO, "moejax")
    trace = tmp_path / "t"
    record = f"{trace},arrays=gate_input+token" if "driver" in options else trace
    with open_llm(policy="auto", trace=record, enable_prefix_caching=False, **options) as llm:
        run(llm, mixed_jobs()[:1], check=False)
        compiled = len(llm.engine.runner.compiler.compiled)
        own_drafts, rest = llm.engine.drafts, at_rest()
        known = Known({i: each.tokens for i, each in enumerate(rest)})
        if own_drafts is not None:
            llm.engine.drafts = known
            assert same_bits(run(llm, mixed_jobs()), rest)
        assert same_bits(run(llm, mixed_jobs()), rest)
        if own_drafts is not None:
            right, drafted = known.counts["accepted"], known.counts["drafted"]
            assert right > 50 and drafted - right > 20, known.counts
            llm.engine.drafts = own_drafts
        said = llm.stats()["control"]["said"]["auto"]
        assert said["switches"] > 2 and len(said["step_s"]) == arms
        line = f"policy auto runs {said['why']}"
        assert line in llm.explain().notes
        shown, drafts = snapshot(llm.engine, RoutingCounts(llm.engine))["policy"], "drafts of"
        assert shown.startswith(line) and (drafts in shown) == ("speculative_config" in options)
        if "placement" in options:
            assert llm.stats()["placement"]["experts"] > 0
        assert llm.engine.control is not None
        router = llm.engine.control.controller.spec.router
        after = len(llm.engine.runner.compiler.compiled)
    assert said["why"] in caplog.text
    found = read_trace(trace)
    said_by_auto = (d["decision"] for d in found.decisions() if d.get("policy") == "auto")
    notes = [decision["note"] for decision in said_by_auto if "note" in decision]
    assert notes[-1] == said["why"] and len(notes) == said["switches"]
    if "fluxmoe" in said["step_s"]:  # and another arm after it
        assert any(note.startswith("fluxmoe:") for note in notes[:-1])
    told = dataclasses.replace(spec_of(found.header), router=router)
    own = options.get("policies", ())
    replay(found, policies=own, spec=told)
    assert after - compiled <= len(mixed_jobs())  # shapes of prompts alone
    header = json.loads((trace / "trace.json").read_text())
    header["spec"]["auto"]["forced"] = 8
    (trace / "trace.json").write_text(json.dumps(header))
    with pytest.raises(TraceError, match="give the policies of the run"):
        replay(read_trace(trace), policies=own, spec=told)


def test_what_a_miss_brings_is_chosen_where_outputs_may_change(at_random, monkeypatch, tmp_path):
    """A start is exact. Under an arm outputs are those of its version, also with its prefetch and
    placement, and a trace of changes at random replays."""
    options: dict[str, Any] = {**LINK, "memory": 4 << 20, "enable_prefix_caching": False}
    own = "dynaexq,paged=true,interval=8 steps,hi_share=0.8"
    host = {"driver": "host", "precision": own}
    both = {**host, "prefetch": "fate", "placement": f"fiddler,{COSTS},load=1ms"}

    def one(version: str = "") -> Callable[..., Auto]:
        """The arms with this version alone, so that no choice changes a bit; or all arms. The first
        has all parts."""

        def make(cells, costs, link, found, **known) -> Auto:
            assert found[:2] == ("lru+precision=dense", "lru+precision=int4")
            arms = tuple(arm for arm in reversed(found) if version in arm)
            return Auto(cells, costs, link, arms, window=2, forced=7, **known)

        return make

    low = tmp_path / "low.npy"
    np.save(low, np.ones((LAYERS, EXPERTS), np.int8))
    with open_llm(precision=f"map={low},paged=true", **options) as llm:
        fixed = run(llm, mixed_jobs(), check=False)
    assert not same_bits(fixed, at_rest())
    for version, wanted in (("precision=dense", at_rest()), ("precision=int4", fixed)):
        monkeypatch.setattr(start, "Auto", one(version))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / version))  # nothing was learned
        with open_llm(policy="auto", **both, **options) as llm:
            assert same_bits(run(llm, mixed_jobs()), wanted)
            said = llm.stats()["control"]["said"]["auto"]
            assert said["switches"] > 2 and len(said["step_s"]) == 4
            assert llm.stats()["placement"]["experts"] > 0
    monkeypatch.setattr(start, "Auto", one())
    for i, (changing, arms) in enumerate(
        (
            ({"precision": own}, 3),
            (host, 15),
            (both, 12),
            ({**host, "precision": "hobbit,promote=9"}, 11),
            ({**both, "precision": "hobbit", "prefetch": None}, 6),
        )
    ):
        trace = tmp_path / f"t{i}"
        given = {**changing, "trace": f"{trace},arrays=gate_input+token" if i else trace}
        with open_llm(policy="auto", **given, **options) as llm:
            run(llm, mixed_jobs(), check=False)
            said = llm.stats()["control"]["said"]["auto"]
            assert llm.engine.control is not None
            router = llm.engine.control.controller.spec.router
        assert said["switches"] > 2 and len(said["step_s"]) == arms
        found = read_trace(trace)
        replay(found, spec=dataclasses.replace(spec_of(found.header), router=router))


def test_steps_of_a_long_rest_are_skipped_and_replay(monkeypatch, tmp_path):
    """Among requests that come and go, each of a length of its own."""
    monkeypatch.setattr(auto, "WATCH_S", 1.0)
    monkeypatch.setattr(auto, "SWITCH_S", 1e9)  # nothing pays, so the first window ends in a rest
    skipped, skip = [], Controller.skip
    monkeypatch.setattr(
        Controller, "skip", lambda *args: skipped.append(skip(*args)) or skipped[-1]
    )
    trace = tmp_path / "t"
    with open_llm(policy="auto", memory="5MiB", trace=trace, enable_prefix_caching=False) as llm:
        assert same_bits(run(llm, mixed_jobs()), at_rest())
        assert llm.engine.control is not None
        state = llm.engine.control.controller._seats[0].state
    assert sum(skipped) > 10
    again = [*skipped]
    skipped.clear()
    replay(read_trace(trace))
    assert sum(skipped) == sum(again) and state.rest > 0


def test_only_steps_of_arms_that_look_between_layers_wait_for_each(monkeypatch):
    """The others are dispatched before the step before is read and, until a window is paid, leave
    no copy of the tables."""
    with open_llm(policy="auto", **HOST) as llm:
        engine, plan, looked, unread, copied = llm.engine, llm.plan, [], [], []
        decode, copy = engine.runner.decode, engine.runner.snapshot

        def watched(*args, hooks, **known):
            looked.append(hooks is not None)
            unread.append(len(looked) - (engine.statistics.steps["decode"] - before))
            return decode(*args, hooks=hooks, **known)

        monkeypatch.setattr(engine.runner, "decode", watched)
        monkeypatch.setattr(engine.runner, "snapshot", lambda: copied.append(len(looked)) or copy())
        policy = next(p for p in plan.settings.policies if isinstance(p, Auto))
        for arm in ("lru", "layer-streaming"):
            for seen in (looked, unread, copied):
                seen.clear()
            before = engine.statistics.steps["decode"]
            arms = arm, *(other for other in policy.arms if other != arm)
            assert engine.control is not None
            spec = dataclasses.replace(plan.spec, router=engine.control.controller.spec.router)
            policies = [dataclasses.replace(policy, arms=arms, window=10**6)]
            engine.begin_anew(spec, policies, list(plan.cells))
            run(llm, mixed_jobs()[:1], check=False)
            assert looked and {*looked} == {arm != "lru"}
            assert max(unread) == (2 if arm == "lru" else 1)
            assert (copied == [0]) == (arm == "lru")


def test_a_placement_that_defers_is_priced_as_one_that_changes_outputs(monkeypatch):
    """Though no prediction has deferred experts."""
    monkeypatch.setattr(auto, "SIMULATE_S", 0.0)
    monkeypatch.setattr(start, "Auto", functools.partial(Auto, window=4))
    placement = f"ktransformers,{COSTS},load=1ms,defer=2"
    with open_llm(policy="auto", placement=placement, **HOST) as llm:
        run(llm, mixed_jobs()[:2], check=False)
        assert llm.engine.control is not None
        controller = llm.engine.control.controller
        assert "defer=2" in [*controller.stats()["said"]["auto"]["step_s"]][-1]
        assert controller._seats[0].state.places.dearer.tolist() == [1, 1, 1, 1 + auto.FEWER_BITS]


def test_what_is_given_is_pinned():
    for options, note in (
        ({"eviction": "lfu", "expert_budget": "40%"}, start.PINNED),
        ({"expert_budget": "100%"}, start.NOTHING),
        ({"driver": "stream", "expert_budget": "60%"}, start.STREAM),
        ({"precision": "random,paged=true", "memory": 4 << 20}, start.TWO),
        ({"precision": precision_of("dynaexq,paged=true"), "memory": 4 << 20}, start.TWO),
    ):
        with open_llm(policy="auto", **options) as llm:
            assert note in llm.explain().notes
            if note is not start.STREAM:
                assert llm.stats()["eviction"] == options.get("eviction", "lru")
            assert {*llm.plan.settings.precision.policies} <= {*llm.plan.settings.policies}
    with open_llm(policy="auto", memory="5MiB", cells=[9, 8, 6, 5]) as llm:
        assert llm.stats()["control"]["said"]["auto"]["arm"] == "lru"
        policy = next(p for p in llm.plan.settings.policies if isinstance(p, Auto))
        assert policy.arms == EVICTIONS


def test_a_plan_says_the_arms():
    for options, note in (
        ({}, "policy auto begins with lru, by stated costs; other arms: lfu, lfru"),
        ({"eviction": "lfu"}, start.PINNED),
    ):
        given: dict[str, Any] = {"policy": "auto", "expert_budget": "40%", **options, **LIMITS}
        plan, _ = dry_run(Config.of("demo", **given))
        assert plan.budget.notes[-1] == note in str(plan)


def test_a_start_goes_on_with_what_was_learned(monkeypatch):
    monkeypatch.setattr(start, "Auto", functools.partial(Auto, window=4, forced=7))
    with open_llm(policy="auto", expert_budget="40%") as llm:
        assert "stated costs" in llm.explain().notes[-1]
        run(llm, mixed_jobs(), check=False)
        said = llm.stats()["control"]["said"]["auto"]
    with open_llm(policy="auto", expert_budget="40%") as llm:
        policy = next(p for p in llm.plan.settings.policies if isinstance(p, Auto))
        assert (policy.arms[0], policy.ratios) == (said["arm"], tuple(said["ratios"]))
        assert "learned costs" in llm.explain().notes[-1]
    for path in (start.cache_root() / "auto").iterdir():
        path.write_text("{")
    with open_llm(policy="auto", expert_budget="40%") as llm:
        assert "stated costs" in llm.explain().notes[-1]


def test_a_start_goes_on_with_what_was_learned_of_drafts():
    options: dict[str, Any] = {"expert_budget": "40%", "speculative_config": NGRAM}
    learned = {"guesses": [(2, 4)] * 5, "extra": {2: {4: 0.25}}}

    def begun(**more) -> Any:
        """What drafts begin with. The run then learns something."""
        with open_llm(**options | more) as llm:
            drafts = llm.engine.drafts
            assert drafts is not None
            found = drafts.learned()
            drafts.recall(learned)
            drafts.length(1)
        return found

    nothing = {"guesses": [], "extra": {}}
    assert [begun(), begun(), begun(policy="auto"), begun()] == [nothing] * 4
    assert begun(policy="auto") == learned
    assert begun(policy="auto", expert_budget="60%") == nothing
    for path in (start.cache_root() / "auto").iterdir():
        path.write_text("{}")
    assert begun(policy="auto") == nothing
