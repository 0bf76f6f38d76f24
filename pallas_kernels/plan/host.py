"""plan on tables in host memory, by the native library: for simulators, whose layers are few
numbers each."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.cpu.library import library, why_not_cpu

LayerPlan = Callable[[int, np.ndarray], list[int]]
"""(layer, due bool[E]) → the numbers of active experts, fills, hits and experts read through. It
changes the tables."""


@functools.cache
def _function() -> Any:
    if why_not_cpu():
        return None
    function = library().moejax_plan
    size, address = ctypes.c_int64, ctypes.c_void_p
    function.restype = ctypes.c_int
    function.argtypes = (address, size, size, size, size, address, address, address)
    return function


def planner(tables: Sequence[np.ndarray]) -> LayerPlan | None:
    """Returns plan for these tables, int32 fields of Tables in order, which the caller keeps; None
    without the library."""
    function = _function()
    fits = all(t.flags.carray and t.dtype == np.int32 for t in tables)  # contiguous, and writable
    if function is None or not fits:
        return None
    (layers, cells), experts = tables[0].shape, tables[4].shape[1]
    addresses = (ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables))
    results = np.empty(4 * experts + 4, np.int32)  # lists, then counts
    at = results.ctypes.data, results[-4:].ctypes.data

    def plan(layer: int, due: np.ndarray) -> list[int]:
        due = np.ascontiguousarray(due, bool)
        if function(addresses, layers, cells, experts, layer, due.ctypes.data, *at):
            raise ValueError(f"the tables of layer {layer} have an owner that is no expert")
        return results[-4:].tolist()

    return plan
