"""Policies are compared over the same routing, never below their bounds; no engine runs here."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from host_offload.traces import read_trace
from moejax.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_policies
import policy_report
import policy_traces

SMALL = (
    *("--text", "--shared", "0.5", "--layers", "2", "--tokens", "3"),
    *("--batches", "1,2", "--budgets", "2"),
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
    """Of decode steps, by hand."""
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
    names |= {"coactivation", "moe-infinity", "layer-streaming", "MIN", "MIN, one pool"}
    for batch in (1, 2):
        cells = sorted({x["cells"] for x in lines if x["batch"] == batch})
        assert cells[0] == 8 and cells[-1] == 128 and len(cells) == 1 + batch
        (path,) = directory.glob(f"*/batch{batch}-*")
        trace = read_trace(path)
        assert trace.array("step.kind").tolist() == [0] + [1] * 12
        for budget in cells:
            here = {name: x for (name, *at), x in found.items() if at == [batch, budget]}
            bounded = budget >= here["lru"]["largest_step"]
            assert here.keys() == (names if bounded else names - {*compare_policies.BOUNDS})
            assert here["lru"]["misses"] == lru_misses(trace, budget)
            if not bounded:
                continue
            assert here["random"]["seeds"] == 3
            for name in names - {"static-layers"}:
                assert here[name]["transfers"] >= here["MIN"]["transfers"], name
            # The oracle knows more than nothing, and streaming moves whatever is not there.
            assert here["oracle"]["precision"] >= here["random"]["precision"]
            assert here["layer-streaming"]["transfers"] > here["lru"]["transfers"]
        # Decode steps may begin with anything, so with room for all nothing must move.
        assert found["MIN", batch, 128]["transfers"] == 0


def test_a_policy_below_its_bound_is_noticed(directory, monkeypatch):
    impossible = dict.fromkeys(compare_policies.BOUNDS, 10**9)
    monkeypatch.setattr(compare_policies, "bounds_of", lambda *_: impossible)
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
    # With a loose budget there may be nothing to bring.
    tight = [(off, on) for off, on in pairs if on["budget"] == "tight"]
    assert all(on["ahead"] for _, on in tight)
    assert sum(on["misses"] for _, on in tight) < sum(off["misses"] for off, _ in tight)


def test_plots(directory, lines):
    assert compare_policies.main(["draw", str(directory)]) == 0
    for name in ("misses.png", "transfers.png"):
        assert (directory / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--tokens", "0"), "sizes must be at least 1"),
        (("--shared", "2"), "shared in [0, 1]"),
        (("--shared", ""), "give --text or --shared"),
        (("--text", "a/x.txt", "b/x.txt"), "texts must have different names"),
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
    assert policy_report.BOUNDS == compare_policies.BOUNDS
