"""Splits of one memory compared at equal bytes; resizes timed and priced. No claim is made here."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from host_offload.configurator import bursts_of, replay_split
from host_offload.split import MissCosts
from host_offload.traces import read_trace
from tests.moejax.budget_workload import MEMORY, recorded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_resize
import budget_arms
import compare_budgets
import table2

COSTS = MissCosts(expert_s=1.0, page_s=0.5)


@pytest.fixture(scope="module")
def scene():
    """A few turns of the second workflow, in little memory."""
    return compare_budgets.made_up("experts", 0, 1 << 30, 0.2)


@pytest.fixture(scope="module")
def arms(scene):
    few = scene.bursts[:6]
    return few, budget_arms.arms_of(few, scene.before[:4], scene.workflow[:6], *scene[4:], COSTS)


def test_all_arms_have_the_same_bytes_and_none_beats_its_bound(scene, arms):
    bursts, found = arms
    seconds = {arm.name: budget_arms.cost_of(*arm.misses(bursts), COSTS) for arm in found}
    for arm in found:
        assert arm.most_bytes(scene.division) <= scene.division.total_bytes
        assert len(arm.cells) == len(arm.pages) == len(bursts)
        assert min(arm.pages) >= scene.division.floor_pages
    held = [arm.name for arm in found if len({tuple(c) for c in arm.cells}) == 1]
    assert "50-50" in held and "hindsight" in held and "mv_wsa cold" not in held
    for name in held:
        # The oracle tries a grid, on which these lie, or near it.
        assert seconds["hindsight"] <= seconds[name] * 1.05
    assert seconds["static layers"] > seconds["50-50"]


def test_the_oracle_is_the_best_of_its_grid(scene):
    bursts, division = scene.bursts[:5], scene.division
    (cap,) = set(budget_arms.oracle_caps(bursts, np.zeros(5, int), division, COSTS))
    layers = bursts[0].active[0].shape[0]

    def seconds(cap: int) -> float:
        found = replay_split(bursts, [np.full(layers, cap)] * 5, [division.pages_at(cap)] * 5)
        return found.expert_misses.sum() * 1.0 + found.kv_misses.sum() * 0.5

    grid = {division.cap_at(split) for split in np.linspace(0, 1, budget_arms.GRID)}
    assert seconds(cap) == min(map(seconds, grid))


def test_layers_get_what_their_curves_say_and_never_more(scene):
    decode = [burst._replace(active=burst.active[1:]) for burst in scene.bursts[:6]]
    found = {arm.name: arm for arm in budget_arms.layer_arms(decode, scene.division)}
    assert {int(arm.cells[0].sum()) for arm in found.values()} == {
        int(found["uniform"].cells[0].sum())
    }
    assert len(set(found["optimal"].cells[0].tolist())) > 1


def test_a_trace_of_the_engine(capsys, tmp_path):
    directory, _ = recorded()
    memory = ("--memory", str(MEMORY))
    arguments = [str(tmp_path), "--trace", str(directory), *memory, "--no-plots"]
    assert compare_budgets.main(arguments) == 0
    lines = [json.loads(x) for x in (tmp_path / "budgets.jsonl").read_text().splitlines()]
    arms = {line["arm"]: line for line in lines if line["kind"] == "split"}
    assert all(line["used_bytes"] <= line["bytes"] <= MEMORY for line in lines)
    bursts = list(bursts_of(read_trace(directory)))
    assert {line["bursts"] for line in lines} == {len(bursts) - len(bursts) // 2}
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
def test_resizes_are_timed(capsys):
    arguments = ["steps", "--resizes", "4", "--every", "3", "--json"]
    assert bench_resize.main(arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = {line["steps"]: line["count"] for line in lines}
    assert counts["moved"] >= 4 and counts["all"] == counts["moved"] + counts["others"]
    assert all(line["failed"] == 0 and line["resizes"] >= 4 for line in lines)


@pytest.mark.nightly
def test_resizes_under_bursts_are_priced(capsys):
    small = ("--seeds", "2", "--sessions", "2", "--turns", "2", "--caps", "4,8", "--json")
    assert bench_resize.main(["bursts", *small]) == 0
    *seeds, other, hindsight = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(seeds) == 2 and other["low"] <= other["ratio"] <= other["high"]
    assert hindsight["ratio"] <= other["ratio"] + 1e-9


def test_bursts_that_mean_nothing(capsys):
    assert bench_resize.main(["bursts", "--seeds", "1"]) == 2
    assert bench_resize.main(["bursts", "--caps", "many"]) == 2
    assert bench_resize.main(["steps", "--every", "0"]) == 2
    assert capsys.readouterr().err.count("bench_resize: error") == 3


def test_static_offload_has_the_bytes_of_the_paged_arm():
    splits = table2.splits_of([16, 32, 128], 48, 128)
    assert splits["all"] == [128] * 48 and splits["static 128"] == splits["all"]
    for cells in (16, 32, 128):
        assert sum(splits[f"static {cells}"]) == sum(splits[f"paged {cells}"])
    assert splits["static 16"][:7] == [128] * 6 + [0]
    assert table2.splits_of([3], 2, 8)["static 3"] == [6, 0]


@pytest.mark.nightly
def test_table2_of_a_part(capsys):
    small = ("--shape", "demo", "--layers", "2", "--cells", "4,16", "--steps", "4", "--warmup", "2")
    assert table2.main([*small, "--repeats", "2", "--json"]) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["cells"] == 4 and last["paged_misses"] == last["static_misses"] == 0
    assert first["streamed_experts"] == 2 * 16 - 8 and first["published"] is None


def test_table2_refuses(capsys):
    assert table2.main(["--cells", "0"]) == 2
    assert table2.main(["--layers", "2", "--routing", "other"]) == 2
    assert "routing 'other' is unknown" in capsys.readouterr().err


def test_scenes_are_of_the_seed():
    one, same = (compare_budgets.made_up("experts", 1, 1 << 30, 0.2) for _ in range(2))
    assert len(one.bursts) == len(same.bursts)
    for a, b in zip(one.bursts, same.bursts, strict=True):
        np.testing.assert_array_equal(a.pages, b.pages)
        np.testing.assert_array_equal(np.array(a.active), np.array(b.active))
    # What is chosen ahead has other sessions, so their KV is no help.
    assert not {int(b.pages[0, 0]) for b in one.bursts} & {int(b.pages[0, 0]) for b in one.before}
    assert dataclasses.is_dataclass(one.division)
