"""fMoE: prefetch by the nearest expert map of earlier iterations."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import (
    Decision,
    Moment,
    Observation,
    Spec,
    Stages,
    stages_at,
    stages_of_queue,
)
from host_offload.policies.prefetch.expert_map.map_matcher import (
    IN_STEP,
    AsynchronousMatcher,
    MapMatcher,
    MapPrediction,
)
from host_offload.policies.prefetch.expert_map.map_store import (
    BITS,
    MapStore,
    empty_store,
    select_experts,
    store_rows,
    with_rows,
)
from host_offload.policies.prefetch.fitted import Fitted, fit_of
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError
from pallas_kernels.cpu.wanted import Queue, want_by_maps
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR, log2_fixed

NAME = "expert_map"


class Matching(NamedTuple):
    """State of ExpertMap."""

    matcher: MapMatcher | AsynchronousMatcher
    wanted: np.ndarray
    """float32[L, E]: probabilities of the experts that the step prefetches; 0: not prefetched."""
    prior: np.ndarray
    """int32[L, E]: prior_of the probabilities of the last match."""
    top_k: int
    step: int = -1
    """The step in progress."""
    searches: int = 0
    matches: int = 0
    similarity: float = 0.0
    """Sum of the least similarity of each of these matches of trajectories."""
    late: int = 0
    """Searches whose result came after the layer that they were for was routed."""


@dataclasses.dataclass(frozen=True)
class MapPolicy:
    """The part that policies by expert maps share: their store."""

    fitted: Fitted | None = None
    """The maps to begin with; None: the store begins empty."""
    capacity: int = 1000
    """Most maps (C)."""
    distance: int = 3
    """Layers ahead (d)."""
    learns: bool = True
    """False: the fitted maps do not change (the paper's offline runs)."""

    def begin_store(self, spec: Spec) -> MapStore:
        """The store to begin with. Raises ValueError for settings out of range and for maps of
        another model."""
        check_sizes(self.capacity, self.distance, spec.layers)
        if self.fitted is None:
            return empty_store(spec.layers, spec.experts, spec.hidden)
        self.fitted.check(spec)
        embeddings = self.fitted.array("embeddings", -1, spec.hidden)
        maps = self.fitted.array("maps", len(embeddings), spec.layers, spec.experts)
        store = store_rows(embeddings, maps)
        if store.size > self.capacity:
            raise ValueError(
                f"{store.size} maps are given and capacity is {self.capacity}; fit with a smaller "
                "one"
            )
        return store

    def memory(self, spec: Spec) -> int:
        """Bytes of host memory of the store, fitted and grown to its capacity. Each map has the
        lengths of its prefixes beside it."""
        given = 0 if self.fitted is None else self.fitted.nbytes
        full = self.capacity * (spec.hidden + spec.layers * (spec.experts + 1)) * 4
        return max(given, full) if self.learns else given


@dataclasses.dataclass(frozen=True)
class ExpertMap(MapPolicy):
    """fMoE, later FineMoE (arXiv:2502.05370, sections 4.1 to 4.5). Each iteration leaves a map, the
    router's probabilities of all layers, and the embedding of its input token.

    The nearest stored embedding predicts the first `distance` layers. After each router the nearest
    map, over the layers routed so far, predicts the layer `distance` later. The less similar the
    map, the more probability is prefetched (map_store.select_experts), likely and near experts
    first. The experts of least probability · (1 + frequency) are evicted, without recency. Over the
    rows of a step each expert has its largest probability. Needs driver="host", which gives `probs`
    and `embedding` to the host. docs/explanation/policies.md says what differs from the paper.
    """

    asynchronous: bool = False
    """True: searches run in another process, and inference never waits for them. Results are used
    from the next moment on, so decisions depend on times; see policies.recorded."""
    pool: bool = True
    """True: all layers share one pool of cells, the paper's cache; False: each layer has its
    own."""
    printed: bool = False
    """True: the experts of least probability · frequency are evicted, as the paper prints it, so
    one that was prefetched and not used yet leaves first."""

    moments: frozenset[Moment] = IN_STEP | {Moment.STEP_END}
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})
    victim_weights: tuple[int, int, int] = (0, 1, 1)
    """log2(1 + frequency) + log2(probability): the product, which decides in the paper."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"embedding", "probs", *(["frequency"] if self.printed else [])})

    def init(self, spec: Spec) -> Matching:
        """The state with the fitted store. Raises ValueError as begin_store."""
        store = self.begin_store(spec)
        matcher = MapMatcher(store, store.trajectory(0), self.capacity, self.distance, self.learns)
        nothing = np.zeros((spec.layers, spec.experts), np.float32)
        # Layers without a prediction, such as those before the first router, have a uniform one;
        # with 0 a pool would never give them a cell.
        even = np.full_like(nothing, 1 / spec.experts)
        begun = AsynchronousMatcher(matcher) if self.asynchronous else matcher
        return Matching(begun, nothing, prior_of(even), spec.top_k)

    def stats(self, state: Matching) -> dict[str, Any]:
        """Statistics: searches (moments of steps that were seen), late (results that came too late,
        and searches that were skipped for that reason), learned_bytes (current size), maps (in the
        store), similarity (mean over matches of trajectories, of the least similar row),
        maps_for (similarity that the paper promises of a new iteration → maps for it), and with
        searches in another process ended (how often it ended and began anew)."""
        matcher, late, beside = state.matcher, state.late, {}
        if isinstance(matcher, AsynchronousMatcher):
            late += matcher.left_out
            beside["ended"] = matcher.ends
        return {
            "searches": state.searches,
            "late": late,
            "learned_bytes": matcher.nbytes,
            "maps": matcher.size,
            "similarity": state.similarity / max(state.matches, 1),
            "maps_for": covering_maps(*state.wanted.shape),
            **beside,
        }

    def decide(self, state: Matching, seen: Observation) -> tuple[Matching, Decision]:
        matcher, in_step = state.matcher, seen.moment in IN_STEP
        if isinstance(matcher, AsynchronousMatcher):
            found = matcher.take_found() if in_step else []
            matcher.publish(seen)
        else:
            matcher, prediction = matcher.see(seen)
            found = [] if prediction is None else [prediction]
        if not in_step:
            return state._replace(matcher=matcher), Decision()
        begins = seen.moment == Moment.EMBEDDED
        wanted = np.zeros_like(state.wanted) if begins else state.wanted
        count, queue = state.searches + 1, None
        state = state._replace(matcher=matcher, wanted=wanted, step=seen.step, searches=count)
        for prediction in found:
            state, queue = _match(state, prediction, seen.layer)
        if not found:
            queue = want_by_maps(wanted, state.prior, seen.layer)
        prior = self._prior(state.prior, seen) if found or self.printed else None
        return state, Decision(prior=prior, stages=_stages(state.wanted, queue, seen.layer))

    def _prior(self, prior: np.ndarray, seen: Observation) -> np.ndarray:
        """int32[L, E]: the prior; as printed, with a term that makes 1 + frequency in the victim
        key the frequency."""
        if not self.printed:
            return prior
        used = seen.frequency
        term = np.where(used > 0, log2_fixed(used) - log2_fixed(used + 1), -MAX_PRIOR)
        return np.maximum(prior + term, -MAX_PRIOR)


def prior_of(likely: np.ndarray) -> np.ndarray:
    """int32[…]: log2 of probabilities float32[…]."""
    least = np.float32(2.0 ** -(MAX_PRIOR // LOG2_UNIT))
    return (np.log2(np.maximum(likely, least)) * LOG2_UNIT).astype(np.int32)


@functools.cache
def _priors() -> np.ndarray:
    """int32[2 ** BITS + 1]: prior_of every probability of a map."""
    return prior_of(np.arange(2**BITS + 1, dtype=np.float32) / 2**BITS)


def _match(state: Matching, found: MapPrediction, now: int) -> tuple[Matching, Queue | None]:
    """The state with a prediction, and its queue; None without the native library. For layers up to
    `now`, the one routed last (−1: none), it is late."""
    wanted, prior = state.wanted.copy(), state.prior.copy()
    first, last = found.layers.start, found.layers.stop
    begun = max(now + 1, first) if found.step == state.step else last
    given = found.likely, found.scores, first, begun, state.top_k
    queue = want_by_maps(wanted, prior, now, *given, _priors())
    if queue is None:
        prior[first:last] = prior_of(found.likely.max(axis=1))
        for layer, rows in zip(range(begun, last), found.likely[begun - first :], strict=True):
            chosen = select_experts(rows, found.scores, state.top_k)
            wanted[layer] = np.where(chosen, rows, 0).max(axis=0)
    late = state.late + (found.step != state.step or first <= now)
    matches, similarity = state.matches, state.similarity
    if first:  # not by embedding
        matches, similarity = matches + 1, similarity + min(found.scores.tolist())
    known = state.matcher, wanted, prior, state.top_k, state.step, state.searches
    return Matching(*known, matches, similarity, late), queue


def covering_maps(layers: int, experts: int) -> dict[str, int]:
    """The maps with which a new iteration finds one of at least that similarity: 2·L·E and
    ½·L·E·ln(L·E) (section 4.4, of a minimal cover by spheres). The ½ is lost in the text that we
    had."""
    count = layers * experts
    return {"75%": 2 * count, "98%": math.ceil(count * math.log(count) / 2)}


def _stages(wanted: np.ndarray, queue: Queue | None, now: int) -> Stages:
    """The wanted experts of later layers, the largest probability over distance first (section
    4.5), equal ones by layer and expert.

    - `queue`: the same by the native library.
    """
    if queue is not None:
        return stages_of_queue(queue, wanted.shape, NAME)
    later = wanted[now + 1 :]
    ahead, expert = np.nonzero(later)
    order = np.argsort(-later[ahead, expert] / (ahead + 1), kind="stable")
    return stages_at(ahead[order] + now + 1, expert[order], NAME)


def check_sizes(capacity: int, distance: int, layers: int) -> None:
    """Raises ValueError for a capacity below 1, and for a distance that leaves no layer."""
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    if not 1 <= distance < layers:
        raise ValueError(f"distance must lie in 1…{layers - 1}, not {distance}")


def fit(trace: Trace, *, capacity: int = 1000, distance: int = 3, share: float = 1.0) -> ExpertMap:
    """ExpertMap with the maps of a trace, taken in step by step as the engine does. It learns no
    more, like the paper's offline runs, whose share is 0.7; `dataclasses.replace(policy,
    learns=True)` continues.

    - `share`: of the trace's requests, the first ones.

    Raises TraceError for a trace without probabilities or embeddings, or without requests if a
    share needs them; ValueError as ExpertMap.init.
    """
    header = trace.header
    check_sizes(capacity, distance, header.layers)
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], not {share}")
    if not (header.probabilities and header.embedding):
        raise TraceError(
            f"{trace.directory} has no maps, which {NAME} learns from; record a trace with "
            "--trace DIR,arrays=probs+embedding"
        )
    requests = None
    if share < 1:
        requests = np.unique(trace.array("token.request"))
        requests = requests[: max(int(share * len(requests)), 1)]
    store = empty_store(header.layers, header.experts, header.embedding)
    for step in trace.step_traces():
        assert step.embedding is not None and step.probabilities is not None
        mine = slice(None) if requests is None else np.isin(step.request, requests)
        given = step.embedding[mine], step.probabilities[mine]
        store, _ = with_rows(store, *given, capacity=capacity, distance=distance)
    arrays = {"embeddings": store.embeddings, "maps": store.maps.swapaxes(0, 1)}
    settings = {"capacity": capacity, "distance": distance, "learns": False}
    found = fit_of(NAME, header, arrays, settings)
    return ExpertMap(found, capacity, distance, learns=False)
