"""How LLaPor learns from a trace (PreScope, section 4.2.2), by jax and Optax."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from host_offload.policies.prefetch.fitted import check_gate_inputs, fitted
from host_offload.policies.prefetch.llapor.llapor_network import compressed, groups, logits, routing
from host_offload.policies.prefetch.llapor.llapor_policy import NAME, Learned
from host_offload.policies.prefetch.next_layers import finite
from host_offload.traces.reader import Trace, TraceError

Report = Callable[[int, int, int, float], None]
"""(layer that learns, layers, epoch, recall on what was left out)"""


class LayerGroup(NamedTuple):
    """What differs between the groups of layers; figures are ours where the paper has none."""

    components: int
    """q of the PCA (the paper's, at 4096 inputs), at most as many as there are inputs."""
    deep: bool
    rate: float
    decay: float
    warmup: int
    """Epochs until the full rate; 0: the rate stays as it is."""


EDGE = LayerGroup(components=256, deep=False, rate=1e-3, decay=1e-4, warmup=5)
MIDDLE = LayerGroup(components=512, deep=True, rate=2e-3, decay=1e-2, warmup=0)


@dataclasses.dataclass(frozen=True)
class NetworkTraining:
    """Settings of ours where the paper has none."""

    width: int = 512
    dropout: float = 0.1
    focal: float = 1.0
    """λ"""
    gamma: float = 2.0
    """γ"""
    noise: float = 0.05
    """Standard deviation of what is added to principal components, which have unit size."""
    masked: float = 0.05
    """Share of a batch's inputs that are zero."""
    batch: int = 128
    epochs: int = 30
    patience: int = 6
    """It ends after so many epochs without a better recall on what was left out."""
    edge: int | None = None
    """Layers of the input and of the output group; None: an eighth each."""
    seed: int = 0


AS_PRESCOPE = NetworkTraining()


class LayerSamples(NamedTuple):
    """What a layer saw and chose, and whom the layer of the prediction chose; by rows."""

    gate_input: np.ndarray
    """float32[N, D]"""
    ids: np.ndarray
    """int16[N, k]"""
    weights: np.ndarray
    """float32[N, k]"""
    later: np.ndarray
    """int16[N, k]: what is to be predicted."""
    step: np.ndarray
    """int[N]: place of the row's step in the trace."""

    def of(self, rows: np.ndarray) -> LayerSamples:
        return LayerSamples(*(array[rows] for array in self))


def samples(trace: Trace, layer: int, stride: int) -> LayerSamples:
    """All rows of a trace, for the prediction of layer + stride by that layer; one layer's arrays
    are held."""
    parts = [
        (
            finite(step.gate_input[:, layer]),
            step.ids[:, layer],
            step.weights[:, layer].astype(np.float32),
            step.ids[:, layer + stride],
            np.full(len(step.ids), place),
        )
        for place, step in enumerate(trace.step_traces())
        if step.gate_input is not None and step.weights is not None
    ]
    return LayerSamples(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def split(trace: Trace, shares: tuple[float, ...]) -> list[np.ndarray]:
    """bool[tokens] of each part of a trace, by its requests in their order, as in
    docs/ablation.md, "A fair comparison".
    shares: of the requests, of all parts but the last. Raises TraceError where a part would be
    empty."""
    request = trace.array("token.request") if trace.tokens else np.zeros(0, np.int32)
    known = np.unique(request)
    ends = [0, *(round(share * len(known)) for share in np.cumsum(shares)), len(known)]
    found = [np.isin(request, known[a:b]) for a, b in itertools.pairwise(ends)]
    if not all(part.any() for part in found):
        raise TraceError(
            f"{trace.directory} has {len(known)} requests, too few to leave some out of training; "
            "record more of them"
        )
    return found


def fit(
    trace: Trace,
    *,
    stride: int = 1,
    training: NetworkTraining = AS_PRESCOPE,
    rows: tuple[np.ndarray, np.ndarray] | None = None,
    report: Report | None = None,
) -> Learned:
    """LLaPor for the model of a trace that has gate inputs.

    rows: bool[tokens] of the trace to learn from and to stop by; None: the first three quarters of
    its requests, and the others. Of the epochs the one with the best recall on those is taken. It
    reads the trace once for each layer. Raises TraceError for a trace without gate inputs or with
    too few requests, ValueError for a stride that leaves no layer.
    """
    header = trace.header
    check_gate_inputs(trace, stride, NAME)
    learned, left_out = rows or split(trace, (0.75,))
    kinds = groups(header.layers - stride, training.edge)
    arrays: dict[str, np.ndarray] = {}
    for layer, kind in enumerate(kinds):
        found = samples(trace, layer, stride)
        told = functools.partial(report, layer, len(kinds)) if report else None
        group = MIDDLE if kind == "middle" else EDGE
        own = trained(found.of(learned), found.of(left_out), header.experts, group, training, told)
        arrays |= {f"{layer}.{name}": array for name, array in own.items()}
    settings = {"stride": stride, "groups": " ".join(kinds)}
    return Learned(fitted(NAME, header, arrays, settings))


def principal(inputs: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean float32[D], basis float32[D, q]) of inputs float32[N, D]: the q directions of largest
    variance, the first one first, divided by one number so that the components have unit size
    together. Of fewer than q directions the rest are left out."""
    mean = inputs.mean(axis=0)
    centred = inputs - mean
    _, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    basis = directions[:, ::-1][:, :components]
    size = np.sqrt(np.mean((centred @ basis) ** 2))
    return mean, np.ascontiguousarray(basis / max(size, 1e-6), np.float32)


def trained(
    learned: LayerSamples,
    left_out: LayerSamples,
    experts: int,
    group: LayerGroup,
    training: NetworkTraining,
    report: Callable[[int, float], None] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of one layer's network (network.scores), of the epoch with the best recall."""
    mean, basis = principal(learned.gate_input, group.components)
    x, y = ((*_inputs(s, mean, basis, experts), _chosen(s, experts)) for s in (learned, left_out))
    batches = -(-len(x[0]) // training.batch)
    rng = np.random.default_rng(training.seed)
    weights = _drawn(basis.shape[1], experts, group.deep, training.width, rng)
    share = x[2].mean(axis=0)
    # 1 / f, relative to an even use; nobody counts for more than ten times that.
    balance = 1 / np.maximum(share / share.mean(), 0.1) if not group.deep else None
    optimizer = _optimizer(group, training, batches)
    state = optimizer.init(weights)
    step = _step_of(group, training, batches)
    best, recall, waited = weights, -1.0, 0
    for epoch in range(training.epochs):
        order = np.resize(rng.permutation(len(x[0])), (batches, training.batch))
        for rows in order:
            some = tuple(jnp.asarray(array[rows]) for array in x)
            key = jax.random.key(rng.integers(1 << 31))
            weights, state = step(weights, state, some, balance, key)
        found = recall_of(np.asarray(_logits(weights, y[0], y[1])), left_out.later)
        if report is not None:
            report(epoch, found)
        waited = 0 if found > recall else waited + 1
        if found > recall:
            best, recall = weights, found
        if waited >= training.patience:
            break
    return {"mean": mean, "basis": basis, **{n: np.asarray(a) for n, a in best.items()}}


def tuned(
    arrays: Mapping[str, np.ndarray],
    some: LayerSamples,
    training: NetworkTraining,
    rate: float,
    iterations: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """A layer's arrays after a few iterations on new samples, from where they are: AdamW at one
    rate. Principal components stay as they are."""
    experts = arrays["output_bias"].size
    group = MIDDLE if "gate" in arrays else EDGE
    x = (*_inputs(some, arrays["mean"], arrays["basis"], experts), _chosen(some, experts))
    weights = {n: jnp.asarray(a) for n, a in arrays.items() if n not in ("mean", "basis")}
    rng = np.random.default_rng(seed)
    step = _step_of(group, training, 0, rate)
    state = _optimizer(group, training, 0, rate).init(weights)
    balance = np.ones(experts, np.float32) if not group.deep else None
    for _ in range(iterations):
        rows = rng.integers(len(x[0]), size=training.batch)
        batch = tuple(jnp.asarray(array[rows]) for array in x)
        key = jax.random.key(rng.integers(1 << 31))
        weights, state = step(weights, state, batch, balance, key)
    return {**arrays, **{n: np.asarray(a) for n, a in weights.items()}}


def recall_of(scores: np.ndarray, later: np.ndarray) -> float:
    """Plain top-k recall: which share of the experts of rows, later int[N, k], is among the k best
    of their scores [N, E]."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, : later.shape[1]]
    return float((best[:, :, None] == later[:, None, :]).any(axis=1).mean())


def loss(
    found: Any, chosen: Any, balance: Any | None, *, focal: float = 1.0, gamma: float = 2.0
) -> Any:
    """The mean over rows of the loss of logits [N, E] against chosen 0/1 [N, E].

    With balance [E] (1/f_i) that of input and output groups, ℒ = L_expert + λ·L_focal, without it
    binary cross-entropy, our reading of what the middle group's is. Both are means over experts;
    the paper's BCE has no minus of its own.
    """
    entropy = optax.sigmoid_binary_cross_entropy(found, chosen)
    if balance is None:
        return entropy.mean()
    wrong = jnp.abs(jax.nn.sigmoid(found) - chosen)  # 1 − p_t
    return (entropy * balance).mean() + focal * (wrong**gamma * entropy).mean()


def _inputs(
    some: LayerSamples, mean: np.ndarray, basis: np.ndarray, experts: int
) -> tuple[np.ndarray, np.ndarray]:
    return compressed(some.gate_input, mean, basis), routing(some.ids, some.weights, experts)


def _chosen(some: LayerSamples, experts: int) -> np.ndarray:
    """float32[N, E]: 1 for whom the later layer chose."""
    return routing(some.later, np.ones(some.later.shape), experts)


def _drawn(
    components: int, experts: int, deep: bool, width: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Weights as torch.nn.Linear begins: evenly within ±1/√(inputs of the layer)."""
    sizes = {"input": (components + experts, width), "output": (width, experts)}
    if deep:
        sizes |= {"inner1": (width, width), "inner2": (width, width), "gate": (components, width)}
    found = {}
    for name, (rows, columns) in sizes.items():
        bound = 1 / np.sqrt(rows)
        found[name] = jnp.asarray(rng.uniform(-bound, bound, (rows, columns)), jnp.float32)
        found[f"{name}_bias"] = jnp.zeros(columns, jnp.float32)
    return found


def _optimizer(
    group: LayerGroup, training: NetworkTraining, batches: int, fixed: float | None = None
) -> optax.GradientTransformation:
    """AdamW: after a linear warm-up a cosine (input, output), or one rate (middle, and where it is
    fixed)."""
    rate: Any = group.rate if fixed is None else fixed
    if group.warmup and fixed is None:
        warmup = min(group.warmup, training.epochs - 1) * batches
        rate = optax.warmup_cosine_decay_schedule(
            0.0, group.rate, warmup, max(training.epochs * batches, warmup + 1)
        )
    return optax.adamw(rate, weight_decay=group.decay)


@functools.cache
def _step_of(
    group: LayerGroup, training: NetworkTraining, batches: int, fixed: float | None = None
) -> Callable[..., tuple[Any, Any]]:
    """The program of a step, one for all layers of a group."""
    optimizer = _optimizer(group, training, batches, fixed)

    @jax.jit
    def step(weights: Any, state: Any, some: Any, balance: Any, key: Any) -> tuple[Any, Any]:
        pca, route, chosen = some
        noise, mask, *drops = jax.random.split(key, 5)
        pca = pca + training.noise * jax.random.normal(noise, pca.shape)
        pca = pca * jax.random.bernoulli(mask, 1 - training.masked, pca.shape)
        keys = iter(drops)

        def drop(x: Any) -> Any:
            kept = jax.random.bernoulli(next(keys), 1 - training.dropout, x.shape)
            return jnp.where(kept, x / (1 - training.dropout), 0.0)

        def objective(weights: Mapping[str, Any]) -> Any:
            found = logits(weights, pca, route, jnp, drop)
            return loss(found, chosen, balance, focal=training.focal, gamma=training.gamma)

        updates, state = optimizer.update(jax.grad(objective)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    return step


@jax.jit
def _logits(weights: Mapping[str, Any], pca: Any, route: Any) -> Any:
    return logits(weights, pca, route, jnp)
