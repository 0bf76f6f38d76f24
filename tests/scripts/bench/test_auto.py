from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moejax.costs.hardware import stated_costs
from moejax.start.choices import GATED
from scripts.bench import auto
from tests.scripts.runs import json_lines

POLICY = auto.Auto(
    (12,) * 6, stated_costs("H100", layers=6, experts=32, top_k=4, expert_bytes=1000, rows=1)
)


class Engine:
    """Takes 0.6 s a phase, and compiles in its first run."""

    def __init__(self):
        said = {"mean_step_s": {}, "switches": 0, "why": "", "switched_experts": 0}
        controller = SimpleNamespace(stats=lambda: {"said": {"auto": said}})
        self.control = SimpleNamespace(controller=controller)
        self.scheduler = SimpleNamespace(max_model_len=512)
        self.runner = SimpleNamespace(link_bytes=[100])
        self.statistics = SimpleNamespace(steps={"decode": 0}, moved={"experts": 0})
        self.runs = 0

    def _tell(self) -> None:
        pass

    def _before_step(self) -> None:
        pass

    def run(self, phases, compiled):
        self.runs += 1
        self._tell()
        if self.runs == 1:
            compiled.append("a program")
        return [9.0 if self.runs == 1 else 0.6] * len(phases), [[1]]


@pytest.fixture
def engine(monkeypatch) -> Engine:
    engine, compiled = Engine(), []
    settings = SimpleNamespace(policies=[POLICY])
    llm = SimpleNamespace(engine=engine, plan=SimpleNamespace(settings=settings))
    monkeypatch.setattr(auto, "compilations", lambda: compiled)
    monkeypatch.setattr(auto, "begin", lambda llm, policy: None)
    monkeypatch.setattr(
        auto, "run_load", lambda llm, phases, counted: llm.engine.run(phases, compiled)
    )
    monkeypatch.setattr(auto, "opened", lambda *_: contextlib.nullcontext(llm))
    return engine


def test_short_loads_have_more_rounds_and_programs_are_compiled_before(engine, capsys, tmp_path):
    """And a cell that a file keeps is not measured again."""
    keep = tmp_path / "cells"
    given = [
        "--links",
        "1GB/s",
        "--memories",
        "12MiB",
        "--loads",
        "chat,shift",
        "--least",
        "4",
        "--keep",
        str(keep),
    ]
    chat, shift = json_lines(capsys, auto.main, *given)
    assert (chat["rounds"], shift["rounds"]) == (7, 5)
    assert chat["auto_s"] == pytest.approx(0.6) and chat["regret"] == shift["regret"] == 0
    assert 0 < chat["own"] < 0.1 and chat["at_best"] is None and shift["at_best"] == 0
    assert engine.runs == (7 + 5) * 4 + 1
    first = json.loads(keep.read_text().splitlines()[0])
    # A file of before, with the time of all phases.
    first["seconds"] = {name: [sum(r) for r in times] for name, times in first["seconds"].items()}
    keep.write_text(json.dumps(first) + "\n")
    again = json_lines(capsys, auto.main, *given, "--rounds", "3")
    # So few rounds decide nothing, so that they are followed by others up to --most.
    assert again[0]["auto_s"] == chat["auto_s"] and engine.runs == (7 + 5 + 4) * 4 + 1
    more = json_lines(capsys, auto.main, *given, "--rounds", "9", "--go-on")
    assert [row["rounds"] for row in more] == [9, 9] and engine.runs == (7 + 5 + 4 + 2 + 5) * 4 + 1


def test_a_regret_that_may_be_5_percent_or_more_has_more_rounds():
    """Up to a limit. Fewer than 5 rounds do not say which it is."""
    args: Any = SimpleNamespace(counted=False, rounds=2, least=1.0, most=6.0)
    for times, decided in (
        ([1.0] * 4 + [1.04], True),
        ([1.1] * 4 + [1.06], True),
        ([1.0] * 4 + [1.06], False),
        ([1.0] * 5 + [1.06], True),
        ([1.0] * 4, False),
        ([1.0], False),
    ):
        assert auto.enough({"auto": times, "lru": [1.0] * len(times)}, args) == decided


def test_what_few_rounds_say_is_not_certain():
    about = {"load": "shift", "own": 0.1, "tau": 1.0, "switch_mb": 0.0, "switches": 0}
    for rounds, own, said in ((4, 0.1, (1, 0)), (5, 0.1, (0, 1)), (1, None, (0, 1))):
        seconds = {"auto": [0.9] * rounds, "lru": [1.0] * rounds}
        first, *_, last = auto.summary([about | auto.figures(seconds) | {"own": own}])
        assert f"either way in {said[0]};" in first and last.endswith(f"with 90% in {said[1]}")


def test_the_mean_regret_of_many_cells_is_not_of_noise():
    cells = [auto.figures(seconds)["regrets"] for seconds in noisy_cells(1.03, 5)]
    mean, low, high = auto.mean_of(cells)
    assert low < 0.03 < high and high - low < 0.02
    assert mean == pytest.approx(0.03, abs=0.01)
    assert auto.mean_of([[0.1], [0.1]]) == pytest.approx((0.1, 0.1, 0.1))


