"""Statistics of a trace's routing: how much steps, tokens and domains have in common."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.traces.reader import KINDS, Chunk, Trace
from host_offload.traces.step_sets import read_step_sets

BATCHES = (1, 2, 4, 8, 16, 32)
MAX_GROUPS = 32
HOT = 10
"""Number of hottest experts that domains are compared by, as in DynaExq's Figure 2."""

_BLOCK = 64
"""Consecutive tokens that go to the same half of a domain, since neighbours are alike."""


@dataclasses.dataclass(frozen=True)
class DomainDistance:
    """The distance between the routing of two domains, mean over layers."""

    a: str
    b: str
    divergence: float
    """Jensen-Shannon divergence of the shares of routing, in bits: 0 … 1 (Lin, 1991)."""
    variation: float
    """Total variation of the shares of routing, 0 … 1."""
    hot_shared: float
    """Share of the HOT hottest experts (at most a quarter of all) that both domains have."""


@dataclasses.dataclass(frozen=True)
class TraceStatistics:
    """Statistics of a trace's routing, means over its layers; NaN if there was nothing to count.

    L layers, E experts, k = top_k. Statistics of decode take generated tokens alone, or all tokens
    if the trace does not say which were generated.
    """

    prefill_steps: int
    decode_steps: int
    unknown_steps: int
    """Steps whose kind the trace does not say."""
    tokens: int
    requests: int | None
    """Number of requests; None: the trace does not say which tokens are of the same request."""
    token_overlap: float
    """Share of a generated token's experts that the token before it in its sequence had."""
    token_overlap_by_chance: float
    """The same share if tokens were independent, with the trace's popularities."""
    step_overlap: float
    """Share of a decode step's active experts that the decode step before it had."""
    activated: dict[int, float]
    """Expected share of E that so many of the trace's tokens activate, by batch size, if tokens are
    independent: mean of 1 − (1 − f)^B over experts, f an expert's share of tokens."""
    activated_in_steps: dict[int, float]
    """Share of E that decode steps activated, by their tokens."""
    activated_uniform: dict[int, float]
    """Like `activated`, if routing were uniform: f = k/E."""
    experts_for_90: float
    """Number of experts of a layer that have 90% of all routing."""
    domains: tuple[str, ...]
    """The compared domains: sessions, or parts between marks; at most MAX_GROUPS."""
    distances: tuple[DomainDistance, ...]
    halves: tuple[DomainDistance, ...]
    """Distance of each domain's one half to its other: the distance that chance alone explains."""


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Reads the trace's arrays a chunk at a time. Raises TraceError for a bad chunk."""
    return TraceStatistics(**_steps(trace), **_tokens(trace), **_domains(trace))


def _steps(trace: Trace) -> dict[str, Any]:
    """Returns the statistics of steps."""
    kinds: dict[str | None, int] = dict.fromkeys((*KINDS, None), 0)
    before = None
    shared: list[float] = []
    sizes: dict[int, list[float]] = {}
    for step in read_step_sets(trace):
        kinds[step.kind] += 1
        active = step.active
        if step.kind == "prefill":
            continue
        total = int(active.sum())
        if before is not None and total:
            shared.append(int((active & before).sum()) / total)
        before = active
        sizes.setdefault(step.tokens, []).append(total / active.size)
    return {
        "prefill_steps": kinds["prefill"],
        "decode_steps": kinds["decode"],
        "unknown_steps": kinds[None],
        "step_overlap": _mean(shared),
        "activated_in_steps": {n: _mean(v) for n, v in sorted(sizes.items())},
    }


def _tokens(trace: Trace) -> dict[str, Any]:
    """Returns the statistics of tokens, of generated ones alone or of all."""
    header = trace.header
    routed = np.zeros((header.layers, header.experts), np.int64)
    generated, generated_tokens = np.zeros_like(routed), 0
    requests: set[int] = set()
    for chunk in trace.chunks:
        ids, decoded = chunk.array("token.ids"), _mask_generated(chunk)
        routed += routed_counts(ids, header.experts)
        generated += routed_counts(ids[decoded], header.experts)
        generated_tokens += int(decoded.sum())
        if "token.request" not in header.absent:
            requests.update(np.unique(chunk.array("token.request")).tolist())
    share = generated / (generated_tokens or np.nan)
    overlaps = _overlaps(trace)
    sizes = np.cumsum(-np.sort(-routed, axis=1), axis=1)
    enough = (sizes < 0.9 * sizes[:, -1:]).sum(axis=1) + 1
    return {
        "tokens": trace.tokens,
        "requests": None if "token.request" in header.absent else len(requests),
        "token_overlap": float(overlaps.mean()),
        "token_overlap_by_chance": float((share**2).sum(axis=1).mean() / header.top_k),
        "activated": {b: float((1 - (1 - share) ** b).mean()) for b in BATCHES},
        "activated_uniform": {b: 1 - (1 - header.top_k / header.experts) ** b for b in BATCHES},
        "experts_for_90": float(enough.mean()),
    }


