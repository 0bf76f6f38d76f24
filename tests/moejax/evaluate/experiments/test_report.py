"""What records come to, and the pages that say so, from records written by hand."""

import dataclasses
import json
import math
import re
import shutil
import types
import xml.etree.ElementTree as ElementTree
from typing import Any, NamedTuple

import pytest

from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.evaluate.experiments import workload
from moejax.evaluate.experiments.records import Records, median_interval, read_results
from moejax.evaluate.experiments.report import figures
from moejax.evaluate.experiments.report.figures import (
    Plot,
    Series,
    draw,
    plots_beside,
    plots_of,
    points_of,
)
from moejax.evaluate.experiments.report.page import definition, page, write_report
from moejax.evaluate.experiments.report.tables import (
    Pair,
    errors,
    kendall,
    labels,
    panel_table,
    panels,
    prediction_table,
    tables_of,
)

ASKED = {
    "model": "demo",
    "policies": ["lru", "dir/mine.py:Mine"],
    "budgets": ["25%", "50%"],
    "texts": ["math"],
    "precision": ["dense"],
    "routing": [],
    "link_rate": ["none"],
    "modes": ["measured"],
    "output_tokens": 3,
    "seeds": [0],
    "repeats": 6,
    "baseline": "lru",
    "files": {"mine.py": "ab" * 32},
}

SESSION = {
    "session": 0,
    "at": "2026-11-22T12:00:00+00:00",
    "driver": "device",
    "precision": "dense",
    "link_rate": "none",
    "batch": 1,
    "platform": "cpu",
    "device": "cpu",
    "compile_s": 3.0,
    "warm_up_s": 1.0,
    "executables": 7,
    "python": "3.11.7",
    "link_bytes_per_s": 2e9,
    "machine": "<here>",
    "versions": {"moejax": "0.1.0"},
}


def row(policy, budget, repeat, *, tpot=1e-3, mode="measured", **other):
    cells = {"25%": 4, "50%": 8}[budget]
    kinds = {
        f"{kind}_{name}": value
        for kind in ("prefill", "decode")
        for name, value in (("steps", 2), ("hits", 12), ("misses", 4), ("fills", 4))
    }
    return {
        "mode": mode,
        "driver": "device",
        "precision": "dense",
        "link_rate": "none",
        "batch": 1,
        "prompt_tokens": 8,
        "text": "math",
        "seed": 0,
        "budget": budget,
        "policy": policy,
        "repeat": repeat,
        "session": 0,
        "error": None,
        "cells_least": cells,
        "cells_most": cells,
        "experts": 16,
        "moves_cells": False,
        "expert_bytes": cells * 2**20,
        "learned_bytes": 0,
        "tokens": "same",
        **kinds,
        "decode_read_through": 0,
        "prefill_read_through": 0,
        "decode_ahead": 0,
        "prefill_ahead": 0,
        "decode_bytes": 400,
        "prefill_bytes": 400,
        "ahead_done": 0,
        "ahead_used": 0,
        "tpot_p50_s": tpot,
        "tpot_p99_s": 2 * tpot,
        "ttft_s": 0.01,
        "tokens_per_s": 1 / tpot,
        "prefill_s": 0.01,
        "decode_s": 2 * tpot,
        "wall_s": 0.1,
        "cpu_s": 0.1,
        "compiled": 0,
        "policy_s": tpot / 4,
        **other,
    }


def bound(budget):
    whole = row("MIN", budget, 0, mode="bound")
    kept = {"decode_misses": 2, "decode_bytes": 200, "pool_misses": 1}
    times = [n for n in whole if n.endswith("_s") or n.startswith("tokens")]
    return {n: v for n, v in (whole | kept).items() if n not in times} | {"session": None}


@pytest.fixture
def records(tmp_path):
    rows = [bound("25%"), bound("50%")]
    for repeat in range(6):
        for budget in ASKED["budgets"]:
            # A machine that slows down: both policies alike, one always 1.5 times the other.
            slow = 1e-3 * (1 + repeat)
            rows.append(row("lru", budget, repeat, tpot=slow))
            rows.append(row("dir/mine.py:Mine", budget, repeat, tpot=1.5 * slow))
    return Records(tmp_path, ASKED, rows, [SESSION])


