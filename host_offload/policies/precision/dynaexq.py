"""DynaExq: the hottest experts in the high version, the others in the low one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, State, Transition
from host_offload.memory.budget import cells_of_layers
from host_offload.policies.precision.maps import HI, LO, check_shape, hi_capacity, top_map


class Hotness(NamedTuple):
    """State of DynaExq."""

    score: np.ndarray
    """float64[L, E]: S, selections an interval."""
    high: np.ndarray
    """bool[L, E]: H, the experts wanted in the high version."""
    capacity: int
    """High experts of all layers."""
    has_all_versions: tuple[bool, ...]
    """By layer, whether it has two versions."""


@dataclasses.dataclass(frozen=True)
class DynaExq:
    """High and low versions by long-horizon hotness (DynaExq).

    At each interval's end S ← α·S + (1 − α)·c, c the interval's counts of selections. A layer's
    high set H becomes the n experts of largest S, with hysteresis. Free places go to the most used
    experts. Then outsiders by S descending are paired with insiders by S ascending, and a pair is
    swapped while the outsider's S exceeds the insider's by more than m. Ties go to insiders, then
    to the lower id. The differences from the resident versions are the queue of transitions, the
    largest difference of scores first. Other code decides when they run, and the budget decides how
    many high experts there are (Spec.capacity).

    The paper gives no values. It leaves open which term α weighs (here the past), the unit of m
    (here shares of the mean score), and how a step over several intervals counts (here as one).
    docs/how-to/precision.md has the settings.
    """

    alpha: float = 0.5
    """α, from 0 to below 1: the weight of the past; 0: only the last interval counts."""
    margin: float = 0.1
    """m as a share of the layer's mean score; 0: no hysteresis."""
    slack: int | None = None
    """r, the paper's alternative to the margin: insiders stay while their rank is at most n + r,
    and outsiders take only free places."""
    scores: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    """float[L, E]: S of an earlier run, a warm start; None: S = 0 and all low."""
    paged: bool = False
    """Whether there are misses, which fill the wanted version."""
    resized: bool = False
    """Whether the capacity changes while it runs. n then follows at once, by the scores of the last
    interval."""
    interval: str = "4096 tokens"

    def __post_init__(self):
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must lie from 0 to below 1, not {self.alpha}")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin must be a number from 0 up, not {self.margin}")
        if self.slack is not None and self.slack < 0:
            raise ValueError(f"slack must be at least 0, not {self.slack}")

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset({Moment.INTERVAL, *([Moment.STEP_END] if self.resized else [])})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"counts", "version", "state", *(["capacity"] if self.resized else [])})

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"transitions", "fill_version"} if self.paged else {"transitions"})

    def init(self, spec: Spec) -> Hotness:
        """All experts low and S = 0, or the warm start. Raises ValueError unless there are two
        versions, and for scores of another model."""
        capacity, shape = hi_capacity(spec), (spec.layers, spec.experts)
        if self.scores is not None:
            check_shape(self.scores, shape, "scores")
        score = np.zeros(shape) if self.scores is None else self.scores.astype(np.float64)
        has_all_versions = tuple(spec.has_all_versions.tolist())
        return Hotness(
            score, self.start(*shape, capacity, has_all_versions) == HI, capacity, has_all_versions
        )

    def start(
        self,
        layers: int,
        experts: int,
        capacity: int,
        has_all_versions: Sequence[bool] | None = None,
    ) -> np.ndarray:
        """The map int8[L, E] to begin with; see precision_maps."""
        if self.scores is None:
            return np.full((layers, experts), LO, np.int8)
        return top_map(self.scores, capacity, has_all_versions)

    def decide(self, state: Hotness, seen: Observation) -> tuple[Hotness, Decision]:
        score = state.score
        if seen.moment == Moment.INTERVAL:
            score = self.alpha * score + (1 - self.alpha) * seen.counts
        elif seen.capacity == state.capacity:
            return state, Decision()
        if self.resized:
            state = state._replace(capacity=seen.capacity)
        wanted = cells_of_layers(state.capacity, state.has_all_versions, score.shape[1])
        layers = zip(score, state.high, wanted, strict=True)
        high = np.array([self._select(*layer) for layer in layers])
        decision = Decision(transitions=list_transitions(score, high, seen.version, seen.state))
        if self.paged:
            fill_version = np.where(high, HI, LO).astype(np.int8)
            decision = dataclasses.replace(decision, fill_version=fill_version)
        return state._replace(score=score, high=high), decision

    def _select(self, value: np.ndarray, high: np.ndarray, capacity: int) -> np.ndarray:
        """The next high set bool[E] of one layer."""
        expert, high = np.arange(len(value)), high.copy()
        if (surplus := int(high.sum()) - capacity) > 0:
            inside = np.lexsort((-expert, value))
            high[inside[high[inside]][:surplus]] = False
        if self.slack is not None:
            # Insiders come first among equals.
            rank = np.argsort(np.lexsort((expert, ~high, -value)))
            high &= rank < capacity + self.slack
        outside = np.lexsort((expert, -value))
        outside = outside[~high[outside] & (value[outside] > 0)]
        free = max(capacity - int(high.sum()), 0)
        high[outside[:free]] = True
        if self.slack is not None:
            return high
        inside = np.lexsort((-expert, value))
        inside = inside[high[inside]]
        outside = outside[free:]
        pairs = min(len(inside), len(outside))
        inside, outside = inside[:pairs], outside[:pairs]
        # The differences fall along the pairs, so the pairs to swap are the first ones.
        swapped = value[outside] > value[inside] + self.margin * value.mean()
        high[inside[swapped]], high[outside[swapped]] = False, True
        return high


def list_transitions(
    value: np.ndarray, high: np.ndarray, version: np.ndarray, state: np.ndarray
) -> tuple[Transition, ...]:
    """The transitions from the residents to the high set: in each layer promotions by value
    descending, paired with demotions by value ascending, the largest difference of a pair first.

    - `value`: float[L, E].
    - `high`: bool[L, E], the wanted high set.
    - `version`: int8[L, E]; −1: absent, which needs no transition.
    - `state`: int8[L, E], policy.State; an expert in flight counts as arrived.
    """
    hi = ((version == HI) & (state != State.DEMOTING)) | (state == State.PROMOTING)
    pairs = []
    for layer in range(len(value)):
        up = np.flatnonzero(high[layer] & ~hi[layer] & (version[layer] >= 0))
        down = np.flatnonzero(~high[layer] & hi[layer])
        up = up[np.argsort(-value[layer, up], kind="stable")]
        down = down[np.argsort(value[layer, down], kind="stable")]
        for place in range(max(len(up), len(down))):
            # A demotion alone frees a place, for which other layers may wait.
            gap = value[layer, up[place]] if place < len(up) else 0.0
            gap -= value[layer, down[place]] if place < len(down) else 0.0
            pair = [(HI, up[place])] if place < len(up) else []
            pair += [(LO, down[place])] if place < len(down) else []
            pairs.append((-float(gap), layer, place, pair))
    return tuple(
        Transition(layer, int(expert), version)
        for _, layer, _, pair in sorted(pairs)
        for version, expert in pair
    )
