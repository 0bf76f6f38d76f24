"""plan on tables in host memory, by the native library: for simulators and controllers, for which
a layer is few numbers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pallas_kernels.cpu.library import address_of, bind

Addresses = tuple[int, int, int]


class LayerPlan(Protocol):
    """plan for some tables, which it changes."""

    def __call__(self, layer: int, due: np.ndarray, into: Addresses | None = None) -> list[int]:
        """References a layer's experts due bool[E]. Returns the numbers of active experts, fills,
        hits and experts read through.

        - `into`: addresses of bool[E], int32[E] and int8[E], which get of each active expert
          whether it was absent (as far as that was not set), and the row and version that it is
          computed from.
        """
        ...


OrderCells = Callable[[Sequence[np.ndarray], int, int], np.ndarray | None]
"""(tables, layer, version) → int64[n], the granted cells in the order in which the layer's next
reference would take them; None for tables that the library cannot read."""


def _fits(table: np.ndarray) -> bool:
    """Whether a table is contiguous int32."""
    return table.flags.c_contiguous and table.flags.aligned and table.dtype == np.int32


def planner(tables: Sequence[np.ndarray]) -> LayerPlan | None:
    """Returns plan for these tables, int32 fields of Tables in order, which the caller keeps; None
    without the library."""
    function = bind("moejax_plan", "assssaaaaaa", ctypes.c_int)
    if function is None or not all(_fits(table) and table.flags.writeable for table in tables):
        return None
    (layers, cells), experts = tables[0].shape, tables[4].shape[1]
    addresses = (ctypes.c_void_p * len(tables))(*(address_of(table) for table in tables))
    results = np.empty(4 * experts + 4, np.int32)  # lists, then counts
    at = address_of(results), address_of(results[-4:])

    def plan(layer: int, due: np.ndarray, into: Addresses | None = None) -> list[int]:
        due, noted = np.ascontiguousarray(due, bool), into or (None, None, None)
        if function(addresses, layers, cells, experts, layer, address_of(due), *at, *noted):
            raise ValueError(f"the tables of layer {layer} have an owner that is no expert")
        return results[-4:].tolist()

    return plan


def cell_order() -> OrderCells | None:
    """Returns a function that orders cells of tables, which are mostly those of its last call, on
    one thread; None without the library."""
    function = bind("moejax_order_cells", "asssssa")
    if function is None:
        return None
    addresses = (ctypes.c_void_p * 11)()
    known: list[Any] = [lambda: None] * 11
    """Weak references, so that a device may write over its tables."""
    found = np.empty(0, np.int64)

    def order(tables: Sequence[np.ndarray], layer: int, version: int) -> np.ndarray | None:
        nonlocal found
        for i, table in enumerate(tables):
            if known[i]() is table:
                continue
            if not _fits(table):
                return None
            addresses[i], known[i] = address_of(table), weakref.ref(table)
        (layers, cells), experts = tables[0].shape, tables[4].shape[1]
        if len(found) < cells:
            found = np.empty(cells, np.int64)
        count = function(addresses, layers, cells, experts, layer, version, address_of(found))
        return None if count < 0 else found[:count].copy()

    return order
