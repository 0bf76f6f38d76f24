"""The model under attack: under random conditions, with answers that are known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from moejax import LLM, RequestOutput, SamplingParams
from scripts.attacks.scene import Scene
from scripts.attacks.values import pick
from scripts.check.kv_faults import kv_faults
from scripts.parts import bench_engine

LIMITS: dict[str, Any] = {**bench_engine.SMALL, "device": "cpu"}

CONDITIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"eviction": "lfu"},
    {"expert_budget": "25%", "eviction": "lfru"},
    {"resize": "peak_headroom"},
    {"expert_budget": "50%", "prefetch": "moe-infinity", "driver": "host", "eviction": None},
    {"resize": "mv_wsa"},
    {"enable_prefix_caching": False, "eviction": "fifo"},
    {"expert_budget": "25%", "prefetch": "random", "max_num_seqs": 2},
)
"""Budgets and policies, none of which changes a bit."""

PROMPTS = ("The old house", "In the morning they went to the river and", "A" * 60, "import numpy")

Answer = list[tuple[int, float]]
"""Tokens with their log-probabilities: their bits."""


@dataclasses.dataclass(frozen=True)
class Known:
    """Requests, and what each gives alone."""

    prompts: tuple[str, ...]
    params: tuple[SamplingParams, ...]
    answers: tuple[Answer, ...]
    texts: tuple[str, ...]

    def sample(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(len(self.prompts)) for _ in range(count)]


def conditions(seed: int, era: int) -> Mapping[str, Any]:
    """What the engine of a run of cases is started with."""
    if era == 0:
        return CONDITIONS[0]
    return pick(random.Random(f"conditions {seed} {era}"), CONDITIONS)


def start(options: Mapping[str, Any]) -> LLM:
    return LLM(**{"model": "demo", **LIMITS, **options})


def answer(output: RequestOutput) -> Answer:
    first = output.outputs[0]
    found = first.logprobs or []
    return [(t, at[t].logprob) for t, at in zip(first.token_ids, found, strict=True)]


def record(llm: LLM) -> Known:
    """Every known request alone, nothing else in the engine."""
    params = tuple(
        SamplingParams(
            temperature=0.0 if i % 2 == 0 else 0.8,
            presence_penalty=0.5 if i == 3 else 0.0,
            seed=i,
            max_tokens=8 + i,
            ignore_eos=True,
            logprobs=1,
        )
        for i in range(len(PROMPTS))
    )
    outputs = [llm.generate([p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    answers = tuple(answer(output) for output in outputs)
    return Known(PROMPTS, params, answers, tuple(output.outputs[0].text for output in outputs))


def other_budget(scene: Scene) -> Callable[[], None]:
    """A function that moves the idle engine's budgets, where no policy does."""
    engine, rng = scene.llm.engine, scene.rng
    arena, scheduler = engine.scheduler.arena, engine.scheduler
    layers, experts = arena.cell_row.shape
    cells = [rng.randrange(experts + 1) for _ in range(layers)]
    pages = scheduler.pages_for(scheduler.max_model_len, 1)
    slots = -(-pages // arena.layout.pages_per_slot) + (rng.random() < 0.3)
    if engine.runner.steps.in_place:
        cells = [0] * layers
    possible = engine.control is None and sum(cells) + slots <= arena.slots
    return partial(engine.set_budget, cells, slots) if possible else lambda: None


def move_budget(scene: Scene) -> None:
    """Other budgets for the idle engine."""
    scene.call("set_budget", other_budget(scene))


def check_answer(scene: Scene, which: int, output: Any, where: str) -> None:
    """The output of a known request is what it was alone."""
    if not isinstance(output, RequestOutput):
        scene.fault("lost", f"{where}: known request {which} gave {output!r:.300}")
        return
    found, expected = answer(output), scene.known.answers[which]
    if found != expected:
        tokens = [t for t, _ in found] == [t for t, _ in expected]
        kind = "log-probabilities" if tokens else "tokens"
        scene.fault("bits", f"{where}: known request {which} gave other {kind} than alone")


def check_engine(scene: Scene) -> None:
    """The engine is idle, whole and free, and answers as it did."""
    llm, engine = scene.llm, scene.llm.engine
    scheduler = engine.scheduler
    if not engine.idle:
        left = len(scheduler.waiting) + len(scheduler.running)
        scene.fault("engine", f"not idle: {left} requests are left in it")
        return
    for session in scheduler.sessions.all:
        scene.call("end_session", lambda name=session.session_id: llm.end_session(name))
    if faults := kv_faults(scheduler) + engine.runner.faults():
        scene.fault("engine", "; ".join(faults))
    cache, pages = scheduler.cache, scheduler.arena.pages
    if cache.available != pages or cache.swapped:
        scene.fault("engine", f"{cache.available} of {pages} pages free, {cache.swapped} swapped")
    which = scene.rng.randrange(len(scene.known.prompts))
    prompt, params = scene.known.prompts[which], scene.known.params[which]
    outputs = scene.call("the known request", lambda: llm.generate([prompt], [params]))
    if isinstance(outputs, list):
        check_answer(scene, which, outputs[0], "afterwards")
    else:
        scene.fault("engine", f"a known request is refused afterwards: {outputs!r:.300}")
