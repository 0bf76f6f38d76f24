"""Batch width, KV pages and expert cells chosen together, for the most tokens a second (ours), as
predicted from miss curves by width and measured costs. docs/miss_curves.md explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.sizing.miss_curves import curves_of
from host_offload.sizing.split import Division, SplitError
from host_offload.traces.reader import Trace


@dataclasses.dataclass(frozen=True)
class DecodeModel:
    """What a decode step takes: all experts resident, and for each one that misses."""

    widths: np.ndarray
    """int64[n]: sequences that run at once, ascending."""
    misses: np.ndarray
    """float64[n, E + 1]: of a step, all layers together, by cap."""
    resident_s: np.ndarray
    """float64[n]: seconds of a step without misses."""
    miss_s: float
    """Seconds of a miss, c_E."""

    def step_s(self, width: float, cap: int) -> float:
        """Between two widths on a straight line."""
        seconds = self.resident_s + self.miss_s * self.misses[:, cap]
        return float(np.interp(width, self.widths, seconds))


def resident_seconds(step_s: Mapping[int, float], widths: Sequence[int] | np.ndarray) -> np.ndarray:
    """float64[n]: what Costs.step_s says of widths, none beyond the largest: rows are padded to
    those of an executable."""
    rows = np.array(sorted(step_s))
    return np.array([step_s[row] for row in rows[np.searchsorted(rows, widths)].tolist()])


def decode_model(
    trace: Trace, *, step_s: Mapping[int, float], miss_s: float, users: int | None = None
) -> DecodeModel:
    """The model of a trace's generated tokens, its sequences side by side at widths that double, up
    to all of them or the rows of `step_s`; first sights left out.

    users: a width that must be among what is known. Raises SplitError where it is not, TraceError
    where the trace does not say which tokens are whose.
    """
    sequences = list(generated_sequences(trace))
    most = min(len(sequences), max(step_s))
    if users is not None and users > most:
        raise SplitError(
            f"steps of {users} sequences cannot be predicted: the trace has {len(sequences)} with "
            f"generated tokens, the costs were measured up to {max(step_s)} rows"
        )
    widths = sorted({*(1 << i for i in range(most.bit_length())), most})
    rows = []
    for width in widths:
        curves = curves_of(side_by_side(sequences, width, trace.header.experts))
        rows.append(curves.warm.sum(axis=0) / curves.steps)
    return DecodeModel(
        np.array(widths, np.int64), np.array(rows), resident_seconds(step_s, widths), miss_s
    )


def generated_sequences(trace: Trace) -> Iterator[np.ndarray]:
    """int16[n, L, k]: routing of each request's generated tokens, in order. Raises TraceError where
    the trace does not say which they are."""
    request, position, phase, ids = (
        trace.array(f"token.{name}") for name in ("request", "position", "phase", "ids")
    )
    rows = np.flatnonzero(phase == 1)
    rows = rows[np.lexsort((position[rows], request[rows]))]
    starts = np.flatnonzero(np.diff(request[rows])) + 1
    yield from (ids[part] for part in np.split(rows, starts) if len(part))


def side_by_side(sequences: Sequence[np.ndarray], width: int, experts: int) -> Iterator[np.ndarray]:
    """bool[L, E] of each step of `width` sequences at once; one that ended is followed by the next,
    and when none is left the steps end, so that all have the same width."""
    waiting = iter(sequences)
    for tokens in zip(*(chain.from_iterable(waiting) for _ in range(width)), strict=False):
        yield routed_counts(np.stack(tokens), experts) > 0


def cap_beside(division: Division, pages: float) -> int | None:
    """The largest legal cap that leaves KV so many pages; None: there is none."""
    caps = np.flatnonzero(division.legal & (division.pages >= pages))
    return int(caps[-1]) if len(caps) else None
