"""A model that Flax NNX and optax trained and CheckpointManager saved, evaluated at its steps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples.train_qwen3_moe import train
from moejax import LLM
from moejax.commands.main import main

LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.mark.nightly
def test_losses_at_two_steps_are_those_of_the_training_program(tmp_path):
    text = "".join(f"{i} and {i + 1} are {2 * i + 1}. " for i in range(500)).encode()
    end = np.frombuffer(text[-260:], np.uint8).reshape(4, 65).astype(np.int32)
    losses = train(tmp_path / "run", text[:-260], jnp.asarray(end), steps=30, every=15)
    assert list(losses) == [15, 30] and losses[15] > losses[30] + 0.01
    for step, wanted in ((15, 15), ("best", 30)):
        with LLM(
            tmp_path / "run", step=step, name_map="nnx_qwen3_moe", progress=False, **LIMITS
        ) as llm:
            assert llm.dtype == "float32"
            found = -np.mean(llm.score_batch(end.tolist()))
        assert found == pytest.approx(losses[wanted], abs=1e-4)


def test_the_command_line_takes_step_and_map(tmp_path, capsys):
    state = {"weight": jnp.ones(2)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    generate = ["generate", "a", "--model", str(tmp_path / "run")]
    for options, message in (
        (["--step", "4"], "has no step 4; steps: 3"),
        (["--step", "newest"], "step 'newest' is unknown"),
        (["--step", "3"], "needs name_map"),
        (["--name-map", "my_map"], "my_map: no name map"),
        (["--name-map", "nnx_qwen3_moe"], "no config.json"),
    ):
        assert main([*generate, *options]) == 2
        assert message in capsys.readouterr().err
