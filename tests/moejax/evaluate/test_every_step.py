"""Steps of a training run are evaluated as they are written, each once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice

import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_qwen3_moe import train
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.evaluate import every_step
from moejax.evaluate.every_step import new_steps
from tests.conftest import REPOSITORY


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(every_step, "INTERVAL_S", 0.01)


def save(root, name, *, committed=True):
    """What finished_steps looks at of a step."""
    directory = root / str(name)
    (directory / "default").mkdir(parents=True)
    (directory / "default" / "_METADATA").write_text("{}")
    stamp = {"commit_timestamp_nsecs": 5} if committed else {}
    (directory / "_CHECKPOINT_METADATA").write_text(json.dumps(stamp))


def test_steps_come_as_they_are_written_and_each_once(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 3)
    steps = new_steps(tmp_path, timeout=0.2)
    assert list(islice(steps, 2)) == [3, 20]
    save(tmp_path, "step_00000025")
    save(tmp_path, 21)
    assert list(steps) == [21, 25]


def test_what_is_not_written_to_its_end_is_not_read(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, "2.orbax-checkpoint-tmp-1")
    save(tmp_path, 3, committed=False)
    (tmp_path / "4").mkdir()
    assert list(new_steps(tmp_path, timeout=0)) == [1]
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 9}')
    (tmp_path / "2.orbax-checkpoint-tmp-1").rename(tmp_path / "2")
    assert list(new_steps(tmp_path, {1}, timeout=0)) == [2, 3]


def test_until_step_ends_after_that_one_or_a_later_one(tmp_path):
    for step in (1, 5, 9):
        save(tmp_path, step)
    assert list(new_steps(tmp_path, until_step=5)) == [1, 5]
    assert list(new_steps(tmp_path, until_step=6)) == [1, 5, 9]
    assert list(new_steps(tmp_path, {5}, until_step=5)) == [1]


def test_what_is_no_root_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory; a root is made before"):
        next(new_steps(tmp_path / "missing"))
    save(tmp_path, 1)
    with pytest.raises(UserError, match="is one checkpoint, not a root with steps"):
        next(new_steps(tmp_path / "1"))


def test_a_step_that_is_deleted_before_it_is_read_is_passed_over(tmp_path, capsys, monkeypatch):
    """As CheckpointManager's max_to_keep does."""
    np.save(tmp_path / "val.npy", np.arange(9))
    for step in (1, 2):
        save(tmp_path, step)

    def gone(args, options):
        shutil.rmtree(tmp_path / str(options["step"]))
        raise UserError("no such step")

    monkeypatch.setattr("moejax.commands.eval.start_llm", gone)
    asked = ["--task", "perplexity", "--token-ids", str(tmp_path / "val.npy")]
    assert main(["eval", str(tmp_path), *asked, "--every-step", "--timeout", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        f"step {step} was deleted before it was read" for step in (1, 2)
    ]


def test_a_step_that_cannot_be_evaluated_ends_the_run(tmp_path, capsys):
    np.save(tmp_path / "val.npy", np.arange(9))
    save(tmp_path, 1)
    asked = ["--task", "perplexity", "--token-ids", str(tmp_path / "val.npy")]
    assert main(["eval", str(tmp_path), *asked, "--every-step", "--timeout", "0"]) == 2
    assert "tree_metadata must be an object" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_run_without_a_tokenizer_is_evaluated_killed_and_resumed(tmp_path, capsys):
    text = "".join(f"{i} and {i + 1} are {2 * i + 1}. " for i in range(200)).encode()
    end = np.frombuffer(text[-260:], np.uint8).reshape(4, 65).astype(np.int32)
    root, output = tmp_path / "run", tmp_path / "val.jsonl"
    losses = train(root, text[:-260], jnp.asarray(end), steps=6, every=2)
    np.save(tmp_path / "val.npy", end)
    late = root / "6"
    late.rename(tmp_path / "hidden")  # not written yet
    save(root, "6.orbax-checkpoint-tmp-3")
    limits = ["--max-model-len=128", "--max-num-seqs=4", "--max-num-batched-tokens=256"]
    asked = ["eval", str(root), "--task", "perplexity", "--token-ids", str(tmp_path / "val.npy")]
    asked += ["--name-map", "nnx_qwen3_moe", "--every-step", "--output", str(output), *limits]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "moejax", *asked], env=environment, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not (output.is_file() and output.read_bytes().count(b"\n") >= 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # in the middle of the next step, or as it waits
    process.wait()
    before = output.read_bytes()
    output.write_bytes(before + before[:30])  # as if it had been writing

    (tmp_path / "hidden").rename(late)
    assert main([*asked, "--timeout", "0", "--expert-budget", "25%"]) == 0
    out, err = capsys.readouterr()
    done = before.count(b"\n")
    assert f"{output} has {done} steps already" in err
    assert [int(row.split()[1]) for row in out.splitlines()] == [2, 4, 6][done:]
    after = output.read_bytes()
    assert after.startswith(before)
    lines = [json.loads(one) for one in after.splitlines()]
    assert [one["step"] for one in lines] == [2, 4, 6]
    for one in lines:
        found = one["total"]["nll"] / one["total"]["scored_tokens"]
        assert one["total"]["scored_tokens"] == 4 * 64 and one["total"]["bits_per_byte"] is None
        assert found == pytest.approx(losses[one["step"]], abs=1e-4)

    # Uninterrupted, with another budget, every figure is the same; another window is refused.
    again = [*asked[: asked.index("--output")], "--output", str(tmp_path / "b.jsonl"), *limits]
    assert main([*again, "--until-step", "2", "--quiet"]) == 0
    twin = [json.loads(one) for one in (tmp_path / "b.jsonl").read_bytes().splitlines()]
    assert [one["total"] for one in twin] == [lines[0]["total"]]
    assert main([*asked, "--timeout", "0", "--window", "32"]) == 2
    assert "has results of another window: None, and this run has 32" in capsys.readouterr().err
    shutil.rmtree(root / "2")
    shutil.copytree(root / "4", root / "2")
    assert main([*asked, "--timeout", "0"]) == 2
    assert "has results of step 2 with other weights than it has now" in capsys.readouterr().err
    assert main(["eval", "--compare", str(output), str(tmp_path / "b.jsonl"), "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [(one["step_a"], one["pairs"], one["difference"]) for one in found] == [(2, 4, 0.0)]
    assert f"note: only {output} has step 4" in shown.err