def of(records, policy, budget="50%"):
    (line,) = [x for x in records.summary() if (x["policy"], x["budget"]) == (policy, budget)]
    return line


def test_of_several_seeds_shares_have_a_range(tmp_path):
    rows = [row("lru", "25%", 0), row("lru", "25%", 0) | {"seed": 1, "decode_hits": 4}]
    (table,) = tables_of(Records(tmp_path, ASKED | {"seeds": [0, 1]}, rows, [SESSION]))
    said = dict(zip(table.headings, table.rows[0], strict=True))
    assert said["hits"] == "66.7% (50.0%–75.0%)" and said["misses/step"] == "2.00 (2.00–2.00)"


def test_ratios_to_the_baseline_have_intervals_over_seeds(tmp_path):
    rows = [
        row(policy, "25%", 0) | {"seed": seed, "decode_misses": misses, "decode_bytes": 10}
        for seed, misses in ((0, 8), (1, 10), (2, 20))
        for policy, misses in (("lru", misses), ("dir/mine.py:Mine", misses - 2 * seed))
    ]
    *_, table = tables_of(Records(tmp_path, ASKED | {"seeds": [0, 1, 2]}, rows, [SESSION]))
    (line,) = (dict(zip(table.headings, each, strict=True)) for each in table.rows)
    assert table.title == "Over lru with the same seed" and line["policy"] == "mine.py:Mine"
    # 1, 0.8 and 0.8: t of two degrees of freedom is 4.303, and the standard error 0.0667.
    assert (line["seeds"], line["misses"]) == ("3", "0.867 [0.580, 1.154]")
    assert line["bytes"] == "1.000 [1.000, 1.000]"


def test_rows_over_seeds_can_be_told_apart_and_count_the_ratios_seeds(tmp_path):
    rows = [
        row(policy, "25%", 0)
        | {"seed": seed, "precision": precision, "driver": driver, "mode": mode}
        # Ratios to no misses there are none, so misses have two seeds and bytes three.
        | {"decode_misses": 0 if seed == 2 else 4}
        for policy in ("lru", "dir/mine.py:Mine")
        for seed in range(3)
        for precision in ("dense", "int8")
        for driver in ("device", "host")
        for mode in ("measured", "simulated")
    ]
    asked = ASKED | {"precision": ["dense", "int8"], "seeds": [0, 1, 2]}
    *_, table = tables_of(Records(tmp_path, asked, rows, [SESSION]))
    lines = [dict(zip(table.headings, each, strict=True)) for each in table.rows]
    assert table.title == "Over lru with the same seed"
    assert len({line["policy"] for line in lines}) == len(lines) == 8
    assert lines[0]["policy"] == "mine.py:Mine, dense, measured, device"
    for line in lines:
        assert line["seeds"] == "3" and line["bytes"] == "1.000 [1.000, 1.000]"
        assert line["misses"] == "1.000 [1.000, 1.000] (2 seeds)"


def test_conversations_have_no_share_of_policies(tmp_path):
    talk = row("lru", "25%", 0, mode="priced") | {"policy_s": 1e-3, "unserved": 0}
    del talk["decode_s"]
    (table,) = tables_of(Records(tmp_path, ASKED, [talk], [SESSION]))
    assert dict(zip(table.headings, table.rows[0], strict=True))["policy ms/step"] == "1.00"


def test_failures_are_in_the_table(records):
    bad = "dir/mine.py:Mine"
    rows = [r | {"error": "ValueError: <no>"} if r["policy"] == bad else r for r in records.rows]
    found = dataclasses.replace(records, rows=rows)
    assert "failed: ValueError: <no>" in page(found, {}, "md")
    assert "failed: ValueError: &lt;no&gt;" in page(found, {})
    assert "12 of 26 runs failed" in "\n".join(found.notes())


