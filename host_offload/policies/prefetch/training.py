"""Shared parts of predictors that learn from router inputs in a trace: samples of a layer, rows
that are left out, and the loop over batches, by jax and Optax.

Shapes: N rows, D hidden size, k top-k, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from host_offload.policies.prefetch.fitted import Fitted, fit_of
from host_offload.policies.prefetch.next_layers import finite
from host_offload.traces.reader import Trace, TraceError

Report = Callable[[int, int, str], None]
"""(layer that learns, number of layers, progress in words)"""

Weights = Mapping[str, Any]
"""Arrays of a layer's network by name, numpy's or jax's."""


class LayerSamples(NamedTuple):
    """By rows: a router's input and choice, and the choice of the predicted layer."""

    gate_input: np.ndarray
    """float32[N, D]"""
    ids: np.ndarray
    """int16[N, k]"""
    weights: np.ndarray
    """float32[N, k]"""
    later: np.ndarray
    """int16[N, k]: the choice to predict."""

    def of(self, rows: np.ndarray) -> LayerSamples:
        return LayerSamples(*(array[rows] for array in self))


def fit_layers(
    trace: Trace,
    policy: str,
    stride: int,
    fit_layer: Callable[[int, LayerSamples, Callable[[str], None] | None], Weights],
    report: Report | None,
    *,
    next_tokens: bool = False,
) -> Fitted:
    """Trains a LayerPredictor of that name. It reads the trace once for each layer and holds the
    inputs of one layer.

    - `fit_layer`: (layer, samples, report) → a layer's arrays.
    - `next_tokens`: whether the last layers have networks too, if the trace has positions; they
      predict the first layers of the next token.

    Raises TraceError for a trace without gate inputs or tokens, ValueError for a stride that leaves
    no layer.
    """
    check_gate_inputs(trace, stride, policy)
    layers, arrays = trace.header.layers, {}
    if not next_tokens or "token.position" in trace.header.absent:
        layers -= stride
    for layer in range(layers):
        say = None if report is None else functools.partial(report, layer, layers)
        own = fit_layer(layer, layer_samples(trace, layer, stride), say)
        arrays |= {f"{layer}.{name}": np.asarray(array) for name, array in own.items()}
    return fit_of(policy, trace.header, arrays, {"stride": stride})


def check_gate_inputs(trace: Trace, stride: int, policy: str) -> None:
    """Checks a trace before a policy of that name learns from it. Raises TraceError for a trace
    without gate inputs or tokens, ValueError for a stride that leaves no layer."""
    header = trace.header
    if not 1 <= stride < header.layers:
        raise ValueError(f"stride must lie in 1…{header.layers - 1}, not {stride}")
    if not header.gate_input:
        raise TraceError(
            f"{trace.directory} has no gate inputs, which {policy} learns from; record a trace "
            "with --trace DIR,arrays=gate_input"
        )
    if not trace.tokens:
        raise TraceError(f"{trace.directory} has no tokens to learn from")


def input_similarity(trace: Trace, stride: int) -> np.ndarray:
    """float64[L − stride]: the mean cosine of each layer's router inputs and those `stride` layers
    later."""
    sums, rows = np.zeros(trace.header.layers - stride), 0
    for step in trace.step_traces():
        assert step.gate_input is not None, "see check_gate_inputs"
        inputs = finite(step.gate_input)
        inputs /= np.maximum(np.linalg.norm(inputs, axis=2, keepdims=True), 1e-6)
        sums += np.einsum("nld,nld->l", inputs[:, :-stride], inputs[:, stride:])
        rows += len(inputs)
    return sums / rows


