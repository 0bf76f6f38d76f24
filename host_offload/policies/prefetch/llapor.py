"""LLaPor, PreScope's learned predictor (section 4.2, docs/explanation/prescope.md): predicts a
later layer's experts from an earlier router's input and choice.

Each layer has a network of one of two shapes. Layers near the input and the output have a shallow
one; layers between have a residual block that the router's input gates. Shapes: N rows, D hidden
size, q principal components, E experts, H width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from host_offload.control.interface import Observation, Spec
from host_offload.policies.prefetch.next_layers import (
    LayerPredictor,
    apply_linear,
    columns,
    finite,
    mark_experts,
    multiply_rows,
)
from host_offload.traces.reader import Trace
from pallas_kernels.cpu.rows import Network

NAME = "learned"

NOT_TRAINED = ("mean", "basis", "balance")
"""A layer's arrays that are not trained: principal components, and 1/f."""


@dataclasses.dataclass(frozen=True)
class Learned(LayerPredictor):
    """The Learnable Layer-aware Predictor of PreScope (section 4.2): a router's input and choice
    predict the experts of the layer `stride` layers later. Needs driver="host". What is ours:
    docs/explanation/prescope.md."""

    needs: frozenset[str] = frozenset({"gate_input", "ids", "weights", "request", "position"})

    def shapes(self, own: Mapping[str, np.ndarray], spec: Spec) -> dict[str, tuple[int, ...]]:
        inputs, q, experts = spec.hidden, columns(own, "basis"), spec.experts
        width = columns(own, "input")
        around = {"mean": (inputs,), "basis": (inputs, q), "balance": (experts,)}
        return around | linear_shapes(q, width, experts, deep="gate" in own)

    def scores(self, own: Mapping[str, np.ndarray], seen: Any) -> np.ndarray:
        return scores(own, finite(seen.gate_input[:, 0]), seen.ids[:, 0], seen.weights[:, 0])

    def best(
        self, own: Mapping[str, np.ndarray], seen: Observation, next_token: bool, k: int
    ) -> list[int]:
        if len(seen.ids) == 1 and seen.gate_input.dtype == np.float16:
            network: Network | None = getattr(own, "network", None)
            if network is not None:
                return network(seen.gate_input, seen.ids, seen.weights, k)[1]
        return super().best(own, seen, next_token, k)

    def networks(self, spec: Spec) -> Networks:
        """The networks for a placement, which calls their `of_layer`. Raises ValueError as init."""
        self.init(spec)
        return self.fitted

    def watch(self, networks: Any, seen: Observation) -> None:
        """Shows the networks what a layer routed."""


class Networks(Protocol):
    """Networks by layer."""

    def of_layer(self, layer: int) -> Mapping[str, np.ndarray]:
        """A layer's arrays; empty without a network."""
        ...


def choose_routing(said: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The routing that scores [N, E] predict, in the form of a router's: (ids int64[N, k], weights
    [N, k]). Weights are the scores' probabilities, and each row has the sum of its earlier
    weights [N, k]."""
    ids = np.argsort(-said, axis=1, kind="stable")[:, : weights.shape[1]]
    p = 1 / (1 + np.exp(-np.take_along_axis(said, ids, axis=1)))
    return ids, p * (weights.sum(axis=1, keepdims=True) / p.sum(axis=1, keepdims=True))


# ---- the network


def linear_shapes(q: int, width: int, experts: int, *, deep: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of a network's matrices and biases, see logits.

    - `deep`: whether it has a block.
    """
    sizes = {"input": (q + experts, width), "output": (width, experts)}
    if deep:
        sizes |= {"inner1": (width, width), "inner2": (width, width), "gate": (q, width)}
    return sizes | {f"{name}_bias": size[1:] for name, size in sizes.items()}