def test_medians_with_intervals_and_pairs(records):
    line = of(records, "dir/mine.py:Mine")
    assert line["tpot_p50_s"] == pytest.approx(1.5 * 3.5e-3)
    assert (line["tpot_p50_s_low"], line["tpot_p50_s_high"]) == pytest.approx((1.5e-3, 9e-3))
    for name in ("", "_low", "_high"):
        assert line[f"tpot_p50_s_ratio{name}"] == pytest.approx(1.5)
    assert line["runs"] == 6
    assert not line["counts_differ"]


def test_what_a_reader_must_know(records):
    rows = [dict(r) for r in records.rows]
    rows[-1]["tokens"] = "others"
    rows[-2]["compiled"] = 1
    rows[-3]["decode_hits"] += 1
    for one in rows:
        one["decode_misses"] += (one["budget"], one["policy"]) == ("50%", "lru")
    asked = ASKED | {"repeats": 3, "policies": ["lru", "random"]}
    versions = {"moejax": "0.1.0", "jax": "0.12.0", "commit": "0123456789ab+"}
    other = SESSION | {"machine": "elsewhere", "processor": "another", "versions": versions}
    found = dataclasses.replace(records, rows=rows, asked=asked, sessions=[SESSION, other])
    said = "\n".join(found.notes())
    for note in (
        "repeats: 3",
        "1 of 10 seeds",
        "report a bug",
        "at 25% every policy missed as many",
        "compiled",
        "copy within the same memory",
        *(f"runs differ in {name}" for name in ("machine", "processor", "jax", "commit")),
    ):
        assert note in said
    linked = [row | {"link_rate": "1GB/s"} for row in records.rows]
    assert not [x for x in dataclasses.replace(records, rows=linked).notes() if "same memory" in x]
    assert sum(line.get("counts_differ", False) for line in found.summary()) == 1