def layer_samples(trace: Trace, layer: int, stride: int) -> LayerSamples:
    """All rows of a trace, to predict layer + stride from `layer`, past the last layer a layer of
    the next token (−1: the request has none). Memory holds one layer's arrays."""
    target = (layer + stride) % trace.header.layers
    parts = [
        (
            finite(step.gate_input[:, layer]),
            step.ids[:, layer],
            step.weights[:, layer].astype(np.float32),
            step.ids[:, target],
        )
        for step in trace.step_traces()
        if step.gate_input is not None and step.weights is not None
    ]
    found = LayerSamples(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if target > layer:
        return found
    here, following = next_tokens(trace.array("token.request"), trace.array("token.position"))
    later = np.full_like(found.later, -1)
    later[here] = found.later[following]
    return found._replace(later=later)


def next_tokens(request: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, row of the next token of the same request), of those of which both are there."""
    order = np.lexsort((position, request))
    here, following = order[:-1], order[1:]
    follows = (request[here] == request[following]) & (position[here] + 1 == position[following])
    return here[follows], following[follows]


def leave_out(trace: Trace, share: float) -> np.ndarray:
    """bool[tokens]: rows of the last `share` of a trace's requests, which are left out of training.
    Raises TraceError if either part would be empty."""
    request = trace.array("token.request")
    known = np.unique(request)
    count = max(round(share * len(known)), 1)
    if count >= len(known):
        raise TraceError(
            f"{trace.directory} has {len(known)} requests, too few to leave some out of training; "
            "record more of them"
        )
    return np.isin(request, known[-count:])


def principal(inputs: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean float32[D], basis float32[D, q]) of inputs float32[N, D]: the q directions of largest
    variance, in order, divided by one number so that the components together have unit size. With
    fewer than q directions the basis is narrower."""
    mean = inputs.mean(axis=0)
    centred = inputs - mean
    _, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    basis = directions[:, ::-1][:, :components]
    size = np.sqrt(np.mean((centred @ basis) ** 2))
    return mean, np.ascontiguousarray(basis / max(size, 1e-6), np.float32)


def draw_linear(rows: int, columns: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Initial weights float32[rows, columns] and bias as in torch.nn.Linear: uniform within
    ±1/√rows."""
    bound = 1 / np.sqrt(rows)
    weights = rng.uniform(-bound, bound, (rows, columns)).astype(np.float32)
    return weights, np.zeros(columns, np.float32)


def recall_of(scores: np.ndarray, later: np.ndarray) -> float:
    """Top-k recall: the share of the rows' experts, later int[N, k], that is among the k best of
    their scores [N, E]."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, : later.shape[1]]
    return float((best[:, :, None] == later[:, None, :]).any(axis=1).mean())


def drop_out(x: Any, share: float, key: Any) -> Any:
    """Dropout of a share of the units."""
    kept = jax.random.bernoulli(key, 1 - share, x.shape)
    return jnp.where(kept, x / (1 - share), 0.0)


class Task(Protocol):
    """A training task; hashable, so that equal layers share one compiled step."""

    @property
    def batch(self) -> int: ...

    @property
    def epochs(self) -> int:
        """Most passes over the rows."""
        ...

    @property
    def patience(self) -> int:
        """Training ends after this many passes without a better score on the rows left out."""
        ...

    def optimizer(self, batches: int) -> optax.GradientTransformation:
        """The optimizer. batches: of an epoch."""
        ...

    def loss(self, weights: Weights, batch: Any, key: Any) -> Any:
        """The mean loss of the rows of a batch."""
        ...


def train(
    task: Task,
    weights: Weights,
    rows: tuple[np.ndarray, ...],
    score: Callable[[Weights], float],
    rng: np.random.Generator,
    report: Callable[[str], None] | None = None,
) -> dict[str, np.ndarray]:
    """The weights of the epoch with the best score.

    - `rows`: arrays [N, …], a batch has some rows of each.
    - `score`: of weights, on the rows left out; larger is better.
    """
    batches = -(-len(rows[0]) // task.batch)
    state = task.optimizer(batches).init(dict(weights))
    best, most, waited = weights, -np.inf, 0
    for epoch in range(task.epochs):
        order = np.resize(rng.permutation(len(rows[0])), (batches, task.batch))
        for some in order:
            weights, state = take_step(task, batches, weights, state, rows, some, rng)
        found = score(weights)
        if report is not None:
            report(f"epoch {epoch}: {found:.3f} on what is left out")
        if found > most:
            best, most, waited = weights, found, 0
        elif (waited := waited + 1) >= task.patience:
            break
    return {name: np.asarray(array) for name, array in best.items()}


def take_step(
    task: Task,
    batches: int,
    weights: Weights,
    state: Any,
    rows: tuple[np.ndarray, ...],
    some: np.ndarray,
    rng: np.random.Generator,
) -> tuple[Weights, Any]:
    """Weights and the optimizer's state after a step on some rows."""
    batch = tuple(jnp.asarray(array[some]) for array in rows)
    return _step_of(task, batches)(weights, state, batch, jax.random.key(rng.integers(1 << 31)))


@functools.cache
def _step_of(task: Task, batches: int) -> Callable[..., tuple[Any, Any]]:
    optimizer = task.optimizer(batches)

    @jax.jit
    def step(weights: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        gradients = jax.grad(task.loss)(weights, batch, key)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    return step
