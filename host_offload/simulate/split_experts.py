"""MoEpic: caches of half experts, in a simulator alone, since an engine's cells hold whole records.

MoEpic (Yan et al., arXiv:2509.08342, of which we had the abstract) divides each expert into a top
and a bottom segment and caches tops, so that more experts are cached in the same memory. While a
layer is computed, the predicted experts of the next one are fetched: bottoms of those whose tops
are cached, and the others whole. What the abstract leaves open is ours: tops are cached by LRU; a
cached top is computed while its bottom comes; and `configure` is our reading of the search for the
memory and the split of each layer, by fixed-point iteration.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.queue.transfer import DEMAND, Transfer
from host_offload.simulate.timeline import Link, Timeline
from host_offload.sizing.miss_curves import MissCurves, trace_curves
from host_offload.traces.reader import Trace

NAME = "moepic"

TOPS = tuple(n / 8 for n in range(2, 9))
"""Shares of an expert that a top may have; 1: experts are not split."""

ROUNDS = 32
"""Most rounds of the fixed-point iteration."""


class SplitConfig(NamedTuple):
    """The memory and the split of each layer."""

    cells: np.ndarray
    """int64[L], in whole experts."""
    top: np.ndarray
    """float64[L]: the share of an expert that its top has."""

    def tops(self, experts: int) -> np.ndarray:
        """int64[L]: tops that a layer's memory holds."""
        return np.minimum((self.cells / self.top + 1e-9).astype(np.int64), experts)


@dataclasses.dataclass(frozen=True)
class HalfExperts:
    """MoEpic as a grid names it."""

    curves: MissCurves
    """Of the trace that it learned from."""
    top: float = 0.0
    """The share of an expert that tops have; 1: experts are whole; 0: `configure` chooses."""
    ahead: bool = True
    """Whether the next layer's experts are fetched, those that its router chooses on this layer's
    input."""

    def config(self, cells: np.ndarray, load_s: float, hidden_s: float) -> SplitConfig:
        """The memory and the split for so many whole experts, int64[L]; see stall_s."""
        if self.top:
            return SplitConfig(cells, np.full(len(cells), self.top))
        return configure(self.curves, int(cells.sum()), load_s=load_s, hidden_s=hidden_s)


def fit(trace: Trace, *, top: float = 0.0, ahead: bool = True) -> HalfExperts:
    """HalfExperts with the miss curves of a trace's decode steps. Raises ValueError for a top that
    is no share, and like trace_curves."""
    if not 0 <= top <= 1:
        raise ValueError(f"top is a share of an expert from 0 to 1, not {top}")
    return HalfExperts(trace_curves(trace, kind="decode"), top, ahead)


def foresee(gate_input: np.ndarray, router: np.ndarray, top_k: int) -> np.ndarray:
    """bool[L, E]: the experts that each layer's router chooses on the input of the layer before.

    - `gate_input`: [N, L, D].
    - `router`: float32[L, D, E].
    """
    found = np.zeros((len(router), router.shape[2]), bool)
    for layer in range(1, len(router)):
        said = gate_scores(gate_input[:, layer - 1], router[layer])
        found[layer, np.argsort(-said, axis=1, kind="stable")[:, :top_k]] = True
    return found


class SplitRun(NamedTuple):
    """The result of T steps."""

    seconds: np.ndarray
    """float64[T]"""
    bytes: int
    """Bytes over the link."""
    hits: int
    """Needed experts whose tops were cached."""
    needed: int


class Prefilled(NamedTuple):
    """A step that takes no time here and changes the cache."""

    waves: Sequence[np.ndarray]
    """bool[L, E] each."""


