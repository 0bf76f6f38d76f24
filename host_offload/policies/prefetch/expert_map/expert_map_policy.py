"""fMoE: prefetch by the nearest expert map of earlier iterations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.policies.prefetch.expert_map.map_store import (
    Trajectory,
    empty_store,
    selected,
    stored,
    with_rows,
)
from host_offload.policies.prefetch.expert_map.matcher import IN_STEP, Matcher
from host_offload.policies.prefetch.expert_map.trackers import (
    NEEDS,
    TRACKERS,
    HitCounts,
    MapPrediction,
    MapTracker,
    Speculation,
    Tracker,
)
from host_offload.policies.prefetch.fitted import Fitted, fitted, read_fitted
from host_offload.policies.prefetch.moe_infinity import diverse, matrices_of
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR

NAME = "expert_map"
PROMPTS = ("tokens", "mean")


class Matching(NamedTuple):
    """State of ExpertMap."""

    tracker: Tracker | Matcher
    wanted: np.ndarray
    """float32[L, E]: probability of what the step is to prefetch, 0: nothing."""
    likely: np.ndarray
    """float32[L, E]: probability as matched last."""
    top_k: int
    step: int = -1
    """The one that is made."""
    searches: int = 0
    late: int = 0
    """Those of them that were found after a layer that they were for was routed."""


class RecordedMaps(NamedTuple):
    """State of ExpertMap where decisions come from a trace."""

    next: int = 0


@dataclasses.dataclass(frozen=True)
class ExpertMap:
    """fMoE, later FineMoE (arXiv:2502.05370, sections 4.1 to 4.5): an iteration leaves the
    router's probabilities of all layers, its map, and the embedding of the token fed in.

    The store's nearest embedding says what the first `distance` layers need; after each router the
    nearest map, over the layers routed so far, what the layer `distance` further on needs. The less
    alike, the more probability is prefetched (store.selected), likely and near experts first; the
    least likely and least often needed are evicted, without recency. Rows of a step are united,
    each probability the largest of theirs. Needs driver="host", which gives `probs` and
    `embedding` to the host. docs/policies.md says what differs from the paper.
    """

    fitted: Fitted | None = None
    """What to begin with; without it it begins empty."""
    capacity: int = 1000
    """Most maps, or requests of "hit_count" (C)."""
    distance: int = 3
    """Layers ahead (d)."""
    tracker: str = "map_tsd"
    """What takes the matcher's place (section 6.5): "map_tsd", the whole; "map_ts": top-k of the
    map, whatever the score; "map_t": so, and nothing for the first `distance` layers; "speculate":
    a later layer's gate on this layer's gate input; "hit_count": counts of requests."""
    learns: bool = True
    """False: what was fitted stays as it is (the paper's offline runs)."""
    prompt: str = "tokens"
    """"tokens": every token of a prompt is a row, with a map; "mean": their mean is one."""
    asynchronous: bool = False
    """True: searches run on a thread beside inference, which never waits; what they find is used
    from the next moment on. Decisions then depend on times: see `recorded`."""
    pool: bool = True
    """Cells are of one pool over all layers, the paper's cache; False: each layer has its own."""
    decisions: tuple[tuple[int, str, Decision], ...] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    """(step, moment, decision) of a run, to be taken again; see `recorded`."""

    moments: frozenset[Moment] = IN_STEP | {Moment.STEP_END, Moment.TURN_END}
    writes: frozenset[str] = frozenset({"victim_weights", "prior", "stages"})
    victim_weights: tuple[int, int, int] = (0, 1, 1)
    """log2(1 + frequency) + log2(probability): the product, which decides in the paper."""

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS.get(self.tracker, NEEDS["map_tsd"])

    def init(self, spec: Spec) -> Matching | RecordedMaps:
        """The store that is given. Raises ValueError for settings that mean nothing and for maps
        of another model."""
        if self.capacity < 1 or self.prompt not in PROMPTS or self.tracker not in TRACKERS:
            raise ValueError(
                f"capacity must be at least 1, prompt one of {', '.join(PROMPTS)}, tracker one of "
                f"{', '.join(TRACKERS)}, not {self.capacity}, {self.prompt!r} and {self.tracker!r}"
            )
        check_distance(self.distance, spec.layers)
        if self.fitted is not None:
            self.fitted.check(spec)
        if self.decisions is not None:
            return RecordedMaps()
        tracker = self._tracker(spec)
        nothing = np.zeros((spec.layers, spec.experts), np.float32)
        # Of layers that nothing was predicted for yet, as those behind no router, nobody is more
        # likely than another; with 0 a pool would never give them a cell.
        even = np.full_like(nothing, 1 / spec.experts)
        begun = Matcher(tracker) if self.asynchronous else tracker
        return Matching(begun, nothing, even, spec.top_k)

    def memory(self, spec: Spec) -> int:
        """Bytes of what it learns: what is given, and what it may grow to."""
        if self.tracker == "speculate":
            return 0
        given = 0 if self.fitted is None else self.fitted.nbytes
        if not self.learns:
            return given
        experts = spec.layers * spec.experts
        # A map has the length of its prefixes beside it.
        row = experts if self.tracker == "hit_count" else spec.hidden + experts + spec.layers
        return max(given, self.capacity * row * 4)

    def stats(self, state: Matching | RecordedMaps) -> dict[str, int]:
        """searches: moments of steps that were seen. late: searches that were found too late, or
        left out since they would have been. learned_bytes: as it is now."""
        if isinstance(state, RecordedMaps):
            return {"decisions": state.next}
        tracker, late = state.tracker, state.late
        late += tracker.left_out if isinstance(tracker, Matcher) else 0
        return {"searches": state.searches, "late": late, "learned_bytes": tracker.nbytes}

    def decide(
        self, state: Matching | RecordedMaps, observation: Observation
    ) -> tuple[Matching | RecordedMaps, Decision]:
        if isinstance(state, RecordedMaps):
            return self._again(state, observation)
        tracker, in_step = state.tracker, observation.moment in IN_STEP
        if isinstance(tracker, Matcher):
            found = tracker.found() if in_step else []
            tracker.publish(observation)
        else:
            tracker, prediction = tracker.seen(observation)
            state = state._replace(tracker=tracker)
            found = [] if prediction is None else [(observation.step, prediction)]
        if not in_step:
            return state, Decision()
        state = state._replace(searches=state.searches + 1, step=observation.step)
        if observation.moment == Moment.EMBEDDED:
            state = state._replace(wanted=np.zeros_like(state.wanted))
        prior = None
        for step, prediction in found:
            state = self._matched(state, step, prediction, observation.layer)
            least = np.float32(2.0 ** -(MAX_PRIOR // LOG2_UNIT))
            prior = (np.log2(np.maximum(state.likely, least)) * LOG2_UNIT).astype(np.int32)
        return state, Decision(prior=prior, stages=_queue(state.wanted, observation.layer))

    def _tracker(self, spec: Spec) -> Tracker:
        arrays = {} if self.fitted is None else self.fitted.arrays
        if self.tracker == "speculate":
            assert spec.router is not None
            return Speculation(spec.router, self.distance)
        needed = {"matrices"} if self.tracker == "hit_count" else {"embeddings", "maps"}
        if arrays.keys() and arrays.keys() != needed:
            raise ValueError(
                f"what was fitted has {', '.join(arrays)}, and tracker {self.tracker!r} takes "
                f"{', '.join(sorted(needed))}; fit with tracker={self.tracker!r}"
            )
        if arrays and (count := len(next(iter(arrays.values())))) > self.capacity:
            raise ValueError(
                f"{count} {'requests' if self.tracker == 'hit_count' else 'maps'} are given and "
                f"capacity is {self.capacity}; fit with a smaller one"
            )
        if self.tracker == "hit_count":
            nothing = np.zeros((0, spec.layers, spec.experts), np.float32)
            known = arrays.get("matrices", nothing)
            return HitCounts(known, self.capacity, self.distance, spec.top_k, self.learns)
        store = empty_store(spec.layers, spec.experts, spec.hidden)
        if arrays:
            store = stored(arrays["embeddings"], arrays["maps"])
        begun = Trajectory.of(store, 0)
        semantic = self.tracker != "map_t"
        settings = self.capacity, self.distance, semantic, self.learns, self.prompt
        return MapTracker(store, begun, *settings)

    def _matched(self, state: Matching, step: int, found: MapPrediction, now: int) -> Matching:
        """With what was predicted in a step; of layers up to `now`, the one routed last, −1: none,
        it comes late."""
        wanted, likely = state.wanted.copy(), state.likely.copy()
        for layer, rows in zip(found.layers, found.likely, strict=True):
            likely[layer] = rows.max(axis=0)
            if step == state.step and layer > now:
                by_similarity = self.tracker == "map_tsd"
                chosen = selected(rows, found.scores, state.top_k, by_similarity=by_similarity)
                wanted[layer] = np.where(chosen, rows, 0).max(axis=0)
        late = step != state.step or found.layers.start <= now
        return state._replace(wanted=wanted, likely=likely, late=state.late + late)

    def _again(
        self, state: RecordedMaps, observation: Observation
    ) -> tuple[RecordedMaps, Decision]:
        if observation.moment not in IN_STEP:
            return state, Decision()
        assert self.decisions is not None
        here = observation.step, observation.moment.name
        if state.next == len(self.decisions) or self.decisions[state.next][:2] != here:
            raise TraceError(
                f"{NAME} decided nothing at {here[1]} of step {here[0]} in the trace that its "
                "decisions are taken from; give that run's trace"
            )
        return RecordedMaps(state.next + 1), self.decisions[state.next][2]


def recorded(trace: Trace, policy: ExpertMap) -> ExpertMap:
    """The policy of a run, which decides again what it decided in that run: how an asynchronous one
    is replayed. Raises TraceError for a trace without its decisions."""
    found = [
        (line["step"], line["moment"], _decision(line["decision"]))
        for line in trace.decided()
        if line["policy"] == type(policy).__name__
    ]
    if not found:
        raise TraceError(f"{trace.directory} has no decisions of {type(policy).__name__}")
    return dataclasses.replace(policy, decisions=tuple(found))


def _decision(written: dict[str, Any]) -> Decision:
    prior = written.get("prior")
    return Decision(
        prior=None if prior is None else np.array(prior, np.int32),
        stages=tuple(Stage(*entry) for entry in written["stages"]),
    )


def _queue(wanted: np.ndarray, now: int) -> tuple[Stage, ...]:
    """What is wanted of layers to come, the largest probability over distance first (section 4.5),
    equal ones by layer and expert."""
    layer, expert = np.nonzero(wanted)
    ahead = layer > now
    layer, expert = layer[ahead], expert[ahead]
    order = np.argsort(-wanted[layer, expert] / (layer - now), kind="stable")
    places = zip(layer[order].tolist(), expert[order].tolist(), strict=True)
    return tuple(Stage(*place, cause=NAME) for place in places)


def check_distance(distance: int, layers: int) -> None:
    """Raises ValueError for a distance that leaves no layer to be predicted."""
    if not 1 <= distance < layers:
        raise ValueError(f"distance must lie in 1…{layers - 1}, not {distance}")


def fit(
    trace: Trace,
    *,
    capacity: int = 1000,
    distance: int = 3,
    tracker: str = "map_tsd",
    share: float = 1.0,
) -> ExpertMap:
    """ExpertMap that begins with the maps of a trace, taken in one step after the other as the
    engine does; for "hit_count" with the counts of its requests, those that differ most. It does
    not learn on: the paper's offline runs, whose share is 0.7 (`dataclasses.replace(policy,
    learns=True)` does).

    share: of the trace's requests, the first ones. Raises TraceError for a trace without
    probabilities or embeddings, or that does not know its requests where that matters; ValueError
    as ExpertMap.init.
    """
    header = trace.header
    check_distance(distance, header.layers)
    if capacity < 1 or not 0 < share <= 1 or tracker not in TRACKERS or tracker == "speculate":
        raise ValueError(
            f"capacity must be at least 1, share lie in (0, 1], and tracker learn something, not "
            f"{capacity}, {share} and {tracker!r}"
        )
    if "token.request" in header.absent and (share < 1 or tracker == "hit_count"):
        raise TraceError(
            f"{trace.directory} does not say which request a token belongs to; record one with "
            "--trace DIR"
        )
    if tracker == "hit_count":
        matrices = matrices_of(trace)
        matrices = matrices[: max(int(share * len(matrices)), 1)]
        arrays = {"matrices": matrices[diverse(matrices, capacity)]}
    else:
        arrays = _maps(trace, capacity, distance, share)
    settings = {"capacity": capacity, "distance": distance, "tracker": tracker}
    found = fitted(NAME, header, arrays, settings)
    return ExpertMap(found, capacity, distance, tracker, learns=False)


def _maps(trace: Trace, capacity: int, distance: int, share: float) -> dict[str, np.ndarray]:
    header = trace.header
    if not (header.probabilities and header.embedding):
        raise TraceError(
            f"{trace.directory} has no maps, which {NAME} learns from; record a trace with "
            "--trace DIR,arrays=probs+embedding"
        )
    first = None
    if share < 1:
        requests = np.unique(trace.array("token.request"))
        first = requests[: max(int(share * len(requests)), 1)]
    store = empty_store(header.layers, header.experts, header.embedding)
    for step in trace.step_traces():
        assert step.embedding is not None and step.probabilities is not None
        mine = slice(None) if first is None else np.isin(step.request, first)
        given = step.embedding[mine], step.probabilities[mine]
        store = with_rows(store, *given, capacity=capacity, distance=distance)
    return {"embeddings": store.embeddings, "maps": store.maps.swapaxes(0, 1)}


def read(path: str) -> ExpertMap:
    """The policy with what a fit wrote to the file."""
    state = read_fitted(path, NAME)
    settings = (state.setting(name) for name in ("capacity", "distance", "tracker"))
    return ExpertMap(state, *settings, learns=False)
