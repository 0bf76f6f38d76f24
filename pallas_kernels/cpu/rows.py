"""Products of a few rows, and searches of expert maps, on the calling thread, by the native
library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.cpu.library import library, why_not_cpu

FORMS = ("", "gelu", "relu", "sigmoid")
"""What may follow a product, by the library's numbers. GELU is that by tanh."""


class _Functions(NamedTuple):
    multiply: Any
    search: Any


@functools.cache
def _functions() -> _Functions | None:
    if why_not_cpu():
        return None
    size, address = ctypes.c_int64, ctypes.c_void_p
    found = _Functions(library().moejax_multiply_rows, library().moejax_nearest_maps)
    found.multiply.argtypes = address, size, size, address, size, address, size, address, size
    found.search.argtypes = address, size, size, address, size, *[address] * 6
    for function in found:
        function.restype = None
    return found


def multiply_few(
    rows: np.ndarray, weights: np.ndarray, bias: np.ndarray | None = None, form: str = ""
) -> np.ndarray:
    """The product of float32 rows [N, D] and float32 or finite float16 weights [D, E], summed in
    float32 in the order of D, with a float32 bias [E] and then one of FORMS. Without the library it
    is numpy's einsum, which sums in the same order and takes up to twice as long."""
    functions, halves = _functions(), weights.dtype == np.float16
    if functions is None or not weights.flags.c_contiguous or rows.shape[1] != len(weights):
        found = np.einsum("nd,de->ne", rows, weights.astype(np.float32, copy=False))
        return finish_product(found if bias is None else found + bias, form)
    rows, found = np.ascontiguousarray(rows), np.empty((len(rows), weights.shape[1]), np.float32)
    places = rows.ctypes.data, *rows.shape, weights.ctypes.data, weights.shape[1], found.ctypes.data
    if bias is not None:
        bias = np.ascontiguousarray(bias, np.float32)
    after = None if bias is None else bias.ctypes.data
    functions.multiply(*places, halves, after, FORMS.index(form))
    return found


def finish_product(x: Any, form: str, xp: Any = np) -> Any:
    """One of FORMS of x, in numpy or jax.numpy."""
    if form == "gelu":
        return 0.5 * x * (1 + xp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    if form == "sigmoid":
        return 1 / (1 + xp.exp(-x))
    return x * (x > 0) if form == "relu" else x


def nearest_maps(
    rows: np.ndarray,
    kept: np.ndarray,
    filled: np.ndarray,
    products: np.ndarray | None = None,
    squares: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """The places of a store of expert maps (map_store.py) with the largest score: by dot products
    of rows float32[N, K] and kept float32[C, K], C ≥ 1, or by the cosine of probabilities and maps
    over all layers so far. Returns places int64[N], of equal ones the first, and scores float32[N];
    None without the library.

    - `filled`: float32[C], 0 for places that are empty.
    - `products`, `squares`: int32[N, C] and int32[N] of the layers before, to which this layer's
      are added, in place.
    - `lengths`: float32[C], of the maps up to this layer.
    """
    functions = _functions()
    if functions is None or not kept.flags.c_contiguous or kept.dtype != np.float32:
        return None
    rows = np.ascontiguousarray(rows, np.float32)
    assert rows.shape[1:] == kept.shape[1:] and filled.shape == kept.shape[:1]
    found = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    given = [None if a is None else a.ctypes.data for a in (products, squares, lengths)]
    places = rows.ctypes.data, *rows.shape, kept.ctypes.data, len(kept), *given, filled.ctypes.data
    functions.search(*places, *(a.ctypes.data for a in found))
    return found
