"""Conversations of a grid: equal tokens under every split, prices, and the table that says so."""

import dataclasses

import pytest

import moejax
from host_offload.policies.budget.mv_wsa import MvWsa
from moejax.evaluate.experiments.arms import arm_of
from moejax.evaluate.experiments.conversations.priced import drawn, prices_of, workloads_of
from moejax.evaluate.experiments.records import read_results
from moejax.evaluate.experiments.report.memory_tables import shared_rows
from moejax.evaluate.experiments.report.page import write_report

BURSTS = 'turns(sessions=3, turns=2, arrival="bursty", rate=8.0, document_tokens=60)'

GRID = {
    "policies": ["lru", "mv_wsa", "mv_wsa=train", "peak_headroom"],
    "memory": "4MiB",
    "budgets": ["25%", "50%"],
    "conversations": [BURSTS],
    "seeds": [0, 1],
    "batch": 4,
    "prompt_tokens": 320,
    "temperature": 0.0,
}


def test_conversations_one_after_the_other():
    workloads = workloads_of(f"{BURSTS} then turns(sessions=2, turns=1)")
    found = drawn(workloads, 64, seed=3)
    assert [each.number for each in found] == [0, 1, 2, 3, 4]
    assert [{turn.session for turn in each.turns} for each in found] == [{n} for n in range(5)]
    assert min(x.arrival_s for x in found[3:]) > max(x.arrival_s for x in found[:3])
    assert drawn(workloads, 64, seed=3) == found != drawn(workloads, 64, seed=4)


def test_policies_are_told_the_prices(tmp_path):
    costs = prices_of({"miss_ms": 4, "page_ms": 0.5}).costs
    assert (costs.expert_s, costs.page_s) == (pytest.approx(4e-3), pytest.approx(1e-3))
    arm = arm_of("mv_wsa(decay=0.8, expect_returns=False)", tmp_path, shared=True)
    (policy,) = [each for each in arm.policies if isinstance(each, MvWsa)]
    assert policy.rule.decay == 0.8 and not policy.expect_returns


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return moejax.ablate(GRID, tmp_path_factory.mktemp("talks") / "out", progress=False)


@pytest.mark.slow
def test_tokens_are_the_same_under_every_split(played):
    assert not played.failures
    rows = played.of_mode("priced")
    assert len(rows) == 4 * 2 * 2
    for seed in (0, 1):
        assert len({row["tokens"] for row in rows if row["seed"] == seed}) == 1
    assert all(row["turns"] == 6 and not row["unserved"] for row in rows)
    held = {r["budget"]: r for r in rows if (r["policy"], r["seed"]) == ("lru", 0)}
    assert held["25%"]["misses"] > held["50%"]["misses"]
    assert [held[b]["cells_end"] for b in held] == [4, 8]
    moved = [r for r in rows if r["moves_memory"] and r["cells_end"] != r["cells_most"]]
    assert moved, "no line moved"
    assert not any("changed tokens" in note for note in played.notes())


@pytest.mark.slow
def test_times_are_what_prices_say(played):
    """From a seed whose conversations leave no pause: decode 4, prefill 20, miss 0.4, page 0.3."""
    for row in played.of_mode("priced"):
        busy = row["decode_steps"] * 4 + row["prefill_steps"] * 20 + row["misses"] * 0.4
        busy += row["kv_pages_moved"] * 0.3
        # Beside that only pauses until somebody comes.
        assert busy / 1e3 <= row["priced_s"] + 1e-9
        assert row["tokens_per_s"] == pytest.approx(row["generated"] / row["priced_s"])


@pytest.mark.slow
def test_what_begins_with_a_trace_has_one(played):
    traces = sorted(path.name for path in (played.directory / "traces").iterdir())
    assert traces == ["train-0-4-16", "train-0-4-32"]


@pytest.mark.slow
def test_a_grid_of_conversations_goes_on_and_is_reported(played, tmp_path):
    again = moejax.ablate(GRID, played.directory, progress=False)
    assert again.rows == played.rows
    rows = shared_rows(read_results(played.directory))
    assert [row[2:4] for row in rows[:2]] == [["lru", "25%"], ["lru", "50%"]]
    assert {row[2] for row in rows[2:]} == {*GRID["policies"][1:]}
    page = write_report(played, tmp_path)[0].read_text()
    assert "one memory of 4MiB for experts and KV, priced" in page
    changed = [{**row, "tokens": row["policy"]} for row in played.rows]
    notes = dataclasses.replace(played, rows=changed).notes()
    assert any("changed tokens" in note for note in notes)
