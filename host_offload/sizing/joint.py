"""Chooses batch width, KV pages and expert cells together, for the most tokens a second as
predicted from miss curves by width and measured costs. This is ours;
docs/explanation/miss_curves.md explains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from host_offload.sizing.split import Division, SplitError


@dataclasses.dataclass(frozen=True)
class DecodeModel:
    """The time of a decode step by the sequences that run at once and the cells of each layer."""

    widths: np.ndarray
    """int64[n]: sequences, ascending."""
    seconds: np.ndarray
    """float64[n, E + 1]: seconds of a step, by cap."""

    def step_s(self, width: float, cap: int) -> float:
        """Returns the seconds of a step, interpolated linearly between two widths."""
        return float(np.interp(width, self.widths, self.seconds[:, cap]))


def resident_seconds(step_s: Mapping[int, float], widths: np.ndarray) -> np.ndarray:
    """Returns the seconds of Costs.step_s at these widths, float64[n]; no width may exceed the
    largest. Rows are padded to those of an executable."""
    rows = np.array(sorted(step_s))
    return np.array([step_s[row] for row in rows[np.searchsorted(rows, widths)].tolist()])


def cap_beside(division: Division, pages: float) -> int | None:
    """Returns the largest legal cap that leaves KV so many pages, or None without one."""
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
    """Chooses the width, cap and pages with the most tokens a second; among equals the narrowest.

    - `pages_per_sequence`: KV that a sequence needs until its end.
    - `demand`: sequences that run or wait.

    Raises SplitError if not even the narrowest width fits.
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
    """Returns a step's misses for widths that never ran, float64[n, E + 1]. It assumes independent
    sequences: each misses each non-resident expert with the same chance.

    - `misses`: float64[E + 1], misses of a step of `width` sequences by cap.
    - `to`: int[n], the other widths.
    - `slots`: [E + 1], experts that are not resident at each cap.
    """
    absent = np.maximum(slots, 1e-9)
    share = np.clip(misses / absent, 0.0, 1 - 1e-9)
    return absent * (1 - (1 - share) ** (np.asarray(to)[:, None] / max(width, 1e-9)))