def compress(gate_input: np.ndarray, mean: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """PCA_q(a): float32[N, q] of router inputs float32[N, D], by a layer's mean [D] and basis [D,
    q], which also scales them to unit size."""
    return multiply_rows(gate_input - mean, basis)


def logits(
    weights: Mapping[str, Any],
    pca: Any,
    route: Any,
    xp: ModuleType,
    drop: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """The logits float32[N, E] for PCA_q(a) [N, q] and route(ids, w) [N, E].

    - `weights`: by name, `input` [q + E, H], `output` [H, E], with a block also `inner1`, `inner2`
      [H, H] and `gate` [q, H]; each with a bias, `input_bias` [H] and so on.
    - `xp`: numpy or jax.numpy.
    - `drop`: dropout, or nothing.
    """

    def linear(name: str, x: Any, form: str = "") -> Any:
        return apply_linear(x, weights[name], weights[f"{name}_bias"], form, xp)

    def block(name: str, x: Any) -> Any:
        """lin: Dropout(GELU(Linear(x)))."""
        return drop(linear(name, x, "gelu"))

    z = block("input", xp.concatenate([pca, route], axis=1))
    if "gate" in weights:
        residual = block("inner2", block("inner1", z))
        z = z + residual * linear("gate", pca, "sigmoid")
    return linear("output", z)


def scores(
    arrays: Mapping[str, np.ndarray], gate_input: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Scores float32[N, E] by a layer's arrays (of_layer), in the order of p = σ(scores).

    - `gate_input`: float32[N, D], finite.
    - `ids`, `weights`: [N, k].
    """
    pca = compress(gate_input, arrays["mean"], arrays["basis"])
    return logits(arrays, pca, mark_experts(ids, arrays["output_bias"].size, weights), np)


def halve(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A layer's arrays with matrices in float16: a step waits for their bytes, and PreScope's
    networks have at most 2.8 MB (section 6.4)."""
    return {
        name: array.astype(np.float16, copy=False) if array.ndim == 2 else array
        for name, array in arrays.items()
    }


# ---- training (section 4.2.2)


@dataclasses.dataclass(frozen=True)
class LayerTask:
    """How a layer of a group learns (training.Task). Values are ours if the paper has none."""

    deep: bool
    """Whether it is a middle layer."""
    width: int = 256
    epochs: int = 30
    patience: int = 6
    batch: int = 128
    fixed_rate: float | None = None
    """AdamW's rate for a network that learns while running; None: its group's."""
    dropout: float = 0.1
    focal: float = 1.0
    """λ"""
    gamma: float = 2.0
    """γ"""
    noise: float = 0.05
    """Standard deviation of the noise on principal components, which have unit size."""
    masked: float = 0.05
    """Share of a batch's inputs that are zero."""

    @property
    def components(self) -> int:
        """q of the PCA (the paper's, for 4096 inputs), at most the number of inputs."""
        return 512 if self.deep else 256

    def optimizer(self, batches: int) -> Any:
        """AdamW: a linear warm-up of five epochs, then a cosine (input, output), or one rate."""
        import optax

        rate: Any = self.fixed_rate or (2e-3 if self.deep else 1e-3)
        if not self.deep and self.fixed_rate is None:
            warmup = min(5, self.epochs - 1) * batches
            steps = max(self.epochs * batches, warmup + 1)
            rate = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps)
        return optax.adamw(rate, weight_decay=1e-2 if self.deep else 1e-4)

    def loss(self, weights: Mapping[str, Any], batch: Any, key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        from host_offload.policies.prefetch.training import drop_out

        pca, route, chosen, balance = batch
        noise, mask, *drops = jax.random.split(key, 5)
        pca = pca + self.noise * jax.random.normal(noise, pca.shape)
        pca = pca * jax.random.bernoulli(mask, 1 - self.masked, pca.shape)
        keys = iter(drops)
        found = logits(weights, pca, route, jnp, lambda x: drop_out(x, self.dropout, next(keys)))
        return self.loss_of(found, chosen, balance)

    def loss_of(self, found: Any, chosen: Any, balance: Any) -> Any:
        """The mean over rows of the loss of logits [N, E] against chosen 0/1 [N, E].

        Input and output groups: ℒ = L_expert + λ·L_focal with balance [N, E] (1/f_i). Middle group:
        binary cross-entropy, our reading of the paper. Both are means over experts. The paper's BCE
        is printed without its minus.
        """
        import jax
        import jax.numpy as jnp
        import optax

        entropy = optax.sigmoid_binary_cross_entropy(found, chosen)
        if self.deep:
            return entropy.mean()
        wrong = jnp.abs(jax.nn.sigmoid(found) - chosen)  # 1 − p_t
        return (entropy * balance).mean() + self.focal * (wrong**self.gamma * entropy).mean()

    def rows_of(self, some: Any, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """The arrays of batches: pca, route, chosen and balance of training.LayerSamples."""
        experts = len(arrays["balance"])
        pca = compress(some.gate_input, arrays["mean"], arrays["basis"])
        route = mark_experts(some.ids, experts, some.weights)
        chosen = mark_experts(some.later, experts)
        return pca, route, chosen, np.broadcast_to(arrays["balance"], chosen.shape)

    def draw_weights(
        self, components: int, experts: int, rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        from host_offload.policies.prefetch.training import draw_linear

        found, shapes = {}, linear_shapes(components, self.width, experts, deep=self.deep)
        for name, shape in shapes.items():
            if len(shape) == 2:
                found[name], found[f"{name}_bias"] = draw_linear(*shape, rng)
        return found


def fit(
    trace: Trace,
    *,
    stride: int = 1,
    width: int = LayerTask.width,
    epochs: int = LayerTask.epochs,
    patience: int = LayerTask.patience,
    batch: int = LayerTask.batch,
    edge: int = -1,
    seed: int = 0,
    report: Callable[[int, int, str], None] | None = None,
) -> Learned:
    """LLaPor for the model of a trace that has gate inputs.

    The last quarter of the trace's requests is left out of training. The epoch with the best recall
    on it is kept.

    - `edge`: layers of the input and of the output group; −1: by the similarity of router inputs
      (middle_group).

    Raises as training.fit_layers, and TraceError for too few requests.
    """
    from host_offload.policies.prefetch import training

    training.check_gate_inputs(trace, stride, NAME)
    middle = range(edge, trace.header.layers - stride - edge)
    if edge < 0:
        middle = middle_group(training.input_similarity(trace, stride))

    def fit_one(layer: int, some: Any, say: Callable[[str], None] | None) -> Any:
        task = LayerTask(layer in middle, width, epochs, patience, batch)
        left_out, known = training.leave_out(trace, 0.25), some.later[:, 0] >= 0
        given = some.of(~left_out & known), some.of(left_out & known)
        if not all(len(part.ids) for part in given):
            return {}  # no request has a next token to learn from
        rng = np.random.default_rng(seed)
        return halve(fit_layer(task, *given, trace.header.experts, rng, say))

    return Learned(training.fit_layers(trace, NAME, stride, fit_one, report, next_tokens=True))


def middle_group(similarity: np.ndarray) -> range:
    """The layers of the middle group: those between the input and the output group, whose router
    inputs resemble later ones more (PreScope, sections 1 and 3.1). Of all runs that leave a layer
    at both ends it is the one that separates the similarities best, by the variance between the
    groups (ours; the paper leaves it open). Empty if no run has more similarity than the rest.

    - `similarity`: float[n], of each layer with a network.
    """
    count, best, found = len(similarity), 0.0, range(0)
    for first in range(1, count - 1):
        for end in range(first + 1, count):
            inside = np.arange(first, end)
            gap = similarity[inside].mean() - np.delete(similarity, inside).mean()
            variance = gap * abs(gap) * len(inside) * (count - len(inside))
            if variance > best:
                best, found = variance, range(first, end)
    return found


def fit_layer(
    task: LayerTask,
    learned: Any,
    left_out: Any,
    experts: int,
    rng: np.random.Generator,
    report: Callable[[str], None] | None = None,
) -> dict[str, np.ndarray]:
    """Trains one layer's network. Returns its arrays (see scores) of the epoch with the best
    recall.

    - `learned`, `left_out`: training.LayerSamples.
    """
    from host_offload.policies.prefetch import training

    mean, basis = training.principal(learned.gate_input, task.components)
    share = mark_experts(learned.later, experts).mean(axis=0)
    # 1 / f relative to uniform use, at most 10.
    balance = (1 / np.maximum(share / share.mean(), 0.1)).astype(np.float32)
    around = {"mean": mean, "basis": basis, "balance": balance}

    def score(weights: Mapping[str, Any]) -> float:
        own = around | {name: np.asarray(array) for name, array in weights.items()}
        found = scores(own, left_out.gate_input, left_out.ids, left_out.weights)
        return training.recall_of(found, left_out.later)

    begun = task.draw_weights(basis.shape[1], experts, rng)
    rows = task.rows_of(learned, around)
    return around | training.train(task, begun, rows, score, rng, report)


def tune_layer(
    arrays: Mapping[str, np.ndarray], some: Any, rate: float, iterations: int, seed: int
) -> dict[str, np.ndarray]:
    """A layer's arrays after a few more iterations on new samples, by AdamW at one rate, trained
    ones in float32. Principal components and 1/f stay.

    - `some`: training.LayerSamples.
    """
    from host_offload.policies.prefetch.training import take_step

    task = LayerTask("gate" in arrays, fixed_rate=rate)
    rows = task.rows_of(some, arrays)
    weights: Any = {
        name: a.astype(np.float32) for name, a in arrays.items() if name not in NOT_TRAINED
    }
    rng = np.random.default_rng(seed)
    state = task.optimizer(1).init(weights)
    for _ in range(iterations):
        chosen = rng.integers(len(rows[0]), size=task.batch)
        weights, state = take_step(task, 1, weights, state, rows, chosen, rng)
    return {**arrays, **{name: np.asarray(array) for name, array in weights.items()}}
