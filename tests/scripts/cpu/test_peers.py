"""The comparison refuses what cannot be, and its engines compute the same."""

import json
import sys

import numpy as np
import pytest

from scripts.cpu import matrix, peers
from scripts.cpu.engines import checkpoint
from scripts.cpu.engines.checkpoint import OLMOE, write_checkpoint
from scripts.cpu.engines.protocol import Task, answered
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


def test_it_refuses_what_cannot_be(capsys, monkeypatch):
    assert "stages are bf16, int8, int4" in refusal(capsys, peers.main, "--stages", "int3")
    assert "--rounds must be at least 1" in refusal(capsys, peers.main, "--rounds", "0")
    said = refusal(capsys, peers.main, "--llama-python", sys.executable, "--stages", "int8")
    assert "pip install llama-cpp-python" in said and "No module named 'llama_cpp'" in said
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    said = refusal(capsys, peers.main, "--without", "llama.cpp")
    assert "pip install torch" in said and "--without transformers" in said


def test_an_engine_that_is_left_out_is_not_needed():
    assert peers.engines_of("bf16", ["llama.cpp"]) == ["moejax", "transformers bf16"]
    assert peers.missing_for(["int8"], ["llama.cpp"], "/no/python") is None


def test_a_random_checkpoint_is_whole_and_seeded(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "DRAWN", 10_007)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, OLMOE | SMALL, seed)
    listed = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert len(listed["weight_map"]) == 3 + 2 * (9 + 3 * 8)
    layers = [(tmp_path / n / "model-layer-1.safetensors").read_bytes() for n in "abc"]
    assert layers[0] == layers[1] != layers[2]


@NATIVE
@pytest.mark.slow
@pytest.mark.skipif(matrix.torch is None, reason="no torch")
def test_moejax_and_transformers_compute_the_same(tmp_path):
    from scripts.cpu.engines.moejax_engine import MoejaxEngine
    from scripts.cpu.engines.torch_engine import TorchEngine

    write_checkpoint(tmp_path, OLMOE | SMALL)
    task = Task(str(tmp_path), 300, batch=2, context=24, steps=6, prompt=40, threads=None)
    ours, theirs = MoejaxEngine(task), TorchEngine(task)
    found = [
        np.array(answered(engine, task, {"what": "check", "batch": 1})["scores"])
        for engine in (ours, theirs)
    ]
    assert found[0].shape == (6, 1) and found[0].std() > 0.1
    np.testing.assert_allclose(*found, atol=0.05)
    read = ours.bytes_read(1)
    assert read["share"] == 2 / 8 and read["experts"] == 2 * 2 * 3 * 64 * 128 * 2
    for what in ("prefill", "decode"):
        question = {"what": what, "batch": 2, "seconds": 0}
        assert answered(ours, task, question)["seconds"][0] > 0
    ours.llm.close()
