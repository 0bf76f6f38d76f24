"""What the layers of a step share: the memory that each changes, and what none does."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from host_offload.memory.tables import Tables
from pallas_kernels import Ops
from pallas_kernels.expert_ffn import ExpertOptions, ExpertPlaces
from pallas_kernels.kv_write import KVPage
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import Formats


class DeviceMemory(NamedTuple):
    """What steps change in place: donated, and in the carry of a scan over layers."""

    arena: Any
    """uint16[rows, D], or an OwnedArena."""
    tables: Tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertContext:
    """What the experts of every layer of a step have in common; all but the stores is static."""

    stores: tuple[jax.Array, ...]
    """By version number uint16[L, E, rows, D], in pinned host memory."""
    ops: Ops
    activation: str
    row_tile: int
    """Rows of one matrix product."""
    waves: int = 1
    """Passes over a layer's experts."""
    formats: Formats | None = None
    """By version number, see VersionFormats; None: one version, dense."""
    in_place: bool = False
    """Every expert is resident in the store: none is missed, filled or moved."""
    packed: RecordFormat | None = None
    """Residents in cells of this format stream too, decoded into the window; None: there are none,
    or they are computed as they are."""

    def places(self, tables: Tables, layer: jax.Array | int) -> ExpertPlaces:
        """Where a layer's experts are by the tables."""
        return ExpertPlaces(self.stores, layer, tables.address, tables.version)

    def expert_options(self, implementation: str) -> ExpertOptions:
        """Those of expert_ffn or fill_ffn."""
        return ExpertOptions(
            activation=self.activation,
            row_tile=self.row_tile,
            formats=self.formats,
            implementation=implementation,
            shared_kib=self.ops.shared_kib,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext(ExpertContext):
    """What all layers of a step have in common."""

    page: KVPage
    window: bool = False
    """Experts stream through a window of two layers: all of a layer's are there before it runs."""
    resident: bool = False
    """Every expert has a cell and is in it, which who dispatches the step knows."""
    queued: bool = False
    """A queue fills the arena, which is owned, so that steps say how many writes they made."""
    arrays: frozenset[str] = frozenset()
    """The TRACE_ARRAYS that the step gives out."""
    cache_aware: float | None = None
    """As of StepSpec, where some experts may be missing; None: no router knows who is resident."""
