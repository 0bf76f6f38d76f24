"""LLaPor that continues to learn while the model runs (PreScope, section 4.2.2, "online")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Observation, Spec
from host_offload.policies.prefetch import llapor
from host_offload.policies.prefetch.fitted import LayerArrays, of_layer
from host_offload.policies.prefetch.llapor import Learned, halve, tune_layer
from host_offload.policies.prefetch.next_layers import Predicted, finite

NAME = llapor.NAME


class SeenRows(NamedTuple):
    """A router's input and choice in a step, and whose rows they are."""

    gate_input: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    request: np.ndarray
    position: np.ndarray


class Tuner:
    """Networks that learn on their own thread, which ends with them. No step waits for it. While a
    round runs, the newest rows of steps are kept, up to the rows of one round."""

    def __init__(self, policy: LearnedOnline, layers: int):
        self.arrays: Mapping[str, np.ndarray] = policy.fitted.arrays
        """The arrays in use."""
        self._by_layer: dict[int, LayerArrays] = {}
        """Those that were asked for, by layer."""
        self.rounds = 0
        """Rounds whose networks came into use."""
        self._policy, self._layers = policy, layers
        self._trained: Mapping[str, np.ndarray] = self.arrays
        """The arrays in use, in float32 once they learned."""
        self._step: list[SeenRows] = []
        self._kept: list[list[SeenRows]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llapor")
        self._running: Future[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] | None = None

    def of_layer(self, layer: int) -> Mapping[str, np.ndarray]:
        """A layer's arrays in use; empty without any."""
        if layer not in self._by_layer:
            self._by_layer[layer] = of_layer(self.arrays, layer)
        return self._by_layer[layer]

    def see(self, layer: int, seen: SeenRows) -> None:
        """Takes the rows of a layer and returns at once. Layers of a step come in order. Arrays are
        kept, not copied. At a step's first layer, networks of a round that ended come into use."""
        if layer == 0:
            self.swap()
            self._step = []
        if len(self._step) != layer:
            return  # the step began before the policy did
        self._step.append(seen)
        if layer < self._layers - 1:
            return
        self._kept.append(self._step)
        rows = np.cumsum([len(step[0].ids) for step in self._kept[::-1]])
        if rows[-1] < self._policy.rows:
            return
        self._kept = self._kept[-1 - int(np.searchsorted(rows, self._policy.rows)) :]
        if self._running is None:
            kept, self._kept = self._kept, []
            self._running = self._thread.submit(self._round, kept, self._trained, self.rounds)

    def swap(self) -> None:
        """Takes the networks of a round that has ended, without waiting. Raises what the round
        raised."""
        if self._running is not None and self._running.done():
            (self._trained, self.arrays), self._running = self._running.result(), None
            self._by_layer = {}
            self.rounds += 1

    def wait(self) -> None:
        """Waits until the running round has ended: for tests."""
        if self._running is not None:
            self._running.exception()

    def _round(
        self, kept: list[list[SeenRows]], arrays: Mapping[str, np.ndarray], seed: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Arrays that learned, and those to use."""
        # Only learning loads Optax, not looking up a policy's name.
        from host_offload.policies.prefetch.training import LayerSamples, next_tokens

        found, stride = dict(arrays), self._policy.fitted.setting("stride")
        columns = [
            SeenRows(*map(np.concatenate, zip(*rows, strict=True)))
            for rows in zip(*kept, strict=True)
        ]
        before, after = next_tokens(columns[0].request, columns[0].position)
        for layer, here in enumerate(columns):
            own, target = of_layer(arrays, layer), (layer + stride) % len(columns)
            later = columns[target].ids
            some = LayerSamples(finite(here.gate_input), here.ids, here.weights, later)
            if target < layer:  # a layer of the next token
                some = some.of(before)._replace(later=later[after])
            if not own or not len(some.ids):
                continue
            some = some._replace(weights=some.weights.astype(np.float32))
            new = tune_layer(own, some, self._policy.rate, self._policy.iterations, seed)
            found |= {f"{layer}.{name}": array for name, array in new.items()}
        return found, halve(found)


class Learning(NamedTuple):
    """State of LearnedOnline. The tuner is mutable; see there."""

    predicted: Predicted
    tuner: Tuner


@dataclasses.dataclass(frozen=True)
class LearnedOnline(Learned):
    """Learned, whose networks continue to learn from what steps route, on a thread beside the
    steps.

    No step waits for it, and new networks take effect at the first layer of a step. No output bit
    depends on them. What is prefetched depends on times, so a replay takes it from the trace
    (policies.recorded). The paper has "a few samples, limited iterations" and no values.
    """

    rows: int = 256
    """Rows of each layer in a round."""
    iterations: int = 10
    """Iterations of a round."""
    rate: float = 2e-4

    def init(self, spec: Spec) -> Learning:
        """The state before the first step. Raises ValueError for another model, and for settings
        without effect."""
        if self.rows < 1 or self.iterations < 1 or self.rate <= 0:
            raise ValueError(
                f"learning on needs rows, iterations and a rate, not {self.rows}, "
                f"{self.iterations} and {self.rate}"
            )
        return Learning(super().init(spec), Tuner(self, spec.layers))

    def networks(self, spec: Spec) -> Tuner:
        return self.init(spec).tuner

    def watch(self, networks: Tuner, seen: Observation) -> None:
        rows = SeenRows(
            seen.gate_input[:, 0], seen.ids[:, 0], seen.weights[:, 0], seen.request, seen.position
        )
        networks.see(seen.layer, rows)

    def stats(self, state: Learning) -> dict[str, int]:
        """Statistics: rounds whose networks came into use."""
        return {"rounds": state.tuner.rounds}

    def decide(self, state: Learning, seen: Observation) -> tuple[Learning, Decision]:
        self.watch(state.tuner, seen)
        predicted, decision = self.predict(state.predicted, seen, state.tuner.of_layer(seen.layer))
        return state._replace(predicted=predicted), decision
