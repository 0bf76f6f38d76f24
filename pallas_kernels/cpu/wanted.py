"""Queues of wanted experts, by what earlier steps needed, on the calling thread, by the native
library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pallas_kernels.cpu.library import address_of, bind


class Queue(NamedTuple):
    """Experts, the most urgent first."""

    columns: np.ndarray
    """int64[n, 3]: layer, expert, and version 0."""
    places: list[int]
    """layer · E + expert of each."""


def _queue(out: np.ndarray, count: int) -> Queue:
    return Queue(out[: 3 * count].reshape(count, 3), out[3 * count : 4 * count].tolist())


def want_by_maps(
    wanted: np.ndarray,
    prior: np.ndarray,
    now: int,
    likely: np.ndarray | None = None,
    scores: np.ndarray | None = None,
    first: int = 0,
    begun: int = 0,
    top_k: int = 0,
    priors: np.ndarray | None = None,
) -> Queue | None:
    """The queue of ExpertMap after layer `now`; None without the library.

    - `wanted`, `prior`: float32[L, E] and int32[L, E]; with `likely`, those of the layers that it
      predicts are changed.
    - `likely`, `scores`: float32[M, N, E] and float32[N], of the layers from `first` on. Those
      before `begun` get priors alone.
    - `priors`: int32[2 ** 11 + 1], of each probability.
    """
    function = bind("moejax_want_by_maps", "assasssaaasssa")
    if function is None:
        return None
    layers, experts = wanted.shape
    out = np.empty(4 * wanted.size, np.int64)
    given: tuple = None, 0, 0, None
    if likely is not None and scores is not None:
        likely = np.ascontiguousarray(likely, np.float32)
        given = address_of(likely), *likely.shape[:2], address_of(scores)
    table = None if priors is None else address_of(priors)
    tables = table, address_of(wanted), address_of(prior)
    count = function(*(*given, first, begun, top_k, *tables, layers, experts, now, address_of(out)))
    return _queue(out, count)


def want_by_matrices(
    collection: np.ndarray,
    lengths: np.ndarray,
    now: int,
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    ids: np.ndarray,
    sequence: np.ndarray,
    used: np.ndarray,
    most: int,
) -> Queue | None:
    """The queue of MoEInfinity after layer `now`, at most `most`; None without the library.

    - `collection`, `lengths`: float32[n, L, E] and float32[n, L].
    - `sequences`: (int32[L, E], float32[n, L]) of each, which are changed.
    - `ids`: int16[N, k], experts of the layer.
    - `sequence`: int64[N], the place in `sequences` of each row's.
    - `used`: int64[n], which is changed.
    """
    function = bind("moejax_want_by_matrices", "aassssasaassasa")
    if function is None:
        return None
    kept, layers, experts = collection.shape
    ids = np.ascontiguousarray(ids, np.int16)
    places = np.array([address_of(array) for each in sequences for array in each], np.int64)
    out = np.empty(4 * layers * experts, np.int64)
    known = address_of(collection), address_of(lengths), kept, layers, experts, now
    rows = address_of(ids), address_of(sequence), len(ids), ids.shape[-1]
    count = function(
        *(*known, address_of(places), len(sequences), *rows, address_of(used), most),
        address_of(out),
    )
    return _queue(out, count)
