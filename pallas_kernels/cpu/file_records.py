"""Expert records that stay in files, as programs carry them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sizes"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class FileRecords:
    """What programs carry in the place of a store uint16[L, E, rows, D] of which no byte is in
    memory: its sizes. Ops of implementation "cpu" take it where they take the array, and get the
    records by the queue and the sources of their owned arena (cpu/sources.h)."""

    sizes: Any
    """int32[4]: shape, as ops see it."""
    shape: tuple[int, ...]

    dtype = np.dtype(np.uint16)
    ndim = 4
    nbytes = 0
    """Bytes of host memory."""

    def delete(self) -> None:
        """There is nothing to free."""


def file_records(shape: tuple[int, ...], device: jax.Device) -> FileRecords:
    """Records of that shape for programs of this device, a CPU."""
    return FileRecords(jax.device_put(np.array(shape, np.int32), device), shape)
