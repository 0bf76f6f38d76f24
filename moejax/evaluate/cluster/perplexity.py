"""Perplexity on the workers of a cluster, which share the windows of all texts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.errors import UserError
from moejax.evaluate.evaluation import (
    EncodedText,
    PerplexityResult,
    Window,
    cost_report,
    encode_texts,
    keep_scores,
    likelihood,
    model_report,
    run_report,
)
from moejax.evaluate.token_ids import TokenIds
from moejax.progress import count_progress
from moejax.serve.cluster.workers import Scale, Worker, Workers, worker_options
from moejax.serve.llm import LLM


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """The texts and the model's report, as a worker prepared them.

    - `together`: windows that fill two prefill steps.
    """

    window: int
    stride: int
    texts: list[EncodedText]
    together: int
    model: dict[str, Any]
    run: dict[str, Any]


class Scorer(Worker):
    """A worker whose pieces of work are functions of its LLM, one after the other."""

    def _begin(self, llm: LLM) -> int:
        self._turn = asyncio.Lock()
        return 2  # the next piece is there when one ends

    async def _work(self, piece: Callable[[LLM], Any]) -> Any:
        assert self._llm is not None
        async with self._turn:
            return await asyncio.to_thread(piece, self._llm)


def _prepare(
    llm: LLM,
    texts: Mapping[str, str | TokenIds],
    window: int | None,
    stride: int | None,
    limit: int | None,
) -> _Prepared:
    found = encode_texts(llm, texts, window, stride, limit)
    together = 2 * llm.engine.scheduler.prefill_chunks
    return _Prepared(*found, together, model_report(llm), run_report(llm))


def _score(llm: LLM, sequences: list[np.ndarray]) -> list[np.ndarray]:
    return llm.score_batch([ids.tolist() for ids in sequences])


def cluster_perplexity(
    model: str,
    texts: Mapping[str, str | TokenIds],
    options: Mapping[str, Any],
    scale: Scale,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> PerplexityResult:
    """Computes `perplexity` on the workers of a connected cluster, with the same bits for any
    number of workers. The report of the run is one worker's, with the number of workers. Costs are
    sums over workers, seconds are wall-clock time. Raises UserError like perplexity."""
    began = time.perf_counter()
    with Workers(worker_options(Scorer, model, options, scale), warn) as workers:
        prepare = functools.partial(
            _prepare, texts=texts, window=window, stride=stride, limit=limit
        )
        ((_, prepared),) = workers.run([prepare])
        if isinstance(prepared, UserError):
            raise prepared
        # Copy the log-probabilities, since arrays from Ray are read-only.
        encoded = [dataclasses.replace(text) for text in prepared.texts]
        windows = [(text, w) for text in encoded for w in text.windows]
        total, scored = sum(w.end - w.first for _, w in windows), 0
        size = prepared.together
        parts = (windows[first : first + size] for first in range(0, len(windows), size))
        with count_progress("scoring", total, 0, progress) as report:
            for part, scores in workers.run(parts, _pack):
                if isinstance(scores, UserError):
                    raise scores
                scored += sum(map(keep_scores, *zip(*part, strict=True), scores))
                report(scored)
        stats = [worker["stats"] for worker in workers.stats()]
    # They lack the work of lost workers, and when each worker compiled.
    cost = cost_report(time.perf_counter() - began, 0.0, encoded, stats)
    run = {**prepared.run, **cost, "workers": len(stats)}
    found = tuple(map(likelihood, encoded))
    return PerplexityResult(prepared.window, prepared.stride, limit, found, prepared.model, run)


def _pack(part: Sequence[tuple[EncodedText, Window]]) -> Callable[[LLM], list[np.ndarray]]:
    return functools.partial(_score, sequences=[text.ids[w.begin : w.end] for text, w in part])
