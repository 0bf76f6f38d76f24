"""A scheduler of placement.SCHEDULERS as a policy of the engine. At each layer it decides which
missed experts the second processor computes, in which order the others are loaded, and what is
prefetched.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage
from host_offload.control.step_record import LinkUse
from host_offload.memory.budget import cells_of_versions
from host_offload.policies.placement.presched import (
    LayerPlan,
    LayerWork,
    PlacementCosts,
    Queue,
    Work,
    follow_hit_rate,
    queue_of,
)
from host_offload.policies.placement.rivals import AFTER_EXPERTS, AHEAD, SCHEDULERS
from host_offload.policies.prefetch.fitted import Fitted
from host_offload.policies.prefetch.llapor import Learned, Networks, choose_routing, scores
from host_offload.policies.prefetch.next_layers import (
    finite,
    gate_scores,
    last_rows,
    still_ahead,
)

DISTANCE = 2
"""How many layers ahead are predicted; the second one is for Q4."""

COSTS = tuple(field.name for field in dataclasses.fields(PlacementCosts))


class Placed(NamedTuple):
    """State of Placement."""

    costs: PlacementCosts
    """The stated or measured ones at the start, then as the link and the second processor are."""
    record_bytes: float
    """Bytes of an expert over the link, the mean of all layers. Costs are those of such an
    expert."""
    sizes: tuple[float, ...]
    """The bytes of each layer's experts over that mean; 1 unless layers differ in format."""
    top_k: int
    layers: int
    router: np.ndarray | None
    """float32[L, D, E] if routers predict."""
    networks: Networks | None
    """Those of `learned`."""
    hit: float
    """R_hit."""
    cells: np.ndarray | None = None
    """int[L, V], of each version; None: of one version, and shown."""
    use: LinkUse = LinkUse()
    """The link and the second processor when the policy was last asked."""
    critical: tuple[tuple[int, int], ...] = ()
    """(layer, expert) of critical prefetches for later layers."""
    ahead: tuple[tuple[int, np.ndarray], ...] = ()
    """(layer, int[E] predicted rows) of later layers."""
    later: tuple[Stage, ...] | None = None
    """Prefetches that begin when this layer's experts are computed."""


