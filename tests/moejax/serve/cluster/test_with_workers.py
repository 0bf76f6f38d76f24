"""The commands that take --ray say and write with two workers what they do with one process."""

from __future__ import annotations

import json
import sys
import types

import pytest

from moejax.commands import main as cli
from moejax.serve.cluster.ray_cluster import LOCAL, connect, open_connection
from tests.moejax.evaluate.experiments.test_grid import equal_part
from tests.moejax.serve.cluster.ray_here import RayHere

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LIMITS = ["--max-model-len=256", "--max-num-seqs=4", "--max-num-batched-tokens=256", "--quiet"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in a directory of the test's, on two workers if it is asked for; returns
    (exit status, what it said)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", RayHere())

    def go(*arguments: str, workers: bool = False) -> tuple[int, str]:
        status = cli.main([*arguments, *(["--ray", "local", "--workers", "2"] if workers else [])])
        return status, capsys.readouterr().out

    return go


def test_a_job(run, tmp_path, monkeypatch):
    """Lines of both forms, turns of a session, a bad line."""
    lines = [
        *({"id": f"a{i}", "prompt": "The old house", "seed": i} for i in range(6)),
        *({"id": f"s{i}", "prompt": "It was", "session_id": "s"} for i in range(2)),
        {"id": "bad", "prompt": "x", "max_tokens": -1},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w"}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ["generate", "--input", "in.jsonl", "--max-tokens", "8", "--on-error", "skip", *LIMITS]
    assert run(*job, "--output", "one.jsonl")[0] == run(*job, "--output", "many", workers=True)[0]
    found, wanted = (
        sorted(json.dumps(json.loads(line) | {"metrics": None}) for line in text.splitlines())
        for text in ((tmp_path / name).read_text() for name in ("many", "one.jsonl"))
    )
    assert found == wanted and len(found) == len(lines)
    # Where workers were, one process goes on, and the other way round; nothing is left to do.
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(*job, "--output", "many")[0] == 3
    assert run(*job, "--output", "one.jsonl", workers=True)[0] == 3


def test_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "o")]
    assert cli.main(["generate", *files, "--ray", "local"]) == 2
    assert "pip install 'moejax[ray]'" in capsys.readouterr().err


def test_a_connection_is_open_until_its_block_ends_or_for_good(monkeypatch):
    """A pipeline of moejax.ray is run after the call that opened the connection."""
    is_open = []
    fake = types.SimpleNamespace(
        is_initialized=lambda: bool(is_open),
        init=lambda *arguments, **options: is_open.append(1),
        shutdown=is_open.clear,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    with connect(LOCAL):
        assert is_open
    assert not is_open
    open_connection(LOCAL)
    with connect(LOCAL):
        assert is_open
    assert is_open


def test_perplexity(run, tmp_path):
    (tmp_path / "a.txt").write_text("The old house by the river was empty. " * 30)
    (tmp_path / "b.txt").write_text("It had been so since winter. " * 9)
    ask = ["eval", "demo", "--task=perplexity", "--window=32", "--stride=16", "--json", *LIMITS]
    ask += ["--data", "a.txt", "b.txt"]
    one, many = (json.loads(run(*ask, workers=w)[1]) for w in (False, True))
    assert many["data"] == one["data"] and many["total"] == one["total"]
    assert many["run"]["workers"] == 2


def test_a_grid(run, tmp_path):
    grid = {
        "policies": ["lru", "coactivation=train"],
        "budgets": ["20%"],
        "texts": ["math"],
        "prompt_tokens": 70,
        "output_tokens": 8,
        "batch": [2],
        "modes": ["measured", "simulated"],
    }
    for name in ("one", "many"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(grid))
    assert run("ablate", "one.yaml", "--quiet")[0] == 0
    status, said = run("ablate", "many.yaml", "--quiet", workers=True)
    one, many = (
        [json.loads(x) for x in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        for name in ("one", "many")
    )
    assert status == 0 and f"{len(one)} records in many; moejax report many" in said
    assert sorted(map(repr, equal_part(many))) == sorted(map(repr, equal_part(one)))
    # Where workers were, one process goes on: nothing is left to do.
    summary = run("ablate", "many.yaml", "--quiet", "--json")[1]
    assert {json.loads(line)["policy"] for line in summary.splitlines()} >= {"lru"}
