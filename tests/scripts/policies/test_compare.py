"""Policies are compared over the same routing, never below their bounds; no engine runs here."""

import json
import math
import sys

import numpy as np
import pytest

from host_offload.traces.reader import read_trace
from moejax.errors import UserError
from moejax.evaluate.experiments.intervals import median_interval
from scripts.parts.places import SHARED
from scripts.policies import arms as policy_arms
from scripts.policies import compare as compare_policies
from scripts.policies import report as policy_report
from scripts.policies import times as bench_policies
from scripts.policies import traces as policy_traces

pytestmark = pytest.mark.slow

SMALL = (
    *("--text", "--shared", "0.5", "--layers", "2", "--tokens", "3"),
    *("--batches", "1,2", "--budgets", "2", "--processes", "1"),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Curves of generated routing: 12 steps, two layers."""
    path = tmp_path_factory.mktemp("policies")
    assert compare_policies.main(["curves", str(path), *SMALL, "--no-plots"]) == 0
    return path


@pytest.fixture(scope="module")
def lines(directory):
    return [json.loads(line) for line in (directory / "curves.jsonl").read_text().splitlines()]


def lru_misses(trace, cells):
    """Misses of decode steps, by hand."""
    misses = 0
    used = [{} for _ in range(trace.header.layers)]  # who is resident → when it was last used
    for step in trace.step_traces():
        for layer, cache in enumerate(used):
            needed = np.unique(step.ids[:, layer]).tolist()
            missing = [expert for expert in needed if expert not in cache]
            misses += len(missing) * (step.kind == "decode")
            cache.update({expert: step.number for expert in needed if expert in cache})
            for expert in missing:
                if len(cache) == cells:
                    idle = [(at, e) for e, at in cache.items() if e not in needed]
                    if not idle:
                        continue  # read through
                    del cache[min(idle)[1]]
                cache[expert] = step.number
    return misses


def test_every_policy_has_its_figures(directory, lines):
    found = {(x["policy"], x["batch"], x["cells"]): x for x in lines}
    assert len(found) == len(lines)
    names = {"lru", "lfu", "lfru", "fifo", "static", "static-layers", "random", "oracle"}
    names |= {"coactivation", "deepspeed", "moe-infinity", "layer-streaming"}
    names |= {"MIN", "MIN, one pool"}
    for batch in (1, 2):
        cells = sorted({x["cells"] for x in lines if x["batch"] == batch})
        assert cells[0] == 8 and cells[-1] == 128 and len(cells) == 1 + batch
        (path,) = directory.glob(f"*/batch{batch}-*")
        trace = read_trace(path)
        assert trace.array("step.kind").tolist() == [0] + [1] * 12
        for budget in cells:
            here = {name: x for (name, *at), x in found.items() if at == [batch, budget]}
            bounded = budget >= here["lru"]["largest_step"]
            assert here.keys() == (names if bounded else names - {*policy_report.BOUNDS})
            assert here["lru"]["misses"] == lru_misses(trace, budget)
            if not bounded:
                continue
            assert here["random"]["seeds"] == len(here["random"]["transfers_by_seed"]) == 10
            for name in names - {"static-layers"}:
                assert here[name]["transfers"] >= here["MIN"]["transfers"], name
            # The oracle knows more than nothing, and streaming moves whatever is not there.
            assert here["oracle"]["precision"] >= here["random"]["precision"]
            assert here["layer-streaming"]["transfers"] > here["lru"]["transfers"]
        # Decode steps may begin with anything, so with room for all nothing must move.
        assert found["MIN", batch, 128]["transfers"] == 0


def test_a_policy_below_its_bound_is_noticed(directory, monkeypatch):
    impossible = dict.fromkeys(policy_report.BOUNDS, 10**9)
    monkeypatch.setattr(policy_arms, "bounds_of", lambda *_: impossible)
    with pytest.raises(RuntimeError, match="below the bound"):
        compare_policies.main(["curves", str(directory / "other"), *SMALL, "--no-plots"])


def test_coactivation_on_and_off(directory, capsys):
    assert compare_policies.main(["coactivation", str(directory), *SMALL]) == 0
    assert "lru + coactivation" in capsys.readouterr().out
    text = (directory / "coactivation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [x["cells"] for x in lines] == [32, 32, 96, 96] * 2
    pairs = [*zip(lines[::2], lines[1::2], strict=True)]
    for off, on in pairs:
        assert off["ahead"] == 0 and off["transfers"] == off["misses"]
        assert on["transfers"] == on["misses"] + on["ahead"] and 0 <= on["precision"] <= 1
    rows = (directory / "coactivation.md").read_text().splitlines()[2:]
    for row, (off, on) in zip(rows, pairs, strict=True):
        source, *cells = row.strip("| ").split(" | ")
        assert [source, *cells[:3]] == [
            *(off["source"], str(off["batch"]), f"{off['cells']}/128", str(off["largest_step"]))
        ]
        assert cells[5] == f"{on['bytes'] / off['bytes']:.2f}×" and cells[6] == f"{on['ahead']:.0f}"
    # With a loose budget there may be nothing to bring.
    tight = [(off, on) for off, on in pairs if on["budget"] == "tight"]
    assert all(on["ahead"] for _, on in tight)
    assert sum(on["misses"] for _, on in tight) < sum(off["misses"] for off, _ in tight)


def test_policies_beside_lru():
    def place(cells, **moved):
        return [
            dict(source="x", context="c", batch=1, cells=cells, experts=9, policy=name)
            | dict(transfers=transfers, misses=misses)
            for name, (transfers, misses) in moved.items()
        ]

    lines = place(3, MIN=(4, 4), lru=(10, 10), lfu=(8, 8), fate=(12, 5), oracle=(10, 1))
    lines += place(6, lru=(4, 4), lfu=(5, 5), fate=(6, 4), oracle=(4, 0))
    lines += place(9, lru=(1, 1), lfu=(0, 0), fate=(0, 0), oracle=(0, 0))  # full residency
    found = policy_report.beside_lru(lines)
    rows = {row.split("`")[1]: row.split(" | ")[1:] for row in found if row.startswith("| `")}
    assert rows["lfu"] == ["0.800–1.250", "1", "1", "1", "0", "0.800–1.250", "1", "1", "0", "1 |"]
    assert rows["fate"] == ["1.200–1.500", "0", "2", "0", "2", "0.500–1.000", "1", "0", "2", "0 |"]
    assert rows["oracle"][5] == "0.000–0.100" and rows.keys() == {"lru", "lfu", "fate", "oracle"}
    assert found[0] == "Beside LRU, 2 places below full residency"
    said = [line for line in found if " / MIN: " in line]
    assert said == [
        "LRU / MIN: 2.50–2.50, 1 places with a bound",
        "the least / MIN: 2.00–2.00, 1 places with a bound",
    ]


def test_plots(directory, lines):
    assert compare_policies.main(["draw", str(directory)]) == 0
    for name in ("misses-generated.png", "transfers-generated.png"):
        assert (directory / name).read_bytes()[:4] == b"\x89PNG"
        assert (directory / name).stat().st_size < 150_000


def test_a_link_gives_predicted_times(directory, lines, capsys):
    """8 GB/s and no arithmetic: the stall is all that the link needs; 10 ms a step hide some."""
    shown = [*SMALL, "--no-plots", "--bandwidth", "8"]
    assert compare_policies.main(["curves", str(directory), *shown]) == 0
    text = (directory / "curves.jsonl").read_text()
    for line, plain in zip(map(json.loads, text.splitlines()), lines, strict=True):
        assert {name: line[name] for name in plain if name != "date"} == {
            name: plain[name] for name in plain if name != "date"
        }
        needs = plain["bytes"] / 8e9 / plain["steps"]
        assert line["moving_s"] == pytest.approx(needs) and line["stall_s"] == line["moving_s"]
    assert "times are predicted" in " ".join(capsys.readouterr().out.split())
    link = policy_arms.Link(1 / 8e9, {1: 0.01})
    assert link.of(4 * 8e9, steps=100, batch=1) == pytest.approx(
        {"moving_s": 0.04, "stall_s": 0.03}
    )
    assert link.of(0.5 * 8e9, steps=100, batch=1)["stall_s"] == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_processes_change_nothing(directory, lines):
    wide = [*SMALL[:-1], "2"]
    assert compare_policies.main(["curves", str(directory), *wide, "--no-plots"]) == 0
    text = (directory / "curves.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == lines


@pytest.mark.parametrize(("n", "cut"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median(n, cut):
    """Order statistics of the sign test's table; one further in would be below 95%."""
    values = [float(v) for v in np.random.default_rng(n).permutation(n)]
    assert median_interval(values) == (cut, n - 1 - cut)
    below = [math.comb(n, k) / 2**n for k in range(cut + 2)]
    assert 1 - 2 * sum(below[: cut + 1]) >= 0.95 > 1 - 2 * sum(below)


def test_too_few_repeats_are_refused(tmp_path, capsys):
    assert bench_policies.main([str(tmp_path), "--repeats", "5"]) == 2
    assert "the median of fewer than 6 has no 95% interval" in capsys.readouterr().err
    assert bench_policies.main([str(tmp_path), "--tokens", "4"]) == 2
    assert "--tokens at least 5" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.shared
def test_times_of_policies(tmp_path, capsys):
    """The demo model: every arm once in a short regime, the same tokens, both drivers."""
    options = ["--model", "demo", "--text", str(SHARED / "corpora/text.txt"), "--batches", "2"]
    options += ["--sequences", "2", "--prompt-tokens", "8", "--long-prompt-tokens", "0", "--json"]
    assert bench_policies.main([str(tmp_path), *options, "--policies", "lfu,fate,random"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["policy"] for x in lines] == ["lru", "lfu", "random", "lru (host)", "fate"]
    for line in lines:
        assert line["repeats"] == 6 and line["runs"] == (12 if line["policy"] == "random" else 6)
        low, high = line["ms_interval"]
        assert 0 < low <= line["ms_per_step"] <= high
        assert line["steps"] + line["steps_left_out"] == 15 * line["runs"]
        assert (line["ahead_per_step"] > 0) == (line["policy"] in ("random", "fate"))
    wrong = [*options, "--policies", "belady"]
    assert bench_policies.main([str(tmp_path), *wrong]) == 2
    assert "no policy is called 'belady'; known: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--tokens", "0"), "sizes must be at least 1"),
        (("--shared", "2"), "shared in [0, 1]"),
        (("--shared", ""), "give --text or --shared"),
        (("--text", "a/x.txt", "b/x.txt"), "texts must have different names"),
        (("--processes", "0"), "sizes must be at least 1"),
        (("--bandwidth", "0"), "GB/s above 0"),
        (("--bandwidth", "8", "--costs", "c.json"), "without --costs"),
        (("--costs", "/nowhere/c.json"), "/nowhere/c.json"),
    ],
)
def test_refusals(tmp_path, capsys, wrong, message):
    assert compare_policies.main(["curves", str(tmp_path), *SMALL, "--no-plots", *wrong]) == 2
    assert message in capsys.readouterr().err


def test_refusals_of_files(tmp_path, capsys, monkeypatch):
    assert compare_policies.main(["draw", str(tmp_path)]) == 2
    assert "run curves first" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare_policies.main(["curves", str(tmp_path), *SMALL]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    with pytest.raises(UserError, match="no room for a prompt of 30"):
        policy_traces.windows(np.arange(100), policy_traces.TEST, 2, 30)
    assert policy_traces.windows(np.arange(100), policy_traces.TEST, 2, 19)[-1][-1] == 99
