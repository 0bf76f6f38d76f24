"""Batch width, KV pages and expert cells chosen together, for the most tokens a second (ours), as
predicted from miss curves by width and measured costs. docs/explanation/miss_curves.md explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from host_offload.sizing.split import Division, SplitError


@dataclasses.dataclass(frozen=True)
class DecodeModel:
    """What a decode step takes by the sequences that run at once and the cells of each layer."""

    widths: np.ndarray
    """int64[n]: sequences, ascending."""
    seconds: np.ndarray
    """float64[n, E + 1]: of a step, by cap."""

    def step_s(self, width: float, cap: int) -> float:
        """Between two widths on a straight line."""
        return float(np.interp(width, self.widths, self.seconds[:, cap]))


def resident_seconds(step_s: Mapping[int, float], widths: np.ndarray) -> np.ndarray:
    """float64[n]: what Costs.step_s says of widths, none beyond the largest: rows are padded to
    those of an executable."""
    rows = np.array(sorted(step_s))
    return np.array([step_s[row] for row in rows[np.searchsorted(rows, widths)].tolist()])


def cap_beside(division: Division, pages: float) -> int | None:
    """The largest legal cap that leaves KV so many pages; None: there is none."""
    caps = np.flatnonzero(division.legal & (division.pages >= pages))
    return int(caps[-1]) if len(caps) else None


class JointChoice(NamedTuple):
    width: int
    """Sequences that should run at once."""
    cap: int
    pages: int
    tokens_per_s: float
    """Predicted."""


def choose(
    model: DecodeModel, division: Division, *, pages_per_sequence: float, demand: int
) -> JointChoice:
    """The width, cap and pages with the most tokens a second; of equals the narrowest.

    pages_per_sequence: KV that one needs until its end. demand: sequences that run or wait. Raises
    SplitError where not even the narrowest width fits.
    """
    most = int(min(max(demand, model.widths[0]), model.widths[-1]))
    best = None
    for width in range(int(model.widths[0]), most + 1):
        cap = cap_beside(division, width * pages_per_sequence)
        if cap is None:
            break
        rate = width / model.step_s(width, cap)
        if best is None or rate > best.tokens_per_s:
            best = JointChoice(width, cap, division.pages_at(cap), rate)
    if best is None:
        raise SplitError(
            f"{division.total_bytes} bytes have no room for {model.widths[0]} sequences of "
            f"{pages_per_sequence:g} pages of {division.page_bytes} bytes"
        )
    return best


def widen(misses: np.ndarray, width: float, to: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """float64[n, E + 1]: misses [E + 1] of a step of `width` sequences, for other widths int[n], if
    sequences were independent: each of the experts that are not resident, slots[c] of them at cap
    c, is then missed by a sequence with the same chance. For widths that were never run."""
    absent = np.maximum(slots, 1e-9)
    share = np.clip(misses / absent, 0.0, 1 - 1e-9)
    return absent * (1 - (1 - share) ** (np.asarray(to)[:, None] / max(width, 1e-9)))
