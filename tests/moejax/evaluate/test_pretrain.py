"""examples/pretrain.py trains, stops, goes on, and saves what moejax computes alike."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.pretrain import main
from examples.small_moe import Decoder, forward, load_weights
from moejax import LLM, SamplingParams
from moejax.commands.main import main as moejax_main

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
LIMITS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["demo", "research"])
def test_greedy_tokens_of_moejax_are_those_of_the_training_program(
    family, repository, tmp_path, capsys
):
    folder = "moejax/demo" if family == "demo" else f"examples/models/{family}"
    config = json.loads((repository / folder / "config.json").read_text()) | SHAPE
    config["n_routed_experts" if family == "research" else "num_experts"] = 8
    model, data, out = tmp_path / "model", tmp_path / "data", tmp_path / "out"
    for folder in (model, data):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    # Documents that count: 5, 6, 7, ..., each ended by 0.
    starts = np.random.default_rng(0).integers(4, 40, size=200)
    tokens = [token for start in starts for token in (*range(start, start + 20), 0)]
    np.save(data / "story-0.npy", np.array(tokens, np.uint16))
    options = {
        "--model": model,
        "--data": data,
        "--out": out,
        "--state": tmp_path / "state",
        "--seconds": 3600,
        "--steps": 40,
        "--dispatch": 20,
        "--rows": 8,
        "--length": 32,
        "--limit": 60_000,
    }
    arguments = [str(part) for option in options.items() for part in option]
    main(arguments)
    main(arguments)
    said = capsys.readouterr().out
    assert "goes on from step 40" in said
    before, after = map(float, re.findall(r"loss ([\d.]+), the last", said))
    assert np.log(config["vocab_size"]) > before > after
    np.save(tmp_path / "held_out.npy", tokens[:2048])
    asked = [
        "eval",
        str(tmp_path / "state"),
        "--name-map",
        str(repository / "examples/small_moe.yaml"),
    ]
    asked += ["--every-step", "--until-step", "80", "--task", "perplexity"]
    limits = [f"--{name.replace('_', '-')}={size}" for name, size in LIMITS.items()]
    evaluated = [
        "--token-ids",
        str(tmp_path / "held_out.npy"),
        "--output",
        str(tmp_path / "e.jsonl"),
    ]
    assert moejax_main([*asked, *evaluated, *limits]) == 0
    steps = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == [40, 80]
    worse, better = (one["total"]["nll"] / one["total"]["scored_tokens"] for one in steps)
    assert np.log(config["vocab_size"]) > worse > better
    assert len(list(out.glob("model-*.safetensors"))) > 1

    trained = Decoder(config, nnx.Rngs(1))
    load_weights(out, config, trained)
    logits = jax.jit(lambda ids: forward(config, trained, ids)[0])
    prompts = [[0, 7, 8, 9], [0, 21, 22, 23]]
    with LLM(out, dtype="float32", expert_budget="50%", progress=False, **LIMITS) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for prompt, generated in zip(prompts, found, strict=True):
        row = [*prompt, *generated]
        best = np.asarray(jnp.argmax(logits(jnp.asarray([row])), axis=-1))[0]
        assert list(generated) == list(best[len(prompt) - 1 : -1])
