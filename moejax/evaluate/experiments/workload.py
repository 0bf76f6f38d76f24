"""Runs a workload through an engine once, and counts."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from host_offload.control.controller import Controller
from moejax.engine.loop import Engine
from moejax.engine.step_work import Step, entries_ahead, moved_bytes
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.step.results import Results

KINDS = ("prefill", "decode")

COUNTED = ("steps", "hits", "fills", "read_through", "ahead", "bytes")
"""Counts of the steps of a kind: experts, including those moved ahead of need, and bytes over the
link."""


class Workload(Protocol):
    """The work of an engine: prompts, or conversations."""

    def play(self, engine: Engine) -> dict[str, Any]:
        """Runs the workload to its end. Returns columns of its record, `tokens` among them. Raises
        errors of a policy or the device, with the engine idle and without policies."""
        ...


@dataclasses.dataclass(frozen=True)
class PromptBatches:
    """Prompts, `batch` of which run together. Each generates equally many tokens and ignores its
    end of text."""

    prompts: tuple[tuple[int, ...], ...]
    batch: int
    output_tokens: int
    temperature: float
    seed: int

    def play(self, engine: Engine) -> dict[str, Any]:
        """Runs the prompts to their end. Returns columns of their record, whose times are seconds
        of the steps, in all and a token. Raises like Workload.play."""
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
    """Returns a digest of the generated tokens, which no policy and no budget may change."""
    return hashlib.sha256(repr([[*output] for output in outputs]).encode()).hexdigest()[:16]


def _times(requests: Sequence[Request], seconds: float) -> dict[str, float | None]:
    first = [r.first_token_s - r.arrival_s for r in requests if r.first_token_s is not None]
    each = [time for request in requests for time in request.token_times]
    # Where steps are short, a CPU's are read two by two: tokens' own times have two medians.
    of_request = [np.mean(request.token_times) for request in requests if request.token_times]
    generated = sum(len(request.output) for request in requests)
    return {
        "ttft_s": float(np.median(first)),
        "tpot_p50_s": float(np.median(of_request)) if of_request else None,
        "tpot_p99_s": float(np.percentile(each, 99)) if each else None,
        "tokens_per_s": generated / seconds if seconds else None,
    }


def run(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Runs a workload to its end. Returns the columns of its record."""
    control = engine.control
    controller = None if control is None else control.controller
    counter = Counter(engine.statistics.record_bytes, controller)
    began, processor = time.perf_counter(), time.process_time()
    engine.listener = counter
    try:
        columns = workload.play(engine)
    finally:
        engine.listener = None
    spent = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - processor}
    transfers: Mapping[str, Mapping[str, int]] = {}
    columns |= counter.columns()
    if controller is not None:
        controller.finish()
        spent["policy_s"] = counter.policy_s("decode")
        transfers = controller.stats()["transfers"]
    return {**columns, **transfer_columns(transfers), **spent}


class Counter:
    """A listener of an engine that keeps the small part of each step, and counts once all steps
    were read.

    - `controller`: asks the engine's policies; None without any.
    """

    def __init__(self, link_bytes: Sequence[int], controller: Controller | None = None):
        self._link_bytes, self._controller = link_bytes, controller
        self._steps: list[Step] = []
        self._policies = [0.0 if controller is None else controller.policy_s]
        """Seconds of the policies up to the dispatch of each step."""

    def policy_s(self, kind: str) -> float:
        """Returns the mean seconds of the policies' own Python in a step of a kind."""
        spent = np.diff(self._policies)[[step.kind == kind for step in self._steps]]
        return float(spent.mean()) if spent.size else 0.0

    def __call__(self, step: Step) -> None:
        if self._controller is not None:
            self._policies.append(self._controller.policy_s)
        # Not its logits, which are large.
        output = step.output._replace(logits=None)  # pyright: ignore[reportArgumentType]
        self._steps.append(dataclasses.replace(step, output=output, logprobs=None))

    def columns(self) -> dict[str, Any]:
        """Returns columns of a record: counts of prefill and decode steps."""
        counts = {kind: np.zeros(len(COUNTED), np.int64) for kind in KINDS}
        for step in self._steps:
            results = Results(step.output.shape, np.asarray(step.results))
            _, hits, fills, through = (int(np.sum(each, dtype=np.int64)) for each in results.paging)
            moved = moved_bytes(step, results.paging, results.demand, self._link_bytes)
            counts[step.kind] += [1, hits, fills, through, _ahead(step), int(moved.sum())]
        return {k: v for kind in KINDS for k, v in count_columns(kind, counts[kind]).items()}


def count_columns(kind: str, counts: Sequence[Any] | np.ndarray) -> dict[str, int]:
    """Returns columns of the steps of a kind, from numbers in the order of COUNTED."""
    found = {name: int(count) for name, count in zip(COUNTED, counts, strict=True)}
    found["misses"] = found["fills"] + found["read_through"]
    return {f"{kind}_{name}": count for name, count in found.items()}


def _ahead(step: Step) -> int:
    """Returns the experts that the step moved ahead of need."""
    lists = [done for _, done in step.between]
    if step.stages is not None and step.output.staged is not None:
        lists.append(step.output.staged)
    chosen = entries_ahead(step.output)
    in_step = 0 if chosen is None else int(np.sum(chosen[:, 3] > 0))
    return in_step + sum(int(np.sum(np.asarray(done) > 0)) for done in lists)


def transfer_columns(transfers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Returns columns of Controller.stats on transfers ahead of need, in all and by cause."""
    names = ("issued", "done", "skipped", "cancelled", "used", "bytes")
    found = {f"ahead_{n}": sum(counts[n] for counts in transfers.values()) for n in names}
    for cause, counts in transfers.items():
        found |= {f"ahead_{n}_{cause}": counts[n] for n in names}
    return found