def test_parts_of_a_grid_have_one_report(records, tmp_path, capsys):
    def written(name, policy, asked=None, **change):
        part = tmp_path / name
        part.mkdir()
        rows = [row | change for row in records.rows if row["policy"] in ("MIN", "lru", policy)]
        asked = {**ASKED, "policies": ["lru", policy], "runs": len(rows) + 5, **(asked or {})}
        (part / "experiment.json").write_text(json.dumps(asked))
        (part / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (part / "sessions.jsonl").write_text(json.dumps(SESSION) + "\n")
        return str(part)

    mine = written("mine", "dir/mine.py:Mine")
    fewer = written("fewer", "fifo")
    out = tmp_path / "out"
    assert cli.main(["report", fewer, mine, "--output", str(out)]) == 0
    said = (out / "report.md").read_text()
    assert f"{len(records.rows)} of {len(records.rows) + 10} runs are done" in said
    assert "dir/mine.py:Mine" in said and "policies:\n- lru\n- fifo\n- dir/mine.py:Mine" in said
    for other, message in (
        (written("model", "fifo", {"model": "tri"}), "no parts of one grid: they differ in model"),
        (written("file", "fifo", {"files": {"mine.py": "0"}}), "mine.py is another file in each"),
        (written("counts", "lru", decode_fills=9), "a run of 'MIN' differs in decode_fills"),
    ):
        assert cli.main(["report", mine, other]) == 2
        assert message in capsys.readouterr().err


def test_the_table_has_marks_intervals_and_bounds(records):
    table, beside = tables_of(records)
    assert [r[:3] for r in table.rows] == [
        ("lru", "25%", "4.00"),
        ("mine.py:Mine", "25%", "4.00"),
        ("lru", "50%", "8.00"),
        ("mine.py:Mine", "50%", "8.00"),
    ]
    said = dict(zip(table.headings, table.rows[3], strict=True))
    assert (said["misses/step"], said["MIN"]) == ("2.00", "1.00")
    assert (said["hits"], said["TPOT p50 ms"]) == ("75.0%", "5.25 [1.50–9.00]")
    assert said["policy ms/step"] == "1.31 [0.38–2.25], 25%"
    assert said["× baseline"] == "1.500 [1.500–1.500]"
    assert "5.25 [1.50–9.00]" in page(records, {}, "md")
    # A column in which nothing has a value is left out.
    assert not {"recall", "high/low", "+ ahead", "unserved"} & {*table.headings}
    assert beside.rows[1][:4] == ("dir/mine.py:Mine", "1.00–1.00", "0", "0")
    assert beside.rows[1][-1] == "2.00–2.00"


def test_a_trace_has_tokens_of_its_own(records):
    for text, said in (("run1,expert_bytes=9", ""), ("zipf,layers=2", " · batch 1 · 8+3 tokens")):
        asked = ASKED | {"texts": [], "routing": [text]}
        rows = [row | {"text": text} for row in records.rows]
        (panel,) = panels(dataclasses.replace(records, asked=asked, rows=rows))
        assert panel.title == text + said


def test_a_simulated_cell_is_told_once_unless_it_differs(records):
    simulated = [
        {n: v for n, v in row("lru", b, 0, mode="simulated").items() if not n.endswith("_s")}
        for b in ASKED["budgets"]
    ]
    found = dataclasses.replace(records, rows=[*records.rows, *simulated])
    assert len(panels(found)[0].lines) == 4
    assert found.agreement() == (2, 2)
    simulated[0]["decode_hits"] = 11
    assert found.agreement() == (2, 1)
    (panel,) = panels(found)
    assert [r[0] for r in panel_table(panel).rows][:3] == [
        "lru, measured",
        "lru, simulated",
        "mine.py:Mine, measured",
    ]


@pytest.mark.slow  # matplotlib takes seconds to import
def test_the_page_needs_nothing_else(records, tmp_path):
    paths = write_report(records, tmp_path / "report")
    assert [path.name for path in paths[:2]] == ["report.html", "report.md"]
    text, markdown = (path.read_text() for path in paths[:2])
    # A namespace is a name, not an address that is read.
    rest = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?:|<script|<link|@import|src=", rest)
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert "&lt;here&gt;" in text and "SHA-256 of mine.py" in text
    assert text.count("<svg") == 4
    assert "budgets:\n- 25%" in definition(records)
    for path in paths[2:]:
        assert f"({path.name})" in markdown or path.suffix == ".csv"
    (table,) = [
        path
        for path in paths
        if path.name.startswith("report-math") and path.name.endswith("tokens.csv")
    ]
    assert table.read_text().startswith("policy,budget,MiB,misses/step")
    (points,) = [path for path in paths if path.name.endswith("times.csv")]
    assert points.read_text().startswith('line,MiB of experts,"ms an output token (median of 6,')
    assert len(list((tmp_path / "report").iterdir())) == len(paths)


@pytest.mark.slow
@pytest.mark.browser
def test_wide_tables_scroll_inside_their_box_on_a_phone(records, tmp_path):
    from playwright.sync_api import sync_playwright

    page, *_ = write_report(records, tmp_path)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        opened = browser.new_page(viewport={"width": 400, "height": 800})
        opened.goto(page.as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        boxes = opened.locator(".scroll")
        sizes = boxes.evaluate_all("all => all.map(b => [b.scrollWidth, b.clientWidth])")
        assert any(inside > shown for inside, shown in sizes)
        assert sizes[-1][0] == sizes[-1][1]  # the machine's facts are text, which wraps
        boxes.first.evaluate("box => box.scrollBy(50, 0)")
        assert boxes.first.evaluate("box => box.scrollLeft") == 50
        browser.close()


def test_plots_have_intervals_and_every_bound(records):
    (panel,) = panels(records)
    plots = {plot.name: plot for plot in plots_of(panel)}
    assert [*plots] == ["misses", "moved", "times", "ratios"]
    for plot in plots.values():
        ElementTree.fromstring(draw(plot))
    bounds = {name: [s.name for s in plot.series if s.bound] for name, plot in plots.items()}
    assert bounds["moved"] == ["MIN", "MIN, one pool"]
    assert bounds["times"] == ["MIN over the link"] and not bounds["misses"]
    (first, _), *_ = [series.points for series in plots["times"].series]
    assert first == (4.0, pytest.approx((3.5, 1.0, 6.0)))


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        ("promoe=a/b/markov.npz", "promoe=markov.npz, host"),
        ("dir/crf.py:Crf,decay=0.9", "crf.py:Crf,decay=0.9, host"),
        ("lru + ../x.py:Y=train,n=2", "lru + x.py:Y=train,n=2, host"),
    ],
)
def test_labels_survive(policy, label):
    found = labels([row(policy, "25%", 0, driver="host"), row("lru", "25%", 0)])
    assert found == [label, "lru, device"]


