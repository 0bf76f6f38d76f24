"""Splits of one memory compared at equal bytes; resizes timed and priced. No claim is made here."""

from __future__ import annotations

import argparse
import dataclasses
import json

import numpy as np
import pytest

from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.sizing.configurator import Turn, turns_of
from host_offload.sizing.split import MissCosts
from host_offload.traces.reader import read_trace
from moejax import LLM, UserError
from scripts.budgets import arms as budget_arms
from scripts.budgets import bursts as resize_bursts
from scripts.budgets import compare as compare_budgets
from scripts.budgets import resize as bench_resize
from scripts.budgets import rule as resize_rule
from scripts.budgets.replay import replay_split
from tests.moejax.engine.budget_workload import MEMORY, recorded

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

COSTS = MissCosts(expert_s=1.0, page_s=0.5)


@pytest.fixture(scope="module")
def scene():
    """A few turns of the second workflow, in little memory."""
    return compare_budgets.made_up("experts", 0, 1 << 30, 0.2)


@pytest.fixture(scope="module")
def arms(scene):
    few = scene.turns[:6]
    return few, budget_arms.arms_of(few, scene.before[:4], scene.workflow[:6], *scene[4:], COSTS)


def test_all_arms_have_the_same_bytes_and_none_beats_its_bound(scene, arms):
    turns, found = arms
    seconds = {arm.name: budget_arms.cost_of(*arm.misses(turns), COSTS) for arm in found}
    for arm in found:
        assert arm.most_bytes(scene.division) <= scene.division.total_bytes
        assert len(arm.cells) == len(arm.pages) == len(turns)
        assert min(arm.pages) >= scene.division.floor_pages
    held = [arm.name for arm in found if len({tuple(c) for c in arm.cells}) == 1]
    assert "50-50" in held and "hindsight" in held and "mv_wsa cold" not in held
    for name in held:
        assert seconds["hindsight"] <= seconds[name]
    assert seconds["static layers"] > seconds["50-50"]


@pytest.mark.nightly  # ten seconds of replays
@pytest.mark.slow
def test_the_oracles_are_bounds(scene):
    """No single cap beats the first; caps of each workflow beat it, where experts of one workflow
    and KV of the other are what matters."""
    first = scene.turns[:6]
    full = np.ones_like(first[0].active[0])
    # Few steps, and six sessions that return and only fit together in a smaller cap's KV.
    second = [
        Turn([full], np.stack([np.full(120, 100 + i % 6), np.arange(120)], axis=1))
        for i in range(12)
    ]
    turns, workflow = [*first, *second], np.repeat([0, 1], [6, 12])
    division, layers = scene.division, len(full)
    best, each = budget_arms.oracle_caps(turns, workflow, division, COSTS)

    def seconds(caps: list[int]) -> float:
        pages = [division.pages_at(cap) for cap in caps]
        found = replay_split(turns, [np.full(layers, cap) for cap in caps], pages)
        return found.expert_misses.sum() * 1.0 + found.kv_misses.sum() * 0.5

    legal = np.flatnonzero(division.legal).tolist()
    assert seconds([best] * 18) == min(seconds([cap] * 18) for cap in legal)
    assert len(set(each[:6])) == len(set(each[6:])) == 1
    assert seconds(each) < seconds([best] * 18)
    assert budget_arms.oracle_caps(turns, 0 * workflow, division, COSTS) == (best, [best] * 18)


@pytest.mark.nightly
def test_in_the_experts_regime_the_best_cap_is_not_the_largest():
    """Else an oracle, a rule for experts alone and a wrong price of KV would all look the same."""
    scene = compare_budgets.made_up("experts", 1, 2 << 30, 0.3)
    costs = MissCosts(scene.division.unit / 25e9, scene.division.page_tokens / 1e4)
    best, _ = budget_arms.oracle_caps(scene.turns, scene.workflow, scene.division, costs)
    assert best < scene.division.largest_cap
    assert budget_arms.flux_cap(scene.before, scene.division) > best


def test_layers_get_what_their_curves_say_and_never_more(scene):
    decode = [turn._replace(active=turn.active[1:]) for turn in scene.turns[:6]]
    found = {arm.name: arm for arm in budget_arms.layer_arms(decode, scene.division)}
    assert {int(arm.cells[0].sum()) for arm in found.values()} == {
        int(found["uniform"].cells[0].sum())
    }
    assert len(set(found["optimal"].cells[0].tolist())) > 1
    # Chosen by the first three, counted from there on, with what those left behind.
    assert budget_arms.half_of(decode) == 3
    arm = found["marginal"]
    every = replay_split(decode, arm.cells, arm.pages)
    counted = int(every.expert_misses[3:].sum()), int(every.kv_misses[3:].sum())
    assert arm.misses(decode, 3) == counted != arm.misses(decode)


