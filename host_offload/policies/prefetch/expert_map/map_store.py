"""The store of expert maps, and the searches in it (fMoE, sections 4.2 to 4.4).

Shapes: n maps in the store, N new rows, L MoE layers, E experts a layer, D hidden size. Layers
count from 0 here and from 1 in the paper. Equal scores go to the lowest place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_ALONE = 1 << 18
"""Multiplications that OpenBLAS, numpy's, gives to one thread (interface/gemm.c, 65536 ·
GEMM_MULTITHREAD_THRESHOLD). Above, the caller waits for others of its threads, which have to get a
core beside those of the step: 20 ms for half a millisecond's work where they do not get one."""

_ROWS = 32
"""Rows of a piece."""


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
    return dot_products(_units(embeddings), store.embeddings)


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
            self.products + dot_products(rows, store.maps[layer]),
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
    row, order = np.arange(len(probabilities))[:, None], _likely_first(probabilities)
    counts = np.full(len(probabilities), top_k)
    if by_similarity:
        wanted = np.clip(1 - scores, 0, 1)[:, None]
        sums = np.cumsum(probabilities[row, order], axis=1)
        counts = np.maximum(counts, np.sum(sums < wanted, axis=1) + 1)
    chosen = np.zeros(probabilities.shape, bool)
    chosen[row, order] = np.arange(probabilities.shape[1]) < counts[:, None]
    return chosen


def _likely_first(probabilities: np.ndarray) -> np.ndarray:
    """int64[N, E]: experts, the likeliest first, equal ones by their numbers. A stable argsort of
    −probabilities, as one sort of whole numbers, five times as fast: the bits of a float32 that is
    not negative are ordered as it is."""
    bits = (probabilities.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
    keys = (-bits << 32) | np.arange(probabilities.shape[1])
    keys.sort(axis=1)
    return keys & 0xFFFFFFFF


def with_rows(
    store: MapStore, embeddings: np.ndarray, maps: np.ndarray, *, capacity: int, distance: int
) -> MapStore:
    """The store after iterations that ended: embeddings float[N, D], maps float[N, L, E].

    Until it has `capacity` maps they are appended. Then each new one in its turn takes the place of
    the one that it makes most redundant, by RDY = d/L · semantic + (L − d)/L · trajectory score
    (section 4.4), so that what is kept is diverse and not recent.
    """
    return placed(store, embeddings, maps, capacity=capacity, distance=distance)[0]


def placed(
    store: MapStore, embeddings: np.ndarray, maps: np.ndarray, *, capacity: int, distance: int
) -> tuple[MapStore, np.ndarray]:
    """The store of with_rows, and the places that it wrote, int64[m], ascending."""
    new = stored(embeddings, maps)
    room = max(capacity - store.size, 0)
    old = MapStore(
        np.concatenate([store.embeddings, new.embeddings[:room]]),
        np.concatenate([store.maps, new.maps[:, :room]], axis=1),
        np.concatenate([store.lengths, new.lengths[:, :room]], axis=1),
    )
    written = {*range(store.size, old.size)}
    if (late := new.size - room) <= 0:
        return old, np.array(sorted(written), np.int64)
    rest = MapStore(new.embeddings[room:], new.maps[:, room:], new.lengths[:, room:])
    scores, among = _redundancy(rest, old, distance), _redundancy(rest, rest, distance)
    for i in range(late):
        place = int(np.argmax(scores[i]))
        old.embeddings[place] = rest.embeddings[i]
        old.maps[:, place], old.lengths[:, place] = rest.maps[:, i], rest.lengths[:, i]
        scores[:, place] = among[:, i]
        written.add(place)
    return old, np.array(sorted(written), np.int64)


def _redundancy(new: MapStore, old: MapStore, distance: int) -> np.ndarray:
    """float32[N, n]: RDY of every new row and every old one."""
    layers = len(old.maps)
    products = np.zeros((new.size, old.size), np.float32)
    for rows, maps in zip(new.maps, old.maps, strict=True):
        products += dot_products(rows, maps)
    trajectory = _quotient(products, new.lengths[-1][:, None] * old.lengths[-1])
    semantic = dot_products(new.embeddings, old.embeddings)
    return (distance * semantic + (layers - distance) * trajectory) / np.float32(layers)


def dot_products(rows: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """float32[N, n]: of each of float32[N, K] and each of float32[n, K], in pieces computed
    where they are asked for: a search must not wait for a core that the step computes on."""
    (count, length), products = kept.shape, np.empty((len(rows), len(kept)), np.float32)
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        piece = max(_ALONE // (len(some) * length), 1)
        whole = count - count % piece
        into = products[first : first + _ROWS]
        pieces = kept[:whole].reshape(-1, piece, length)
        into[:, :whole] = (pieces @ some.T).reshape(whole, len(some)).T
        into[:, whole:] = (kept[whole:] @ some.T).T
    return products


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
    """a / b, 0 where both are: what has no direction is like nothing."""
    return a / np.maximum(b, np.finfo(np.float32).tiny)