def test_a_bound_far_below_does_not_press_the_data_flat(monkeypatch):
    """At one budget it is a dash, since there is no line."""
    shown, marks = [], []

    def note(figure, axes):
        shown.append(axes.get_ylim())
        marks.extend(line.get_marker() for line in axes.get_lines() if line.get_label() == "MIN")

    monkeypatch.setattr(figures, "_svg_of", note)
    data, floor = Series("lru", [(4.0, (3.0, 2.0, 4.0))]), Series("MIN", [(4.0, (1e-6,) * 3)], True)
    draw(Plot("times", "ms", [data, floor], log=True))
    assert shown == [pytest.approx((2 / 1.5, 4 * 1.5))] and marks == ["_"]


def test_a_requests_time_a_token_is_its_mean():
    """A CPU's short steps are read two by two: the median of tokens' times may be half of it."""
    requests: list[Any] = [
        types.SimpleNamespace(first_token_s=1.0, arrival_s=0.0, token_times=times, output=[1] * 5)
        for times in ([1, 3, 1, 3, 1], [1, 3, 1, 3, 1], [9, 9, 9, 9, 9])
    ]
    found = workload._times(requests, 10.0)
    assert found["tpot_p50_s"] == pytest.approx(9 / 5) and found["tpot_p99_s"] == 9


class Output(NamedTuple):
    logits: None = None


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    kind: str
    output: Output
    logprobs: None = None


def test_policies_time_is_that_of_decode_steps():
    """A prompt's step takes policies many times as long, and steps of decode are few."""
    controller: Any = types.SimpleNamespace(policy_s=9.0)  # of steps before
    counter: Any = workload.Counter([1], controller)
    for kind, seconds in (("prefill", 5.0), ("decode", 1.0), ("decode", 2.0)):
        controller.policy_s += seconds
        counter(DispatchedStep(kind, Output()))
    assert (counter.policy_s("prefill"), counter.policy_s("decode")) == (5.0, 1.5)


def test_one_chart_has_all_places(records):
    """Two links; over the second the policy is as fast as the baseline at half the budget."""
    slower = [
        row
        | {"link_rate": "1GB/s", "decode_ahead": 4 * (row["budget"] == "25%")}
        | ({"tpot_p50_s": 1e-3} if row["budget"] == "50%" and "tpot_p50_s" in row else {})
        for row in records.rows
    ]
    asked = {**ASKED, "link_rate": ["none", "1GB/s"]}
    both = dataclasses.replace(records, asked=asked, rows=[*records.rows, *slower])
    moved, time = plots_beside("lru", panels(both))
    assert time.places == ["no link", "link 1GB/s"]
    (mine,) = time.series
    assert mine.name == "mine.py:Mine"
    (_, apart), (_, near) = mine.points
    assert apart == pytest.approx((1.5, 1.5, 1.5)) and near == pytest.approx((1.5**0.5, 1, 1.5))
    assert [ratio for _, ratio in moved.series[0].points] == [(1, 1, 1), (1, 1, 1)]
    names = {e.text for e in ElementTree.fromstring(draw(time)).iter() if e.text}
    assert {"no link", "link 1GB/s", "mine.py:Mine"} <= names
    assert list(points_of(time))[2][:2] == ("mine.py:Mine", "link 1GB/s")
    assert not list(plots_beside("lru", panels(records)))


