"""Products of a few rows on the calling thread, by the native library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from pallas_kernels.cpu.library import library, why_not_cpu


@functools.cache
def _function() -> Any:
    if why_not_cpu():
        return None
    function = library().moejax_multiply_rows
    size, address = ctypes.c_int64, ctypes.c_void_p
    sizes = address, size, size, address, size, address, size
    function.restype, function.argtypes = None, sizes
    return function


def multiply_few(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The product of float32 rows [N, D] and float32 or finite float16 weights [D, E], summed in
    float32 in the order of D. Without the library it is numpy's einsum, which sums in the same
    order and takes up to twice as long."""
    function, halves = _function(), weights.dtype == np.float16
    if function is None or not weights.flags.c_contiguous or rows.shape[1] != len(weights):
        return np.einsum("nd,de->ne", rows, weights.astype(np.float32, copy=False))
    rows, found = np.ascontiguousarray(rows), np.empty((len(rows), weights.shape[1]), np.float32)
    places = rows.ctypes.data, *rows.shape, weights.ctypes.data, weights.shape[1], found.ctypes.data
    function(*places, halves)
    return found