def test_a_trace_of_the_engine(capsys, tmp_path):
    directory, _ = recorded()
    memory = ("--memory", str(MEMORY))
    arguments = [str(tmp_path), "--trace", str(directory), *memory, "--no-plots"]
    assert compare_budgets.main(arguments) == 0
    lines = [json.loads(x) for x in (tmp_path / "budgets.jsonl").read_text().splitlines()]
    arms = {line["arm"]: line for line in lines if line["kind"] == "split"}
    assert all(line["used_bytes"] <= line["bytes"] <= MEMORY for line in lines)
    turns = list(turns_of(read_trace(directory)))
    assert {line["turns"] for line in lines} == {len(turns) - len(turns) // 2}
    assert "× hindsight" in capsys.readouterr().out and "per workflow" in arms


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--regimes", "kv,gpu"), "unknown regime 'gpu'; known: kv, experts, shifts"),
        (("--seeds", "0"), "--seeds must be at least 1"),
        (("--link", "fast"), "is not a rate"),
        (("--costs", "c.json"), "--costs are of a trace's model"),
        (("--trace", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_compared(arguments, match, capsys, tmp_path):
    assert compare_budgets.main([str(tmp_path), *arguments]) == 2
    assert match in capsys.readouterr().err


# ---- the other scripts of budgets


@pytest.mark.nightly
def test_resizes_under_bursts_are_priced(capsys):
    small = ("--seeds", "2", "--sessions", "2", "--turns", "2", "--caps", "4,8", "--json")
    assert bench_resize.main(["bursts", *small]) == 0
    *seeds, other, hindsight, warm, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["seed"] for line in seeds] == [0, 1]
    arms = {"cap 4", "cap 8", "mv_wsa", "mv_wsa-trace"}
    assert all(line["unserved"] == dict.fromkeys(arms, 0) for line in seeds)
    assert other["low"] <= other["ratio"] <= other["high"] and other["worst"] <= other["ratio"]
    assert hindsight["ratio"] <= other["ratio"] + 1e-9
    assert (other["live"], warm["live"]) == ("mv_wsa", "mv_wsa-trace")


@pytest.mark.nightly
def test_turns_that_are_refused_are_counted():
    """Conversations that outgrow max_model_len: what was left is unserved, and the engine goes on
    as if nothing had been."""
    parser = argparse.ArgumentParser()
    resize_bursts.add_arguments(parser)
    args = parser.parse_args(["--sessions", "2", "--turns", "2"])
    short = resize_bursts.workload_of(args, 0)
    long = dataclasses.replace(short, turns=40)
    with LLM("demo", memory="4MiB", progress=False, **resize_bursts.LIMITS) as llm:
        arm = resize_bursts.Arm("cap 6", 6, None)
        first = resize_bursts.run(llm, args, arm, short)
        found = resize_bursts.run(llm, args, arm, long)
        assert 0 < found.unserved < 80 and "max_model_len" in found.why
        assert resize_bursts.run(llm, args, arm, short) == first
    assert not first.unserved and len(first.tokens) == 4


def test_what_resizing_must_not_do():
    """No turn is unserved that a fixed split serves, and tokens are the same."""
    fixed, live = (resize_bursts.Arm(n, 4, p) for n, p in (("cap 4", None), ("live", MvWsa())))
    served = resize_bursts.Played(9.0, [(1,), (2,)], 0)
    refused = resize_bursts.Played(9.0, [(1,)], 1, "too long")
    resize_bursts.check([fixed, fixed, live], [served, refused, served], 0)
    resize_bursts.check([fixed, live], [refused, refused], 0)
    with pytest.raises(UserError, match=r"live leaves 1 turns unserved, a fixed split 0: too long"):
        resize_bursts.check([fixed, fixed, live], [refused, served, refused], 0)
    for other in (served._replace(tokens=[(1,), (3,)]), served._replace(tokens=[(1,)])):
        with pytest.raises(UserError, match="seed 7: tokens differ between splits"):
            resize_bursts.check([fixed, live], [served, other], 7)


def test_bursts_that_mean_nothing(capsys):
    assert bench_resize.main(["bursts", "--seeds", "1"]) == 2
    assert bench_resize.main(["bursts", "--caps", "many"]) == 2
    assert bench_resize.main(["bursts", "--live", "mv_wsa,best"]) == 2
    assert bench_resize.main(["bursts", "--trace-seed", "3"]) == 2
    assert bench_resize.main(["steps", "--every", "0"]) == 2
    assert bench_resize.main(["rule", "--seeds", "1"]) == 2
    assert bench_resize.main(["rule", "--memories", "much"]) == 2
    assert capsys.readouterr().err.count("python -m scripts.budgets resize: error") == 7


@pytest.mark.nightly
def test_moving_is_compared_with_the_rules_split(capsys, monkeypatch):
    job = resize_rule.Workload(sessions=16, turns=1, rate=1000, document_tokens=120)
    small = {"batch": job}
    monkeypatch.setattr(resize_rule, "WORKLOADS", small)
    arguments = ["rule", "--seeds", "2", "--memories", "4MiB", "--max-num-seqs", "8"]
    assert bench_resize.main([*arguments, "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["workload"] == "batch" and line["held"] > 0
    assert line["ratio"] != 1, "no slot moved"
    assert bench_resize.main(arguments) == 0
    assert "moving / held" in capsys.readouterr().out


def test_scenes_are_of_the_seed():
    one, same = (compare_budgets.made_up("experts", 1, 1 << 30, 0.2) for _ in range(2))
    assert len(one.turns) == len(same.turns)
    for a, b in zip(one.turns, same.turns, strict=True):
        np.testing.assert_array_equal(a.pages, b.pages)
        np.testing.assert_array_equal(np.array(a.active), np.array(b.active))
    # What is chosen ahead has other sessions, so their KV is no help.
    assert not {int(b.pages[0, 0]) for b in one.turns} & {int(b.pages[0, 0]) for b in one.before}
    assert dataclasses.is_dataclass(one.division)
