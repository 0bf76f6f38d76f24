"""Which of three tiers holds each expert of a layer, and when experts move: FluxMoE's
bandwidth-balanced placement (equations 5 to 9) and its residency planner (Algorithm 2, equations 10
to 13), by the readings of shared/papers.md, 3.3.

Tiers: `dense`, resident as they are computed; `packed`, resident and compressed without loss;
`host`, in the store: columns of a placement int64[L, 3], experts of each layer in each. Experts
of the last two come into the window of two layers before their layer runs, each from a backend of
its own, both at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from host_offload.control.window import DENSE, HOST, PACKED

DEAD_ZONE = 0.9
"""θ: a step whose ideal compute over modelled load is from here to 1 moves nothing."""

REVERSAL = 0.02
"""How far outside of the dead zone ρ must be for a move that reverses the last one. Neighbouring
placements may lie at its two ends, where noise would move an expert to and fro."""

INTERVAL = 300
"""Steps between two moves: those of the paper's Exp#3."""


@dataclasses.dataclass(frozen=True)
class StorageModel:
    """The memory and time that a placement takes."""

    layers: int
    experts: int
    record_bytes: int
    """Bytes of a dense expert."""
    host_rate: float
    """Dense bytes a second that come from the store."""
    packed_rate: float = 0.0
    """Dense bytes a second that come out of packed experts; 0: no packed tier."""
    kappa: float = 1.0
    """Bytes of a packed expert over those of a dense one, in the real store."""
    direct: bool = False
    """Whether packed experts are computed in packed form and take nothing of the window."""
    halves: int = 2
    """Halves of the window that are memory of the arena; the other half is beside it."""

    def experts_bytes(self, placement: np.ndarray, halves: int | None = None) -> int:
        """Returns C_exp, the device bytes of residents and of the window, whose halves are as large
        as the largest layer if layers differ.

        - `halves`: halves of the window to count; None: those in the arena.
        """
        halves = self.halves if halves is None else halves
        dense, packed, _ = placement.sum(axis=0).tolist()
        streamed = placement[:, HOST] + (0 if self.direct else placement[:, PACKED])
        of_dense = (dense + halves * int(streamed.max())) * self.record_bytes
        return of_dense + packed * math.ceil(self.kappa * self.record_bytes - 1e-6)

    def layer_seconds(self, placement: np.ndarray) -> np.ndarray:
        """float64[L]: max_k τ_k of each layer, equations (6) and (9)."""
        host = placement[:, HOST] * self.record_bytes / self.host_rate
        if not self.packed_rate or self.direct:
            return host
        return np.maximum(host, placement[:, PACKED] * self.record_bytes / self.packed_rate)

    def load_seconds(self, placement: np.ndarray) -> float:
        """τ_load of a pass, equation (10)."""
        return float(self.layer_seconds(placement).sum())

    @property
    def most_packed(self) -> int:
        """Experts of a layer beyond which more packed ones load no faster."""
        return self.balance(self.experts)

    def balance(self, experts: int) -> int:
        """Returns how many of a layer's `experts` are packed so that both backends end together:
        x_gpu of equation (8), in whole experts those with the shortest load. Packed experts that
        are computed in packed form need no loading, so then all of them."""
        if not self.packed_rate:
            return 0
        counts = np.arange(experts + 1)
        packed = 0 * counts if self.direct else counts / self.packed_rate
        return int(np.argmin(np.maximum(packed, (experts - counts) / self.host_rate)))


def uniform_placement(model: StorageModel, dense: int, packed: int) -> np.ndarray:
    """Returns a placement, int64[L, 3], with equally many experts of every layer in each tier.
    Raises ValueError for more experts than there are."""
    row = dense, packed, model.experts - dense - packed
    if min(row) < 0 or (packed and not model.packed_rate):
        raise ValueError(
            f"{row} experts of {model.experts} cannot be dense, packed and at the host"
        )
    return np.tile(np.array(row, np.int64), (model.layers, 1))


def move_one_each(placement: np.ndarray, source: int, target: int) -> np.ndarray | None:
    """Moves one expert of every layer from a tier to another: a staggered move. Returns None if a
    layer has none there."""
    if np.any(placement[:, source] < 1):
        return None
    after = placement.copy()
    after[:, source] -= 1
    after[:, target] += 1
    return after


def move_in_one_layer(
    placement: np.ndarray, source: int, target: int, layer: int | None = None
) -> np.ndarray | None:
    """Moves as many experts as move_one_each, all of one layer: the paper's arm without I/O
    balance. Returns None if the layer has fewer.

    - `layer`: None: the first layer with the most experts in the source.
    """
    layer = int(np.argmax(placement[:, source])) if layer is None else layer
    count = len(placement)
    if placement[layer, source] < count:
        return None
    after = placement.copy()
    after[layer, source] -= count
    after[layer, target] += count
    return after


