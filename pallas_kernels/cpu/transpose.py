"""Transposed copies, by the native library."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cpu.library import bind


def transpose(out: np.ndarray, matrix: np.ndarray) -> bool:
    """Computes out[:] = matrix.T for unsigned[N, M] and unsigned[M, N] of 16 or 32 bits whose rows
    are contiguous. Returns False, having done nothing, for others and without the library."""
    function, item = bind("moejax_transpose", "assssas", None), matrix.itemsize
    rows = all(array.strides[1] == item and array.strides[0] > 0 for array in (out, matrix))
    if function is None or item not in (2, 4) or not rows or out.strides[0] % item:
        return False
    assert out.shape == matrix.shape[::-1] and out.dtype == matrix.dtype
    n, width = matrix.shape
    to = out.ctypes.data, out.strides[0] // item
    function(matrix.ctypes.data, n, matrix.strides[0], width, item, *to)
    return True
