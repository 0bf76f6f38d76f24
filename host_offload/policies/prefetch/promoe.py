"""ProMoE: a learned predictor that looks a stride ahead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Spec
from host_offload.policies.prefetch.next_layers import (
    LayerPredictor,
    apply_linear,
    columns,
    finite,
    mark_experts,
)
from host_offload.traces.reader import Trace

NAME = "promoe"


@dataclasses.dataclass(frozen=True)
class ProMoE(LayerPredictor):
    """Stride prefetching with learned predictors (Song et al. 2024, arXiv:2410.22134; a baseline in
    fMoE, sections 6.1 and 7).

    The router's input of layer l predicts the experts of layer l + stride, so that transfers have
    the time of several layers. Each layer has its own network, trained like a copy of ProMoE's
    training script (see `fit`). The queue of transfers provides chunks, and demands that overtake
    prefetches (docs/explanation/transfers.md). Needs driver="host". What is left out of the paper:
    docs/explanation/policies.md.
    """

    def shapes(self, own: Mapping[str, np.ndarray], spec: Spec) -> dict[str, tuple[int, ...]]:
        sizes = spec.hidden, columns(own, "weights1"), columns(own, "weights2"), spec.experts
        found: dict[str, tuple[int, ...]] = {}
        for i, pair in enumerate(itertools.pairwise(sizes), 1):
            found |= {f"weights{i}": pair, f"bias{i}": pair[1:]}
        return found

    def scores(self, own: Any, seen: Any) -> np.ndarray:
        return scores(own, finite(seen.gate_input[:, 0]))


def scores(weights: Any, x: Any, drop: Callable[[Any], Any] = lambda x: x) -> Any:
    """Scores [N, E] for router inputs float32[N, D] of numpy or jax: two hidden layers with ReLU
    and a linear output."""
    for i in (1, 2):
        x = drop(apply_linear(x, weights[f"weights{i}"], weights[f"bias{i}"], "relu"))
    return apply_linear(x, weights["weights3"], weights["bias3"])


def draw_network(sizes: Sequence[int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Initial weights. sizes: inputs, units of each hidden layer, outputs."""
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

    For each layer l + stride a network learns the 0/1 vector of chosen experts from the router's
    input of layer l: two hidden layers, absolute error, Adam, a tenth of the tokens left out to
    decide when to stop, as in deps/sparse-llm-cache-scripts/train-predict-model of huwf5/promoe,
    commit 02312ad5 (train_predict_model.py, utils.py). Raises as training.fit_layers.
    """
    from host_offload.policies.prefetch import training

    task, experts = ProMoETask(rate, dropout, batch, epochs), trace.header.experts

    def fit_layer(layer: int, some: Any, say: Callable[[str], None] | None) -> Any:
        x, y = some.gate_input, mark_experts(some.later, experts)
        rng = np.random.default_rng((seed, layer))
        order = rng.permutation(len(x))
        kept, left_out = order[len(x) // 10 :], order[: max(len(x) // 10, 1)]

        def score(weights: Any) -> float:
            return -float(np.abs(np.asarray(scores(weights, x[left_out])) - y[left_out]).mean())

        begun = draw_network((x.shape[1], hidden, hidden, experts), rng)
        return training.train(task, begun, (x[kept], y[kept]), score, rng, say)

    return ProMoE(training.fit_layers(trace, NAME, stride, fit_layer, report))
