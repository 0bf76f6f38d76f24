"""The store of expert maps, and the searches in it (fMoE, sections 4.2 to 4.4).

Shapes: n maps in the store, N new rows, L MoE layers, E experts a layer, D hidden size. Layers
count from 0 here and from 1 in the paper. Equal scores go to the lowest place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class MapStore(NamedTuple):
    """Maps of earlier iterations, each with the embedding of the token that was fed in."""

    embeddings: np.ndarray
    """float32[n, D], of length 1."""
    maps: np.ndarray
    """float32[L, n, E]: the router's probabilities; layer-major, as a step searches them."""
    lengths: np.ndarray
    """float32[L, n]: of a map up to that layer, the layer included."""

    @property
    def size(self) -> int:
        return len(self.embeddings)


def empty_store(layers: int, experts: int, hidden: int) -> MapStore:
    return _stored(np.zeros((0, hidden), np.float32), np.zeros((layers, 0, experts), np.float32))


def stored(embeddings: np.ndarray, maps: np.ndarray) -> MapStore:
    """A store of rows: embeddings float[n, D], maps float[n, L, E]."""
    return _stored(_units(embeddings), np.ascontiguousarray(_distributions(maps).swapaxes(0, 1)))


def semantic_scores(store: MapStore, embeddings: np.ndarray) -> np.ndarray:
    """float32[N, n]: cosines of embeddings float[N, D] and the store's (equation 4)."""
    return _units(embeddings) @ store.embeddings.T


class Trajectory(NamedTuple):
    """Rows of a step beside every map, over the layers routed so far: enough to add one layer in
    O(N·n·E)."""

    products: np.ndarray
    """float32[N, n]"""
    squares: np.ndarray
    """float32[N]: of the rows themselves."""

    @classmethod
    def of(cls, store: MapStore, rows: int) -> Trajectory:
        """Before the first layer."""
        return cls(np.zeros((rows, store.size), np.float32), np.zeros(rows, np.float32))

    def after(self, store: MapStore, layer: int, probabilities: np.ndarray) -> Trajectory:
        """With the layer's probabilities, float[N, E]."""
        rows = _distributions(probabilities)
        return Trajectory(
            self.products + rows @ store.maps[layer].T,
            self.squares + np.einsum("ne,ne->n", rows, rows),
        )

    def scores(self, store: MapStore, layer: int) -> np.ndarray:
        """float32[N, n]: cosines of what was concatenated up to that layer (equation 5)."""
        return _quotient(self.products, np.sqrt(self.squares)[:, None] * store.lengths[layer])


def selected(
    probabilities: np.ndarray, scores: np.ndarray, top_k: int, *, by_similarity: bool = True
) -> np.ndarray:
    """bool[N, E]: the experts of float[N, E] that are prefetched (equations 6 to 8).

    The fewest, likeliest ones whose probabilities sum to at least clip(1 − score, 0, 1), and at
    least top_k; all where rounding keeps the sum below. by_similarity: False takes top_k.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    counts = np.full(len(probabilities), top_k)
    if by_similarity:
        wanted = np.clip(1 - scores, 0, 1)[:, None]
        sums = np.cumsum(np.take_along_axis(probabilities, order, 1), axis=1)
        counts = np.maximum(counts, np.sum(sums < wanted, axis=1) + 1)
    first = np.arange(probabilities.shape[1]) < counts[:, None]
    chosen = np.zeros(probabilities.shape, bool)
    np.put_along_axis(chosen, order, first, 1)
    return chosen


def with_rows(
    store: MapStore, embeddings: np.ndarray, maps: np.ndarray, *, capacity: int, distance: int
) -> MapStore:
    """The store after iterations that ended: embeddings float[N, D], maps float[N, L, E].

    Until it has `capacity` maps they are appended. Then each new one in its turn takes the place of
    the one that it makes most redundant, by RDY = d/L · semantic + (L − d)/L · trajectory score
    (section 4.4), so that what is kept is diverse and not recent.
    """
    new = stored(embeddings, maps)
    room = max(capacity - store.size, 0)
    old = _stored(
        np.concatenate([store.embeddings, new.embeddings[:room]]),
        np.concatenate([store.maps, new.maps[:, :room]], axis=1),
    )
    if (late := new.size - room) <= 0:
        return old
    rest = MapStore(new.embeddings[room:], new.maps[:, room:], new.lengths[:, room:])
    scores, among = _redundancy(rest, old, distance), _redundancy(rest, rest, distance)
    for i in range(late):
        place = int(np.argmax(scores[i]))
        old.embeddings[place] = rest.embeddings[i]
        old.maps[:, place], old.lengths[:, place] = rest.maps[:, i], rest.lengths[:, i]
        scores[:, place] = among[:, i]
    return old


def _redundancy(new: MapStore, old: MapStore, distance: int) -> np.ndarray:
    """float32[N, n]: RDY of every new row and every old one."""
    layers = len(old.maps)
    products = np.zeros((new.size, old.size), np.float32)
    for rows, maps in zip(new.maps, old.maps, strict=True):
        products += rows @ maps.T
    trajectory = _quotient(products, new.lengths[-1][:, None] * old.lengths[-1])
    semantic = new.embeddings @ old.embeddings.T
    return (distance * semantic + (layers - distance) * trajectory) / np.float32(layers)


def _stored(units: np.ndarray, maps: np.ndarray) -> MapStore:
    return MapStore(units, maps, np.sqrt(np.cumsum(np.einsum("lne,lne->ln", maps, maps), axis=0)))


def _units(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float32)
    return _quotient(rows, np.linalg.norm(rows, axis=1, keepdims=True))


def _distributions(probabilities: np.ndarray) -> np.ndarray:
    """float32 whose last axis sums to 1: scores of sigmoid routers are divided by their sum, which
    keeps their order and ratios; softmax's stay what they are but for float16's rounding."""
    rows = probabilities.astype(np.float32)
    return _quotient(rows, rows.sum(axis=-1, keepdims=True))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is: what has no direction is like nothing."""
    return a / np.where(b > 0, b, np.float32(np.inf))
