"""Transposed copies, by the native library."""

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
    function = library().moejax_transpose
    address, size = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = [address, size, size, size, size, address, size]
    return function


def transpose(out: np.ndarray, matrix: np.ndarray) -> bool:
    """Computes out[:] = matrix.T for unsigned[N, M] and unsigned[M, N] of 16 or 32 bits whose rows
    are contiguous. Returns False, having done nothing, for others and without the library."""
    function, item = _function(), matrix.itemsize
    rows = all(array.strides[1] == item and array.strides[0] > 0 for array in (out, matrix))
    if function is None or item not in (2, 4) or not rows or out.strides[0] % item:
        return False
    assert out.shape == matrix.shape[::-1] and out.dtype == matrix.dtype
    n, width = matrix.shape
    to = out.ctypes.data, out.strides[0] // item
    function(matrix.ctypes.data, n, matrix.strides[0], width, item, *to)
    return True
