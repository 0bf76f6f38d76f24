"""One run of a batch of prompts through an engine, and what it counted."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.engine.loop import Engine
from moejax.engine.step_work import Step, chosen_in_step, moved_bytes
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.step.hooks import LayerTransfers
from moejax.step.results import Results

KINDS = ("prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, `batch` of which run together, and how they go on."""

    prompts: tuple[tuple[int, ...], ...]
    batch: int
    output_tokens: int
    temperature: float
    seed: int

    def params(self, place: int) -> SamplingParams:
        """Those of one prompt: every one generates as many tokens, whatever it would end with."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.output_tokens,
            ignore_eos=True,
            seed=1000 * self.seed + place,
        )


@dataclasses.dataclass
class _Counted:
    """Counts of the steps of one kind."""

    steps: int = 0
    hits: int = 0
    fills: int = 0
    read_through: int = 0
    ahead: int = 0
    moved: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(3, np.int64))

    def columns(self, kind: str) -> dict[str, Any]:
        fill, through, ahead = self.moved.tolist()
        return {
            f"{kind}_steps": self.steps,
            f"{kind}_hits": self.hits,
            f"{kind}_misses": self.fills + self.read_through,
            f"{kind}_fills": self.fills,
            f"{kind}_read_through": self.read_through,
            f"{kind}_ahead": self.ahead,
            f"{kind}_bytes": fill + through + ahead,
            f"{kind}_fill_bytes": fill,
            f"{kind}_read_through_bytes": through,
            f"{kind}_ahead_bytes": ahead,
        }


class Counter:
    """An engine's listener that keeps of each step what is small, and counts when all were read."""

    def __init__(self, cells: Sequence[int], link_bytes: Sequence[int]):
        self._cells, self._link_bytes = np.asarray(cells), link_bytes
        self._steps: list[Step] = []

    def __call__(self, step: Step) -> None:
        # Not its logits, which are large.
        output = step.output._replace(logits=None)  # pyright: ignore[reportArgumentType]
        self._steps.append(dataclasses.replace(step, output=output, logprobs=None))

    def columns(self) -> dict[str, Any]:
        """Columns of a record: counts of prefill and decode steps, and of the places where eviction
        had a choice."""
        counted = {kind: _Counted() for kind in KINDS}
        choices, held = 0, np.zeros(len(self._cells), np.int64)
        for step in self._steps:
            results = Results(step.output.shape, np.asarray(step.results))
            paging, count = results.paging, counted[step.kind]
            active, hits, fills, through = (np.asarray(x, np.int64) for x in paging)
            count.steps += 1
            count.hits += int(hits.sum())
            count.fills += int(fills.sum())
            count.read_through += int(through.sum())
            count.moved += moved_bytes(step, paging, results.demand, self._link_bytes)
            ahead = _ahead(step, len(held))
            count.ahead += int(ahead.sum())
            held += fills + ahead
            if step.kind == "decode":
                choices += has_choice(active, fills, self._cells, held)
        found = {kind: count.columns(kind) for kind, count in counted.items()}
        return {**found["prefill"], **found["decode"], "eviction_choices": choices}


def has_choice(active: np.ndarray, fills: np.ndarray, cells: np.ndarray, held: np.ndarray) -> int:
    """In how many layers a step left eviction a choice, all int[L]: something came in, more experts
    had come so far (`held`) than there are cells, and not all cells were needed by the step."""
    return int(np.sum((fills > 0) & (held > cells) & (active < cells)))


def _ahead(step: Step, layers: int) -> np.ndarray:
    """int[L]: experts that the step moved ahead of need."""
    lists = [*step.between]
    if step.stages is not None and step.output.staged is not None:
        lists.append(LayerTransfers(step.stages, step.output.staged))
    found = np.zeros(layers, np.int64)
    for entries, done in lists:
        chosen = np.asarray(entries.layer)[np.asarray(done) > 0]
        found += np.bincount(chosen, minlength=layers)[:layers]
    if (chosen := chosen_in_step(step.output)) is not None:
        found += np.bincount(chosen[chosen[:, 3] > 0, 0], minlength=layers)
    return found


def run(engine: Engine, workload: Workload, counter: Counter | None = None) -> dict[str, Any]:
    """Runs the prompts to their end; the columns of their record. Raises what a policy or the
    device raises, with the engine idle and without policies."""
    statistics, control = engine.statistics, engine.control
    before, requests = dict(statistics.seconds), []
    engine.listener = counter
    began, processor = time.perf_counter(), time.process_time()
    try:
        for first in range(0, len(workload.prompts), workload.batch):
            for place in range(first, min(first + workload.batch, len(workload.prompts))):
                prompt = list(workload.prompts[place])
                requests.append(engine.add(prompt, workload.params(place)))
            while not engine.scheduler.idle:
                engine.step()
            engine.drain()
    except BaseException:
        engine.control = engine.hooks = None
        engine.abort(requests)
        engine.drain()
        raise
    finally:
        engine.listener = None
    spent = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - processor,
    }
    seconds = {kind: statistics.seconds[kind] - before[kind] for kind in KINDS}
    transfers: Mapping[str, Mapping[str, int]] = {}
    if control is not None:
        control.controller.finish()
        transfers = control.controller.stats()["transfers"]
    return {
        "tokens": _digest(requests),
        **(counter.columns() if counter is not None else {}),
        **transfer_columns(transfers),
        **{f"{kind}_s": seconds[kind] for kind in KINDS},
        **_times(requests, sum(seconds.values())),
        **spent,
    }


def transfer_columns(transfers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Columns of what Controller.stats says of transfers ahead of need, in all and by cause."""
    names = ("issued", "done", "skipped", "cancelled", "used", "bytes")
    found = {f"ahead_{n}": sum(counts[n] for counts in transfers.values()) for n in names}
    for cause, counts in transfers.items():
        found |= {f"ahead_{n}_{cause}": counts[n] for n in names}
    return found


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


def _digest(requests: Sequence[Request]) -> str:
    """What the prompts went on with: no policy and no budget may change it."""
    outputs = np.array([request.output for request in requests], np.int64)
    return hashlib.sha256(outputs.tobytes()).hexdigest()[:16]
