"""The comparison refuses engines that compute something else, and its arithmetic is right."""

import sys

import numpy as np
import pytest

from scripts.bench import peer_engines, peers
from scripts.bench.peer_engines import Task, answered
from scripts.parts import big_checkpoint
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.runs import refusal

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "eos_token_id": 2,
}


class Fake:
    """A worker with given log-probabilities."""

    def __init__(self, scores):
        self.task, self.scores = Task("model", 7, batch=2, steps=len(scores)), scores

    def ask(self, what, batch):
        assert what == "check"
        return {"scores": [row[:batch] for row in self.scores]}


def test_engines_that_compute_something_else_are_refused():
    ours, theirs = Fake([[-1.0, -2.0]] * 4), Fake([[-1.1, -2.1]] * 4)
    (line,) = peers.agreement({"moejax": ours, "llama.cpp BF16": theirs}, 0.2)
    assert "8 forced tokens" in line and "median difference 0.1000" in line
    for other in (theirs, Fake([[np.nan, np.nan]] * 4)):
        with pytest.raises(RuntimeError, match="do not compute the same"):
            peers.agreement({"moejax": ours, "llama.cpp BF16": other}, 0.05)
    # Of transformers the first sequence alone has the same context.
    others = {"moejax": ours, "transformers bf16": Fake([[-1.0, 5.0]] * 4)}
    (line,) = peers.agreement(others, 0.05)
    assert "4 forced tokens" in line


def test_ratios_are_of_neighbours():
    found = {"moejax": [0.1, 0.2] * 3, "llama.cpp BF16": [0.11, 0.22] * 3, "transformers": [30.0]}
    first, second, third = peers.case_rows("decode 8", 8, found)
    assert first["tokens_per_s"] == pytest.approx(8 / 0.15) and first["ratio"] is None
    assert [second[name] for name in ("ratio", "low", "high")] == pytest.approx([1.1] * 3)
    assert third["ratio"] == pytest.approx(200) and third["low"] is None


def test_a_worker_that_ends_says_why():
    worker = peers.Worker("nobody", sys.executable, Task("broken", 7))
    with pytest.raises(RuntimeError, match=r"nobody ended with status 1: (?s:.*)KeyError: 'nobody"):
        worker.answer()
    worker.close()


def test_it_refuses_what_cannot_be(capsys):
    assert "stages are bf16, int8, int4" in refusal(capsys, peers.main, "--stages", "int3")
    said = refusal(capsys, peers.main, "--stages", "int8")
    assert "pip install llama-cpp-python" in said and "No module named 'llama_cpp'" in said
    assert peers.engines_of("bf16", ["llama.cpp"]) == ["moejax", "transformers bf16"]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(big_checkpoint, "DRAWN", 100_003)
    big_checkpoint.write_checkpoint(tmp_path, peers.OLMOE | SMALL)
    return tmp_path


def test_a_gguf_file_has_every_tensor(checkpoint):
    """Of a whole checkpoint: the names are those of llama.cpp, experts are stacked."""
    found = dict(peer_engines.gguf_tensors(checkpoint, peers.OLMOE | SMALL))
    assert len(found) == 3 + 2 * (9 + 3)
    assert found["blk.1.ffn_down_exps.weight"].shape == (8, 128, 64)
    assert found["blk.1.ffn_gate_inp.weight"].dtype == np.float32
    experts = found["blk.0.ffn_up_exps.weight"]
    assert len({expert.tobytes() for expert in experts}) == 8
    whole = peer_engines.bfloat16_tensors(checkpoint)
    assert sum(t.size for t in found.values()) == sum(t.size for t in whole.values())


@NATIVE
@pytest.mark.nightly  # transformers takes a minute
def test_moejax_and_transformers_compute_the_same(checkpoint):
    pytest.importorskip("torch")
    task = Task(str(checkpoint), 300, batch=2, context=24, steps=6, prompt=40)
    engines = peer_engines.MoejaxEngine(task), peer_engines.TransformersEngine(task)
    ours, theirs = (
        np.array(answered(engine, task, {"what": "check", "batch": 1})["scores"])
        for engine in engines
    )
    assert ours.shape == (6, 1) and ours.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=0.05)
    for what in ("prefill", "decode"):
        question = {"what": what, "batch": 2, "seconds": 0}
        assert all(answered(engine, task, question)["seconds"][0] > 0 for engine in engines)
    engines[0].llm.close()
