"""ProMoE: a learned predictor that looks a stride ahead."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, fitted
from host_offload.policies.prefetch.next_layers import (
    Predicted,
    finite,
    mark_experts,
    with_predicted,
)
from host_offload.traces.reader import Trace

NAME = "promoe"


@dataclasses.dataclass(frozen=True)
class ProMoE:
    """Stride prefetching with learned predictors (Song et al. 2024, arXiv:2410.22134; as a baseline
    in fMoE, sections 6.1 and 7): what the router of layer l saw predicts the experts of layer
    l + stride, so that transfers have several layers' time. Everybody whom some row is predicted
    to choose is wanted, the nearest layer first. A predictor is a network of its layer, trained as
    a copy of ProMoE's training script does (see `fit`). The first `stride` layers have no
    prediction. Chunks, and demands that go before what was begun, are those of the queue of
    transfers (docs/transfers.md). Needs driver="host". What is left out of the paper:
    docs/policies.md.
    """

    fitted: Fitted

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Predicted:
        """No layer is predicted yet. Raises ValueError for another model."""
        self.fitted.check(spec)
        return Predicted(spec.top_k)

    def decide(self, state: Predicted, observation: Observation) -> tuple[Predicted, Decision]:
        seen: Any = observation
        arrays, stride, found = self.fitted.arrays, self.fitted.setting("stride"), None
        if seen.layer < len(arrays["bias1"]):
            own = {name: array[seen.layer] for name, array in arrays.items()}
            found = scores(own, finite(seen.gate_input[:, 0]))
        return with_predicted(state, seen.layer, stride, found, NAME)


def scores(weights: Any, x: Any, drop: Callable[[Any], Any] = lambda x: x) -> Any:
    """[N, E] of gate inputs float32[N, D], numpy's or jax's: two hidden layers with ReLU and a
    linear output."""
    for i in (1, 2):
        x = x @ weights[f"weights{i}"] + weights[f"bias{i}"]
        x = drop(x * (x > 0))
    return x @ weights["weights3"] + weights["bias3"]


def draw_network(sizes: Sequence[int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights to begin with. sizes: inputs, units of each hidden layer, outputs."""
    from host_offload.policies.prefetch.training import draw_linear

    found: dict[str, np.ndarray] = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        found[f"weights{i}"], found[f"bias{i}"] = draw_linear(inputs, outputs, rng)
    return found


@dataclasses.dataclass(frozen=True)
class ProMoETask:
    """Absolute error and Adam (training.Task)."""

    rate: float
    dropout: float
    batch: int
    epochs: int
    patience: int = 10

    def optimizer(self, batches: int) -> Any:
        import optax

        return optax.adam(self.rate)

    def loss(self, weights: Any, batch: Any, key: Any) -> Any:
        import jax

        from host_offload.policies.prefetch.training import drop_out

        x, chosen = batch
        keys = iter(jax.random.split(key, 2))
        found = scores(weights, x, lambda x: drop_out(x, self.dropout, next(keys)))
        return abs(found - chosen).mean()


def fit(
    trace: Trace,
    *,
    stride: int = 2,
    hidden: int = 128,
    rate: float = 1e-3,
    dropout: float = 0.1,
    batch: int = 256,
    epochs: int = 200,
    seed: int = 0,
    report: Callable[[int, int, str], None] | None = None,
) -> ProMoE:
    """ProMoE with predictors for the model of a trace that has gate inputs.

    For each layer l + stride a network is trained from the gate input of layer l to the 0/1 vector
    of the experts chosen: two hidden layers, absolute error, Adam, a tenth of the tokens left out
    to see when to stop, as in deps/sparse-llm-cache-scripts/train-predict-model of huwf5/promoe,
    commit 02312ad5 (train_predict_model.py, utils.py). It reads the trace once for each layer and
    holds the inputs of one. Raises TraceError for a trace without gate inputs or tokens, ValueError
    for a stride that leaves no layer.
    """
    from host_offload.policies.prefetch import training

    header, layers = trace.header, trace.header.layers - stride
    training.check_gate_inputs(trace, stride, NAME)
    sizes = header.gate_input, hidden, hidden, header.experts
    task, networks = ProMoETask(rate, dropout, batch, epochs), []
    for layer in range(layers):
        some = training.layer_samples(trace, layer, stride)
        x, y = some.gate_input, mark_experts(some.later, header.experts)
        rng = np.random.default_rng((seed, layer))
        order = rng.permutation(len(x))
        kept = order[len(x) // 10 :]
        left_out = order[: len(x) // 10] if len(x) >= 10 else order
        begun = draw_network(sizes, rng)
        say = None if report is None else functools.partial(report, layer, layers)

        def score(weights: Any, x=x[left_out], y=y[left_out]) -> float:
            return -float(np.abs(np.asarray(scores(weights, x)) - y).mean())

        networks.append(training.train(task, begun, (x[kept], y[kept]), score, rng, say))
    arrays = {name: np.stack([each[name] for each in networks]) for name in networks[0]}
    return ProMoE(fitted(NAME, header, arrays, {"stride": stride, "hidden": hidden}))
