"""Moves cells between layers by live miss curves."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.sizing.cell_allocation import ALLOCATIONS, share_anew
from host_offload.sizing.miss_curves import LiveCurves, cold_curves


class Layers(NamedTuple):
    """State of LayerCells."""

    curves: LiveCurves
    least: np.ndarray
    """int64[L]"""
    most: int
    """Most cells of a layer."""


@dataclasses.dataclass(frozen=True)
class LayerCells:
    """Shares a fixed number of cells over the layers again, if that is predicted to save enough
    misses (ours; WiSP gives every layer the same number).

    - `allocation`: see cell_allocation.
    - `decay`: of the distances, once an interval.
    - `gate`: the least saving that moves cells, as a share of the misses.
    """

    allocation: str = "marginal"
    decay: float = 0.8
    gate: float = 0.02
    interval: str = "256 steps"

    moments: frozenset[Moment] = frozenset({Moment.STEP_END, Moment.INTERVAL})
    needs: frozenset[str] = frozenset({"ids", "cells"})
    writes: frozenset[str] = frozenset({"cells"})

    def init(self, spec: Spec) -> Layers:
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"cells are {', '.join(ALLOCATIONS)}, not {self.allocation!r}")
        curves = cold_curves(spec.layers, spec.experts)
        return Layers(curves, spec.min_cells.astype(np.int64), min(spec.experts, spec.cell_bound))

    def decide(self, state: Layers, seen: Observation) -> tuple[Layers, Decision]:
        if seen.moment == Moment.STEP_END:
            return state._replace(curves=state.curves.see(seen.ids)), Decision()
        state = state._replace(curves=state.curves.forget(self.decay))
        misses = state.curves.misses[:, : state.most + 1]
        slots, limits = int(seen.cells.sum()), {"gate": self.gate, "least": state.least}
        cells = share_anew(self.allocation, misses, slots, seen.cells, **limits)
        return state, Decision(cells=None if cells is None else cells.astype(np.int32))
