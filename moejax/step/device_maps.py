"""The store of expert maps on the device, which decode steps search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.control.interface import MapRows, MapSearch
from moejax.step.compiler import Compiler
from moejax.step.map_search import WRITTEN, MapArrays
from moejax.step.programs import ProgramKey


class DeviceMaps:
    """An empty store of expert maps.

    - `shapes`: of its arrays.
    """

    def __init__(
        self,
        search: MapSearch,
        shapes: MapArrays,
        compiler: Compiler,
        sharding: jax.sharding.Sharding,
    ):
        self.search, self._compiler = search, compiler
        self.arrays: MapArrays = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype, device=sharding), shapes
        )
        compiler.need(ProgramKey("write_maps", maps=search))

    def write(self, rows: MapRows) -> None:
        """Writes rows, for the steps to come."""
        key = ProgramKey("write_maps", maps=self.search)
        for i in range(0, len(rows.place), WRITTEN):
            place, *values = (part[i : i + WRITTEN] for part in rows)
            padding = WRITTEN - len(place)
            place = np.pad(place, (0, padding), constant_values=self.search.capacity)
            values = [np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)) for a in values]
            self.arrays = self._compiler.call(key, self.arrays, place, *values)

    def delete(self) -> None:
        for array in self.arrays:
            array.delete()
