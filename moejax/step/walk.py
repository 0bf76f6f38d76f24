"""A step as one executable, and what both walks have in common."""

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
from moejax.step.compiler import Compiler
from moejax.step.map_search import WRITTEN
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import Routing, StepOutput, StepSpec, TraceArrays
from pallas_kernels.plan import Tables
from pallas_kernels.stage import Entries

Hooks = Callable[[Moment, int, Any], Entries | None]
"""How the engine asks policies between the parts of a layer: (moment, layer, what is known now).

Layers count over MoE layers, −1: none yet. Known is at EMBEDDED the step's embeddings
float16[T, D], where steps give them out; at ROUTED ids int32[T, K], ascending, E for padding, and
weights float32[T, K], for the rows of the decode bucket or the tokens of the largest prefill step.

Entries that come back (int32[STAGES] each, of any layers) are carried out right there, before what
the walk dispatches next; those that do not fit the tables are skipped, as `transfers` says. A layer
whose experts this step has yet to compute needs none of its cells before its plan, so there an
entry may also replace an expert that the step before used. An exception ends the step."""


class LayerTransfers(NamedTuple):
    """A list of transfers that a hook returned."""

    entries: Entries
    done: jax.Array
    """int32[STAGES]: 1 for each entry that was carried out."""


LOOK_EVERY = 64
"""Steps after which the host looks again: each costs a launch, and a step that needs no plan is a
few launches a layer shorter."""


@dataclasses.dataclass
class Completeness:
    """Follows tables from step to step. Each of its fields is about one Tables object, so that
    whatever else gives the runner other tables ends what was known, without telling anybody."""

    complete: Tables | None = None
    """Nobody is absent from these."""
    looked: tuple[jax.Array, Tables] | None = None
    """The least address of tables, and what steps without transfers have made of those by now: no
    expert leaves in such a step unless one is missing."""
    steps: int = LOOK_EVERY
    """Since the host looked last."""

    def due(self, tables: Tables) -> bool:
        """Whether it is time to look at these tables."""
        known = tables is self.complete
        return not known and self.looked is None and self.steps >= LOOK_EVERY

    def look(self, least_address: jax.Array, tables: Tables) -> None:
        """Keeps what was asked of these tables, until the device has answered."""
        least_address.copy_to_host_async()
        self.looked, self.steps = (least_address, tables), 0

    def is_complete(self, tables: Tables) -> bool:
        """Whether every expert is known to be in a cell by these tables."""
        if self.looked is not None:
            least, last = self.looked
            if last is not tables:
                self.looked = None
            elif least.is_ready():  # pyright: ignore[reportAttributeAccessIssue]  not in jax's stubs
                self.looked, self.complete = None, tables if int(least) >= 0 else None
        return tables is self.complete

    def follow_step(self, before: Tables, after: Tables) -> None:
        """A step without transfers made `after` of `before`."""
        self.steps += 1
        if self.complete is before:
            self.complete = after
        if self.looked is not None and self.looked[1] is before:
            self.looked = self.looked[0], after


class DeviceMaps:
    """An empty store of expert maps.

    - `shapes`: of its arrays.
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
    """Of `Programs.batch`."""
    forced: Routing | None
    stages: Entries | None
    hooks: Hooks | None
    maps: DeviceMaps | None


class CompiledWalk:
    """A step as one executable.

    - `params`: the model's arrays.
    - `slots`: of the arena.
    """

    transfers: Sequence[LayerTransfers] = ()
    """What was carried out between the layers of the latest step."""
    layer_arrays = TraceArrays()
    """[T, ·] each, of the layer routed last, while hooks are called."""

    def __init__(
        self, steps: StepSpec, params: tuple, buffers: Buffers, compiler: Compiler, slots: int
    ):
        self._steps, self._params = steps, params
        self._buffers, self._compiler = buffers, compiler
        self._completeness = Completeness()
        places = slots * steps.layout.cells_per_slot[0]
        layers, experts = buffers.tables.address.shape
        self._all_fit = steps.resident_steps and places >= layers * experts
        """Every expert could be in a cell, and there are steps for when it is."""

    def calls(
        self, step: ProgramKey, *, staged: bool = False, maps: DeviceMaps | None = None
    ) -> list[ProgramKey]:
        """The executables that a step calls.

        - `staged`: with a stage list.
        - `maps`: that decode steps search.
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
            key, self._params, buffers.stores, buffers.arena, before, *args, *extras
        )
        if not transfers:
            self._completeness.follow_step(before, buffers.tables)
        return output

    def _is_resident(self, key: ProgramKey) -> bool:
        """Whether a decode step may take every expert to be in its cell: the host knows that they
        are, and the executable, which compiles in the background, is there."""
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
