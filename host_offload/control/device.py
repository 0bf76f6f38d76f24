"""What a Control asks of the device whose steps it accompanies, and of who moves budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from host_offload.control.controller import Controller
from host_offload.memory.tables import Entry, Move, Residency


class Device(Protocol):
    """Tables and arena that steps are run on, in dispatch order: the engine's runner with either
    driver (moejax.step.runner) or a simulator's pager (host_offload.simulate)."""

    def prepare(self, controller: Controller) -> None:
        """What this controller's policies may decide will be asked for, from the first step on."""
        ...

    def snapshot(self) -> Callable[[], Residency]:
        """Copies the tables as the steps so far leave them; what it returns waits for the copy."""
        ...

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Other contents of some tables, for the steps to come."""
        ...

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells within the arena, for the steps to come."""
        ...

    def transfer(self, entries: Sequence[Entry]) -> np.ndarray:
        """Carries out a list before the next step; int32[S], 1 for each entry that was."""
        ...

    def carried_out(self) -> np.ndarray:
        """As of transfer, for the list that Control.between_layers returned last."""
        ...


class Moved(NamedTuple):
    """What became of a resize request."""

    settled: bool
    """Nothing is left to do: it was carried out, or it failed and the earlier split stands."""
    changed: bool
    """The split is another one than before."""


class Resizer(Protocol):
    """Who moves the line between experts and KV."""

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        """Before a step. cells: int32[L] wanted of each layer; None: as they are. kv_pages: pages
        wanted of KV, likewise."""
        ...

    def limit(self, max_running: int) -> None:
        """No more sequences than so many should run at once."""
        ...
