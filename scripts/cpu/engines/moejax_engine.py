"""moejax as a worker: the steps of LLM's engine."""

from __future__ import annotations

import jax
import numpy as np

from moejax import LLM, SamplingParams
from moejax.requests.request import Request
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.engines.protocol import Task, serve
from scripts.parts.decode_timing import Sequences, prefill, step_bytes


class MoejaxEngine:
    def __init__(self, task: Task):
        if reason := why_not_cpu():
            raise RuntimeError(reason)
        self.task = task
        files = task.host_memory is not None
        self.llm = LLM(
            task.model,
            expert_budget=None if task.resident or files else 0,
            store="file" if files else "memory",
            host_memory=task.host_memory,
            transfer_threads=task.transfer_threads if files else None,
            verify_reads=task.verify_reads or not files,
            precision=task.precision,
            # Named, so that each expert has a cell where all have: else they stay in the store.
            eviction="lru" if task.resident else None,
            threads=task.threads,
            max_num_seqs=task.batch,
            max_model_len=max(task.context + task.steps, task.prompt) + 2,
            max_num_batched_tokens=max(task.prompt, task.context),
            enable_prefix_caching=False,
            progress=False,
        )
        self.llm.engine.runner.wait_compiled(everything=True)
        self.versions = {"jax": jax.__version__, "ops": f"cpu ({instruction_set()})"}
        self._requests: list[Request] = []
        self._sequences: Sequences | None = None
        self.active = np.zeros(0)
        """int[L]: experts that the latest step had to read."""

    def start(self, batch: int) -> None:
        if len(self._requests) == batch:
            return
        self._stop()
        prompts = self.task.decoded()[:batch, : self.task.context].tolist()
        self._requests, self._sequences = prefill(self.llm.engine, prompts, self.task.steps)

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        assert self._sequences is not None
        runner, rows = self.llm.engine.runner, list(self._sequences.rows)
        positions = np.full(runner.shapes.rows, -1, np.int32)
        positions[rows] = position
        current = np.zeros(runner.shapes.rows, np.int32)
        current[rows] = tokens
        runner.place_tokens(current, positions >= 0)
        output = runner.decode(positions, self._sequences.block_table)
        logits, self.active = np.asarray(output.logits), np.asarray(output.paging.active)
        return logits[rows]

    def prefill(self, tokens: np.ndarray) -> None:
        self._stop()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = self.llm.engine.add(tokens.tolist(), params)
        while not request.output:
            self.llm.engine.step()

    def bytes_read(self, batch: int) -> dict[str, float]:
        runner, context = self.llm.engine.runner, self.task.context
        active = float(np.sum(self.active))
        read = step_bytes(runner, active, batch=batch, context=context)
        return read | {"share": active / np.prod(runner.stores[0].shape[:2])}

    def _stop(self) -> None:
        """Ends the decoded sequences: the engine would go on with them beside a prompt."""
        self.llm.engine.abort(self._requests)
        self._requests, self._sequences = [], None


if __name__ == "__main__":
    serve(MoejaxEngine)
