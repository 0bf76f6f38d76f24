"""count_faults of arrays that a test holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.memory.integrity import count_faults
from host_offload.memory.tables import Residency


def memory_faults(arena: Any, tables: Any, stores: Sequence[Any]) -> list[int]:
    """arena uint16[rows, D]; stores: by version uint16[L, E, record rows, D]."""
    held, sizes = np.asarray(arena), [store.shape[2] for store in stores]

    def is_intact(layer: int, expert: int, version: int, row: int) -> bool:
        record = held[row : row + sizes[version]]
        return np.array_equal(record, np.asarray(stores[version][layer, expert]))

    return count_faults(Residency(*map(np.asarray, tables)), sizes, is_intact)
