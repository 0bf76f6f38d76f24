"""Runs request mixes through one compiled engine under changing budgets, and records every bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from host_offload.memory.tables import with_contents
from host_offload.policies.eviction.eviction_names import EVICTION
from moejax import LLM, SamplingParams
from moejax.engine.step_work import Draft, Step
from scripts.check.kv_faults import kv_faults


@dataclasses.dataclass(frozen=True)
class Job:
    """A request and the engine step before which it arrives."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    session: str | None = None
    """A turn of this session: its prompt follows on what was said so far."""
    priority: int = 0
    abort: int | None = None
    """Engine steps after its arrival at which it is cancelled."""


@dataclasses.dataclass
class Recorded:
    """What a request produced: its tokens and the logits each was chosen from."""

    tokens: list[int]
    logits: list[np.ndarray]

    def same_bits(self, other: Recorded) -> bool:
        return (
            self.tokens == other.tokens
            and len(self.logits) == len(other.logits)
            and all(
                np.array_equal(a.view(np.uint32), b.view(np.uint32))
                for a, b in zip(self.logits, other.logits, strict=True)
            )
        )


def mixed_jobs() -> list[Job]:
    """Prompts of six lengths, greedy and sampled, with priorities, one a step."""
    rng = np.random.default_rng(3)
    found = []
    for i, length in enumerate((17, 66, 130, 90, 40, 1)):
        sampling = {"temperature": 0.9, "top_p": 0.9} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **sampling)
        prompt = tuple(rng.integers(1, 4096, length).tolist())
        found.append(Job(prompt, params, arrival=i, priority=-(i % 2)))
    return found


class Faulty(AssertionError):
    """An invariant broke after a step."""


def set_budget(llm: LLM, cells: Sequence[int], kv_slots: int, eviction: str = "lru") -> None:
    """Other budgets and policy for an idle engine: table contents only, nothing is compiled."""
    llm.engine.set_budget(cells, kv_slots)
    runner = llm.engine.runner
    weights = {"victim_weights": EVICTION[eviction]}
    runner.tables = with_contents(runner.tables, weights)


def run(llm: LLM, jobs: Sequence[Job], *, check: bool = True) -> list[Recorded]:
    """Runs the jobs to their end. check: all invariants after every step (raises Faulty)."""
    engine = llm.engine
    requests: list = [None] * len(jobs)
    logits: dict[int, list[np.ndarray]] = {}
    said: dict[str | None, list[int]] = {}
    added: dict[int, int] = {}
    drafts: list[tuple[Draft, np.ndarray]] = []

    def record(step: Step) -> None:
        record_accepted()
        rows = np.asarray(step.output.logits)
        for row, request in step.sampled():
            if request.finish_reason is None:
                logits.setdefault(id(request), []).append(rows[row].copy())
        drafts.extend((draft, rows) for draft in step.work.drafts)
        placed = step.output.placed
        if placed is not None and np.any(placed & ~step.output.read().missed):
            raise Faulty(f"step {step.number}: a resident was computed by the second processor")
        if check:
            check_step(llm, step)

    def record_accepted() -> None:
        """Records the logits of drafts that were right, once their step was read."""
        for draft, rows in drafts:
            logits[id(draft.request)] += [rows[row] for row in draft.rows[: draft.accepted]]
        drafts.clear()

    engine.listener = record
    try:
        number = 0
        while any(r is None or r.finish_reason is None for r in requests):
            for job, request in zip(jobs, requests, strict=True):
                if job.session and request and request.finish_reason in ("stop", "length"):
                    said[job.session] = request.prompt + request.output
            for i, job in enumerate(jobs):
                if requests[i] is None and job.arrival <= number and _turn(job, jobs[:i], requests):
                    prompt = [*said.get(job.session, []), *job.prompt]
                    requests[i] = engine.add(
                        prompt, job.params, session_id=job.session, priority=job.priority
                    )
                    added[i] = number
                elif job.abort is not None and number - added.get(i, number) >= job.abort:
                    engine.abort([requests[i]])
            engine.step()
            number += 1
        while not engine.idle:
            engine.step()
        record_accepted()
    finally:
        engine.listener = None
        engine.abort([r for r in requests if r is not None])
    # A row that ended by a token of the step before runs once more; that result is dropped.
    return [Recorded(r.output, logits.get(id(r), [])[: len(r.output)]) for r in requests]


def _turn(job: Job, earlier: Sequence[Job], requests: Sequence) -> bool:
    """Whether the turns before it have ended."""
    before = [requests[j] for j, other in enumerate(earlier) if other.session == job.session]
    return job.session is None or all(r and r.finish_reason for r in before)


def check_residents(llm: LLM) -> None:
    """Checks the tables and the bytes of all residents after every step from now on."""
    step = llm.engine.step

    def checked():
        touched = step()
        assert llm.engine.runner.faults() == []
        return touched

    llm.engine.step = checked


def check_step(llm: LLM, step: Step) -> None:
    engine = llm.engine
    runner = engine.runner
    faults = runner.faults()
    faults += kv_faults(engine.scheduler)
    tables = jax.tree.map(np.asarray, runner.tables)
    ids, paging = (
        np.asarray(step.output.routing.ids),
        jax.tree.map(np.asarray, step.output.read().paging),
    )
    layers, experts = tables.address.shape
    for layer in range(layers):
        active = np.unique(ids[layer][ids[layer] < experts])
        counts = [int(n[layer]) for n in paging]
        placed = 0 if step.output.placed is None else int(np.sum(step.output.placed[layer]))
        if counts[0] != len(active) or counts[0] != sum(counts[1:]) + placed:
            faults.append(f"layer {layer}: {len(active)} active experts counted as {counts}")
        # What was hit or filled is still there: an expert the layer needs is never a victim.
        lies = tables.address[layer, active] >= 0
        resident = len(active) if runner.steps.in_place else int(np.sum(lies))
        # In a window or a pool the cells go on to other layers.
        pooled = engine.control is not None and engine.control.controller.pool is not None
        stays = runner.shapes.waves == 1 and not runner.steps.window and not pooled
        if stays and resident != counts[1] + counts[2]:
            faults.append(
                f"layer {layer}: {counts[1]} hits + {counts[2]} fills, {resident} resident"
            )
    if faults:
        raise Faulty(f"step {step.number} ({step.kind}): " + "; ".join(faults))
