"""A worker whose logits say what it was asked, without any model."""

from __future__ import annotations

import sys
from typing import ClassVar

import numpy as np

from scripts.cpu.engines.protocol import Task, serve


class Counting:
    versions: ClassVar = {"counting": "1"}

    def __init__(self, task: Task):
        if task.model == "broken":
            raise RuntimeError("no such model")
        self.task = task
        print("what a library prints is no answer")

    def start(self, batch: int) -> None:
        assert batch <= self.task.batch

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        return np.eye(self.task.vocabulary, dtype=np.float32)[tokens] * position

    def prefill(self, tokens: np.ndarray) -> None:
        assert tokens.shape == (self.task.prompt,)

    def bytes_read(self, batch: int) -> dict[str, float]:
        return {"experts": 8.0, "others": 2.0, "KV": 1.0 * batch, "share": 0.5}


if __name__ == "__main__":
    serve(Counting)
    sys.exit(0)
