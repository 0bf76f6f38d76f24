from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from moejax.costs.hardware import stated_costs
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
        "--keep",
        str(keep),
    ]
    chat, shift = json_lines(capsys, auto.main, *given)
    assert (chat["rounds"], shift["rounds"]) == (4, 2)
    assert chat["auto_s"] == pytest.approx(0.6) and chat["regret"] == shift["regret"] == 0
    assert 0 < chat["own"] < 0.1
    assert engine.runs == (4 + 2) * 4 + 1
    keep.write_text(json.dumps(json.loads(keep.read_text().splitlines()[0])) + "\n")
    again = json_lines(capsys, auto.main, *given)
    assert again[0]["auto_s"] == chat["auto_s"] and engine.runs == (4 + 2 + 2) * 4 + 1
