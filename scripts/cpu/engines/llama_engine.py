"""llama.cpp as a worker, through llama-cpp-python's bindings of its C interface."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from scripts.cpu.engines.gguf_file import tensor_bytes
from scripts.cpu.engines.protocol import Task, serve

llama_cpp: Any = import_module("llama_cpp")
"""Not in the environment of the tests."""


class LlamaEngine:
    def __init__(self, task: Task):
        self.task = task
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(task.model.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {task.model}")
        params = llama_cpp.llama_context_default_params()
        longest = max(task.prompt, task.context + task.steps + 1)
        params.n_seq_max = task.batch + 1  # the last one is the timed prompt's
        params.n_ctx = (task.batch + 1) * -(-longest // 256) * 256
        params.n_batch = params.n_ubatch = max(512, task.prompt)
        params.n_threads = params.n_threads_batch = task.threads
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this model")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._started = 0
        system = llama_cpp.llama_print_system_info().decode()
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "system": system.strip()}

    def start(self, batch: int) -> None:
        contexts = self.task.decoded()[:, : self.task.context]
        for i in range(self._started, batch):
            self._compute(contexts[i], np.arange(self.task.context), [i] * self.task.context, 1)
        self._started = max(self._started, batch)

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        count = len(tokens)
        for i in range(count):
            llama_cpp.llama_memory_seq_rm(self._memory, i, position, -1)
        self._compute(tokens, np.full(count, position), list(range(count)), count)
        width = self.task.vocabulary
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(count, width)).copy()

    def prefill(self, tokens: np.ndarray) -> None:
        last = self.task.batch
        self._compute(tokens, np.arange(len(tokens)), [last] * len(tokens), 1)
        llama_cpp.llama_get_logits(self._context)
        llama_cpp.llama_memory_seq_rm(self._memory, last, -1, -1)

    def bytes_read(self, batch: int) -> dict[str, float]:
        """All experts' bytes; the command takes the share of them that a step reads."""
        return tensor_bytes(self.task.model)

    def _compute(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: list[int], logits: int
    ) -> None:
        """Runs one batch; the last `logits` tokens give logits."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = int(tokens[i]), int(positions[i])
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[i]
            batch.logits[i] = i >= count - logits
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)


if __name__ == "__main__":
    serve(LlamaEngine)
