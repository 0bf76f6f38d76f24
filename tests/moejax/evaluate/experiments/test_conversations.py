"""Conversations of a grid: the same for a seed, with the rates that were asked for; equal tokens
under every split, prices, and the table that says so."""

import dataclasses

import numpy as np
import pytest

import moejax
from host_offload.policies.budget.mv_wsa import MvWsa
from moejax.errors import UserError
from moejax.evaluate.experiments.arms import read_arm
from moejax.evaluate.experiments.records import read_results
from moejax.evaluate.experiments.report.page import page
from moejax.evaluate.experiments.report.tables import tables_of
from moejax.evaluate.experiments.sources.conversations import (
    SessionKind,
    bursty_arrivals,
    draw_sessions,
    poisson_arrivals,
    read_prices,
    read_sessions,
)

BURSTS = "turns,sessions=3,turns=2,arrival=bursty,rate=8.0,document_tokens=60"

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


def test_sessions_of_two_kinds_come_one_after_the_other():
    kinds = read_sessions(f"{BURSTS} then turns,sessions=2,turns=1")
    found = draw_sessions(kinds, 64, seed=3)
    assert [len(each.turns) for each in found] == [2, 2, 2, 1, 1]
    assert min(x.arrival_s for x in found[3:]) > max(x.arrival_s for x in found[:3])
    assert draw_sessions(kinds, 64, seed=3) == found != draw_sessions(kinds, 64, seed=4)


def test_fewer_sessions_are_the_first_of_more_and_arrivals_change_no_turn():
    many = SessionKind(sessions=60, turns=12, tool_share=0.3, shift_share=0.2)
    found = draw_sessions((many,), 512, 5)
    assert draw_sessions((dataclasses.replace(many, sessions=7),), 512, 5) == found[:7]
    bursty = draw_sessions((dataclasses.replace(many, arrival="bursty"),), 512, 5)
    assert [c.turns for c in bursty] == [c.turns for c in found]
    assert [c.arrival_s for c in bursty] != [c.arrival_s for c in found]
    longest = max(len(turn.new_tokens) for each in found for turn in each.turns[1:])
    assert 64 < longest <= 64 + 36  # a topic's document, and a question or a tool's result


