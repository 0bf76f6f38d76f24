"""Expert maps that are searched inside the compiled step.

The policy keeps the store of the host form, and the step searches and fetches
(moejax/step/map_search.py). This module has the same decisions in numpy, for a simulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, MapSearch, Moment, Observation, Spec
from host_offload.memory.pager import rank_cells
from host_offload.memory.tables import Entry, Residency
from host_offload.policies.prefetch.expert_map import expert_map_policy
from host_offload.policies.prefetch.expert_map.expert_map_policy import MapPolicy
from host_offload.policies.prefetch.expert_map.map_store import (
    BITS,
    NONE,
    FoundMaps,
    MapStore,
    select_experts,
    with_rows,
)
from host_offload.traces.reader import Trace
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR, log2_fixed, victim_key

NAME = expert_map_policy.NAME

ENTRIES = 24
"""Most transfers of a layer and step, if it has that many experts: as many as the host form makes
between two layers."""


class Kept(NamedTuple):
    """State of ExpertMapInStep."""

    store: MapStore
    unwritten: np.ndarray
    """bool[capacity]: places that the device does not have yet."""


@dataclasses.dataclass(frozen=True)
class ExpertMapInStep(MapPolicy):
    """fMoE's expert maps (arXiv:2502.05370, sections 4.1 to 4.5) on the device, a form of our own.

    Decode steps of driver="device" search the store before the first layer and after each router,
    and fetch the experts that the nearest map predicts for the layer `distance` later, without the
    host. Prefill steps prefetch nothing. The policy keeps the store by the rules of ExpertMap and
    writes changed rows between steps. Maps of a step enter when it is read, which is after the next
    step was dispatched. Without learning, steps return no probabilities.
    """

    pooled: bool = False
    """True: fetched experts may take cells of other layers, the paper's one cache (pool_entries);
    misses fill their own layer's. False: each layer has its own cells."""
    most: int | None = None
    """Most transfers after a layer. Of all layers to come, the experts of the largest probability
    over distance come first, and the others wait (section 4.5). None: those of each layer come
    when its map is found, at most ENTRIES."""

    writes: frozenset[str] = frozenset({"victim_weights", "prior", "map_rows"})
    """The steps themselves write the prior."""
    victim_weights: tuple[int, int, int] = (0, 1, 1)
    """Those of ExpertMap."""

    @property
    def moments(self) -> frozenset[Moment]:
        begin = frozenset({Moment.STEP_BEGIN})
        return begin | {Moment.STEP_END} if self.learns else begin

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"embedding", "probs"} if self.learns else ())

    @property
    def search(self) -> MapSearch:
        return MapSearch(self.capacity, self.distance, self.pooled, self.most)

    def init(self, spec: Spec) -> Kept:
        """The state with the fitted store. Raises ValueError as begin_store, and for no
        transfers."""
        if self.most is not None and self.most < 1:
            raise ValueError(f"most must be at least 1, not {self.most}")
        store = self.begin_store(spec)
        return Kept(store, np.arange(self.capacity) < store.size)

    def memory(self, spec: Spec) -> int:
        """Bytes of the store on the device, and on the host, which keeps it to learn."""
        on_device = self.search.nbytes(spec.layers, spec.experts, spec.hidden)
        return on_device + super().memory(spec)

    def stats(self, state: Kept) -> dict[str, int]:
        """Statistics: maps in the store, and learned_bytes, the host's part now."""
        return {"maps": state.store.size, "learned_bytes": sum(a.nbytes for a in state.store)}

    def decide(self, state: Kept, seen: Observation) -> tuple[Kept, Decision]:
        if seen.moment == Moment.STEP_END:
            sizes = {"capacity": self.capacity, "distance": self.distance}
            store, place = with_rows(state.store, seen.embedding, seen.probs, **sizes)
            unwritten = state.unwritten.copy()
            unwritten[place] = True
            return Kept(store, unwritten), Decision()
        place = np.flatnonzero(state.unwritten)
        if not len(place):
            return state, Decision()
        written = state._replace(unwritten=np.zeros_like(state.unwritten))
        return written, Decision(map_rows=state.store.rows_at(place))


def fit(
    trace: Trace,
    *,
    capacity: int = 1000,
    distance: int = 3,
    share: float = 1.0,
    pooled: bool = False,
    most: int | None = None,
) -> ExpertMapInStep:
    """The fit of expert_map, for steps that search."""
    found = expert_map_policy.fit(trace, capacity=capacity, distance=distance, share=share)
    settings: dict[str, Any] = {"learns": False, "pooled": pooled, "most": most}
    return ExpertMapInStep(found.fitted, capacity, distance, **settings)


def prior_of(likely: Any, xp: Any) -> Any:
    """The priors int32[E] of experts with rounded probabilities float32[E], for victim_key: their
    logarithm; for probability 0 the least prior.

    - `xp`: numpy or jax.numpy.
    """
    whole = (likely * np.float32(2.0**BITS)).astype(np.int32)
    return xp.where(whole > 0, log2_fixed(whole) - BITS * LOG2_UNIT, -MAX_PRIOR)


