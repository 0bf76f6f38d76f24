"""Perplexity: windows, figures, the command, and what cannot be scored."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import LLM
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.evaluate.evaluation import (
    check_windows,
    perplexity,
    result_json,
    sliding_windows,
    window_units,
)
from moejax.evaluate.token_ids import TokenIds

LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 256}
STORY = "The old house stood by the sea – nobody had lived there for years. " * 5 + "É fini. 🏚"
CODE = "def total(values):\n    return sum(v for v in values if v > 0)\n" * 4


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", progress=False, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    (directory / "story.txt").write_bytes(STORY.encode())
    (directory / "code.txt").write_bytes(CODE.replace("\n", "\r\n").encode())
    return [str(directory / "story.txt"), str(directory / "code.txt")]


def scored_bytes(llm, text):
    """Of all tokens but the first."""
    tokenizer = llm.get_tokenizer()
    return len(text.encode()) - len(tokenizer.decode(tokenizer(text)["input_ids"][:1]).encode())


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(2, 12), st.data())
def test_windows_score_each_token_once(tokens, window, data):
    stride = data.draw(st.integers(1, window))
    windows = sliding_windows(tokens, window, stride)
    scored = [i for w in windows for i in range(w.first, w.end)]
    alone = {0} if stride < window else set(range(0, tokens, window))
    assert scored == [i for i in range(tokens) if i not in alone]
    for w in windows:
        assert w.begin % stride == 0 and w.begin < w.first < w.end <= w.begin + window
        assert w.first - w.begin >= min(window - stride, w.first)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1, None, None), "window must be at least 2 tokens, got 1"),
        ((8, 0, None), "stride must be at least 1 token, got 0"),
        ((8, 9, None), "stride 9 is larger than window 8"),
        ((8, 8, 1), "limit must be at least 2 tokens, got 1"),
    ],
)
def test_windows_out_of_range_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        check_windows(*given)


@pytest.mark.slow
def test_figures_are_those_of_scores_of_single_windows(llm):
    result = perplexity(llm, {"story": STORY, "code": CODE}, window=48, stride=20)
    for text, found in zip((STORY, CODE), result.texts, strict=True):
        ids = llm.get_tokenizer()(text)["input_ids"]
        scores = np.full(len(ids), np.nan)
        for begin in range(0, len(ids), 20):
            end = min(begin + 48, len(ids))
            known = np.flatnonzero(~np.isnan(scores)).max(initial=begin)
            scores[known + 1 : end] = llm.score(ids[begin:end])[known - begin :]
        np.testing.assert_array_equal(found.logprobs, scores)
        assert (found.tokens, found.scored_tokens) == (len(ids), len(ids) - 1)
        assert found.perplexity == pytest.approx(math.exp(-np.nanmean(scores)), rel=1e-12)
        nbytes = scored_bytes(llm, text)
        assert found.scored_bytes == nbytes
        assert found.bits_per_byte == pytest.approx(-np.nansum(np.log2(np.exp(scores))) / nbytes)
    total = result.total
    assert total.nll == result.texts[0].nll + result.texts[1].nll
    assert total.bits_per_token == pytest.approx(math.log2(total.perplexity), rel=1e-12)


def test_a_short_text_is_one_window(llm):
    ids = llm.get_tokenizer()(CODE)["input_ids"]
    (text,) = perplexity(llm, CODE, limit=30).texts
    np.testing.assert_array_equal(text.logprobs[1:], llm.score(ids[:30]))
    assert (text.windows, text.tokens, text.name) == (1, 30, "text 0")
    assert text.scored_bytes == len(llm.get_tokenizer().decode(ids[1:30]).encode())


def token_ids(*documents):
    return TokenIds(tuple(np.asarray(one, np.int64) for one in documents), "ab" * 32)


def test_token_ids_have_the_figures_of_their_text(llm):
    ids = llm.get_tokenizer()(STORY)["input_ids"]
    given = {"story": STORY, "ids": token_ids(ids)}
    result = perplexity(llm, given, window=48, stride=20)
    text, found = result.texts
    np.testing.assert_array_equal(found.logprobs, text.logprobs)
    assert (found.nll, found.perplexity) == (text.nll, text.perplexity)
    assert found.scored_bytes is None and found.bits_per_byte is None
    # Nobody knows the bytes of both.
    assert result.total.scored_bytes is None and result.total.nll == 2 * text.nll
    report = json.loads(json.dumps(result_json(result)))
    assert report["data"]["texts"][1]["sha256"] == "ab" * 32
    assert report["total"]["bits_per_byte"] is None


def test_documents_are_no_context_of_each_other(llm):
    ids = llm.get_tokenizer()(STORY)["input_ids"]
    documents = [ids[:50], ids[50:51], ids[51:71]]
    result = perplexity(llm, {"a": token_ids(*documents)}, window=32, stride=16, limit=64)
    (text,) = result.texts
    alone = [perplexity(llm, token_ids(d), window=32, stride=16).texts[0] for d in (ids[:50],)]
    np.testing.assert_array_equal(text.logprobs[:50], alone[0].logprobs)
    np.testing.assert_array_equal(text.logprobs[52:], llm.score(ids[51:64]))
    # The first of each, and a document of one token, have no context.
    assert np.flatnonzero(np.isnan(text.logprobs)).tolist() == [0, 50, 51]
    (units,) = window_units(result)
    assert sum(units.weights) == text.scored_tokens == 61
    assert sum(units.sums) == pytest.approx(text.nll / math.log(2))
    assert len(set(units.keys)) == len(units.keys) == text.windows


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[5, 6, 70_000]], "a: token 2 has the id 70000, outside of the vocabulary of 4096; were"),
        ([[5, -1]], "a: token 1 has the id -1, outside of the vocabulary"),
        ([[5], [6]], r"a is too short to score \(tokens: 2\)"),
    ],
)
def test_token_ids_that_cannot_be_scored_are_refused(llm, documents, message):
    with pytest.raises(UserError, match=message):
        perplexity(llm, {"a": token_ids(*documents)})
    assert llm.engine.idle


@pytest.mark.slow
def test_budgets_change_only_what_a_run_cost(llm, files, capsys):
    """All experts resident here, none in the command, whose layers are called one by one."""
    texts = {name: Path(name).read_bytes().decode() for name in files}
    expected = result_json(perplexity(llm, texts, window=64, stride=32))
    options = "--window 64 --expert-budget 0 --eviction lfu --driver host --json"
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    asked = ["eval", "demo", "--task", "perplexity", "--data", *files, *options.split(), *limits]
    assert cli.main(asked) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    run, before = found.pop("run"), expected.pop("run")
    assert found == expected
    assert found["versions"]["jax"] and found["model"]["experts"] == {"dense": 98304}
    assert [text["scored_bytes"] for text in found["data"]["texts"]] == [
        scored_bytes(llm, text) for text in texts.values()
    ]
    # Every expert crosses the link at most once a prefill step, however many windows are in it.
    windows = sum(text["windows"] for text in found["data"]["texts"])
    assert (
        run["read_through"] == run["activations"] == run["misses"] <= run["prefill_steps"] * 4 * 16
    )
    assert run["prefill_steps"] < windows / 2
    assert before["prefill_steps"] == run["prefill_steps"] and before["read_through"] == 0
    assert run["read_through_bytes"] == run["read_through"] * 98304
    assert run["options"]["expert_budget"] == "0" and run["arena"]["expert_slots"] == 0
    assert 0 < run["scored_tokens_per_s"] < run["tokens_per_s"]
    assert run["seconds"] > run["compile_s"] > 0


@pytest.mark.slow  # two engines
def test_a_tokenizer_of_another_directory(demo_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(demo_dir / name, tmp_path / name)
    with LLM(tmp_path, progress=False, **LIMITS) as bare:
        assert bare.get_tokenizer() is None
        with pytest.raises(UserError, match=r"\(--tokenizer DIR\), or give token ids"):
            perplexity(bare, STORY)
    with LLM(tmp_path, tokenizer=demo_dir, progress=False, **LIMITS) as llm:
        assert llm.get_tokenizer()("The old house")["input_ids"]
    with pytest.raises(UserError, match="/no/such: no tokenizer"):
        LLM(tmp_path, tokenizer="/no/such", progress=False, **LIMITS)


def test_without_lm_eval_its_tasks_say_what_to_install(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tasks", "model"):
        monkeypatch.delitem(sys.modules, f"moejax.evaluate.harness.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    assert cli.main(["eval", "demo", "--task", "lm-eval:arc_easy"]) == 2
    said = capsys.readouterr().err
    assert "need lm-evaluation-harness: pip install 'moejax[lm-eval]'" in said


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "there is no text to score"),
        ([""], {}, "text 0 is empty"),
        ({"a.txt": "x"}, {}, r"a.txt is too short to score \(tokens: 1\)"),
        (["\udcff"], {}, "text 0 is not valid Unicode text"),
        ([STORY], {"window": 129}, "at most 128, or max_model_len from 129 on"),
        ([STORY], {"window": 1 << 20}, r"at most 128 \(the model has [0-9]+ positions"),
        ([STORY], {"window": 32, "stride": 33}, "stride 33 is larger than window 32"),
        # The default window and stride count too.
        ([STORY], {"stride": 129}, "stride 129 is larger than window 128"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, texts, options, message):
    with pytest.raises(UserError, match=message):
        perplexity(llm, texts, **options)
    assert llm.engine.idle


def test_scores_that_are_not_finite_are_refused(llm, monkeypatch):
    read = llm.engine._read_scores

    def broken(step, now):
        scores = np.array(step.output.scores)
        scores[0, 5] = np.nan
        object.__setattr__(step, "output", step.output._replace(scores=scores))
        return read(step, now)

    monkeypatch.setattr(llm.engine, "_read_scores", broken)
    with pytest.raises(UserError, match=r"text 0: .* log-probability of token 6 is nan; values"):
        perplexity(llm, STORY)


@pytest.fixture
def kept(llm, monkeypatch):
    """Commands run with the fixture's LLM, not with another one each."""

    class Kept:
        def __new__(cls, model, **options):
            return llm

    monkeypatch.setattr("moejax.LLM", Kept, raising=False)
    monkeypatch.setattr(LLM, "__exit__", lambda *_: None)