@dataclasses.dataclass(frozen=True)
class PlacementPolicy:
    """Decides which processor computes a missed expert (PreScope, section 4.3; the other arms are
    in docs/explanation/prescope.md). Resident experts stay on the accelerator. Needs driver="host".

    The work of a layer is known at its routing. The work of the next two layers is predicted by the
    networks of `learned` (LLaPor), by the routers on this layer's input (`predict` "gates"), or not
    at all: then nothing is prefetched. A network that is asked for two layers ahead reads the
    routing that the one before it predicts. After the last layer come the first ones of the next
    token, if there are networks for them. Empty cells are filled first, whatever the rule, since
    engines start cold and some rules never load. α is the time of what the link still has to bring,
    `load` for each expert. R_hit follows how often critical prefetches were used, and costs follow
    what the link and the second processor do (PlacementCosts.follow).
    """

    scheduler: str = "prescope"
    stated: tuple[tuple[str, float], ...] = ()
    """(name, seconds) of the stated PlacementCosts; the others are measured (Spec.costs)."""
    load_of_link: bool = False
    """Whether a load takes the time of the stated link (Spec.link)."""
    predict: str = ""
    """"gates"; empty: predict by `learned`, or nothing without it."""
    hit: float = 1.0
    """R_hit at the start."""
    learned: Learned | None = None
    defer: int = 0
    """Experts of a token, those of least weight, that the second processor may compute while the
    device goes on: their rows are added after the next layer's experts (KTransformers, SOSP 2025,
    "expert deferral"; decode steps alone, and not in the last layer). THIS CHANGES OUTPUTS."""
    buffers: int | None = None
    """Cells of each layer for prefetched experts, beside a hot table (static.hot_beside_prefetches,
    a separate policy); None: residents are the experts that eviction leaves."""

    @property
    def fitted(self) -> Fitted | None:
        return None if self.learned is None else self.learned.fitted

    @property
    def looks_ahead(self) -> bool:
        """Whether it prefetches."""
        return self.scheduler in AHEAD and bool(self.predict or self.learned)

    @property
    def moments(self) -> frozenset[Moment]:
        after = self.scheduler in AFTER_EXPERTS and self.looks_ahead
        return frozenset({Moment.EXPERTS_BEGIN, *([Moment.LAYER_BEGIN] if after else [])})

    @property
    def needs(self) -> frozenset[str]:
        found = {"counts", "version", "cells", "fill_version"}
        if {*dict(self.stated), *(["load"] if self.load_of_link else [])} < {*COSTS}:
            found.add("costs")
        if self.looks_ahead:
            found |= {*LinkUse._fields, "gate_input"}
            found |= {"router"} if self.learned is None else self.learned.needs
        return frozenset(found)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"execute", "load_order", *(["stages"] if self.looks_ahead else [])})

    def init(self, spec: Spec) -> Placed:
        """The state before the first step. Raises ValueError for networks of another model."""
        networks = None if self.learned is None else self.learned.networks(spec)
        sizes = max(spec.link_bytes.values(), key=np.max)
        record = float(np.mean(sizes))
        costs = costs_of(self, spec, record)
        of_layers = tuple((np.broadcast_to(sizes, spec.layers) / record).tolist())
        known = spec.top_k, spec.layers, spec.router, networks, self.hit
        cells = None
        if len(spec.version_bytes) == 2 and spec.capacity is not None:
            high, low = spec.capacity
            shares = cells_of_versions(high, low, spec.has_all_versions.tolist(), spec.experts)
            cells = np.array(shares).T
        return Placed(costs, record, of_layers, *known, cells=cells)

    def decide(self, state: Placed, seen: Observation) -> tuple[Placed, Decision]:
        if seen.moment == Moment.LAYER_BEGIN:
            if state.later is None:
                return state, Decision()
            return state._replace(later=None), Decision(stages=state.later)
        layer, counts, there = seen.layer, seen.counts[seen.layer], seen.version >= 0
        if self.looks_ahead:
            use = LinkUse(*(getattr(seen, name) for name in LinkUse._fields))
            state = state._replace(costs=state.costs.follow(state.use, use), use=use)
            state = self._foresee(_judge(state, layer, counts), seen)
        ahead: list[Queue] = []
        if state.ahead:
            rows, none = dict(state.ahead), np.zeros(len(counts), int)
            for distance in range(1, DISTANCE + 1):
                later = layer + distance
                if later < state.layers or later in rows:
                    other = later % state.layers
                    ahead.append(queue_of(other, rows.get(later, none), there[other]))
        alpha = 0.0
        if self.looks_ahead:
            alpha = seen.link_bytes_left / state.record_bytes * state.costs.load
        current = queue_of(layer, counts, there[layer])
        resident = queue_of(layer, counts, ~there[layer])
        costs = state.costs.of_size(state.sizes[layer])
        given = LayerWork(current, ahead, costs, alpha, state.hit, resident)
        plan = SCHEDULERS[self.scheduler](given)
        # Residents stay on the accelerator, whatever the rule says.
        stay = {*resident}
        plan = plan._replace(cpu=tuple(work for work in plan.cpu if work not in stay))
        cells, comes = seen.cells[layer, None] - (self.buffers or 0), np.zeros(len(counts), int)
        held = np.array([np.count_nonzero(there[layer])])
        if state.cells is not None:
            cells, comes = state.cells[layer], seen.fill_version[layer]
            held = np.bincount(seen.version[layer][there[layer]], minlength=len(cells))
        plan = _filling(plan, (cells - held).tolist(), comes)
        return self._make_decision(state, plan, np.flatnonzero(counts))

    def _make_decision(
        self, state: Placed, plan: LayerPlan, active: np.ndarray
    ) -> tuple[Placed, Decision]:
        """The plan as a decision. active: the layer's experts with rows, ascending."""
        beside = {work.expert for work in plan.cpu}
        order = {work.expert: place for place, work in enumerate(plan.load)}
        experts = active.tolist()
        decision = Decision(
            execute=np.array([expert in beside for expert in experts], np.int8),
            load_order=np.array([order.get(e, len(order)) for e in experts], np.int16),
        )
        if not self.looks_ahead:
            return state, decision
        wanted = tuple(Stage(w.layer, w.expert, cause=self.scheduler) for w in plan.prefetch)
        if wanted:
            last = plan.prefetch[-1]
            state = state._replace(critical=(*state.critical, (last.layer, last.expert)))
        if plan.after_experts:
            return state._replace(later=wanted), dataclasses.replace(decision, stages=())
        return state, dataclasses.replace(decision, stages=wanted)

    def _foresee(self, state: Placed, seen: Observation) -> Placed:
        """The state with this layer's predictions."""
        inputs, layer = seen.gate_input[:, 0], seen.layer
        found = dict(still_ahead(state.ahead, layer, state.layers))
        if self.learned is not None and state.networks is not None:
            self.learned.watch(state.networks, seen)
            found |= self._predict(state.networks, state.layers, seen)
        elif state.router is not None:
            for other in range(layer + 1, min(layer + 1 + DISTANCE, state.layers)):
                found[other] = rows_of(gate_scores(inputs, state.router[other]), state.top_k)
        return state._replace(ahead=tuple(found.items()))

    def _predict(self, networks: Networks, layers: int, seen: Observation) -> dict[int, np.ndarray]:
        """Later layer, counted on over the token's end → int[E], rows that the networks predict for
        each of its experts."""
        assert self.fitted is not None
        stride, found = self.fitted.setting("stride"), {}
        given = finite(seen.gate_input[:, 0]), seen.ids[:, 0], seen.weights[:, 0]
        for layer in range(seen.layer, seen.layer + DISTANCE, stride):
            if not (own := networks.of_layer(layer % layers)):
                break
            if layer < layers <= layer + stride:
                last = last_rows(seen.request, seen.position)
                given = given[0][last], given[1][last], given[2][last]
            ids, weights = choose_routing(scores(own, *given), given[2])
            found[layer + stride] = np.bincount(ids.ravel(), minlength=own["balance"].size)
            given = given[0], ids, weights
        return found


