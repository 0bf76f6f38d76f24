"""The smallest memory that is enough: for a user's working set, for a speed, for so many users."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.sizing.coactivation_counts import coactivation_counts, predicted_use
from host_offload.sizing.miss_curves import MissCurves, curves_of, trace_curves
from host_offload.sizing.split import Division, SplitError
from host_offload.traces.reader import Trace

EPSILON = 0.01
"""The warm miss rate that counts as none (ours; the paper gives no number)."""


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """The cells of each layer that are enough for a user, as if served alone, or for everybody."""

    user: int | None
    """Number of the session in the trace; None: everybody together."""
    tokens: int
    by_reuse: tuple[int, ...]
    """right_size: what LRU needs, by the tokens' own reuse distances."""
    by_coactivation: tuple[int, ...] | None
    """right_size_of_use: by the predictor of WiSP's Appendix C, from the counts of the same tokens.
    None for a model with one MoE layer, which has no layer before it to predict from."""


def working_sets(trace: Trace, epsilon: float = EPSILON, most: int = 32) -> list[WorkingSet]:
    """The set of everybody in a trace, then of those users (sessions) who have the most tokens, at
    most `most`, by their numbers. Raises TraceError as trace_curves does."""
    users, ids = trace.array("token.user"), trace.array("token.ids")
    known, tokens = np.unique(users[users >= 0], return_counts=True)
    chosen = np.sort(known[np.argsort(-tokens, kind="stable")[:most]]).tolist()
    found = []
    for user in (None, *chosen):
        mine = ids if user is None else ids[users == user]
        predicted = None
        if ids.shape[1] > 1:
            use = predicted_use(coactivation_counts(mine, trace.header.experts), trace.header.top_k)
            predicted = tuple(right_size_of_use(use, epsilon).tolist())
        own = tuple(right_size(trace_curves(trace, user=user), epsilon).tolist())
        found.append(WorkingSet(user, len(mine), own, predicted))
    return found


def right_size(curves: MissCurves, epsilon: float = EPSILON) -> np.ndarray:
    """int64[L]: the fewest cells of each layer with a warm miss rate of at most `epsilon`, by the
    user's own reuse distances (curves of trace_curves(…, user=…), or of everybody)."""
    warm = curves.warm
    allowed = epsilon * (curves.references - curves.first)
    return (warm > allowed[:, None]).sum(axis=1)


def right_size_of_use(use: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """int64[L]: the fewest cells of each layer whose experts, the most used ones, have all of the
    predicted use but `epsilon`: the support of a converged working set. A cache that has to find
    out who they are (LRU) needs as many or more."""
    shares = np.cumsum(-np.sort(-use, axis=1), axis=1)
    return (shares < 1 - epsilon - 1e-12).sum(axis=1) + 1


@dataclasses.dataclass(frozen=True)
class Capacity:
    """So many users at once, in a memory."""

    users: int
    memory: int
    """Bytes of the arena."""
    cap: int
    """Cells of each layer."""
    kv_pages: int
    pages_per_user: int
    step_s: float
    """Predicted time per output token of each user."""


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


def decode_model(
    trace: Trace, *, step_s: Mapping[int, float], miss_s: float, users: int | None = None
) -> DecodeModel:
    """The model of a trace's generated tokens, its sequences side by side at widths that double, up
    to all of them or the rows of `step_s`; first sights left out.

    step_s: as of Costs, everything resident; rows are padded to those of an executable. miss_s: of
    an expert, c_E. users: a width that must be among what is known. Raises SplitError where it is
    not, TraceError where the trace does not say which tokens are whose.
    """
    sequences = list(generated_sequences(trace))
    most = min(len(sequences), max(step_s))
    if users is not None and users > most:
        raise SplitError(
            f"steps of {users} sequences cannot be predicted: the trace has {len(sequences)} with "
            f"generated tokens, the costs were measured up to {max(step_s)} rows"
        )
    widths = sorted({*(1 << i for i in range(most.bit_length())), most})
    misses = []
    for width in widths:
        curves = curves_of(side_by_side(sequences, width, trace.header.experts))
        misses.append(curves.warm.sum(axis=0) / curves.steps)
    resident = resident_seconds(step_s, widths)[:, None]
    return DecodeModel(np.array(widths), resident + miss_s * np.array(misses))


def resident_seconds(step_s: Mapping[int, float], widths: Sequence[int] | np.ndarray) -> np.ndarray:
    """float64[n]: what Costs.step_s says of widths, none beyond the largest: rows are padded to
    those of an executable."""
    rows = np.array(sorted(step_s))
    return np.array([step_s[row] for row in rows[np.searchsorted(rows, widths)].tolist()])


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


def memory_for(
    model: DecodeModel, division: Division, *, users: int, tpot_s: float, pages_per_user: int
) -> Capacity:
    """The least memory with which so many users at once get a token every `tpot_s` seconds.

    division: its sizes; total_bytes is not looked at. Raises SplitError where no memory is enough,
    saying what everything resident would give, and for users beyond the model's widths.
    """
    seconds = np.array([model.step_s(users, cap) for cap in range(division.caps + 1)])
    enough = np.flatnonzero(seconds[division.least_cap :] <= tpot_s) + division.least_cap
    if not len(enough):
        raise SplitError(
            f"{users} users cannot get a token every {tpot_s * 1e3:.4g} ms: with every expert "
            f"resident it takes {seconds[-1] * 1e3:.4g} ms; ask for that, or for fewer users"
        )
    cap = int(enough[0])
    wanted = max(users * pages_per_user, division.floor_pages)
    units = -(-wanted // division.unit_pages)
    return Capacity(
        users=users,
        memory=cap * division.cap_bytes + units * division.unit,
        cap=cap,
        kv_pages=units * division.unit_pages,
        pages_per_user=pages_per_user,
        step_s=float(seconds[cap]),
    )


def users_for(
    model: DecodeModel, division: Division, *, tpot_s: float, pages_per_user: int
) -> Capacity:
    """The most users at once that get a token every `tpot_s` seconds from this memory. Raises
    SplitError where not even the model's smallest width does."""
    best = np.inf
    for users in range(int(model.widths[-1]), int(model.widths[0]) - 1, -1):
        cap = cap_beside(division, users * pages_per_user)
        if cap is None:
            continue
        seconds = model.step_s(users, cap)
        best = min(best, seconds)
        if seconds <= tpot_s:
            pages = division.pages_at(cap)
            return Capacity(users, division.total_bytes, cap, pages, pages_per_user, seconds)
    fastest = f"it would take {best * 1e3:.4g} ms" if best < np.inf else "their KV does not fit"
    raise SplitError(
        f"{division.total_bytes} bytes do not give {model.widths[0]} users a token every "
        f"{tpot_s * 1e3:.4g} ms: {fastest}; more memory, or a longer time"
    )
