"""The store of expert maps, and the searches in it (fMoE, sections 4.2 to 4.4).

The host policy, a compiled step (moejax/step/map_search.py) and a simulation find the same maps to
the bit. Sums of float32 depend on their order, so rows are rounded to multiples of 2 ** -BITS. Then
every product, and every sum of products of rows of length 1, is a multiple of 2 ** -(2 · BITS) that
float32 holds exactly, in any order. Sums over layers are int32. The remaining operations (a root, a
product, a quotient of two numbers) have one result by IEEE. Functions with `xp` take numpy or
jax.numpy.

Shapes: C places of the store, N rows, L MoE layers, E experts a layer, D hidden size. Layers count
from 0 here and from 1 in the paper. Equal scores go to the lowest place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import MapRows
from pallas_kernels.cpu.rows import nearest_maps

BITS = 11
"""Bits of a float16 below 1: multiples of 2 ** -BITS are stored exactly."""

NONE = -3.0
"""A score below every cosine, for an empty store."""

_COARSE = 8
"""Bits of a row's largest element when its length is computed: squares of 2^15 elements fit into
int32."""

_FINE = 20
"""Bits of a probability when a row's sum is computed."""

_ALONE = 1 << 18
"""Most multiplications that numpy's OpenBLAS gives to one thread (interface/gemm.c, 65536 ·
GEMM_MULTITHREAD_THRESHOLD). Above, the caller waits for other threads, which need cores beside
those of the step: 20 ms for half a millisecond of work if no core is free."""

_VECTOR_ALONE = 2304 * 4
"""The same of one row (interface/gemv.c)."""


# ---- rounding, for numpy and jax


def unit_rows(rows: Any, xp: Any) -> Any:
    """Rows float32[N, D] divided by their lengths, in multiples of 2 ** -BITS."""
    largest = xp.max(xp.abs(rows), axis=1, keepdims=True)
    coarse = xp.rint(rows * _quotient(2.0**_COARSE, largest, xp)).astype(np.int32)
    squares = xp.sum(coarse * coarse, axis=1, keepdims=True, dtype=np.int32)
    length = largest * xp.sqrt(squares.astype(np.float32))
    return xp.rint(rows * _quotient(2.0 ** (_COARSE + BITS), length, xp)) * _float(2.0**-BITS)


def distributions(probabilities: Any, xp: Any) -> Any:
    """float32[…, E] divided by the sums over the last axis, in multiples of 2 ** -BITS. Scores of
    sigmoid routers keep their order and ratios; softmax's change only by rounding."""
    whole = xp.rint(probabilities * _float(2.0**_FINE)).astype(np.int32)
    sums = xp.sum(whole, axis=-1, keepdims=True, dtype=np.int32).astype(np.float32)
    scale = _quotient(2.0 ** (_FINE + BITS), sums, xp)
    return xp.rint(probabilities * scale) * _float(2.0**-BITS)


def whole_products(products: Any) -> Any:
    """int32 of sums of products of rounded rows, float32, in units of 2 ** -(2 · BITS)."""
    return (products * _float(2.0 ** (2 * BITS))).astype(np.int32)


def squares_of(rows: Any, xp: Any) -> Any:
    """int32[…]: the square of the length of each rounded row float32[…, E], in the same units."""
    whole = (rows * _float(2.0**BITS)).astype(np.int32)
    return xp.sum(whole * whole, axis=-1, dtype=np.int32)


def prefix_lengths(maps: Any, xp: Any) -> Any:
    """float32[L, n]: lengths of rounded maps float32[L, n, E] up to and including each layer, in
    units of 2 ** -BITS."""
    squares = xp.cumsum(squares_of(maps, xp), axis=0, dtype=np.int32)
    return xp.sqrt(squares.astype(np.float32))


def cosines(products: Any, squares: Any, lengths: Any, xp: Any) -> Any:
    """Cosines float32[N, C] from products int32[N, C], squares int32[N] of the rows, and lengths
    float32[C], roots of squares."""
    both = xp.sqrt(squares.astype(np.float32))[:, None] * lengths
    return _quotient(products.astype(np.float32), both, xp)


# ---- the store: numpy's arrays or, in a compiled step, jax's


class FoundMaps(NamedTuple):
    """The nearest map of each row; of equal ones the lowest place."""

    place: Any
    """int[N]"""
    score: Any
    """float32[N]: its cosine; NONE: the store is empty."""


