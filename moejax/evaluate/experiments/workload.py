"""One run of a workload through an engine, and what it counted."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from moejax.engine.loop import Engine
from moejax.engine.step_work import Step, entries_ahead, moved_bytes
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.step.hooks import LayerTransfers
from moejax.step.results import Results

KINDS = ("prefill", "decode")


class Workload(Protocol):
    """What is run."""

    def play(self, engine: Engine) -> dict[str, Any]:
        """Runs it to its end; columns of its record, `tokens` among them. Raises what a policy or
        the device raises, with the engine idle and without policies."""
        ...


@dataclasses.dataclass(frozen=True)
class PromptBatches:
    """Prompts, `batch` of which run together, each of which generates as many tokens, whatever it
    would end with."""

    prompts: tuple[tuple[int, ...], ...]
    batch: int
    output_tokens: int
    temperature: float
    seed: int

    def play(self, engine: Engine) -> dict[str, Any]:
        """As of Workload. Times are seconds of the steps, in all and a token."""
        statistics, requests = engine.statistics, []
        before = dict(statistics.seconds)
        try:
            for first in range(0, len(self.prompts), self.batch):
                for place in range(first, min(first + self.batch, len(self.prompts))):
                    params = SamplingParams(
                        temperature=self.temperature,
                        max_tokens=self.output_tokens,
                        ignore_eos=True,
                        seed=1000 * self.seed + place,
                    )
                    requests.append(engine.add(list(self.prompts[place]), params))
                while not engine.scheduler.idle:
                    engine.step()
                engine.drain()
        except BaseException:
            engine.control = engine.hooks = None
            engine.abort(requests)
            engine.drain()
            raise
        seconds = {f"{kind}_s": statistics.seconds[kind] - before[kind] for kind in KINDS}
        tokens = digest_outputs([request.output for request in requests])
        return {"tokens": tokens, **seconds, **_times(requests, sum(seconds.values()))}


def digest_outputs(outputs: Sequence[Sequence[int]]) -> str:
    """What the prompts went on with: no policy and no budget may change it."""
    return hashlib.sha256(repr([[*output] for output in outputs]).encode()).hexdigest()[:16]


def _times(requests: Sequence[Request], seconds: float) -> dict[str, float | None]:
    first = [r.first_token_s - r.arrival_s for r in requests if r.first_token_s is not None]
    each = [time for request in requests for time in request.token_times]
    generated = sum(len(request.output) for request in requests)
    return {
        "ttft_s": float(np.median(first)),
        "tpot_p50_s": float(np.percentile(each, 50)) if each else None,
        "tpot_p99_s": float(np.percentile(each, 99)) if each else None,
        "tokens_per_s": generated / seconds if seconds else None,
    }


def run(engine: Engine, workload: Workload, cells: Sequence[int] | None = None) -> dict[str, Any]:
    """Runs a workload to its end; the columns of its record. cells: each layer's; None: they move
    while it runs."""
    control, counter = engine.control, Counter(cells, engine.statistics.record_bytes)
    began, processor = time.perf_counter(), time.process_time()
    engine.listener = counter
    try:
        columns = workload.play(engine)
    finally:
        engine.listener = None
    spent = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - processor}
    transfers: Mapping[str, Mapping[str, int]] = {}
    if control is not None:
        control.controller.finish()
        transfers = control.controller.stats()["transfers"]
    return {**columns, **counter.columns(), **transfer_columns(transfers), **spent}


class Counter:
    """An engine's listener that keeps of each step what is small, and counts when all were read."""

    def __init__(self, cells: Sequence[int] | None, link_bytes: Sequence[int]):
        self._cells, self._link_bytes = cells, link_bytes
        self._steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        # Not its logits, which are large.
        output = step.output._replace(logits=None)  # pyright: ignore[reportArgumentType]
        self._steps.append(dataclasses.replace(step, output=output, logprobs=None))

    def columns(self) -> dict[str, Any]:
        """Columns of a record: counts of prefill and decode steps, and of the places where eviction
        had a choice."""
        counted = {kind: np.zeros(4, np.int64) for kind in KINDS}
        nbytes = {kind: np.zeros(3, np.int64) for kind in KINDS}
        steps: dict[str, int] = dict.fromkeys(KINDS, 0)
        choices = Choices(self._cells) if self._cells is not None else None
        for step in self._steps:
            results = Results(step.output.shape, np.asarray(step.results))
            active, hits, fills, through = (np.asarray(x, np.int64) for x in results.paging)
            ahead = _ahead(step, len(fills))
            steps[step.kind] += 1
            counted[step.kind] += [hits.sum(), fills.sum(), through.sum(), ahead.sum()]
            nbytes[step.kind] += moved_bytes(step, results.paging, results.demand, self._link_bytes)
            if choices is not None:
                choices.see(step.kind, active, fills, ahead)
        found: dict[str, Any] = {}
        for kind in KINDS:
            found |= count_columns(kind, steps[kind], counted[kind], nbytes[kind])
        return found if choices is None else found | {"eviction_choices": choices.count}


class Choices:
    """In how many layers of decode steps eviction had a choice: something came in, more experts had
    come so far than there are cells, and not all cells were needed by the step."""

    def __init__(self, cells: Sequence[int]):
        self._cells, self._held, self.count = np.asarray(cells), np.zeros(len(cells), np.int64), 0

    def see(self, kind: str, active: np.ndarray, fills: np.ndarray, ahead: np.ndarray) -> None:
        """A step; all int[L]: experts that it needed, that it filled, that came ahead of need."""
        self._held += fills + ahead
        if kind == "decode":
            chosen = (fills > 0) & (self._held > self._cells) & (active < self._cells)
            self.count += int(np.sum(chosen))


def count_columns(
    kind: str, steps: int, counts: Sequence[int] | np.ndarray, nbytes: Sequence[int] | np.ndarray
) -> dict[str, int]:
    """Columns of the steps of a kind. counts: hits, fills, experts read through, and moved ahead of
    need. nbytes: what the last three moved over the link."""
    hits, fills, through, ahead = (int(count) for count in counts)
    moved = {"fill": nbytes[0], "read_through": nbytes[1], "ahead": nbytes[2]}
    return {
        f"{kind}_steps": int(steps),
        f"{kind}_hits": hits,
        f"{kind}_misses": fills + through,
        f"{kind}_fills": fills,
        f"{kind}_read_through": through,
        f"{kind}_ahead": ahead,
        f"{kind}_bytes": int(sum(nbytes)),
        **{f"{kind}_{name}_bytes": int(count) for name, count in moved.items()},
    }


def _ahead(step: Step, layers: int) -> np.ndarray:
    """int[L]: experts that the step moved ahead of need."""
    lists = [*step.between]
    if step.stages is not None and step.output.staged is not None:
        lists.append(LayerTransfers(step.stages, step.output.staged))
    found = np.zeros(layers, np.int64)
    for entries, done in lists:
        chosen = np.asarray(entries.layer)[np.asarray(done) > 0]
        found += np.bincount(chosen, minlength=layers)[:layers]
    if (chosen := entries_ahead(step.output)) is not None:
        found += np.bincount(chosen[chosen[:, 3] > 0, 0], minlength=layers)
    return found


def transfer_columns(transfers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Columns of what Controller.stats says of transfers ahead of need, in all and by cause."""
    names = ("issued", "done", "skipped", "cancelled", "used", "bytes")
    found = {f"ahead_{n}": sum(counts[n] for counts in transfers.values()) for n in names}
    for cause, counts in transfers.items():
        found |= {f"ahead_{n}_{cause}": counts[n] for n in names}
    return found
