"""A step as one executable, and what both walks have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moejax.errors import UserError
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.completeness import Completeness
from moejax.step.device_maps import DeviceMaps
from moejax.step.hooks import Hooks, LayerTransfers
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import Routing, StepOutput, StepSpec, TraceArrays
from pallas_kernels.stage import Entries


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
        step, args, forced, stages, hooks, maps = request
        check_hooks(self._steps.driver, hooks)
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
            self._completeness.stepped(before, buffers.tables)
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


def check_hooks(driver: str, hooks: Hooks | None) -> None:
    """Raises UserError for hooks that this driver cannot call."""
    if hooks is not None and driver != "host":
        raise UserError(
            f"driver {driver!r} runs a step as one executable, which no hook can enter; use "
            "driver='host'"
        )
