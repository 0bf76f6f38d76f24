"""How ExpertFlow's forests learn from a trace, by scikit-learn (an extra: `train`)."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.policies.prefetch.expertflow.expertflow_policy import NAME, ExpertFlow, read
from host_offload.policies.prefetch.expertflow.forest import (
    HISTORY,
    Forest,
    Seen,
    features,
    pre_gate,
)
from host_offload.policies.prefetch.fitted import (
    check_fitted,
    check_gate_inputs,
    fitted,
)
from host_offload.policies.prefetch.llapor.llapor_network import routing
from host_offload.policies.prefetch.llapor.llapor_training import LayerSamples, principal, samples
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.traces.reader import Trace

Report = Callable[[int, int, int], None]
"""(layer that learns, layers, layers ahead)"""


class NoTrainer(ValueError):
    """scikit-learn is not installed."""


@dataclasses.dataclass(frozen=True)
class ForestTraining:
    """Settings of ours: the paper has a random forest and no figures of it that we know."""

    trees: int = 20
    leaves: int = 256
    """Most leaves of a tree."""
    components: int = 64
    """Principal components of the gate input, in place of the token's id, which traces lack."""
    reach: int = 4
    """Layers ahead that have forests: the largest step size."""
    share: float = 1 / 3
    """Features that a split is looked for in."""
    seed: int = 0


AS_OURS = ForestTraining()


def check_trainer() -> None:
    """Raises NoTrainer without scikit-learn, which nothing imports before it trains."""
    if importlib.util.find_spec("sklearn") is None:
        raise NoTrainer("forests are trained by scikit-learn: pip install 'moejax[train]'")


def fit(
    trace: Trace,
    router: np.ndarray,
    *,
    training: ForestTraining = AS_OURS,
    rows: np.ndarray | None = None,
    report: Report | None = None,
) -> ExpertFlow:
    """ExpertFlow for the model of a trace that has gate inputs.

    router: float32[L, D, E], whose guesses the forests set right. rows: bool[tokens] to learn from;
    None: all. For each layer and each distance up to `reach` there is a forest, all of whose trees
    answer for all experts at once. The same trace and seed give the same forests. Raises TraceError
    for a trace without gate inputs or tokens, ValueError for settings that mean nothing and for a
    router of other sizes, NoTrainer without scikit-learn.
    """
    header = trace.header
    check_gate_inputs(trace, 1, NAME)
    if min(training.trees, training.components, training.reach) < 1 or training.leaves < 2:
        raise ValueError(f"trees, components and reach are at least 1, leaves 2, not {training}")
    if training.leaves > np.iinfo(np.int16).max // 2:
        raise ValueError(f"a tree has at most {np.iinfo(np.int16).max // 2} leaves")
    if router.shape != (header.layers, header.gate_input, header.experts):
        raise ValueError(
            f"routers of {router.shape} are not those of a model with layers, hidden size and "
            f"experts {(header.layers, header.gate_input, header.experts)}"
        )
    kept = np.ones(trace.tokens, bool) if rows is None else rows
    ids = trace.array("token.ids")[kept]
    arrays: dict[str, np.ndarray] = {}
    for layer in range(header.layers - 1):
        for ahead in range(1, min(training.reach, header.layers - 1 - layer) + 1):
            some = samples(trace, layer, ahead).of(kept)
            if ahead == 1:
                mean, basis = principal(some.gate_input, training.components)
                arrays |= {f"{layer}.mean": mean, f"{layer}.basis": basis}
            if report is not None:
                report(layer, header.layers - 1, ahead)
            base = pre_gate(gate_scores(some.gate_input, router[layer + ahead]), header.top_k)
            chosen = routing(some.later, np.ones(some.later.shape), header.experts)
            told = features(seen_of(some, ids, layer), base, mean, basis)
            forest = _grown(told, chosen - base, training)
            arrays |= {f"{layer}.{ahead}.{name}": array for name, array in forest._asdict().items()}
    settings = {"reach": min(training.reach, header.layers - 1), "trees": training.trees}
    return ExpertFlow(fitted(NAME, header, arrays, settings))


def kept_policy(
    path: Path,
    trace: Trace,
    router: np.ndarray,
    *,
    reach: int = AS_OURS.reach,
    trees: int = AS_OURS.trees,
    leaves: int = AS_OURS.leaves,
    pool: bool = True,
) -> ExpertFlow:
    """ExpertFlow with the forests of a file, which `fit` trains with these settings, and with its
    own for the rest, where there is none. pool: that of ExpertFlow. Raises what fit raises, and
    ValueError for a file of another kind or model."""
    if path.exists():
        found = read(str(path))
        check_fitted([found], trace.header.config_digest)
    else:
        training = dataclasses.replace(AS_OURS, reach=reach, trees=trees, leaves=leaves)
        found = fit(trace, router, training=training)
        found.fitted.write(path)
    return dataclasses.replace(found, pool=pool)


def seen_of(some: LayerSamples, ids: np.ndarray, layer: int) -> Seen:
    """What rows of a trace say of a layer. ids: int[N, L, k] of the same rows."""
    past = [ids[:, layer - back] for back in range(1, min(HISTORY, layer) + 1)]
    return Seen(some.gate_input, some.ids, some.weights, past)


def _grown(x: np.ndarray, y: np.ndarray, training: ForestTraining) -> Forest:
    """The forest that learned y float32[N, E] from x float32[N, F]."""
    check_trainer()
    from sklearn.ensemble import RandomForestRegressor

    model = RandomForestRegressor(
        training.trees,
        max_leaf_nodes=training.leaves,
        max_features=training.share,
        random_state=training.seed,
    ).fit(x, y)
    trees = [each.tree_ for each in model.estimators_]
    nodes = max(tree.node_count for tree in trees)
    leaves = max(int((tree.children_left < 0).sum()) for tree in trees)
    columns = [_arrays(tree, nodes, leaves) for tree in trees]
    depth = np.array([max(tree.max_depth for tree in trees)], np.int16)
    return Forest(*(np.stack(column) for column in zip(*columns, strict=True)), depth=depth)


def _arrays(tree: Any, nodes: int, leaves: int) -> tuple[np.ndarray, ...]:
    """A tree of scikit-learn in the arrays of a Forest but the depth."""
    count, is_leaf = tree.node_count, tree.children_left < 0
    own = np.arange(count)
    # Rows are float32 and its thresholds float64: the largest float32 that is no larger.
    threshold = tree.threshold.astype(np.float32)
    above = threshold > tree.threshold
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    number = np.where(is_leaf, np.cumsum(is_leaf) - 1, 0)
    value = np.zeros((leaves, tree.value.shape[1]), np.float32)
    value[: is_leaf.sum()] = tree.value[is_leaf, :, 0]

    def padded(array: np.ndarray, dtype: type) -> np.ndarray:
        return np.pad(array, (0, nodes - count)).astype(dtype)

    return (
        padded(np.where(is_leaf, 0, tree.feature), np.int16),
        padded(np.where(is_leaf, 0, threshold), np.float32),
        padded(np.where(is_leaf, own, tree.children_left), np.int16),
        padded(np.where(is_leaf, own, tree.children_right), np.int16),
        padded(number, np.int16),
        value,
    )