def wanted_of(
    store: MapStore, found: FoundMaps, layer: int, top_k: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """(prior int32[E], demand for each expert of the layer float32[E], 0: not wanted); None: the
    store is empty."""
    if not np.all(found.score > NONE):
        return None
    likely = store.maps[layer, found.place]
    chosen = select_experts(likely, found.score, top_k)
    return prior_of(likely.max(axis=0), np), np.where(chosen, likely, 0).max(axis=0)


def entries_of_list(search: MapSearch, experts: int) -> int:
    """How many entries a list for one layer has, S."""
    return min(search.most or ENTRIES, experts)


def most_urgent(wanted: Any, address: Any, now: Any, most: int, xp: Any) -> Any:
    """bool[L, E]: the absent experts to fetch after layer `now`, `most` of them: the largest
    probability over distance first (section 4.5), equal ones by layer and expert.

    - `wanted`: float32[L, E], 0: not wanted. Layers up to `now` are past.
    - `xp`: numpy or jax.numpy.
    """
    ahead = xp.arange(len(wanted))[:, None] - now
    # Whole numbers: XLA and numpy would round a quotient of floats differently.
    whole = (wanted * np.float32(2.0**BITS)).astype(np.int32) << 16
    waits = (ahead > 0) & (address < 0) & (whole > 0)
    urgency = xp.where(waits, whole // xp.maximum(ahead, 1), 0).ravel()
    place = xp.lexsort([xp.arange(urgency.size), -urgency])
    rank = xp.lexsort([place]).reshape(wanted.shape)
    return waits & (rank < most)


class PooledEntries(NamedTuple):
    """Transfers to a layer, int[S] a field, and the cells that come from other layers for them."""

    fits: Any
    """bool[S]: whether there is such a transfer."""
    expert: Any
    cell: Any
    """The cell's number in the layer."""
    comes: Any
    """bool[S]: whether the cell comes from another layer."""
    giver: Any
    place: Any
    """The cell's number in the giver."""
    owner: Any
    """The expert in it; −1: it is empty."""


def pool_entries(
    tables: Any, layer: Any, now: Any, near: int, wanted: Any, due: Any, size: int, xp: Any
) -> PooledEntries:
    """The transfers of entries_of, if cells of all layers are one pool (section 4.5).

    Evict in this order: empty cells of the layer, of other layers, unwanted experts by the victim
    key of plan, experts of the layer that are wanted less than the new one. The `near` layers
    after `now` keep theirs, since a step has just fetched for them.

    - `tables`: Residency, or a step's Tables.
    - `now`: the layer that was computed last; −1: none.
    - `wanted`: float32[E], 0: not wanted.
    - `due`: bool[E], those that may come now.
    - `xp`: numpy or jax.numpy.
    """
    layers, columns = tables.owner.shape
    number, owned = xp.arange(layers)[:, None], tables.owner >= 0
    own, owner = number == layer, xp.maximum(tables.owner, 0)

    def of_owner(values: Any) -> Any:
        return xp.where(owned, xp.take_along_axis(values, owner, 1), 0)

    worth = xp.where(own & owned, wanted[owner], np.float32(0))
    age = tables.clock[:, None] + np.int32(1) - tables.last_used
    key = victim_key(age, of_owner(tables.frequency), of_owner(tables.prior), tables.victim_weights)
    kind = xp.where(owned, 2 + (worth > 0), 1 - own.astype(np.int32))
    candidate = (tables.cell_row >= 0) & (own | (number <= now) | (number > now + near))
    order = owner * owned, number + 0 * owner, tables.last_used * owned, key * owned, worth, kind
    given = xp.lexsort([each.ravel() for each in (*order, ~candidate)])[:size]
    expert, absent = xp.arange(len(wanted)), due & (wanted > 0) & (tables.address[layer] < 0)
    coming = xp.lexsort([expert, -wanted, ~absent])[:size]
    giver, place = given // columns, given % columns
    comes = giver != layer
    # Cells of other layers take numbers that no cell of this layer has.
    held = tables.cell_row[layer] >= 0
    numbers = xp.lexsort([xp.arange(columns), held])
    count = xp.where(comes, xp.cumsum(comes) - 1, 0)
    cell = xp.where(comes, numbers[xp.minimum(count, columns - 1)], place)
    fits = candidate.ravel()[given] & absent[coming] & (wanted[coming] > worth.ravel()[given])
    fits &= ~comes | ((count < columns) & ~held[cell])
    return PooledEntries(fits, coming, cell, comes, giver, place, tables.owner.ravel()[given])


def entries_of(
    tables: Residency, layer: int, wanted: np.ndarray, due: np.ndarray, size: int
) -> Sequence[Entry]:
    """A step's transfers to a layer that it will compute later, at most `size`: absent wanted
    experts, the likeliest first. Evict in this order: empty cells, unwanted experts by the victim
    key of plan, experts that are wanted less than the new one.

    - `wanted`: float32[E], 0: not wanted.
    - `due`: bool[E], those that may come now.
    """
    room = rank_cells(tables, layer, 0)
    worth = {cell: 0.0 if owner < 0 else float(wanted[owner]) for cell, owner in room}
    cells = sorted(worth, key=lambda cell: worth[cell] > 0 and worth[cell])
    absent = np.flatnonzero(due & (wanted > 0) & (tables.address[layer] < 0))
    likely_first = absent[np.argsort(-wanted[absent], kind="stable")][:size]
    return [
        Entry(layer, expert, 0, cell)
        for expert, cell in zip(likely_first.tolist(), cells, strict=False)
        if wanted[expert] > worth[cell]
    ]
