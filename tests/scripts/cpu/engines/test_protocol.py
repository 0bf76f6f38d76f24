"""Workers answer what they are asked, draw the same tokens, and say why they ended."""

import sys

import numpy as np
import pytest

from scripts.cpu.engines.protocol import Task, Worker, scores, timed_steps

MODULE = "tests.scripts.cpu.engines.counting"
TASK = Task("model", vocabulary=7, batch=3, context=5, steps=4, prompt=6)


def test_tokens_are_the_same_for_everyone_and_of_the_vocabulary():
    tokens = TASK.decoded()
    assert tokens.shape == (3, 5 + 4 + 1) and TASK.prefilled().shape == (6,)
    assert tokens.min() >= 0 and tokens.max() < 7 and len(np.unique(tokens)) > 3
    np.testing.assert_array_equal(tokens, Task(**vars(TASK)).decoded())


def test_scores_are_log_probabilities():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)) + 3
    np.testing.assert_allclose(scores(logits, np.array([1, 2])), np.log([0.25, 0.8]), rtol=1e-6)


def test_a_block_has_one_step_at_least_and_no_more_than_there_are():
    done: list[int] = []
    assert len(timed_steps(done.append, 5, limit_s=0.0)["seconds"]) == 1
    found = timed_steps(done.append, 5, limit_s=60.0)
    assert len(found["seconds"]) == 5 and found["processor"] >= 0
    assert done == [0, *range(5)]


def test_a_worker_answers_and_forces_the_tokens():
    worker = Worker("counting", sys.executable, MODULE, TASK).loaded()
    try:
        assert worker.versions == {"counting": "1"}
        found = np.array(worker.ask("check", batch=2)["scores"])
        tokens = TASK.decoded()
        for step in range(4):
            row, position = tokens[:2, 5 + step], 5 + step
            expected = scores(np.eye(7)[row] * position, tokens[:2, position + 1])
            np.testing.assert_allclose(found[step], expected)
        assert len(worker.ask("decode", batch=1, seconds=60)["seconds"]) == 4
        assert len(worker.ask("prefill")["seconds"]) == 1
    finally:
        worker.close()


def test_a_worker_that_ends_says_why():
    worker = Worker("counting", sys.executable, MODULE, Task("broken", 7))
    with pytest.raises(RuntimeError, match=r"counting ended with status 1: (?s:.*)no such model"):
        worker.loaded()
    worker.close()
    worker = Worker("counting", sys.executable, MODULE, TASK).loaded()
    with pytest.raises(RuntimeError, match="counting ended with status 1"):
        worker.ask("nonsense", batch=9)
    worker.close()
