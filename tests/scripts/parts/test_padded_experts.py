"""Experts padded with zeros say what the model says."""

import json

import pytest

from moejax import LLM, SamplingParams, UserError
from scripts.parts.padded_experts import WIDTH, padded_experts
from scripts.parts.places import DEMO


def test_padded_experts_generate_the_models_tokens(tmp_path):
    wide = padded_experts("demo", 192, tmp_path)
    assert json.loads((wide / "config.json").read_text())[WIDTH] == 192
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for model in ("demo", wide):
        with LLM(model, max_num_seqs=1, max_model_len=64, progress=False) as llm:
            found.append(llm.generate("The old house", greedy)[0].outputs[0].token_ids)
            size = llm.engine.runner.layout.records[0].nbytes
    assert found[0] == found[1] and size == 3 * 128 * 192 * 2
    # What is there is taken; what a kill left has no config.json and is written anew.
    (wide / "kept").touch()
    assert padded_experts("demo", 192, tmp_path) == wide and (wide / "kept").exists()


def test_a_width_below_the_models_is_refused(tmp_path):
    with pytest.raises(UserError, match="at least moe_intermediate_size of demo, 128, not 64"):
        padded_experts("demo", 64, tmp_path)
    dense = tmp_path / "dense"
    dense.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no experts as tensors of their own"):
        padded_experts(str(dense), 256, tmp_path)
