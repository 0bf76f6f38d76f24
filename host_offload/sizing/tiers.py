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
"""How far outside of the dead zone ρ has to be for a move that takes the last one back:
neighbouring placements may lie at its two ends, where noise would move an expert to and fro."""

INTERVAL = 300
"""Steps between two moves: those of the paper's Exp#3."""


@dataclasses.dataclass(frozen=True)
class StorageModel:
    """What a placement takes of memory and time."""

    layers: int
    experts: int
    record_bytes: int
    """A dense expert's."""
    host_rate: float
    """Dense bytes a second that come from the store."""
    packed_rate: float = 0.0
    """Dense bytes a second that come out of packed experts; 0: there is no such tier."""
    kappa: float = 1.0
    """A packed expert's bytes by a dense one's, of the real store."""
    direct: bool = False
    """Packed experts are computed as they are, and take nothing of the window."""
    halves: int = 2
    """Halves of the window that are memory of the arena; the other one is beside it."""

    def experts_bytes(self, placement: np.ndarray, halves: int | None = None) -> int:
        """C_exp: what experts take of the device, residents and the window of two layers, each as
        large as the largest where layers differ; or with so many halves of that alone."""
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
        """How many of so many of a layer are packed where both backends end together: x_gpu of
        equation (8), in whole experts those with the shortest load. Those that are computed as they
        are packed need no loading, so all of them."""
        if not self.packed_rate:
            return 0
        counts = np.arange(experts + 1)
        packed = 0 * counts if self.direct else counts / self.packed_rate
        return int(np.argmin(np.maximum(packed, (experts - counts) / self.host_rate)))


def uniform_placement(model: StorageModel, dense: int, packed: int) -> np.ndarray:
    """int64[L, 3] with as many experts of every layer in each tier. Raises ValueError for more than
    there are."""
    row = dense, packed, model.experts - dense - packed
    if min(row) < 0 or (packed and not model.packed_rate):
        raise ValueError(
            f"{row} experts of {model.experts} cannot be dense, packed and at the host"
        )
    return np.tile(np.array(row, np.int64), (model.layers, 1))


def move_one_each(placement: np.ndarray, source: int, target: int) -> np.ndarray | None:
    """One expert of every layer from a tier to another: a staggered move. None where a layer has
    none there."""
    if np.any(placement[:, source] < 1):
        return None
    after = placement.copy()
    after[:, source] -= 1
    after[:, target] += 1
    return after


def move_in_one_layer(
    placement: np.ndarray, source: int, target: int, layer: int | None = None
) -> np.ndarray | None:
    """As many experts as move_one_each, all of one layer, by default the first layer with the
    most experts in the source: the paper's arm without I/O balance. None where it has fewer."""
    layer = int(np.argmax(placement[:, source])) if layer is None else layer
    count = len(placement)
    if placement[layer, source] < count:
        return None
    after = placement.copy()
    after[layer, source] -= count
    after[layer, target] += count
    return after


Move = Callable[[np.ndarray, int, int], np.ndarray | None]
"""(placement, source, target) → the placement after a move, None: there is none."""


class PlannerState(NamedTuple):
    """What the planner knows from one step to the next."""

    placement: np.ndarray
    """int64[L, 3]"""
    seconds: float = 0.0
    """Ideal compute of the steps observed since the last move, in all."""
    steps: int = 0
    last: int = 0
    """1 after a move that made more resident, −1 after one that made less, 0 before any."""


def plan_residency(
    model: StorageModel,
    state: PlannerState,
    *,
    compute_s: float,
    room_bytes: int,
    interval: int = INTERVAL,
    staggered: bool = True,
) -> PlannerState:
    """Algorithm 2 after a step: the placement from then on.

    compute_s: τ_comp(theory) of the step's batch bucket, everything resident; its mean since the
    last move counts. room_bytes: C_gpu − C_kv, what KV leaves (C_gpu net of other weights and
    activations). First the hard constraint (12): as many moves at once as it takes. Then at most
    one move after each `interval` steps. Where ρ = τ_comp / τ_load > 1 memory goes back, unless ρ
    would fall below the dead zone: residents have whole experts, so it may not be met. Where ρ is
    below it, more become resident: packed ones up to x_gpu, beyond which only dense ones help, as
    far as there is room. Not staggered, the paper's arm without I/O balance, a move is of one
    layer.

    Raises ValueError as fit_placement.
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
    """The placement after as many moves as the hard constraint (12) takes; the same array where it
    fits as it is. Raises ValueError where not even the window of two layers fits."""
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
    """The placement with a step less of residency, which takes less memory; None: there is none."""
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
    """The placement with a step more of residency, which loads faster and fits; where no step does,
    one that loads as fast with less to bring, as where both backends end together; None: hold."""
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
