"""`moejax train-predictor`: from a trace of text to a prefetch, and what it refuses."""

from __future__ import annotations

import json

import pytest

from moejax.commands.main import main
from tests.host_offload.policies.prefetch.test_llapor import deterministic, trace_of

pytestmark = pytest.mark.slow
QUICK = ["--predictor", "learned,epochs=2,width=16"]
FORESTS = ["--predictor", "expertflow,trees=2,leaves=16,reach=2", "--model", "demo"]


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

    assert main(["train-predictor", trace, file, *QUICK]) == 0
    assert f"MiB; --prefetch learned={file}" in capsys.readouterr().out

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
    assert main(["train-predictor", trace, file, *FORESTS, "--quiet"]) == 0
    capsys.readouterr()
    files[-1] = str(third := tmp_path / "third.jsonl")
    assert main(["generate", *files, *engine, "--prefetch", f"expertflow={file}", "--json"]) == 0
    said = capsys.readouterr().err
    transfers = json.loads(said[said.index("{") :])["control"]["transfers"]
    assert transfers["expertflow"]["done"] > 0
    assert texts[0] == [json.loads(line)["text"] for line in third.read_text().splitlines()]
    other = tmp_path / "other"
    inputs, ids, _ = deterministic()
    trace_of(other, inputs, ids)
    assert main(["train-predictor", str(other / "trace"), file, *FORESTS]) == 2
    assert "the trace is of another model" in capsys.readouterr().err


def test_what_is_refused(tmp_path, capsys):
    inputs, ids, _ = deterministic()
    trace = str(trace_of(tmp_path / "a", inputs, ids).directory)
    blind = str(trace_of(tmp_path / "b", inputs, ids, gate_input=0).directory)
    out = str(tmp_path / "out")
    for given, match in (
        (["/nowhere", out], "/nowhere is no trace"),
        ([blind, out], "has no gate inputs, which learned learns from"),
        ([trace, out, "--predictor", "learned,epochs=x"], "epochs='x' is not a whole number"),
        ([trace, out, "--predictor", "learned,stride=4"], "stride must lie in 1…3, not 4"),
        ([trace, str(tmp_path / "no" / "where"), *QUICK], "its folder does not exist"),
        ([trace, str(tmp_path), "--predictor", "coactivation"], "cannot be written"),
        ([trace, out, "--predictor", "expertflow"], "name it with --model"),
        ([trace, out, "--predictor", "fate"], "unknown predictor 'fate'; known: coactivation, "),
        ([trace, out, "--predictor", "learned,trees=3"], "has no setting 'trees=3'"),
    ):
        assert main(["train-predictor", *given]) == 2
        assert match in capsys.readouterr().err
