"""The arms that place missed experts on two processors, over work that was routed: part of the
commands `placement` and `prescope`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from host_offload.policies.placement.caches import (
    Cache,
    Horizon,
    LayerLru,
    ScoreCache,
    TwoLevelLru,
)
from host_offload.policies.placement.correlation import correlated
from host_offload.policies.placement.presched import PlacementCosts, Scheduler
from host_offload.policies.placement.rivals import SCHEDULERS, expertflow, klotski
from host_offload.simulate.placement import (
    LayerTimes,
    Setting,
    interleaved,
    simulate_placement,
)

GROUP = 8
"""Buffers of a prefetch group."""

REACH = 4
"""Most layers ahead that ExpertFlow looks at; the others look at one."""

DRAWS = 10
"""Tables drawn at random in place of the hot table, of which the mean is taken."""

PREDICTORS = ("learned", "gate", "right")
"""The best that there is of the first two is what the ablations have."""

FOREST = "forest"
"""ExpertFlow's own predictor, which nobody else has; it looks as far ahead as it was trained."""


class Work(NamedTuple):
    """What is played: steps of one batch size."""

    tokens: np.ndarray
    """int[T, L, E]"""
    resident: np.ndarray
    """bool[L, E]: the hot table."""
    predicted: Mapping[str, np.ndarray]
    """Predictor → int[T, L, d, E]"""
    after: np.ndarray
    """int[L − 1, E, k]: `successors` of a profile."""
    top_k: int
    group: int = GROUP
    """Buffers of each of both prefetch groups."""

    @property
    def rows(self) -> int:
        """Tokens of all steps."""
        return round(int(self.tokens[:, 0].sum()) / self.top_k)

    def best(self, reach: int = 1) -> str:
        """The first of PREDICTORS that looks so far ahead, or the first of all."""
        there = [name for name in PREDICTORS if name in self.predicted]
        return next((n for n in there if self.predicted[n].shape[2] >= reach), there[0])


class Arm(NamedTuple):
    """A rule, and what it has in place of the hot table and of one layer ahead."""

    scheduler: Callable[[Work], Scheduler]
    cache: type[ScoreCache] | type[LayerLru] | type[TwoLevelLru] | None = None
    reach: int = 0
    """Layers ahead that are predicted; 0: none."""


def _plain(name: str) -> Callable[[Work], Scheduler]:
    return lambda work: SCHEDULERS[name]


ARMS: dict[str, Arm] = {
    "prescope": Arm(_plain("prescope"), reach=1),
    "greedy": Arm(_plain("greedy"), reach=1),
    "hybrimoe": Arm(_plain("hybrimoe"), reach=1),
    "hybrimoe-code": Arm(_plain("hybrimoe-code"), ScoreCache),
    "fate": Arm(_plain("fate"), reach=1),
    "fate, cache": Arm(_plain("fate"), LayerLru, reach=1),
    "expertflow": Arm(lambda work: expertflow, TwoLevelLru, reach=REACH),
    "klotski": Arm(lambda work: functools.partial(klotski, hot=work.top_k)),
    "fiddler": Arm(_plain("fiddler")),
    "fiddler-code": Arm(_plain("fiddler-code")),
    "llama.cpp": Arm(_plain("llama.cpp")),
    "no-prediction": Arm(_plain("no-prediction")),
}
"""Name → arm; Klotski's two batches are `played`'s."""

ABLATIONS = ("no-prediction", "no hot table", "no PreSched", "no asynchronous loads")
"""The paper's: without LLaPor, the table, PreSched (the greedy, with all else), AsyncIO."""


def played(
    name: str, predictor: str, work: Work, costs: PlacementCosts, *, draws: int = DRAWS
) -> dict[str, Any]:
    """The line of an arm or of an ablation. Raises ValueError for another."""
    if name == "no hot table":
        random = np.random.default_rng(0)
        tables = [
            random.permutation(work.resident.ravel()).reshape(work.resident.shape)
            for _ in range(draws)
        ]
        works = [work._replace(resident=table) for table in tables]
        found = [_steps("prescope", predictor, each, costs) for each in works]
        return _line(name, predictor, work.rows * draws, [s for f in found for s in f])
    if name == "no asynchronous loads":
        steps = _steps("prescope", predictor, work, costs, asynchronous=False)
    elif name == "no PreSched":
        steps = _steps("greedy", predictor, work, costs)
    elif name in ARMS:
        steps = _steps(name, predictor, work, costs)
    else:
        raise ValueError(f"unknown arm {name!r}; known: {', '.join((*ARMS, *ABLATIONS))}")
    rows = work.rows
    if name == "klotski":
        rows = round(int(interleaved(work.tokens)[0][:, 0].sum()) / work.top_k)
    return _line(name, predictor if name not in ARMS or ARMS[name].reach else "", rows, steps)


def all_played(work: Work, costs: PlacementCosts) -> Iterator[dict[str, Any]]:
    """A line for each arm and each predictor that it can have, ExpertFlow by its forests where
    there are any, then the ablations."""
    there = [name for name in PREDICTORS if name in work.predicted]
    for predictor in there:
        for name, arm in ARMS.items():
            if arm.reach and work.predicted[predictor].shape[2] >= arm.reach:
                yield played(name, predictor, work, costs)
    if FOREST in work.predicted:
        yield played("expertflow", FOREST, work, costs)
    for name, arm in ARMS.items():
        if not arm.reach:
            yield played(name, "", work, costs)
    for name in ("no hot table", "no asynchronous loads"):
        yield played(name, work.best(), work, costs)


def _steps(
    name: str, predictor: str, work: Work, costs: PlacementCosts, *, asynchronous: bool = True
) -> list[list[LayerTimes]]:
    arm = ARMS[name]
    tokens, passes = work.tokens, None
    predicted = work.predicted[predictor or work.best()][:, :, : max(arm.reach, 1)]
    if name == "klotski":
        tokens, passes = interleaved(tokens)
        predicted = correlated(tokens, work.after)
        costs = dataclasses.replace(costs, attention=2 * costs.attention)
    elif not arm.reach:
        predicted = np.zeros_like(predicted)
    cache: Cache | None = None if arm.cache is None else arm.cache.of(work.resident, work.top_k)
    horizon = None
    if arm.reach > 1:
        active = float(np.count_nonzero(tokens)) / tokens[..., 0].size
        missed = float(np.count_nonzero((tokens > 0) & ~work.resident)) / tokens[..., 0].size
        layer_s = costs.attention + active * costs.accelerator
        horizon = Horizon.of(missed, costs.load, layer_s, predicted.shape[2])
    setting = Setting(
        arm.scheduler(work),
        costs,
        work.group,
        asynchronous=asynchronous,
        cache=cache,
        horizon=horizon,
    )
    return simulate_placement(tokens, predicted, work.resident, setting, passes)


def _line(name: str, predictor: str, rows: int, steps: list[list[LayerTimes]]) -> dict[str, Any]:
    layers = [times for step in steps for times in step]
    gaps = np.array([abs(times.cpu_s - times.accelerator_s) for times in layers])
    seconds = sum(times.seconds for times in layers)
    return {
        "arm": name,
        "predictor": predictor,
        "step_us": seconds / len(steps) * 1e6,
        "tokens_s": rows / seconds,
        "ahead": float(np.mean([times.begun for times in layers])),
        "gap_us": float(np.median(gaps)) * 1e6,
        "largest_us": float(gaps.max()) * 1e6,
        "link": sum(times.link_s for times in layers) / seconds,
    }
