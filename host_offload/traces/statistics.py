"""What a trace says about its routing: how much steps, tokens and domains have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.traces.reader import KINDS, Chunk, Trace
from host_offload.traces.recency import cold_recency, reference, tails
from host_offload.traces.step_sets import StepSet, chunk_step_sets

BATCHES = (1, 2, 4, 8, 16, 32)
QUANTILES = (0.5, 0.9, 0.99)
MAX_GROUPS = 32
HOT = 10
"""How many of the hottest experts are compared between domains, as in DynaExq's Figure 2."""

_BLOCK = 64
"""Tokens in a row that go to the same half of a domain: neighbours are alike."""


@dataclasses.dataclass(frozen=True)
class DomainDistance:
    """How far apart the routing of two domains is, mean over layers."""

    a: str
    b: str
    divergence: float
    """Jensen-Shannon divergence of the shares of routing, in bits: 0 … 1 (Lin, 1991)."""
    variation: float
    """Total variation of the same, 0 … 1."""
    hot_shared: float
    """Share of the HOT hottest experts (at most a quarter of all) that both have."""


@dataclasses.dataclass(frozen=True)
class TraceStatistics:
    """Statistics of a trace's routing, means over its layers; NaN where nothing was there to count.

    L layers, E experts, k = top_k. Tokens that were generated alone count in what is said of
    decode, or all where the trace does not say which were.
    """

    prefill_steps: int
    decode_steps: int
    unknown_steps: int
    """The trace does not say of which kind."""
    tokens: int
    requests: int | None
    """None: the trace does not say which tokens are of the same."""
    token_overlap: float
    """Share of a generated token's experts that the token before it in its sequence had."""
    token_overlap_by_layer: tuple[float, ...]
    token_overlap_by_chance: float
    """The same if tokens were independent, with the trace's popularities."""
    step_overlap: float
    """Share of a decode step's active experts that the decode step before it had."""
    activated: dict[int, float]
    """Batch size → expected share of E that so many of the trace's tokens activate, if they are
    independent: mean of 1 − (1 − f)^B over experts, f an expert's share of tokens."""
    activated_in_steps: dict[int, float]
    """Tokens of a decode step → share of E that such steps did activate."""
    activated_uniform: dict[int, float]
    """As `activated`, if routing were uniform: f = k/E."""
    experts_for_90: float
    """How many experts of a layer have 90% of all routing."""
    experts_for_90_by_layer: tuple[int, ...]
    first_uses: int
    """References of decode steps to an expert that no step had used. A reference is an active
    expert of a layer in a step."""
    reuse_distances: dict[float, float]
    """Quantile → distance of other references: how many experts of the layer were used since."""
    lru_misses: dict[int, float]
    """Cells a layer → share of decode references that miss under LRU, first uses included (WiSP's
    equation 3). Below `largest_step` cells it is a lower bound, since a step does not fit. Of a
    prefill step that does not fit, the highest ids are taken as what it leaves behind."""
    largest_step: int
    """Most experts of a layer that a decode step activates."""
    domains: tuple[str, ...]
    """What was compared: sessions, or parts between marks; at most MAX_GROUPS."""
    distances: tuple[DomainDistance, ...]
    halves: tuple[DomainDistance, ...]
    """Each domain's one half to its other: what is left of distances by chance."""


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Reads the whole trace once, a chunk at a time. Raises TraceError for a bad chunk."""
    counts = _Counts(trace)
    for chunk in trace.chunks:
        counts.add(chunk)
    return counts.statistics()


class _Counts:
    """Running counts over the chunks of a trace."""

    def __init__(self, trace: Trace):
        header = trace.header
        self.layers, self.experts, self.top_k = header.layers, header.experts, header.top_k
        shape = (self.layers, self.experts)
        marks = trace.marks()
        self.mark_steps = [mark.step for mark in marks]
        parts = ["start", *(mark.name for mark in marks)]
        self.names = list(dict.fromkeys(parts))
        self.parts = np.asarray([self.names.index(name) for name in parts])
        if not marks:
            self.names = list(header.spec.get("user_names", ()))
        self.header, self.absent = header, set(header.absent)
        self.kinds = dict.fromkeys((*range(len(KINDS)), -1), 0)
        self.tokens = 0
        self.requests: set[int] = set()
        self.routed = np.zeros(shape, np.int64)
        self.generated = np.zeros(shape, np.int64)
        self.generated_tokens = 0
        none = np.zeros(0, np.int64)
        # ids, request and position of each sequence's last token so far.
        self.ends = np.zeros((0, self.layers, self.top_k), np.int16), none, none
        self.same = np.zeros(self.layers, np.int64)
        self.pairs = 0
        self.before: np.ndarray | None = None
        self.step_shares: list[float] = []
        self.sizes: dict[int, list[float]] = {}
        self.recency = cold_recency(*shape)
        self.largest_step = 0
        self.distances = np.zeros(self.experts, np.int64)
        self.first_uses = 0
        self.groups: dict[int, np.ndarray] = {}
        self.group_tokens: dict[int, int] = {}

    def add(self, chunk: Chunk) -> None:
        ids, tokens = chunk.array("token.ids"), chunk.array("step.tokens")
        columns = {
            name: chunk.array(f"token.{name}")
            for name in ("request", "position", "phase")
            if f"token.{name}" not in self.absent
        }
        decoded = columns["phase"] == 1 if "phase" in columns else np.ones(len(ids), bool)
        self.tokens += len(ids)
        self.routed += routed_counts(ids, self.experts)
        self.generated += routed_counts(ids[decoded], self.experts)
        self.generated_tokens += int(decoded.sum())
        if (request := columns.get("request")) is not None:
            self.requests.update(np.unique(request).tolist())
            place = columns.get("position", np.zeros(len(ids), np.int64))
            self._neighbours(ids[decoded], request[decoded], place[decoded])
        for step in chunk_step_sets(chunk, self.header):
            self.kinds[step.kind] += 1
            self._step(step)
        self._group(chunk, ids, np.repeat(chunk.array("step.number"), tokens))

    def _neighbours(self, ids: np.ndarray, request: np.ndarray, place: np.ndarray) -> None:
        """Compares each generated token with the one before it in its sequence."""
        joined = zip(self.ends, (ids, request, place), strict=True)
        ids, request, place = (np.concatenate(pair) for pair in joined)
        order = np.argsort(request, kind="stable")
        ids, request, place = ids[order], request[order], place[order]
        follows = request[1:] == request[:-1]
        # Where there are no positions, a request's tokens are taken as neighbours.
        if "token.position" not in self.absent:
            follows &= place[1:] == place[:-1] + 1
        rows = np.flatnonzero(follows)
        for part in np.array_split(rows, len(rows) // 1024 + 1):
            equal = ids[part + 1][..., :, None] == ids[part][..., None, :]
            self.same += equal.sum(axis=(0, 2, 3))
        self.pairs += len(rows)
        final = np.append(request[1:] != request[:-1], True)[: len(request)]
        self.ends = ids[final], request[final], place[final]

    def _step(self, step: StepSet) -> None:
        active = step.active
        self.recency, found = reference(self.recency, active)
        if step.kind == KINDS.index("prefill"):
            return
        total = int(active.sum())
        if self.before is not None and total:
            self.step_shares.append(int((active & self.before).sum()) / total)
        self.before = active
        self.largest_step = max(self.largest_step, int(found.sizes.max()))
        self.sizes.setdefault(step.tokens, []).append(total / active.size)
        distances = found.place[~found.is_first] % self.experts
        self.distances += np.bincount(distances, minlength=self.experts)
        self.first_uses += int(found.is_first.sum())

    def _group(self, chunk: Chunk, ids: np.ndarray, steps: np.ndarray) -> None:
        user = chunk.array("token.user")
        if self.mark_steps:
            user = self.parts[np.searchsorted(self.mark_steps, steps, side="right")]
        for group in np.unique(user[user >= 0]).tolist():
            if group not in self.groups and len(self.groups) == MAX_GROUPS:
                continue
            rows = np.flatnonzero(user == group)
            begin = self.group_tokens.get(group, 0)
            half = (begin + np.arange(len(rows))) // _BLOCK % 2
            counts = self.groups.setdefault(
                group, np.zeros((2, self.layers, self.experts), np.int64)
            )
            for i in (0, 1):
                counts[i] += routed_counts(ids[rows[half == i]], self.experts)
            self.group_tokens[group] = begin + len(rows)

    # ---- results

    def statistics(self) -> TraceStatistics:
        share = self.generated / max(self.generated_tokens, 1)
        known = self.generated_tokens > 0
        overlaps = self.same / self.pairs / self.top_k if self.pairs else self.same * np.nan
        sizes = np.cumsum(-np.sort(-self.routed, axis=1), axis=1)
        enough = (sizes < 0.9 * sizes[:, -1:]).sum(axis=1) + 1
        names = self.names
        halves = {
            names[group] if group < len(names) else str(group): counts
            for group, counts in sorted(self.groups.items())
        }
        whole = {name: counts.sum(axis=0) for name, counts in halves.items()}
        pairs = [(a, b) for i, a in enumerate(whole) for b in list(whole)[i + 1 :]]
        return TraceStatistics(
            prefill_steps=self.kinds[KINDS.index("prefill")],
            decode_steps=self.kinds[KINDS.index("decode")],
            unknown_steps=self.kinds[-1],
            tokens=self.tokens,
            requests=None if "token.request" in self.absent else len(self.requests),
            token_overlap=float(overlaps.mean()),
            token_overlap_by_layer=tuple(overlaps.tolist()),
            token_overlap_by_chance=(
                float((share**2).sum(axis=1).mean() / self.top_k) if known else np.nan
            ),
            step_overlap=_mean(self.step_shares),
            activated={
                b: float((1 - (1 - share) ** b).mean()) if known else np.nan for b in BATCHES
            },
            activated_in_steps={n: _mean(v) for n, v in sorted(self.sizes.items())},
            activated_uniform={b: 1 - (1 - self.top_k / self.experts) ** b for b in BATCHES},
            experts_for_90=float(enough.mean()),
            experts_for_90_by_layer=tuple(enough.tolist()),
            first_uses=self.first_uses,
            reuse_distances=self._quantiles(),
            lru_misses=self._misses(),
            largest_step=self.largest_step,
            domains=tuple(whole),
            distances=tuple(domain_distance(a, b, whole[a], whole[b]) for a, b in pairs),
            halves=tuple(
                domain_distance(name, name, *counts)
                for name, counts in halves.items()
                if counts[1].any()
            ),
        )

    def _quantiles(self) -> dict[float, float]:
        total = np.cumsum(self.distances)
        if not total[-1]:
            return dict.fromkeys(QUANTILES, np.nan)
        return {q: float(np.searchsorted(total, q * total[-1])) for q in QUANTILES}

    def _misses(self) -> dict[int, float]:
        missed = self.first_uses + tails(self.distances)
        wanted = {self.top_k, *(self.experts * i // 8 for i in (1, 2, 4, 6, 8))}
        cells = sorted(c for c in wanted if c >= self.top_k)
        return {c: int(missed[c]) / int(missed[0]) if missed[0] else np.nan for c in cells}


def domain_distance(a: str, b: str, p: np.ndarray, q: np.ndarray) -> DomainDistance:
    """The distance of two domains by counts [L, E], each with at least one. a, b: their names."""
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
    """Bits of each row."""
    positive = np.where(shares > 0, shares, 1)
    return -(shares * np.log2(positive)).sum(axis=1)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def as_json(statistics: TraceStatistics) -> dict[str, Any]:
    """For json.dumps: what is NaN becomes None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(v) for name, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and np.isnan(value) else value

    return plain(dataclasses.asdict(statistics))