def costs_of(policy: PlacementPolicy, spec: Spec, record: float) -> PlacementCosts:
    """The stated costs, and measured ones for the rest.

    - `record`: bytes of an expert over the link.

    Raises ValueError for a cost that is neither stated nor measured.
    """
    found = dict(policy.stated)
    if policy.load_of_link and spec.link is not None:
        found["load"] = float(spec.link[0] + spec.link[1] * record)
    if (costs := spec.costs) is not None:
        startup, per_token = costs.cpu_expert.tolist()
        measured = {
            "per_token": per_token,
            "startup": startup,
            "load": float(costs.fill[0] + costs.fill[1] * record),
            "accelerator": float(costs.gpu_expert[0, 1]),
            "attention": costs.attention_s,
        }
        found = {**measured, **found}
    missing = [name for name in COSTS if not np.isfinite(found.get(name, np.nan))]
    if missing:
        raise ValueError(
            f"placement does not know {', '.join(missing)}: state them in seconds, such as "
            f"{missing[0]}=100us, or run `moejax calibrate`"
        )
    return PlacementCosts(**{name: found[name] for name in COSTS})


def rows_of(said: np.ndarray, top_k: int) -> np.ndarray:
    """int[E]: how many rows of scores [N, E] have the expert among their top_k best."""
    best = np.argsort(-said, axis=1, kind="stable")[:, :top_k]
    return np.bincount(best.ravel(), minlength=said.shape[1])


def _filling(plan: LayerPlan, free: list[int], version: np.ndarray) -> LayerPlan:
    """The plan with additional loads of the heaviest experts, for the layer's free cells.

    - `free`: cells of each version.
    - `version`: int[E], in which a load brings each expert; below 0: in no cell.
    """
    free = [*free, 0]  # the last for those below 0
    for work in plan.load:
        free[version[work.expert]] -= 1
    cpu, more = list[Work](), list[Work]()
    for work in reversed(plan.cpu):  # the heaviest first
        of = version[work.expert]
        (more if free[of] > 0 else cpu).append(work)
        free[of] -= 1
    if not more:
        return plan
    return plan._replace(cpu=(*cpu[::-1],), load=(*more[::-1], *plan.load))


def _judge(state: Placed, layer: int, counts: np.ndarray) -> Placed:
    """The state after it is known whether the layer's critical prefetches were used."""
    hit = state.hit
    for of, expert in state.critical:
        if of == layer:
            hit = follow_hit_rate(hit, bool(counts[expert]))
    left = tuple(key for key in state.critical if key[0] > layer)
    return state._replace(hit=hit, critical=left)