def _mask_generated(chunk: Chunk) -> np.ndarray:
    """Returns which tokens were generated, bool[N]; all if the trace does not say."""
    if "token.phase" in chunk.header.absent:
        return np.ones(chunk.tokens, bool)
    return chunk.array("token.phase") == 1


def _overlaps(trace: Trace) -> np.ndarray:
    """Returns the share of a generated token's experts that the token before it in its sequence
    had, float64[L]; NaN if no token is known to follow another."""
    header = trace.header
    same, pairs = np.zeros(header.layers, np.int64), 0
    none = np.zeros(0, np.int64)
    # ids, request and position of each sequence's last token so far.
    ends = np.zeros((0, header.layers, header.top_k), np.int16), none, none
    for chunk in trace.chunks if "token.request" not in header.absent else ():
        request = chunk.array("token.request")
        # Where there are no positions, a request's tokens are taken as neighbours.
        placed = "token.position" not in header.absent
        place = chunk.array("token.position") if placed else np.zeros(len(request), np.int64)
        decoded = _mask_generated(chunk)
        found = (array[decoded] for array in (chunk.array("token.ids"), request, place))
        joined = [np.concatenate(pair) for pair in zip(ends, found, strict=True)]
        order = np.argsort(joined[1], kind="stable")
        ids, request, place = (array[order] for array in joined)
        follows = request[1:] == request[:-1]
        if placed:
            follows &= place[1:] == place[:-1] + 1
        rows = np.flatnonzero(follows)
        for part in np.array_split(rows, len(rows) // 1024 + 1):
            equal = ids[part + 1][..., :, None] == ids[part][..., None, :]
            same += equal.sum(axis=(0, 2, 3))
        pairs += len(rows)
        final = np.append(request[1:] != request[:-1], True)[: len(request)]
        ends = ids[final], request[final], place[final]
    return same / pairs / header.top_k if pairs else same * np.nan


def _domains(trace: Trace) -> dict[str, Any]:
    """Returns the statistics of domains: parts between marks if there are marks, else sessions."""
    header, marks = trace.header, trace.marks()
    parts = ["start", *(mark.name for mark in marks)]
    names = list(dict.fromkeys(parts) if marks else header.spec.get("user_names", ()))
    groups: dict[int, np.ndarray] = {}
    tokens: dict[int, int] = {}
    for chunk in trace.chunks:
        ids, domain = chunk.array("token.ids"), chunk.array("token.user")
        if marks:
            steps = np.repeat(chunk.array("step.number"), chunk.array("step.tokens"))
            part = np.searchsorted([mark.step for mark in marks], steps, side="right")
            domain = np.asarray([names.index(name) for name in parts])[part]
        for group in np.unique(domain[domain >= 0]).tolist():
            if group not in groups and len(groups) == MAX_GROUPS:
                continue
            rows = np.flatnonzero(domain == group)
            begin = tokens.get(group, 0)
            half = (begin + np.arange(len(rows))) // _BLOCK % 2
            counted = [routed_counts(ids[rows[half == i]], header.experts) for i in (0, 1)]
            groups[group] = groups.get(group, 0) + np.array(counted)
            tokens[group] = begin + len(rows)
    halves = {names[i] if i < len(names) else str(i): groups[i] for i in sorted(groups)}
    whole = {name: counts.sum(axis=0) for name, counts in halves.items()}
    pairs = itertools.combinations(whole, 2)
    of_halves = ((name, counts) for name, counts in halves.items() if counts[1].any())
    return {
        "domains": tuple(whole),
        "distances": tuple(domain_distance(a, b, whole[a], whole[b]) for a, b in pairs),
        "halves": tuple(domain_distance(name, name, *counts) for name, counts in of_halves),
    }


def domain_distance(a: str, b: str, p: np.ndarray, q: np.ndarray) -> DomainDistance:
    """Returns the distance of two domains by counts [L, E], each with at least one.

    - `a`, `b`: their names.
    """
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    hot = max(min(HOT, p.shape[1] // 4), 1)
    tops = [np.argsort(-x, axis=1, kind="stable")[:, :hot] for x in (p, q)]
    shared = [len(np.intersect1d(*rows)) / hot for rows in zip(*tops, strict=True)]
    divergence = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
    return DomainDistance(
        a=a,
        b=b,
        # Rounding may leave a tiny negative number between equal distributions.
        divergence=float(np.maximum(divergence, 0).mean()),
        variation=float(np.abs(p - q).sum(axis=1).mean() / 2),
        hot_shared=float(np.mean(shared)),
    )


def _entropy(shares: np.ndarray) -> np.ndarray:
    """Returns the entropy of each row in bits."""
    positive = np.where(shares > 0, shares, 1)
    return -(shares * np.log2(positive)).sum(axis=1)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def as_json(statistics: TraceStatistics) -> dict[str, Any]:
    """Returns the statistics for json.dumps, with None for NaN."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(v) for name, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and np.isnan(value) else value

    return plain(dataclasses.asdict(statistics))
