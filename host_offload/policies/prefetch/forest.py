"""A random forest in numpy, and its features. The forest predicts the difference between a later
layer's choice of experts and the guess of that layer's router from an earlier layer's input.

Shapes: N rows, F features, T trees, M nodes of a tree, V leaves of a tree, E experts, k top-k.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.policies.prefetch.fitted import Fitted
from host_offload.policies.prefetch.next_layers import mark_experts, softmax

HISTORY = 2
"""Earlier layers whose choices are features (moejax's number, not the paper's)."""


class Forest(NamedTuple):
    """Regression trees; their mean is the prediction. The children of a leaf are the leaf
    itself."""

    feature: np.ndarray
    """int16[T, M]: the feature that a node compares with its threshold."""
    threshold: np.ndarray
    """float32[T, M]: rows with at most this value go left."""
    left: np.ndarray
    """int16[T, M]: the node's child for rows that go left."""
    right: np.ndarray
    """int16[T, M]: the node's child for all other rows."""
    leaf: np.ndarray
    """int16[T, M]: number of the leaf; 0 for other nodes."""
    value: np.ndarray
    """float32[T, V, E]: the prediction of each leaf."""
    depth: np.ndarray
    """int16[1]: most steps from a root to a leaf."""

    def predicted(self, x: np.ndarray) -> np.ndarray:
        """Predictions float32[N, E] for features float32[N, F]."""
        trees = np.arange(len(self.feature))
        node = np.zeros((len(x), len(trees)), np.int16)
        rows = np.arange(len(x))[:, None]
        for _ in range(int(self.depth[0])):
            goes_left = x[rows, self.feature[trees, node]] <= self.threshold[trees, node]
            node = np.where(goes_left, self.left[trees, node], self.right[trees, node])
        found = np.zeros((len(x), self.value.shape[2]), np.float32)
        for tree in trees:  # a fixed order, so that a row's bits do not depend on other rows
            found += self.value[tree, self.leaf[tree, node[:, tree]]]
        return found / np.float32(len(trees))


class Seen(NamedTuple):
    """The data that is known once a layer is routed."""

    gate_input: np.ndarray
    """float32[N, D]: the input of the layer's router, finite."""
    ids: np.ndarray
    """int[N, k]: the chosen experts."""
    weights: np.ndarray
    """float[N, k]: the weight of each chosen expert."""
    history: Sequence[np.ndarray]
    """int[N, k] each: the choices of earlier layers, the nearest first. It has at most HISTORY, and
    fewer in the first layers."""


def pre_gate(said: np.ndarray, top_k: int) -> np.ndarray:
    """Guesses how likely a later layer chooses each expert: k · softmax(said), at most 1, as
    float32[N, E].

    - `said`: float32[N, E], the logits of the later layer's router on this layer's input.
    - `top_k`: k, how many experts a row chooses.
    """
    return np.minimum(top_k * softmax(said), 1).astype(np.float32)


def features(seen: Seen, base: np.ndarray, mean: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """The features float32[N, F] of the forest: the router's guess, this layer's choice with its
    weights, the choices of earlier layers (zeros if there are none), and the principal components
    of the input.

    - `seen`: the data of this layer.
    - `base`: float32[N, E], the router's guess.
    - `mean`, `basis`: float32[D] and float32[D, ·], of the principal components.
    """
    experts = base.shape[1]
    past = [mark_experts(ids, experts) for ids in seen.history[:HISTORY]]
    past += [np.zeros_like(base)] * (HISTORY - len(past))
    here = mark_experts(seen.ids, experts, seen.weights)
    parts = [base, here, *past, (seen.gate_input - mean) @ basis]
    return np.concatenate(parts, axis=1, dtype=np.float32)


def forest_of(arrays: Mapping[str, np.ndarray], layer: int, ahead: int) -> Forest:
    """The forest that predicts from `layer` the layer `ahead` layers later.

    - `arrays`: "LAYER.AHEAD.NAME" → array, for each field of Forest.
    """
    return Forest(*(arrays[f"{layer}.{ahead}.{name}"] for name in Forest._fields))


def check_forest(fitted: Fitted, name: str, experts: int, components: int) -> None:
    """Raises ValueError for a forest, of arrays NAME.FIELD, whose arrays do not fit each other, so
    many experts or the features of so many principal components."""

    def places(field: str, *shape: int, below: int) -> np.ndarray:
        return fitted.array(f"{name}.{field}", *shape, dtypes=(np.int16,), below=below)

    count = (2 + HISTORY) * experts + components  # see features
    trees, nodes = places("feature", -1, -1, below=count).shape
    fitted.array(f"{name}.threshold", trees, nodes)
    value = fitted.array(f"{name}.value", trees, -1, experts)
    places("depth", 1, below=nodes + 1)
    for field, below in (("left", nodes), ("right", nodes), ("leaf", value.shape[1])):
        places(field, trees, nodes, below=below)


def scores(
    arrays: Mapping[str, np.ndarray], layer: int, ahead: int, seen: Seen, said: np.ndarray
) -> np.ndarray:
    """Scores the experts of the layer `ahead` layers later: its router's guess, corrected by the
    forest, as float32[N, E].

    - `arrays`: the forests, and "LAYER.mean" and "LAYER.basis".
    - `seen`: the data of `layer`.
    - `said`: float32[N, E], the logits of the later layer's router on this layer's input.
    """
    base = pre_gate(said, seen.ids.shape[1])
    told = features(seen, base, arrays[f"{layer}.mean"], arrays[f"{layer}.basis"])
    return base + forest_of(arrays, layer, ahead).predicted(told)


class NoTrainer(ValueError):
    """scikit-learn is not installed."""


def check_trainer() -> None:
    """Raises NoTrainer without scikit-learn, which is imported only for training."""
    if importlib.util.find_spec("sklearn") is None:
        raise NoTrainer("forests are trained by scikit-learn: pip install 'moejax[train]'")


def grow_forest(
    x: np.ndarray, y: np.ndarray, *, trees: int, leaves: int, share: float, seed: int
) -> Forest:
    """Trains a forest to predict y float32[N, E] from x float32[N, F], by scikit-learn (extra:
    `train`). Each tree predicts all experts at once.

    - `leaves`: most leaves of a tree.
    - `share`: the share of the features among which a split is searched.

    Raises NoTrainer without scikit-learn.
    """
    check_trainer()
    from sklearn.ensemble import RandomForestRegressor

    model = RandomForestRegressor(
        trees, max_leaf_nodes=leaves, max_features=share, random_state=seed
    ).fit(x, y)
    grown = [each.tree_ for each in model.estimators_]
    nodes = max(tree.node_count for tree in grown)
    most = max(int((tree.children_left < 0).sum()) for tree in grown)
    columns = [_arrays(tree, nodes, most) for tree in grown]
    depth = np.array([max(tree.max_depth for tree in grown)], np.int16)
    return Forest(*(np.stack(column) for column in zip(*columns, strict=True)), depth=depth)


def _arrays(tree: Any, nodes: int, leaves: int) -> tuple[np.ndarray, ...]:
    """A tree of scikit-learn as the arrays of a Forest, except the depth."""
    count, is_leaf = tree.node_count, tree.children_left < 0
    own = np.arange(count)
    # Rows are float32 and thresholds float64, so a threshold becomes the largest float32 that is
    # not larger.
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
