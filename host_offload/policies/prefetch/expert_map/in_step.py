"""Expert maps searched inside the compiled step: the store is the host form's, the searches and
what they fetch are the step's own (moejax/step/map_search.py)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import (
    Decision,
    MapRows,
    MapSearch,
    Moment,
    Observation,
    Spec,
)
from host_offload.policies.prefetch.expert_map.expert_map_policy import NAME, check_distance
from host_offload.policies.prefetch.expert_map.expert_map_policy import fit as fit_maps
from host_offload.policies.prefetch.expert_map.map_store import (
    MapStore,
    empty_store,
    placed,
    stored,
)
from host_offload.policies.prefetch.expert_map.step_search import rounded
from host_offload.policies.prefetch.fitted import Fitted, read_fitted
from host_offload.traces.reader import Trace


class Kept(NamedTuple):
    """State of ExpertMapInStep."""

    store: MapStore
    unwritten: np.ndarray
    """bool[capacity]: places that the device has not been given."""


@dataclasses.dataclass(frozen=True)
class ExpertMapInStep:
    """fMoE's expert maps (arXiv:2502.05370, sections 4.1 to 4.5) on the device, a form of our own:
    decode steps of driver="device" search the store between the embedding and the first layer and
    after each router, and fetch what the nearest map says of the layer `distance` further on,
    without the host. Nothing is fetched ahead in prefill steps.

    The policy keeps the store, by the rules of ExpertMap, and writes the rows that changed between
    steps. Maps of a step enter once it was read, which with this driver is after the next one was
    dispatched. Each layer has its own cells.
    """

    fitted: Fitted | None = None
    """What to begin with; without it it begins empty."""
    capacity: int = 1000
    """Most maps (C)."""
    distance: int = 3
    """Layers ahead (d)."""
    learns: bool = True
    """False: what was fitted stays as it is, and steps give out no probabilities."""

    writes: frozenset[str] = frozenset({"victim_weights", "prior", "map_rows"})
    """The prior is written by the steps themselves."""
    victim_weights: tuple[int, int, int] = (0, 1, 1)
    """As of ExpertMap."""

    @property
    def moments(self) -> frozenset[Moment]:
        begin = frozenset({Moment.STEP_BEGIN})
        return begin | {Moment.STEP_END} if self.learns else begin

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"embedding", "probs"} if self.learns else ())

    @property
    def search(self) -> MapSearch:
        return MapSearch(self.capacity, self.distance)

    def init(self, spec: Spec) -> Kept:
        """The store that is given. Raises ValueError for settings that mean nothing and for maps of
        another model."""
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {self.capacity}")
        check_distance(self.distance, spec.layers)
        store = empty_store(spec.layers, spec.experts, spec.hidden)
        if self.fitted is not None:
            self.fitted.check(spec)
            arrays = self.fitted.arrays
            if arrays.keys() != {"embeddings", "maps"}:
                raise ValueError(
                    f"steps search maps, and what was fitted has {', '.join(arrays)}; fit "
                    "expert_map with tracker='map_tsd'"
                )
            store = stored(arrays["embeddings"], arrays["maps"])
        if store.size > self.capacity:
            raise ValueError(
                f"{store.size} maps are given and capacity is {self.capacity}; fit with a smaller "
                "one"
            )
        return Kept(store, np.arange(self.capacity) < store.size)

    def memory(self, spec: Spec) -> int:
        """Bytes of the store: on the device, and on the host, where it is kept to learn."""
        on_device = self.search.nbytes(spec.layers, spec.experts, spec.hidden)
        row = spec.hidden + spec.layers * (spec.experts + 1)
        given = 0 if self.fitted is None else self.fitted.nbytes
        return on_device + (max(given, self.capacity * row * 4) if self.learns else given)

    def stats(self, state: Kept) -> dict[str, int]:
        """maps: in the store. learned_bytes: the host's part, as it is now."""
        return {"maps": state.store.size, "learned_bytes": sum(a.nbytes for a in state.store)}

    def decide(self, state: Kept, observation: Observation) -> tuple[Kept, Decision]:
        if observation.moment == Moment.STEP_END:
            return self._learned(state, observation), Decision()
        place = np.flatnonzero(state.unwritten)
        if not len(place):
            return state, Decision()
        store = state.store
        maps = store.maps[:, place].swapaxes(0, 1)
        rows = MapRows(place, *rounded(store.embeddings[place], maps))
        return state._replace(unwritten=np.zeros_like(state.unwritten)), Decision(map_rows=rows)

    def _learned(self, state: Kept, seen: Any) -> Kept:
        settings = {"capacity": self.capacity, "distance": self.distance}
        store, place = placed(state.store, seen.embedding, seen.probs, **settings)
        unwritten = state.unwritten.copy()
        unwritten[place] = True
        return Kept(store, unwritten)


def fit(
    trace: Trace, *, capacity: int = 1000, distance: int = 3, share: float = 1.0
) -> ExpertMapInStep:
    """As expert_map.policy.fit, for steps that search."""
    found = fit_maps(trace, capacity=capacity, distance=distance, share=share)
    return ExpertMapInStep(found.fitted, capacity, distance, learns=False)


def read(path: str) -> ExpertMapInStep:
    """The policy with what a fit of expert_map wrote to the file."""
    state = read_fitted(path, NAME)
    capacity, distance = state.setting("capacity"), state.setting("distance")
    return ExpertMapInStep(state, capacity, distance, learns=False)