class Trajectory(NamedTuple):
    """Sums over the routed layers for the rows of a step and every map: one more layer costs
    O(N·C·E)."""

    products: Any
    """int32[N, C]: sums of whole_products."""
    squares: Any
    """int32[N]: squares of the rows."""


class MapStore(NamedTuple):
    """Maps of earlier iterations, each with the embedding of its input token. They are rounded, so
    a device holds them as float16."""

    embeddings: Any
    """float[C, D], of length 1."""
    maps: Any
    """float[L, C, E]: the router's probabilities; layer-major, as a step searches them."""
    lengths: Any
    """float32[L, C]: see prefix_lengths; 0: the place is empty."""

    @property
    def size(self) -> int:
        return len(self.embeddings)

    def write(self, rows: MapRows) -> None:
        """Writes rows into these arrays, in place: for a store that a device mirrors."""
        self.embeddings[rows.place] = rows.embeddings
        self.maps[:, rows.place] = rows.maps.swapaxes(0, 1)
        self.lengths[:, rows.place] = prefix_lengths(self.maps[:, rows.place], np)

    def rows_at(self, place: np.ndarray) -> MapRows:
        """The rows of these places, as a device takes them."""
        maps = self.maps[:, place].swapaxes(0, 1)
        return MapRows(place, self.embeddings[place].astype(np.float16), maps.astype(np.float16))

    def nearest_embedding(self, embeddings: Any, xp: Any = np) -> FoundMaps:
        """The nearest maps by the cosine of embeddings float[N, D] (equation 4)."""
        said = embeddings.astype(np.float32)
        if xp is np and self.size:
            found = nearest_maps(said, self.embeddings, self.lengths[0])
            if found is not None:
                return FoundMaps(*found)
        return self._nearest(dot_products(unit_rows(said, xp), self.embeddings, xp), xp)

    def trajectory(self, rows: int, xp: Any = np) -> Trajectory:
        """The trajectory before the first layer of a step."""
        return Trajectory(xp.zeros((rows, self.size), np.int32), xp.zeros(rows, np.int32))

    def nearest_map(
        self, before: Trajectory, layer: Any, probabilities: Any, xp: Any = np
    ) -> tuple[Trajectory, FoundMaps]:
        """The nearest maps by the cosine over all routed layers, including this one with its
        probabilities float[N, E] (equation 5). One product for each row is added to those of
        earlier layers."""
        said = probabilities.astype(np.float32)
        if xp is np and self.size:
            after = Trajectory(before.products.copy(), before.squares.copy())
            lengths = self.lengths[layer]
            found = nearest_maps(said, self.maps[layer], self.lengths[0], *after, lengths)
            if found is not None:
                return after, FoundMaps(*found)
        rows = distributions(said, xp)
        after = Trajectory(
            before.products + whole_products(dot_products(rows, self.maps[layer], xp)),
            before.squares + squares_of(rows, xp),
        )
        return after, self._nearest(cosines(*after, self.lengths[layer], xp), xp)

    def _nearest(self, scores: Any, xp: Any) -> FoundMaps:
        if not self.size:
            return FoundMaps(np.zeros(len(scores), int), np.full(len(scores), NONE, np.float32))
        scores = xp.where(self.lengths[0] > 0, scores, np.float32(NONE))
        return FoundMaps(xp.argmax(scores, axis=1), xp.max(scores, axis=1))


def empty_store(layers: int, experts: int, hidden: int, places: int = 0) -> MapStore:
    """A store with `places` empty places."""
    return MapStore(
        np.zeros((places, hidden), np.float32),
        np.zeros((layers, places, experts), np.float32),
        np.zeros((layers, places), np.float32),
    )


def store_rows(embeddings: np.ndarray, maps: np.ndarray) -> MapStore:
    """A store of rows: embeddings float[n, D], maps float[n, L, E]."""
    by_layer = distributions(np.ascontiguousarray(maps.swapaxes(0, 1), np.float32), np)
    units = unit_rows(embeddings.astype(np.float32), np)
    return MapStore(units, by_layer, prefix_lengths(by_layer, np))