Move = Callable[[np.ndarray, int, int], np.ndarray | None]
"""A function of (placement, source, target) that returns the placement after a move, or None if no
move is possible."""


class PlannerState(NamedTuple):
    """The planner's state between steps."""

    placement: np.ndarray
    """int64[L, 3]"""
    seconds: float = 0.0
    """Seconds of ideal compute of all steps since the last move."""
    steps: int = 0
    last: int = 0
    """1 after a move that made more experts resident, −1 after one that made fewer, 0
    before any."""


def plan_residency(
    model: StorageModel,
    state: PlannerState,
    *,
    compute_s: float,
    room_bytes: int,
    interval: int = INTERVAL,
    staggered: bool = True,
) -> PlannerState:
    """Runs Algorithm 2 after a step and returns the placement from then on.

    - `compute_s`: τ_comp(theory) of the step's batch bucket, with everything resident; its mean
      since the last move counts.
    - `room_bytes`: C_gpu − C_kv, what KV leaves (C_gpu net of other weights and activations).
    - `staggered`: False: a move is of one layer, the paper's arm without I/O balance.

    First it meets the hard constraint (12), with as many moves at once as that takes. Then it makes
    at most one move after each `interval` steps. If ρ = τ_comp / τ_load > 1, memory goes back,
    unless ρ would fall below the dead zone; residents are whole experts, so the zone may not be
    met. If ρ is below the zone, more experts become resident as far as there is room: packed ones
    up to x_gpu, beyond which only dense ones help.

    Raises ValueError like fit_placement.
    """
    move = move_one_each if staggered else move_in_one_layer
    placement = fit_placement(model, state.placement, room_bytes, move)
    if placement is not state.placement:
        return PlannerState(placement, last=-1)
    seconds, steps = state.seconds + compute_s, state.steps + 1
    if steps < interval:
        return state._replace(seconds=seconds, steps=steps)
    mean, load = seconds / steps, model.load_seconds(placement)
    wanted, last, direction = None, state.last, 0
    if mean > load * (1 + REVERSAL * (last > 0)):
        wanted = _less(model, placement, move)
        if wanted is not None and mean < DEAD_ZONE * model.load_seconds(wanted):
            wanted = None
        direction = -1
    elif mean < load * (DEAD_ZONE - REVERSAL * (last < 0)):
        wanted, direction = _more(model, placement, room_bytes, move), 1
    if wanted is None:
        return PlannerState(placement, last=last)
    return PlannerState(wanted, last=direction)


def fit_placement(
    model: StorageModel, placement: np.ndarray, room_bytes: int, move: Move = move_one_each
) -> np.ndarray:
    """Returns the placement after as many moves as the hard constraint (12) takes; the same array
    if it fits already. Raises ValueError if not even the window of two layers fits."""
    while model.experts_bytes(placement) > room_bytes:
        less = _less(model, placement, move)
        if less is None:
            raise ValueError(
                f"a window of two layers takes {model.experts_bytes(placement)} bytes, and KV "
                f"leaves {room_bytes}"
            )
        placement = less
    return placement


def _less(
    model: StorageModel, placement: np.ndarray, move: Move = move_one_each
) -> np.ndarray | None:
    """Returns the placement with a step less of residency, which takes less memory, or None without
    one."""
    packs = model.packed_rate > 0 and model.kappa < 1
    below = PACKED if packs else HOST
    kept = model.experts_bytes(placement)
    for source, target in ((DENSE, below), (DENSE, HOST), (PACKED, HOST)):
        after = move(placement, source, target)
        if after is not None and model.experts_bytes(after) < kept:
            return after
    return None


def _more(
    model: StorageModel, placement: np.ndarray, room_bytes: int, move: Move = move_one_each
) -> np.ndarray | None:
    """Returns the placement with a step more of residency, which loads faster and fits. If no step
    loads faster, returns one that loads as fast and brings less, as when both backends end
    together. None: no change."""
    options = []
    if placement[:, PACKED].max() < model.most_packed:
        options.append(move(placement, HOST, PACKED))
    if not model.direct:
        options.append(move(placement, PACKED, DENSE))
    options.append(move(placement, HOST, DENSE))
    load, fit = model.load_seconds(placement), 1 + 1e-9
    there = [after for after in options if after is not None]
    wanted = [after for after in there if model.load_seconds(after) * fit < load]
    if not wanted:
        denser = [after for after in there if after[:, DENSE].sum() > placement[:, DENSE].sum()]
        wanted = [after for after in denser if model.load_seconds(after) <= load * fit]
    return next((o for o in wanted if model.experts_bytes(o) <= room_bytes), None)