def counts(times: np.ndarray, window: float) -> np.ndarray:
    return np.bincount((times // window).astype(int))[:-1]


def test_arrivals_have_their_rate_and_only_bursty_ones_are_bursty():
    dispersion = {}
    for name, process in (("poisson", poisson_arrivals), ("bursty", bursty_arrivals)):
        times = process(np.random.default_rng(0), 4.0, 40_000)
        assert (np.diff(times) > 0).all() and times[0] > 0
        assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05), name
        seen = counts(times, 5.0)
        dispersion[name] = seen.var() / seen.mean()
    assert dispersion["poisson"] == pytest.approx(1.0, abs=0.1)
    # The rate is 20/s or 0/s, 0.5 and 2 s long in the mean; its covariance 20²·0.2·0.8·e^(−2.5 t)
    # integrated over a window of 5 s gives the dispersion of the counts.
    rate_of_change, variance = 1 / 0.5 + 1 / 2, 20**2 * 0.2 * 0.8
    within = 1 - (1 - np.exp(-rate_of_change * 5)) / (rate_of_change * 5)
    expected = 1 + 2 * variance / rate_of_change / 4 * within
    assert dispersion["bursty"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sessions", 0, "sessions must be a number above 0, got 0"),
        ("answer_tokens", 0, "answer_tokens must be a number above 0"),
        ("document_tokens", -1, "document_tokens must be a number above 0"),
        ("think_s", float("nan"), "think_s must be a number above 0"),
        ("arrival", "uniform", "arrival is one of poisson, bursty, not 'uniform'"),
        ("rate", 0.0, "rate must be a number above 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        SessionKind(**{field: value})


def test_policies_are_told_the_prices(tmp_path):
    costs = read_prices({"miss_ms": 4, "page_ms": 0.5}).costs
    assert (costs.expert_s, costs.page_s) == (pytest.approx(4e-3), pytest.approx(1e-3))
    arm = read_arm("mv_wsa,decay=0.8,expect_returns=false", tmp_path, shared=True)
    (policy,) = [each for each in arm.policies if isinstance(each, MvWsa)]
    assert policy.rule.decay == 0.8 and not policy.expect_returns


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return moejax.ablate(GRID, tmp_path_factory.mktemp("talks") / "out", progress=False)


@pytest.mark.nightly
def test_tokens_are_the_same_under_every_split(played):
    assert not played.failures
    rows = played.of_mode("priced")
    assert len(rows) == 4 * 2 * 2
    for seed in (0, 1):
        assert len({row["tokens"] for row in rows if row["seed"] == seed}) == 1
    assert all(row["turns"] == 6 and not row["unserved"] for row in rows)
    held = {r["budget"]: r for r in rows if (r["policy"], r["seed"]) == ("lru", 0)}
    assert held["25%"]["decode_misses"] > held["50%"]["decode_misses"]
    assert [held[b]["cells_end"] for b in held] == [4, 8]
    moved = [r for r in rows if r["moves_memory"] and r["cells_end"] != r["cells_most"]]
    assert moved, "no line moved"
    assert not any("changed tokens" in note for note in played.notes())


@pytest.mark.slow
def test_times_are_what_prices_say(played):
    """From a seed whose conversations leave no pause: decode 4, prefill 20, miss 0.4, page 0.3."""
    for row in played.of_mode("priced"):
        misses = row["prefill_misses"] + row["decode_misses"]
        busy = row["decode_steps"] * 4 + row["prefill_steps"] * 20 + misses * 0.4
        busy += row["kv_pages_moved"] * 0.3
        # Beside that only pauses until somebody comes.
        assert busy / 1e3 <= row["priced_s"] + 1e-9
        assert row["tokens_per_s"] == pytest.approx(row["generated"] / row["priced_s"])


@pytest.mark.slow
def test_times_over_a_link_are_measured(tmp_path):
    """A miss of 96 KiB over 20 MB/s takes 5 ms, so more cells make turns shorter, by at least half
    of what the link takes for the others' misses; tokens are those of stated prices."""
    changes = {"policies": ["lru"], "prices": "measured", "link_rate": ["20MB/s"], "seeds": [0]}
    found = moejax.ablate({**GRID, **changes}, tmp_path / "out", progress=False)
    few, many = (row for row in found.rows if row["mode"] == "priced")
    assert (few["budget"], many["budget"]) == ("25%", "50%") and few["tokens"] == many["tokens"]
    saved = few["prefill_bytes"] + few["decode_bytes"] - many["prefill_bytes"]
    saved -= many["decode_bytes"]
    assert few["priced_s"] - many["priced_s"] > saved / 20e6 / 2 > 0
    assert few["turn_s"] > many["turn_s"] > many["ttft_s"] > 0


@pytest.mark.slow
def test_what_begins_with_a_trace_has_one(played):
    traces = sorted(path.name for path in (played.directory / "traces").iterdir())
    assert traces == ["train-0-4-16", "train-0-4-32"]


@pytest.mark.slow
def test_a_grid_of_conversations_goes_on_and_is_reported(played):
    again = moejax.ablate(GRID, played.directory, progress=False)
    assert again.rows == played.rows
    table, beside = tables_of(read_results(played.directory))
    assert table.title.startswith(BURSTS) and beside.title == "Over lru with the same seed"
    # Splits that are held, then policies that move the line.
    assert [row[:2] for row in table.rows[:2]] == [("lru", "25%"), ("lru", "50%")]
    assert {row[0] for row in table.rows[2:]} == {*GRID["policies"][1:]}
    assert {"/ best held", "tokens/s", "TTFT ms", "KV pages moved"} <= {*table.headings}
    assert table.title in page(played, {}, "md")
    changed = [{**row, "tokens": row["policy"]} for row in played.rows]
    notes = dataclasses.replace(played, rows=changed).notes()
    assert any("changed tokens" in note for note in notes)