def test_results_go_to_stdout_and_cost_to_stderr(kept, files, capsys):
    asked = ["eval", "demo", "--task", "perplexity", "--data", *files, "--limit", "60"]
    assert cli.main(asked) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["tokens", "scored", "bits/token", "bits/byte", "perplexity"]
    assert [row.split()[0] for row in rows] == [*files, "all"]
    assert re.fullmatch(r"all +120 +118( +\d+\.\d{4}){3}", rows[-1])
    assert re.search(r"^speed +118 tokens computed in .* tokens/s$", err, re.MULTILINE)
    assert "experts  hit rate" in err and "moved" in err and "note" in err
    assert cli.main([*asked, "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")


def test_results_are_kept_and_compared(kept, llm, files, tmp_path, capsys):
    np.save(tmp_path / "story.npy", llm.get_tokenizer()(STORY)["input_ids"])
    asked = ["eval", "demo", "--task", "perplexity", "--token-ids", str(tmp_path / "story.npy")]
    asked += ["--window=32", "--stride=32"]
    outputs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert cli.main([*asked, "--output", outputs[0]]) == 0
    assert re.search(r"story.npy +\d+ +\d+ +\d+\.\d{4} +– +\d", capsys.readouterr().out)
    assert cli.main([*asked, "--output", outputs[1], "--quiet"]) == 0
    assert cli.main([*asked, "--output", outputs[1]]) == 2
    assert "has results already; choose another --output" in capsys.readouterr().err
    # As another model would have it: one bit more a token, in every window.
    line = json.loads(Path(outputs[1]).read_text())
    for unit in line["units"]:
        unit["sums"] = [a + w for a, w in zip(unit["sums"], unit["weights"], strict=True)]
    Path(outputs[1]).write_text(json.dumps(line) + "\n")
    assert cli.main(["eval", "--compare", *outputs]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"story.npy +– +bits/token +\d .* \+1\.0000 +\[\+1.0000, \+1.0000\]$", out)
    assert "with fewer than 30 pairs a normal interval is rough" in err