def test_a_report_that_cannot_be_written_is_refused(records, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="has no records yet"):
        write_report(dataclasses.replace(records, rows=[]), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_report(records, tmp_path / "file" / "below")
    page, *_ = write_report(records, tmp_path)
    assert "without matplotlib there are no figures: pip install" in page.read_text()


def test_results_are_read_or_refused(records, tmp_path, capsys):
    root = tmp_path / "results"
    with pytest.raises(UserError, match="is no directory of results; moejax ablate"):
        read_results(root)
    assert cli.main(["report", str(root)]) == 2
    assert "is no directory of results" in capsys.readouterr().err
    root.mkdir()
    (root / "experiment.json").write_text(json.dumps(ASKED))
    for name, lines in (("records", records.rows), ("sessions", records.sessions)):
        (root / f"{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    assert read_results(root).summary() == records.summary()
    assert cli.main(["report", str(root), "--output", str(tmp_path / "there")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "there" / "report.html")


@pytest.mark.slow  # pandas takes seconds to import
def test_frames_for_notebooks(records, monkeypatch):
    frame = records.to_pandas()
    assert len(frame) == len(records.rows)
    assert set(frame["policy"]) == {"MIN", *ASKED["policies"]}
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match="pip install"):
        records.to_pandas()


@pytest.mark.parametrize(("n", "cut"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median(n, cut):
    """Order statistics of the sign test's table; one further in would be below 95%."""
    values = [float(7 * i % n) for i in range(n)] if n % 7 else [float(i) for i in range(n)]
    assert median_interval(values) == (cut, n - 1 - cut)
    below = [math.comb(n, k) / 2**n for k in range(cut + 2)]
    assert 1 - 2 * sum(below[: cut + 1]) >= 0.95 > 1 - 2 * sum(below)
    with pytest.raises(UserError, match="median of fewer than 6"):
        median_interval(values[:5])


def pair(measured, predicted, *, budget="25%", **place):
    """A cell with these milliseconds a step, ten steps after a first token of as many."""

    def line(mode, ms):
        seconds = {"prefill_s": ms / 1e3, "decode_s": ms / 1e2, "decode_steps": 10, "runs": 6}
        times = dict.fromkeys(("tpot_p50_s", "tpot_p99_s", "ttft_s"), ms / 1e3)
        where = row("lru", budget, 0) | {"mode": mode, **place}
        return where | seconds | times

    stall = {"stall_share": 0.25, "stall_bound_share": 0.125}
    return Pair(line("measured", measured), line("predicted", predicted) | stall)


def test_tau_counts_pairs_of_one_batch():
    assert kendall([pair(1, 10), pair(2, 20), pair(3, 30)]) == 1.0
    assert kendall([pair(1, 30), pair(2, 20), pair(3, 10)]) == -1.0
    one_wrong = [pair(1, 10), pair(2, 30), pair(3, 20)]
    assert kendall(one_wrong) == pytest.approx(1 / 3)
    # Equal predictions are a pair that is not ordered.
    assert kendall([pair(1, 10), pair(2, 10)]) == 0.0
    assert math.isnan(kendall([pair(1, 10), pair(2, 20, batch=2)]))


def test_errors_are_relative_to_what_was_measured():
    pairs = [pair(2, 1), pair(2, 2.5, budget="50%"), pair(4, 4, batch=8)]
    assert errors(pairs, "first token") == pytest.approx([-0.5, 0.25, 0])
    table = prediction_table([line for found in pairs for line in found])
    assert [row[:3] for row in table.rows] == [["none", "1", "2"], ["none", "8", "1"]]
    said = dict(zip(table.headings, table.rows[0], strict=True))
    assert said["p99"] == said["first token"] == said["decode step"] == "37.5% (-50.0%)"
    assert (said["τ"], said["stall"], said["bound"]) == ("0.00", "25%", "12%")
