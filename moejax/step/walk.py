"""Runs a step as one executable, and defines the types that both walks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.control.interface import MapRows, MapSearch, Moment
from host_offload.policies.prefetch.expert_map.map_store import MapStore
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler, is_ready
from moejax.step.map_search import WRITTEN
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import Routing, StepOutput, StepSpec, TraceArrays
from pallas_kernels.plan import Tables
from pallas_kernels.stage import Entries

Hooks = Callable[[Moment, int, Any], Entries | None]
"""The engine's callback between the parts of a layer: (moment, layer, known) → transfers.

`layer` counts over MoE layers; −1 before the first one. `known` is at EMBEDDED the step's
embeddings float16[T, D], if steps return them. At ROUTED it is (ids int32[T, K], ascending, E for
padding; weights float32[T, K]), of the rows of the decode bucket or the tokens of the largest
prefill step.

The returned entries (int32[STAGES] a field, of any layers) are carried out before the walk's next
dispatch. Entries that do not fit the tables are skipped; `transfers` has which were carried out. A
layer whose experts are still to come needs none of its cells before its plan, so an entry of it may
also replace an expert that the step before used. An exception ends the step."""


class LayerTransfers(NamedTuple):
    """A list of transfers that a hook returned."""

    entries: Entries
    done: jax.Array
    """int32[STAGES]: 1 for each entry that was carried out."""


LOOK_EVERY = 64
"""Steps between two looks of the host at the tables. A look costs one launch; a step without plans
saves a few launches a layer."""


@dataclasses.dataclass
class Completeness:
    """Tracks whether every expert is in a cell, from step to step.

    Each field is about one Tables object. So code that gives the runner other tables makes this
    knowledge void without a call.
    """

    complete: Tables | None = None
    """Tables in which no expert is absent."""
    looked: tuple[jax.Array, Tables] | None = None
    """The least address of some tables, and the tables that steps without transfers have made of
    them. In such a step no expert leaves unless one is missing."""
    steps: int = LOOK_EVERY
    """Steps since the host's last look."""

    def due(self, tables: Tables) -> bool:
        """Whether it is time to look at these tables."""
        known = tables is self.complete
        return not known and self.looked is None and self.steps >= LOOK_EVERY

    def look(self, least_address: jax.Array, tables: Tables) -> None:
        """Begins to read the least address of these tables."""
        least_address.copy_to_host_async()
        self.looked, self.steps = (least_address, tables), 0

    def is_complete(self, tables: Tables) -> bool:
        """Whether every expert is known to be in a cell by these tables."""
        if self.looked is not None:
            least, last = self.looked
            if last is not tables:
                self.looked = None
            elif is_ready(least):
                self.looked, self.complete = None, tables if int(least) >= 0 else None
        return tables is self.complete

    def follow_step(self, before: Tables, after: Tables) -> None:
        """Notes that a step without transfers turned the tables `before` into `after`."""
        self.steps += 1
        if self.complete is before:
            self.complete = after
        if self.looked is not None and self.looked[1] is before:
            self.looked = self.looked[0], after


class DeviceMaps:
    """A store of expert maps on the device, empty at first.

    - `shapes`: the shapes of its arrays.
    """

    def __init__(
        self,
        search: MapSearch,
        shapes: MapStore,
        compiler: Compiler,
        sharding: jax.sharding.Sharding,
    ):
        self.search, self._compiler = search, compiler
        self.arrays: MapStore = jax.tree.map(
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


class StepRequest(NamedTuple):
    """A step to dispatch."""

    key: ProgramKey
    args: tuple
    """The arrays that Programs.batch describes."""
    forced: Routing | None
    stages: Entries | None
    hooks: Hooks | None
    maps: DeviceMaps | None


class CompiledWalk:
    """Runs a step as one executable.

    - `params`: the model's arrays.
    - `slots`: slots of the arena.
    """

    transfers: Sequence[LayerTransfers] = ()
    """The transfers between the layers of the latest step."""
    layer_arrays = TraceArrays()
    """Arrays [T, ·] of the layer that was routed last, for hooks."""

    def __init__(
        self, steps: StepSpec, params: tuple, buffers: Buffers, compiler: Compiler, slots: int
    ):
        self._steps, self.params = steps, params
        self._buffers, self._compiler = buffers, compiler
        self._completeness = Completeness()
        places = slots * steps.layout.cells_per_slot[0]
        layers, experts = buffers.tables.address.shape
        self._all_fit = steps.resident_steps and places >= layers * experts
        """Whether every expert can be in a cell and there are steps without plans for then."""

    def calls(
        self, step: ProgramKey, *, staged: bool = False, maps: DeviceMaps | None = None
    ) -> list[ProgramKey]:
        """Returns the keys of the executables that a step calls.

        - `staged`: whether the step has a stage list.
        - `maps`: the maps that decode steps search.
        """
        search = maps.search if maps is not None and step.kind == "decode" else None
        traced = bool(self._steps.trace_arrays)
        return [step._replace(traced=traced, staged=staged, maps=search)]

    def run(self, request: StepRequest) -> StepOutput:
        """Dispatches a step."""
        step, args, forced, stages, _, maps = request
        buffers = self._buffers
        (key,) = self.calls(step, staged=stages is not None, maps=maps)
        key = key._replace(forced=forced is not None)
        extras: list[Any] = [value for value in (forced, stages) if value is not None]
        transfers = stages is not None or maps is not None
        if not (extras or transfers) and self._is_resident(key):
            key = key._replace(resident=True)
        if key.maps is not None and maps is not None:
            extras.append(maps.arrays)
        before = buffers.tables
        buffers.arena, buffers.tables, output = self._compiler.call(
            key, self.params, buffers.stores, buffers.arena, before, *args, *extras
        )
        if not transfers:
            self._completeness.follow_step(before, buffers.tables)
        return output

    def _is_resident(self, key: ProgramKey) -> bool:
        """Whether the step may run without plans: it decodes, the host knows that every expert is
        in a cell, and the executable is compiled."""
        if not self._all_fit or key.kind != "decode":
            return False
        known, tables, least = self._completeness, self._buffers.tables, ProgramKey("least_address")
        if known.is_complete(tables):
            return self._compiler.start(key._replace(resident=True)).done()
        if known.due(tables) and self._compiler.start(least).done():
            known.look(self._compiler.call(least, tables), tables)
        return False

    def delete(self) -> None:
        pass