def select_experts(probabilities: np.ndarray, scores: np.ndarray, top_k: int) -> np.ndarray:
    """bool[N, E]: the experts to prefetch (equations 6 to 8): the fewest likeliest ones whose
    probabilities, float[N, E], sum to at least clip(1 − score, 0, 1), and at least top_k. All
    experts if rounding keeps the sum below."""
    row, order = np.arange(len(probabilities))[:, None], _sort_likely_first(probabilities)
    wanted = np.clip(1 - scores, 0, 1)[:, None]
    sums = np.cumsum(probabilities[row, order], axis=1)
    counts = np.maximum(top_k, np.sum(sums < wanted, axis=1) + 1)
    chosen = np.zeros(probabilities.shape, bool)
    chosen[row, order] = np.arange(probabilities.shape[1]) < counts[:, None]
    return chosen


def _sort_likely_first(probabilities: np.ndarray) -> np.ndarray:
    """int64[N, E]: experts, the likeliest first, equal ones by number. It equals a stable argsort
    of −probabilities, but sorts integers, which is five times as fast: the bits of a float32 that
    is not negative sort like the float."""
    bits = (probabilities.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
    keys = (-bits << 32) | np.arange(probabilities.shape[1])
    keys.sort(axis=1)
    return keys & 0xFFFFFFFF


def with_rows(
    store: MapStore, embeddings: np.ndarray, maps: np.ndarray, *, capacity: int, distance: int
) -> tuple[MapStore, np.ndarray]:
    """Adds ended iterations, embeddings float[N, D] and maps float[N, L, E], to the store.

    Maps are appended until there are `capacity`. Then each new map replaces the one that it makes
    most redundant, by RDY = d/L · semantic + (L − d)/L · trajectory score (section 4.4). So the
    store keeps diverse maps, not recent ones.

    Returns (store, places that were written, int64[m], ascending).
    """
    new = store_rows(embeddings, maps)
    room = max(capacity - store.size, 0)
    old = MapStore(
        np.concatenate([store.embeddings, new.embeddings[:room]]),
        np.concatenate([store.maps, new.maps[:, :room]], axis=1),
        np.concatenate([store.lengths, new.lengths[:, :room]], axis=1),
    )
    written = {*range(store.size, old.size)}
    rest = MapStore(new.embeddings[room:], new.maps[:, room:], new.lengths[:, room:])
    if rest.size:
        scores, among = _redundancy(rest, old, distance), _redundancy(rest, rest, distance)
        for i in range(rest.size):
            place = int(np.argmax(scores[i]))
            old.embeddings[place] = rest.embeddings[i]
            old.maps[:, place], old.lengths[:, place] = rest.maps[:, i], rest.lengths[:, i]
            scores[:, place] = among[:, i]
            written.add(place)
    return old, np.array(sorted(written), np.int64)


def _redundancy(new: MapStore, old: MapStore, distance: int) -> np.ndarray:
    """float32[N, C]: RDY of every new and every old row."""
    layers = len(old.maps)
    products = sum(
        whole_products(dot_products(rows, maps))
        for rows, maps in zip(new.maps, old.maps, strict=True)
    )
    both = new.lengths[-1][:, None] * old.lengths[-1]
    trajectory = _quotient(np.asarray(products, np.float32), both, np)
    semantic = dot_products(new.embeddings, old.embeddings)
    return (distance * semantic + (layers - distance) * trajectory) / np.float32(layers)


def dot_products(rows: Any, kept: Any, xp: Any = np) -> Any:
    """Dot products float32[N, C] of rows float32[N, K] and float[C, K]. numpy computes them in
    pieces small enough for the calling thread: a search must not wait for a core that the step
    uses."""
    if xp is not np:
        given = {"preferred_element_type": np.float32}
        return xp.einsum("nk,ck->nc", rows.astype(kept.dtype), kept, **given)
    alone = _ALONE if len(rows) > 1 else _VECTOR_ALONE
    piece = max(alone // max(rows.size, 1), 1)
    products = np.empty((len(rows), len(kept)), np.float32)
    for first in range(0, len(kept), piece):
        some = slice(first, first + piece)
        products[:, some] = rows @ kept[some].T
    return products


def _float(value: float) -> Any:
    """A float32 number. numpy would treat a Python number as float64 beside an array without
    axes."""
    return np.float32(value)


def _quotient(a: Any, b: Any, xp: Any) -> Any:
    """a / b, and 0 where b is 0: a zero row is similar to nothing."""
    a = _float(a) if isinstance(a, float) else a
    return a / xp.where(b > 0, b, _float(np.inf))
