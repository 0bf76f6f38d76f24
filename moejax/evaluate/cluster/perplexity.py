"""Perplexity on the workers of a cluster: windows of all texts are shared out."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moejax.errors import UserError
from moejax.evaluate.evaluation import (
    Cost,
    EncodedText,
    PerplexityResult,
    encoded_texts,
    likelihood,
)
from moejax.evaluate.evaluation_report import model_report, run_report
from moejax.evaluate.token_ids import TokenIds
from moejax.progress import token_progress
from moejax.serve.cluster.fleet import Scale, worker_options
from moejax.serve.cluster.pool import Pool, Task
from moejax.serve.cluster.worker import ModelWorker, Started
from moejax.serve.llm import LLM


@dataclasses.dataclass(frozen=True)
class _Prepare:
    """A task: the windows of the texts, as this model has them."""

    texts: Mapping[str, str | TokenIds]
    window: int | None
    stride: int | None
    limit: int | None


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What the model says of the texts and of itself."""

    window: int
    stride: int
    texts: list[EncodedText]
    together: int
    """Windows that fill two prefill steps."""
    model: dict[str, Any]
    run: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Score:
    """A task: sequences of token ids."""

    sequences: list[np.ndarray]


class Scorer(ModelWorker):
    """A worker that scores windows of texts."""

    def _begin(self, llm: LLM) -> Started:
        self._turn, self._scored = threading.Lock(), 0
        # The next task is there when one ends.
        return Started(2, llm.stats()["time"]["total_s"])

    def _tokens(self) -> int:
        return self._scored

    async def _work(self, number: int, payload: _Prepare | _Score) -> _Prepared | list[np.ndarray]:
        return await asyncio.to_thread(self._do, payload)

    def _do(self, payload: _Prepare | _Score) -> _Prepared | list[np.ndarray]:
        llm = self._llm
        assert llm is not None
        with self._turn:
            if isinstance(payload, _Prepare):
                found = encoded_texts(
                    llm, payload.texts, payload.window, payload.stride, payload.limit
                )
                together = 2 * llm.engine.scheduler.prefill_chunks
                return _Prepared(*found, together, model_report(llm), run_report(llm))
            scores = llm.score_batch([ids.tolist() for ids in payload.sequences])
            self._scored += sum(map(len, scores))
            return scores


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
) -> tuple[PerplexityResult, dict[str, Any], dict[str, Any]]:
    """`perplexity` on the workers of a connected cluster: the same bits, however many there are.
    Returns the result and what `evaluation.reported` takes: of the model, and of the run, that of
    one worker and the number of all. Costs are sums over workers, seconds those that passed. Raises
    UserError as perplexity does."""
    began = time.perf_counter()
    with Pool(worker_options(Scorer, model, options, scale), warn) as pool:
        prepare = _Prepare(texts, window, stride, limit)
        ((_, prepared),) = pool.run([Task(prepare)])
        if isinstance(prepared, UserError):
            raise prepared
        assert isinstance(prepared, _Prepared)
        # With log-probabilities of their own: what Ray brings is read-only.
        texts_here = [dataclasses.replace(text) for text in prepared.texts]
        prepared = dataclasses.replace(prepared, texts=texts_here)
        total = sum(w.end - w.first for text in prepared.texts for w in text.windows)
        scored = 0
        with token_progress("scoring", total, 0, None, progress) as report:
            for task, scores in pool.run(_tasks(prepared)):
                if isinstance(scores, UserError):
                    raise scores
                places = task.tag
                assert isinstance(places, list)
                for (text, w), values in zip(places, scores, strict=True):
                    text.logprobs[w.first : w.end] = values[w.first - w.begin - 1 :]
                    scored += w.end - w.first
                report(scored)
        stats = [worker["stats"] for worker in pool.stats()]
    cost = _cost(stats, prepared.texts, time.perf_counter() - began)
    result = PerplexityResult(
        prepared.window, prepared.stride, limit, tuple(map(likelihood, prepared.texts)), cost
    )
    return result, prepared.model, {**prepared.run, "workers": len(stats)}


def _tasks(prepared: _Prepared) -> Iterator[Task]:
    """Windows of all texts, as many together as fill a worker's prefill steps."""
    windows = [(text, w) for text in prepared.texts for w in text.windows]
    for first in range(0, len(windows), prepared.together):
        part = windows[first : first + prepared.together]
        ids = [text.ids[w.begin : w.end] for text, w in part]
        yield Task(_Score(ids), sum(map(len, ids)), tag=part)


def _cost(stats: list[dict[str, Any]], texts: list[EncodedText], seconds: float) -> Cost:
    """Sums over workers that live at the end; what a lost one did is not among them."""
    experts = {
        name: sum(one["experts"][name] for one in stats)
        for name in ("activations", "hits", "fills", "read_through")
    }
    return Cost(
        seconds=seconds,
        compile_s=sum(one["time"]["compile_s"] for one in stats),
        computed_tokens=sum(w.end - w.begin - 1 for text in texts for w in text.windows),
        prefill_steps=sum(one["steps"]["prefill"] for one in stats),
        fill_bytes=sum(one["bytes"]["fill"] for one in stats),
        read_through_bytes=sum(one["bytes"]["read_through"] for one in stats),
        **experts,
    )
