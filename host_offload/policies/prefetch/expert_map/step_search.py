"""What a compiled step's searches for expert maps compute, to the bit: the roundings that the step
(moejax/step/map_search.py) and numpy share, and the rest of it in numpy, for a simulation.

Sums of float32 depend on their order, and two computers of the same product would sometimes find
another nearest map. So rows are rounded to multiples of 2 ** -BITS: every product, and every sum of
products of rows of length 1, is then a whole number of 2 ** -(2 · BITS) that float32 holds exactly,
in whatever order; sums over layers are int32. What is left (a root, a product, a quotient of two
numbers) IEEE rounds in one way.

Shapes: C places of the store, L MoE layers, E experts a layer, D hidden size, R rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import MapRows, MapSearch
from host_offload.control.staging import making_room
from host_offload.memory.tables import Entry, Residency
from host_offload.policies.prefetch.expert_map.map_store import selected
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR, log2_fixed

BITS = 11
"""Those that a float16 below 1 has: what is rounded to 2 ** -BITS is stored as it is."""

ENTRIES = 24
"""Most transfers of a layer and step, where it has as many experts: as many as the host form hands
out between two layers."""

NONE = -3.0
"""A score below every cosine: nothing is stored."""

_COARSE = 8
"""Bits of a row's largest element with which its length is found: squares of 2^15 of them fit into
int32."""

_FINE = 20
"""Bits of a probability with which a row's sum is found, likewise."""


def unit_rows(rows: Any, xp: Any) -> Any:
    """Rows float32[N, D] divided by their lengths, in multiples of 2 ** -BITS. xp: numpy, or
    jax.numpy for jax's arrays."""
    largest = xp.max(xp.abs(rows), axis=1, keepdims=True)
    coarse = xp.rint(rows * _quotient(2.0**_COARSE, largest, xp)).astype(np.int32)
    squares = xp.sum(coarse * coarse, axis=1, keepdims=True, dtype=np.int32)
    length = largest * xp.sqrt(squares.astype(np.float32))
    return xp.rint(rows * _quotient(2.0 ** (_COARSE + BITS), length, xp)) * _float(2.0**-BITS)


def distributions(probabilities: Any, xp: Any) -> Any:
    """float32[…, E] divided by the sums over the last axis, in multiples of 2 ** -BITS."""
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


def cosines(products: Any, squares: Any, lengths: Any, xp: Any) -> Any:
    """float32[R, C]: of products int32[R, C], squares int32[R] of the rows, and lengths
    float32[C], roots of squares."""
    both = xp.sqrt(squares.astype(np.float32))[:, None] * lengths
    return _quotient(products.astype(np.float32), both, xp)


def prior_of(likely: Any, xp: Any) -> Any:
    """int32[E]: the prior of experts of these probabilities, rounded ones float32[E], as of
    victim_key: their logarithm, of 0 the least there is."""
    whole = (likely * _float(2.0**BITS)).astype(np.int32)
    return xp.where(whole > 0, log2_fixed(whole) - BITS * LOG2_UNIT, -MAX_PRIOR)


def rounded(embeddings: np.ndarray, maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a store as a step has them, float16: embeddings float[n, D], maps float[n, L, E]."""
    units = unit_rows(embeddings.astype(np.float32), np)
    return units.astype(np.float16), distributions(maps.astype(np.float32), np).astype(np.float16)


class FoundMaps(NamedTuple):
    """The nearest map of each row; equal ones: the lowest place."""

    place: np.ndarray
    """int[R]"""
    score: np.ndarray
    """float32[R]: its cosine; NONE: nothing is stored."""


class HeldMaps:
    """The store as decode steps have it, in numpy, and what they find in it."""

    def __init__(self, search: MapSearch, layers: int, experts: int, hidden: int):
        self.search = search
        self._embeddings = np.zeros((search.capacity, hidden), np.float32)
        self._maps = np.zeros((layers, search.capacity, experts), np.float32)
        self._lengths = np.zeros((layers, search.capacity), np.float32)

    def write(self, rows: MapRows) -> None:
        """Other rows for the steps to come."""
        maps = rows.maps.astype(np.float32).swapaxes(0, 1)
        self._embeddings[rows.place], self._maps[:, rows.place] = rows.embeddings, maps
        squares = np.cumsum(squares_of(maps, np), axis=0, dtype=np.int32)
        self._lengths[:, rows.place] = np.sqrt(squares.astype(np.float32))

    def nearest_embedding(self, embeddings: np.ndarray) -> FoundMaps:
        """For float16[R, D] of a step."""
        return self._nearest(unit_rows(embeddings.astype(np.float32), np) @ self._embeddings.T)

    def trajectory(self, rows: int) -> HeldTrajectory:
        """Before the first layer of a step."""
        return HeldTrajectory(
            np.zeros((rows, self.search.capacity), np.int32), np.zeros(rows, np.int32)
        )

    def nearest_map(
        self, before: HeldTrajectory, layer: int, probabilities: np.ndarray
    ) -> tuple[HeldTrajectory, FoundMaps]:
        """With what the router of a layer said, float16[R, E]."""
        rows = distributions(probabilities.astype(np.float32), np)
        after = HeldTrajectory(
            before.products + whole_products(rows @ self._maps[layer].T),
            before.squares + squares_of(rows, np),
        )
        return after, self._nearest(cosines(*after, self._lengths[layer], np))

    def wanted(
        self, found: FoundMaps, layer: int, top_k: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(prior int32[E], and how much each expert of the layer is wanted, float32[E], 0: it is
        not); None where nothing is stored."""
        if not self._lengths[0].any():
            return None
        likely = self._maps[layer, found.place]
        chosen = selected(likely, found.score, top_k)
        return prior_of(likely.max(axis=0), np), np.where(chosen, likely, 0).max(axis=0)

    def _nearest(self, scores: np.ndarray) -> FoundMaps:
        scores = np.where(self._lengths[0] > 0, scores, np.float32(NONE))
        place = np.argmax(scores, axis=1)
        return FoundMaps(place, scores[np.arange(len(scores)), place])


class HeldTrajectory(NamedTuple):
    """Rows of a step beside every map, over the layers routed so far."""

    products: np.ndarray
    """int32[R, C]: as of whole_products."""
    squares: np.ndarray
    """int32[R]: of the rows themselves."""


def entries_of(tables: Residency, layer: int, wanted: np.ndarray) -> Sequence[Entry]:
    """A step's transfers to a layer that it has yet to compute, at most ENTRIES: absent experts of
    float32[E], 0: not wanted, the likeliest first. Free cells make room first, then those whose
    owner nobody wants, by plan's victim key, then those whose owner is wanted less than who
    comes."""
    room = making_room(tables, layer, 0)
    worth = {cell: 0.0 if owner < 0 else float(wanted[owner]) for cell, owner in room}
    cells = sorted(worth, key=lambda cell: worth[cell] > 0 and worth[cell])
    absent = np.flatnonzero((wanted > 0) & (tables.address[layer] < 0))
    likely_first = absent[np.argsort(-wanted[absent], kind="stable")][:ENTRIES]
    return [
        Entry(layer, expert, 0, cell)
        for expert, cell in zip(likely_first.tolist(), cells, strict=False)
        if wanted[expert] > worth[cell]
    ]


def _float(value: float) -> Any:
    """numpy would take a Python number of a product for a float64 if an array had no axes."""
    return np.float32(value)


def _quotient(a: Any, b: Any, xp: Any) -> Any:
    """a / b, 0 where b is: what has no direction is like nothing."""
    a = _float(a) if isinstance(a, float) else a
    return a / xp.where(b > 0, b, _float(np.inf))
