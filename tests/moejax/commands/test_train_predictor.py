"""`moejax train-predictor`: from a trace of text to a prefetch, and what it refuses."""

from __future__ import annotations

import json

import pytest

from moejax.commands.main import main
from tests.host_offload.policies.prefetch.llapor.test_llapor import deterministic, trace_of

pytestmark = pytest.mark.slow
QUICK = ["--epochs", "2", "--width", "16"]


def test_from_a_trace_to_a_prefetch(tmp_path, capsys):
    """A trace of the embedded model, a predictor of it, and a run with it, whose text is the same
    and in which experts came ahead."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    words = ("The old house", "def main():", "Tom has 3 apples", "x = 1", "She went")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    trace, file = str(tmp_path / "trace"), str(tmp_path / "learned.safetensors")
    engine = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    engine += ["--driver", "host", "--expert-budget", "40%", "--max-tokens", "12", "--quiet"]
    record = ["--trace", f"{trace},arrays=gate_input"]
    assert main(["generate", "--input", str(prompts), "--output", str(out), *record, *engine]) == 0
    capsys.readouterr()

    assert main(["train-predictor", trace, file, *QUICK, "--model", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(x["layer"], x["group"]) for x in found["layers"]] == [
        (1, "input"),
        (2, "middle"),
        (3, "output"),
    ]
    for layer in found["layers"]:
        # Gates of the embedded model say something of the next layer's experts (4 of 16).
        assert layer["gate"]["recall"] > 0.25 and layer["nbytes"] > 0
        assert all(0 <= share <= 1 for share in layer["learned"].values())

    again = tmp_path / "again.jsonl"
    files = ["--input", str(prompts), "--output", str(again)]
    assert main(["generate", *files, *engine, "--prefetch", f"learned={file}", "--json"]) == 0
    said = capsys.readouterr().err
    transfers = json.loads(said[said.index("{") :])["control"]["transfers"]
    assert transfers["learned"]["done"] > 0
    texts = [
        [json.loads(line)["text"] for line in p.read_text().splitlines()] for p in (out, again)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == len(words)
    # The same with ExpertFlow's forests.
    forests = ["--predictor", "forest", "--trees", "2", "--leaves", "16", "--reach", "2"]
    assert main(["train-predictor", trace, file, *forests, "--model", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(x["layer"], x["group"]) for x in found["layers"]] == [
        *((1, "1 ahead"), (2, "1 ahead"), (3, "1 ahead"), (2, "2 ahead"), (3, "2 ahead")),
    ]
    files[-1] = str(third := tmp_path / "third.jsonl")
    assert main(["generate", *files, *engine, "--prefetch", f"expertflow={file}", "--json"]) == 0
    said = capsys.readouterr().err
    transfers = json.loads(said[said.index("{") :])["control"]["transfers"]
    assert transfers["expertflow"]["done"] > 0
    assert texts[0] == [json.loads(line)["text"] for line in third.read_text().splitlines()]
    other = tmp_path / "other"
    inputs, ids, _ = deterministic()
    trace_of(other, inputs, ids)
    assert main(["train-predictor", str(other / "trace"), file, *QUICK, "--model", "demo"]) == 2
    assert "the trace is of another model" in capsys.readouterr().err


def test_the_table_and_a_trace_to_test_on(tmp_path, capsys):
    inputs, ids, _ = deterministic()
    trace = trace_of(tmp_path / "a", inputs, ids)
    test = trace_of(tmp_path / "b", *deterministic(1)[:2])
    file = str(tmp_path / "learned.safetensors")
    given = [str(trace.directory), file, *QUICK, "--test", str(test.directory)]
    assert main(["train-predictor", *given]) == 0
    said = capsys.readouterr()
    assert f"{file}: " in said.out and "600 tokens tested" in said.out
    assert "middle" in said.out and "name the trace's model with --model" in said.out
    assert main(["train-predictor", str(trace.directory), file, *QUICK, "--edge", "0"]) == 0
    said = capsys.readouterr().out
    assert "120 tokens tested" in said and "input" not in said


def test_what_is_refused(tmp_path, capsys):
    inputs, ids, _ = deterministic()
    trace = str(trace_of(tmp_path / "a", inputs, ids).directory)
    blind = str(trace_of(tmp_path / "b", inputs, ids, gate_input=0).directory)
    other = str(trace_of(tmp_path / "c", inputs, ids, config_digest="ab" * 32).directory)
    out = str(tmp_path / "out")
    for given, match in (
        (["/nowhere", out], "/nowhere is no trace"),
        ([blind, out], "has no gate inputs, which learned learns from"),
        ([trace, out, "--test", other], "is a trace of another model than"),
        ([trace, out, "--epochs", "0"], "--epochs must be at least 1, got 0"),
        ([trace, out, "--edge", "-1"], "--edge must be at least 0, got -1"),
        ([trace, out, "--stride", "4"], "stride must lie in 1…3, not 4"),
        ([trace, str(tmp_path / "no" / "where"), *QUICK], "its folder does not exist"),
        ([trace, str(tmp_path), *QUICK, "--edge", "0"], "cannot be written"),
        ([trace, out, "--predictor", "forest"], "name it with --model"),
        ([trace, out, "--trees", "3"], "--predictor llapor has no --trees; it has --stride"),
        (
            [trace, out, "--predictor", "forest", "--epochs", "3", "--model", "demo"],
            "--predictor forest has no --epochs; it has --trees, --leaves, --reach, --seed",
        ),
        (
            [trace, out, "--predictor", "forest", "--leaves", "1", "--model", "demo"],
            "--leaves must be at least 2, got 1",
        ),
    ):
        assert main(["train-predictor", *given]) == 2
        assert match in capsys.readouterr().err