def test_a_cell_that_is_not_there_is_named(engine, capsys):
    assert auto.main(["--cells", "2GB/s:12MiB:chat,1GB/s:12MiB:chat", "--links", "1GB/s"]) == 2
    said = capsys.readouterr().err
    assert "no cell '2GB/s:12MiB:chat'; cells are LINK:MEMORY:LOAD of --links 1GB/s" in said
    assert not engine.runs


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [("fluxmoe",), (*GATED, "tokens", "layer-streaming")])
def test_prefetches_are_arms(ahead, capsys, monkeypatch):
    """With driver host, whose --memories are expert budgets: a pool has none of KV's. None is the
    same arm as another one that misses as much."""
    begun, begin = [], auto.begin
    monkeypatch.setattr(
        auto, "begin", lambda llm, policy: begin(llm, policy) or begun.append((llm.plan, policy))
    )
    given = ["--driver", "host", "--loads", "batch", "--links", "1GB/s"]
    if len(ahead) == 1:
        given += ["--prefetch", *ahead]
    monkeypatch.setattr(auto, "enough", lambda *_: True)
    (row,) = json_lines(capsys, auto.main, *given, "--memories", "40%", "--tokens", "8")
    plan, policy = begun[0]
    assert {*policy.arms} == {"lru", "lfu", "lfru", *ahead}
    assert {arm for arm, first in row["same"].items() if arm == first} >= {"lru", *ahead}
    assert {*row["seconds"]} == {*policy.arms, "auto"}
    assert policy.pool == (ahead == ("fluxmoe",)) and sum(plan.cells) == round(0.4 * 64)
    assert auto.main([*given, "--counted"]) == 2
    assert "prefetches run beside them; with --driver host leave it out" in capsys.readouterr().err


def noisy_cells(factor: float, rounds: int) -> Iterator[dict[str, list[float]]]:
    """Cells of six arms, two of them as fast as any, and of auto, so much slower than these."""
    rng = np.random.default_rng(0)
    means = {"lru": 1.0, "lfu": 1.0, "lfru": 1.01, "a": 1.02, "b": 1.1, "c": 1.2, "auto": factor}
    for _ in range(300):
        slow = rng.gamma(2.0, 0.05, rounds)  # of a round, whatever else runs
        yield {
            name: (mean * (1 + slow + rng.gamma(2.0, 0.04, rounds))).tolist()
            for name, mean in means.items()
        }


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("rounds", [3, 6])
def test_a_regret_by_rounds_is_not_of_noise(factor, rounds):
    """One over the least of all arms' times in hindsight is."""
    found = [auto.figures(seconds) for seconds in noisy_cells(factor, rounds)]
    assert np.mean([cell["regret"] for cell in found]) == pytest.approx(factor - 1, abs=0.015)
    assert np.mean([cell["to_lru"] for cell in found]) == pytest.approx(factor - 1, abs=0.01)
    held = [cell["regret_in"][0] <= factor - 1 <= cell["regret_in"][1] for cell in found]
    assert np.mean(held) > (0.9 if rounds == 6 else 0.6)
    in_hindsight = [
        min(times["auto"]) / min(min(times[arm]) for arm in auto.arms_of(times)) - 1
        for times in noisy_cells(factor, rounds)
    ]
    assert np.mean(in_hindsight) > factor - 1 + 0.015


def test_phases_have_best_arms_and_ablations_regrets_of_their_own():
    times = {
        "lru": [[1.0, 3.0]] * 3,
        "lfu": [[2.0, 1.0]] * 3,
        "auto": [[1.0, 1.0]] * 3,
        "no horizon": [[3.0, 3.0]] * 3,
    }
    found = auto.figures(times)
    assert found["best"] == "lfu" and found["regret"] == pytest.approx(2 / 3 - 1)
    assert found["at_best"] == pytest.approx(2 / 3 - 1)
    assert found["no horizon"] == pytest.approx(1.0) and "no hysteresis" not in found


def test_arms_that_do_the_same_work_are_one():
    """Their time is their mean, so that the luckiest of them is not the best arm."""
    work = {"lru": (False, 9, 3), "lfu": (False, 9, 2), "lfru": (False, 9, 3), "a": (True, 9, 3)}
    runs = auto.Runs({"lfru": [0.8, 0.9], "lru": [1.2, 1.1], "lfu": [1.1] * 2, "a": [1.3] * 2})
    runs.work |= work
    runs.seconds["auto"] = [1.0] * 2
    assert runs.same() == {"lru": "lru", "lfru": "lru", "lfu": "lfu", "a": "a"}
    found = auto.figures(auto.joined(runs.seconds, runs.same()))
    assert (found["best"], found["best_s"]) == ("lru", pytest.approx(1.0))
    assert found["regret"] == found["to_lru"] == pytest.approx(0.0)


def test_no_way_is_always_first():
    turns = [auto.order(["a", "b", "c", "d", "e"], turn) for turn in range(20)]
    assert turns[1::2] == [names[::-1] for names in turns[::2]]
    assert len({names[0] for names in turns}) == 5
