"""LLaPor that goes on learning while the model runs (PreScope, section 4.2.2, "online")."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.policies.prefetch.fitted import read_fitted
from host_offload.policies.prefetch.llapor.llapor_network import of_layer, scores
from host_offload.policies.prefetch.llapor.llapor_policy import NAME, Learned
from host_offload.policies.prefetch.next_layers import Predicted, finite, with_predicted
from host_offload.traces.reader import Trace, TraceError


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A round of learning; the paper has "a few samples, limited iterations" and no figures."""

    rows: int = 256
    """Rows of each layer that a round waits for."""
    iterations: int = 10
    rate: float = 2e-4


class SeenRows(NamedTuple):
    """What a layer's router saw and chose in a step."""

    gate_input: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


class Tuner:
    """Networks that learn on a thread of their own, which ends with them. Nobody waits for it:
    what steps bring while a round runs is kept up to the rows of one round, the newest."""

    def __init__(self, arrays: Mapping[str, np.ndarray], stride: int, tuning: Tuning):
        self.arrays: Mapping[str, np.ndarray] = arrays
        """As they are used now."""
        self.rounds = 0
        """That were swapped in."""
        self._stride, self._tuning = stride, tuning
        # Optax is loaded by those who learn, not by whoever looks a policy's name up.
        self._training: Any = pkgutil.resolve_name(f"{__package__}.llapor_training")
        self._step: list[SeenRows] = []
        self._kept: list[list[SeenRows]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llapor")
        self._running: Future[dict[str, np.ndarray]] | None = None

    def see(self, layer: int, layers: int, seen: SeenRows) -> None:
        """Takes what a layer saw; layers of a step come in order. Returns at once; the arrays are
        kept, not copied."""
        if layer == 0:
            self._step = []
        if len(self._step) != layer:
            return  # the step began before the policy did
        self._step.append(seen)
        if layer < layers - 1:
            return
        self._kept.append(self._step)
        rows = np.cumsum([len(step[0].ids) for step in self._kept[::-1]])
        if rows[-1] < self._tuning.rows:
            return
        self._kept = self._kept[-1 - int(np.searchsorted(rows, self._tuning.rows)) :]
        if self._running is None:
            kept, self._kept = self._kept, []
            self._running = self._thread.submit(self._round, kept, self.arrays, self.rounds)

    def swap(self) -> None:
        """Takes the networks of a round that has ended; waits for none. Raises what it raised."""
        if self._running is not None and self._running.done():
            self.arrays, self._running = self._running.result(), None
            self.rounds += 1

    def wait(self) -> None:
        """Until the round that runs has ended: for tests."""
        if self._running is not None:
            self._running.exception()

    def _round(
        self, kept: list[list[SeenRows]], arrays: Mapping[str, np.ndarray], seed: int
    ) -> dict[str, np.ndarray]:
        found, tuning = dict(arrays), self._tuning
        for layer in range(len(kept[0]) - self._stride):
            here = [step[layer] for step in kept]
            later = [step[layer + self._stride] for step in kept]
            some = self._training.LayerSamples(
                finite(np.concatenate([seen.gate_input for seen in here])),
                np.concatenate([seen.ids for seen in here]),
                np.concatenate([seen.weights for seen in here]).astype(np.float32),
                np.concatenate([seen.ids for seen in later]),
                np.zeros(0, int),
            )
            own = of_layer(arrays, layer)
            settings = self._training.AS_PRESCOPE, tuning.rate, tuning.iterations, seed
            new = self._training.tuned(own, some, *settings)
            found |= {f"{layer}.{name}": array for name, array in new.items()}
        return found


class Learning(NamedTuple):
    """State of LearnedOnline. The tuner is no value: see there."""

    predicted: Predicted
    layers: int
    tuner: Tuner | None
    """None: decisions are taken again."""
    next: int = 0
    """How many were."""


@dataclasses.dataclass(frozen=True)
class LearnedOnline(Learned):
    """Learned whose networks go on learning, on a thread beside the steps, from what these route:
    no step waits for it, and new networks are used from the first layer of a step on. No output bit
    depends on them; what is prefetched then depends on times, so it is taken from the trace of a
    run where it is replayed: see `recorded`.
    """

    tuning: Tuning = Tuning()
    decisions: tuple[tuple[int, tuple[Stage, ...]], ...] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    """(step, stages) of each layer of a run, to be taken again."""

    def init(self, spec: Spec) -> Learning:  # type: ignore[override]
        """Raises ValueError for another model, or a tuning that learns nothing."""
        if self.tuning.rows < 1 or self.tuning.iterations < 1 or self.tuning.rate <= 0:
            raise ValueError(f"tuning needs rows, iterations and a rate, not {self.tuning}")
        predicted = super().init(spec)
        if self.decisions is not None:
            return Learning(predicted, spec.layers, None)
        stride = self.fitted.setting("stride")
        return Learning(predicted, spec.layers, Tuner(self.fitted.arrays, stride, self.tuning))

    def stats(self, state: Learning) -> dict[str, int]:
        """rounds: of learning whose networks came into use."""
        return {"rounds": 0 if state.tuner is None else state.tuner.rounds}

    def decide(  # type: ignore[override]
        self, state: Learning, observation: Observation
    ) -> tuple[Learning, Decision]:
        seen: Any = observation
        if state.tuner is None:
            return self._again(state, observation)
        tuner = state.tuner
        if seen.layer == 0:
            tuner.swap()
        here = SeenRows(seen.gate_input[:, 0], seen.ids[:, 0], seen.weights[:, 0])
        tuner.see(seen.layer, state.layers, here)
        found = None
        if own := of_layer(tuner.arrays, seen.layer):
            found = scores(own, finite(here.gate_input), here.ids, here.weights)
        stride = self.fitted.setting("stride")
        predicted, decision = with_predicted(state.predicted, seen.layer, stride, found, NAME)
        return state._replace(predicted=predicted), decision

    def _again(self, state: Learning, observation: Observation) -> tuple[Learning, Decision]:
        assert self.decisions is not None
        if state.next == len(self.decisions) or self.decisions[state.next][0] != observation.step:
            raise TraceError(
                f"{NAME} decided nothing more in step {observation.step} of the trace that its "
                "decisions are taken from; give that run's trace"
            )
        stages = self.decisions[state.next][1]
        return state._replace(next=state.next + 1), Decision(stages=stages)


def recorded(trace: Trace, policy: LearnedOnline) -> LearnedOnline:
    """The policy of a run, which decides again what it decided in that run. Raises TraceError for a
    trace without its decisions."""
    found = [
        (line["step"], tuple(Stage(*entry) for entry in line["decision"]["stages"]))
        for line in trace.decided()
        if line["policy"] == LearnedOnline.__name__ and line["moment"] == Moment.ROUTED.name
    ]
    if not found:
        raise TraceError(f"{trace.directory} has no decisions of {LearnedOnline.__name__}")
    return dataclasses.replace(policy, decisions=tuple(found))


def read(path: str) -> LearnedOnline:
    """The policy that begins with the networks of a file of `moejax train-predictor`."""
    return LearnedOnline(read_fitted(path, NAME))