def play_split(
    steps: Iterable[np.ndarray | Prefilled],
    config: SplitConfig,
    *,
    record_bytes: int,
    link: Link,
    layer_s: float,
    expert_s: float,
    predicted: Iterable[np.ndarray] | None = None,
) -> SplitRun:
    """Plays steps on a device and a link, from a cold cache.

    - `steps`: bool[L, E] each, the experts that a step needs; or a prefill step.
    - `layer_s`, `expert_s`: seconds of a layer without its experts, and of an expert.
    - `predicted`: bool[L, E] of each step with a time, what the layer before predicts of each
      layer; None: nothing is fetched ahead.
    """
    timeline, pager, seconds = Timeline(link, record=False), None, []
    moved = hits = needed = 0
    foreseen, buffers = iter(() if predicted is None else predicted), itertools.count()

    def fetch(layer: int, expert: int, cause: str) -> tuple[int, int]:
        """Returns (ticket, bytes) of what is not cached of an expert."""
        assert pager is not None
        there = pager.tables.address[layer, expert] >= 0
        size = round(record_bytes * (1 - config.top[layer])) if there else record_bytes
        return timeline.submit(Transfer(layer, expert, 0, next(buffers), cause), size), size

    for active in steps:
        layers, experts = (active.waves[0] if isinstance(active, Prefilled) else active).shape
        if pager is None:
            pager = Pager(cold_tables(config.tops(experts), experts))
        if isinstance(active, Prefilled):
            for wave in active.waves:
                pager.reference(wave)
            continue
        ahead = next(foreseen, np.zeros_like(active))
        began, flying = timeline.now, dict[int, tuple[int, int]]()
        for layer in range(layers):
            timeline.compute("layer", layer_s, layer)
            top, due = float(config.top[layer]), np.flatnonzero(active[layer]).tolist()
            there = [e for e in due if pager.tables.address[layer, e] >= 0]
            whole = [e for e in there if top == 1]
            for expert in [e for e in flying if e not in due and timeline.cancel(flying[e][0])]:
                del flying[expert]
            for expert in due:
                if expert in flying:
                    timeline.urge(flying[expert][0])
                elif expert not in whole:
                    flying[expert] = fetch(layer, expert, DEMAND)
            hits, needed = hits + len(there), needed + len(due)
            moved += sum(size for _, size in flying.values())
            wanted, flying = flying, {}
            if layer + 1 < layers:
                for expert in np.flatnonzero(ahead[layer + 1]).tolist():
                    held = pager.tables.address[layer + 1, expert] >= 0
                    if not (held and config.top[layer + 1] == 1):
                        flying[expert] = fetch(layer + 1, expert, "prefetch")
            timeline.compute("tops", expert_s * top * len(there), layer)
            for expert in due:
                if expert not in whole:
                    timeline.wait(wanted[expert][0], layer=layer)
                    left = 1 - top if expert in there else 1.0
                    timeline.compute("expert", expert_s * left, layer)
            pager.reference(active[[layer]], layer)
        timeline.drop_settled()
        seconds.append(timeline.now - began)
    return SplitRun(np.array(seconds), moved, hits, needed)


def stall_s(
    curves: MissCurves, layer: int, cells: float, top: float, load_s: float, hidden_s: float
) -> float:
    """Returns the seconds for which a step waits in a layer, by its miss curve.

    - `cells`: whole experts that its memory holds.
    - `load_s`: of a whole expert over the link.
    - `hidden_s`: of the computing that transfers run beside.
    """
    experts = curves.misses.shape[1] - 1
    count = min(int(cells / top + 1e-9), experts)
    misses = curves.misses[layer, count] / curves.steps
    cached = curves.references[layer] / curves.steps - misses
    return max((misses + cached * (1 - top)) * load_s - hidden_s, 0.0)


def configure(
    curves: MissCurves,
    cells: int,
    *,
    load_s: float,
    hidden_s: float,
    tops: tuple[float, ...] = TOPS,
) -> SplitConfig:
    """Returns the memory and the split of each layer for so many whole experts in all layers
    together. By turns each layer takes the best split for its memory, and memory goes, expert by
    expert, where it saves most at these splits, until neither changes."""
    layers, experts = curves.misses.shape[0], curves.misses.shape[1] - 1

    def cost(layer: int, own: int, top: float) -> float:
        return stall_s(curves, layer, own, top, load_s, hidden_s)

    held = np.full(layers, cells // layers, np.int64)
    held[: cells % layers] += 1
    best = (np.inf, SplitConfig(held, np.ones(layers)))
    for _ in range(ROUNDS):
        top = np.array(
            [min(tops, key=lambda t, i=i: (cost(i, held[i], t), -t)) for i in range(layers)]
        )
        found = sum(cost(i, held[i], top[i]) for i in range(layers))
        if found >= best[0]:
            break
        best = found, SplitConfig(held, top)
        held = _divide(lambda i, n, top=top: cost(i, n, float(top[i])), layers, experts, cells)
    return best[1]


def _divide(cost, layers: int, experts: int, cells: int) -> np.ndarray:
    """Returns int64[L]: memory by the largest saving for each expert of it, also of several at
    once, since a curve may fall only after a few."""
    held, left = np.zeros(layers, np.int64), min(cells, layers * experts)

    def offer(layer: int) -> tuple[float, int, int]:
        now, most = cost(layer, held[layer]), min(left, experts - held[layer])
        savings = [(now - cost(layer, held[layer] + n)) / n for n in range(1, most + 1)]
        n = int(np.argmax(savings)) + 1 if savings else 0
        return (-savings[n - 1] if n else 0.0, layer, n)

    queue = [offer(layer) for layer in range(layers)]
    heapq.heapify(queue)
    while left and queue:
        _, layer, n = heapq.heappop(queue)
        if n > left:
            heapq.heappush(queue, offer(layer))
            continue
        if not n:
            continue
        held[layer], left = held[layer] + n, left - n
        heapq.heappush(queue, offer(layer))
    return held
