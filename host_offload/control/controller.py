"""The controller asks policies at their moments, and turns their decisions into contents of tables
and a bounded list of transfers. It is host code over numpy, without a device, and no decision
depends on a clock."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from host_offload.control.interface import (
    ALWAYS,
    Decision,
    MapSearch,
    Moment,
    Observation,
    Policy,
    Spec,
    StagedTransfer,
    routed_counts,
)
from host_offload.control.kv_references import KVReferences
from host_offload.control.pool import PooledStaging
from host_offload.control.rules import (
    BETWEEN_LAYERS,
    PolicyError,
    check_decision,
    check_policies,
    check_pool,
    check_search,
    check_second_processor,
    moments_with,
    name_of,
    parse_interval,
    search_of,
    wants_pool,
)
from host_offload.control.staging import Staging, last_used
from host_offload.control.step_record import (
    SEEN,
    USES,
    Glance,
    LayerRouting,
    LinkUse,
    StepRecord,
    StepRows,
)
from host_offload.control.transfers import COUNTS
from host_offload.control.transitions import (
    ArrivingTransitions,
    Transitions,
    check_resident,
)
from host_offload.memory.tables import Entry, Residency

RESIDENCY = frozenset(
    {"version", "state", "last_used", "clock", "frequency", "cells", "fill_version"}
)
"""Names of `needs` that are read from a copy of the device's tables."""

_ALWAYS_SHOWN = tuple(ALWAYS - {"interval"})

TABLE_FIELDS = ("victim_weights", "prior", "fill_version")
"""Fields of a Decision that are contents of the device's tables."""


@dataclasses.dataclass(frozen=True)
class Decided:
    """An event: a policy's decision that changes something."""

    step: int
    moment: Moment
    policy: str
    decision: Decision


@dataclasses.dataclass(frozen=True)
class Observed:
    """An event: the state of the queue beside compute that policies saw between two layers."""

    step: int
    moment: Moment
    layer: int
    link: LinkUse


Event = Decided | StagedTransfer | Observed
"""Transfers are events when they are skipped, first used, or evicted without use."""


class Assigned(NamedTuple):
    """The processors that compute the missed experts of a layer."""

    layer: int
    beside: np.ndarray
    """bool[E]: experts that the second processor computes if they are absent."""
    order: np.ndarray
    """int32[E]: each expert's place in the order of loads."""


class Shown(NamedTuple):
    """The fields of an Observation that a moment brings, beside tables and transfers."""

    moment: Moment
    step: int
    seconds: float
    age: int = 0
    layer: int = -1
    turn: int = -1
    rows: StepRecord | StepRows | None = None
    routing: LayerRouting | None = None
    counts: np.ndarray | None = None
    kv_refs: np.ndarray | None = None
    link: LinkUse | None = None


class Seat:
    """A policy in the controller: its state, and news and counts since it was last asked."""

    def __init__(self, policy: Policy, spec: Spec):
        self.policy, self.name = policy, name_of(policy)
        self.moments, self.writes = policy.moments, policy.writes  # they may be properties
        self._observed: dict[tuple[Moment, bool], tuple[str, ...]] = {}
        self._active: Callable[[Any], frozenset[Moment]] | None = getattr(policy, "active", None)
        self.rests: Callable[[Any, Glance], Any] | None = getattr(policy, "rests", None)
        self._skips: Callable[[Any], tuple[int, int]] | None = getattr(policy, "skips", None)
        self.stages_between_layers = bool(policy.moments & BETWEEN_LAYERS) and not (
            policy.writes.isdisjoint({"stages", "transitions"})
        )
        if "router" not in policy.needs:
            spec = dataclasses.replace(spec, router=None)
        try:
            self.state = policy.init(spec)
        except Exception as error:
            error.add_note(f"in policy {self.name} at its init")
            raise
        self.news: dict[tuple[str, Moment], list[StagedTransfer]] = {}
        interval = getattr(policy, "interval", None)
        never = math.inf, "steps"
        self._every = never if interval is None else parse_interval(interval, self.name)
        self._passed = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0}
        self._sums = interval is not None and "counts" in policy.needs
        self.intervals = 0
        self.counts: np.ndarray | None = None

    @property
    def active(self) -> frozenset[Moment]:
        """The moments at which the policy wants to be asked now."""
        return self.moments if self._active is None else self._active(self.state)

    @property
    def skips(self) -> tuple[int, int]:
        """Steps and misses that may pass before the policy is asked whether it rests."""
        return (0, 0) if self._skips is None else self._skips(self.state)

    @property
    def looks_away(self) -> bool:
        """Whether the policy looks at no tables for now."""
        away: Callable[[Any], bool] | None = getattr(self.policy, "looks_away", None)
        return away is not None and away(self.state)

    @property
    def pools(self) -> bool:
        """Whether the policy wants a pool now."""
        pools: Callable[[Any], bool] | None = getattr(self.policy, "pools", None)
        return wants_pool(self.policy) if pools is None else pools(self.state)

    def observed_at(self, moment: Moment) -> tuple[str, ...]:
        """Returns the fields of an Observation that the policy needs and the moment has."""
        away = self.looks_away
        if (key := (moment, away)) not in self._observed:
            needs = self.policy.needs - {"router"} - (RESIDENCY if away else frozenset())
            self._observed[key] = tuple(n for n in sorted(needs) if moment in moments_with(n))
        return self._observed[key]

    def count_step(self, rows: int, seconds: float, counts: np.ndarray | None) -> None:
        """Counts a step that was read.

        - `rows`: rows of the step.
        - `seconds`: from the start until it was read.
        - `counts`: int32[L, E], rows routed to each expert.
        """
        self._passed["steps"] += 1
        self._passed["tokens"] += rows
        self._passed["seconds"] = seconds
        if self._sums and counts is not None:
            self.counts = counts if self.counts is None else self.counts + counts

    def pass_interval(self) -> bool:
        """Whether an interval has passed since the last call."""
        (count, unit), before = self._every, self.intervals
        self.intervals = int(self._passed[unit] // count)
        return self.intervals > before

    def tell(self, name: str, news: Sequence[StagedTransfer]) -> None:
        if name in self.policy.needs:
            for moment in self.moments:
                self.news.setdefault((name, moment), []).extend(news)


class Controller:
    """Shows observations to policies and holds their decisions until a step takes them.

    For each step a Control calls begin_step and stages before the step is made, and end_step once
    it was read; with driver="host" also between_layers. It carries out the `changes`. Several steps
    may be under way: transfers are matched by step number.

    - `listener`: called with each event.

    Raises PolicyError for policies that cannot run. Methods that ask a policy raise it for a
    decision that cannot be carried out.
    """

    def __init__(
        self,
        spec: Spec,
        policies: Sequence[Policy],
        *,
        listener: Callable[[Event], None] | None = None,
    ):
        check_policies(policies, spec.driver)
        check_search(policies, spec.driver, len(spec.version_bytes))
        self.search: MapSearch | None = search_of(policies)
        """The search of expert maps in decode steps; None without one."""
        self.spec, self.listener = spec, listener
        self.moments: frozenset[Moment] = frozenset().union(*(p.moments for p in policies))
        """Moments at which a policy is asked; without any, steps need no Control."""
        self.needs: frozenset[str] = frozenset().union(*(p.needs for p in policies))
        self.writes: frozenset[str] = frozenset().union(*(p.writes for p in policies))
        for missing in ("costs", "router"):
            if missing in self.needs and getattr(spec, missing) is None:
                who = next(name_of(p) for p in policies if missing in p.needs)
                raise PolicyError(f"policy {who} needs {missing!r}, which this Spec does not have")
        self.tables: Residency | None = None
        """The newest copy of the device's tables, with the decisions since then."""
        self.wanted_cells: np.ndarray | None = None
        """int32[L]: cells that a policy wants and the engine has not granted yet."""
        self.wanted_kv_pages: int | None = None
        self._skips = self._skipped = 0, 0
        """Steps and misses that may pass without a glance, and that have since the last one."""
        self._running = 0
        """Requests at the last glance."""
        self.max_running: int | None = None
        self.budget_deferred = 0
        """How often a budget had to wait because KV in use was in the way."""
        self.policy_s = 0.0
        """Seconds in the policies' own Python so far."""
        self._contents: dict[str, np.ndarray] = {}
        if spec.resident is not None:
            check_resident(policies, spec.resident)
        check_second_processor(policies, spec)
        kind: type[Staging | Transitions] = Staging
        if any(map(wants_pool, policies)):
            kind = PooledStaging
        if kind is PooledStaging or (self.search is not None and self.search.pooled):
            check_pool(policies, spec)
        if kind is PooledStaging:
            self.moments |= {Moment.EXPERTS_BEGIN}
        if spec.resident is not None:
            kind = ArrivingTransitions if spec.resident.arriving else Transitions
        self.staging = kind(spec, self._log)
        """The wanted transfers and their life. A Control forgets failed steps there."""
        self.changes = self.staging.changes
        """Changes that the device does not have yet: contents of TABLE_FIELDS, moves of cells, rows
        of the store of expert maps. If every expert is resident, also `cell_row` and
        `cell_version`, which the device never changes."""
        self._kv_references = KVReferences(spec.page_tokens) if "kv_refs" in self.needs else None
        self._use: np.ndarray | None = None
        """int64[len(USES)]: StepRecord.use of the step that was read last."""
        self._assigned: Assigned | None = None
        self._decisions: Counter[str] = Counter()
        self._seats = [Seat(policy, spec) for policy in policies]
        self._always: frozenset[Moment] = frozenset().union(
            *(seat.moments for seat in self._seats if not hasattr(seat.policy, "active"))
        )
        """Moments at which a policy always wants to be asked."""
        for seat in self._seats:
            if (weights := getattr(seat.policy, "victim_weights", None)) is not None:
                self._change("victim_weights", np.asarray(weights, np.int32))

    @functools.cached_property
    def transitions(self) -> Transitions | None:
        """The transitions, which book experts' slots, if every expert is resident; else None."""
        return self.staging if isinstance(self.staging, Transitions) else None

    @functools.cached_property
    def arriving(self) -> ArrivingTransitions | None:
        """The transitions, if their copies go beside the steps; else None."""
        return self.staging if isinstance(self.staging, ArrivingTransitions) else None

    @functools.cached_property
    def pool(self) -> PooledStaging | None:
        """The staging that passes cells from layer to layer, if all cells are one pool; else
        None."""
        return self.staging if isinstance(self.staging, PooledStaging) else None

    def is_asked(self, moment: Moment) -> bool:
        """Whether a policy wants to be asked at the moment now."""
        if moment not in self.moments:
            return False
        if self.pool is not None and self.pool.pools and moment == Moment.EXPERTS_BEGIN:
            return True
        return moment in self._always or any(moment in seat.active for seat in self._seats)

    def needs_at(self, moments: frozenset[Moment]) -> frozenset[str]:
        """Returns the fields that policies need at these moments."""
        asked = (seat.policy for seat in self._seats if seat.policy.moments & moments)
        return frozenset(
            need for policy in asked for need in policy.needs if moments_with(need) & moments
        )

    @functools.cached_property
    def stages_transfers(self) -> bool:
        return not self.writes.isdisjoint({"stages", "transitions"})

    @functools.cached_property
    def needs_residency(self) -> bool:
        wanted = self.stages_transfers or self.pool is not None or self.search is not None
        return wanted or not self.needs.isdisjoint(RESIDENCY)

    @property
    def needs_tables(self) -> bool:
        """Whether the tables after the next step are needed."""
        away = self.may_rest and all(seat.looks_away for seat in self._seats)
        return self.needs_residency and not away

    @functools.cached_property
    def needs_link(self) -> bool:
        """Whether policies look at the queue beside compute."""
        return not self.needs.isdisjoint(LinkUse._fields)

    def assigned(self, layer: int) -> Assigned | None:
        """Returns the assignment of a layer's experts by this step's policies; None without one."""
        assigned = self._assigned
        return assigned if assigned is not None and assigned.layer == layer else None

    # ---- a step

    def see(self, tables: Residency) -> None:
        """Takes a newer copy of the device's tables. Decided contents override it."""
        self.tables = tables._replace(**self._contents) if self._contents else tables

    def begin_step(self, step: int, *, seconds: float) -> None:
        """Asks policies at STEP_BEGIN, before the step is made."""
        self._assigned = None
        self._ask_all(Shown(Moment.STEP_BEGIN, step, seconds))

    def stages(self, step: int) -> list[Entry]:
        """Returns the step's list of transfers, at most spec.stage_entries. They are in flight
        until end_step or forget."""
        if self.tables is None:
            return []
        if self.pool is not None and (self.pool.pools or self.needs_tables):
            self.tables = self.tables.copy()
            self.pool.begin_step(step, self.tables, any(seat.pools for seat in self._seats))
        return self.staging.entries(step, self.tables) if self.stages_transfers else []

    def settle_budget(self, done: bool) -> None:
        """Notes whether wanted_cells and wanted_kv_pages were carried out; otherwise they wait."""
        if done:
            self.wanted_cells = self.wanted_kv_pages = None
        else:
            self.budget_deferred += 1

    @functools.cached_property
    def all_rest(self) -> bool:
        """Whether policies can do without some steps: each says so, and nobody else counts them."""
        alone = self.search is None and "counts" not in self.needs
        return alone and all(seat.rests is not None for seat in self._seats)

    @property
    def may_rest(self) -> bool:
        """Whether policies can do without some steps now, since no transfer is under way."""
        staging = self.staging
        return self.all_rest and not (staging.queued or staging.flying or staging.watching)

    def skip(self, decode: bool, running: int, waiting: int, missed: int) -> bool:
        """Whether a step that was read passes without a glance, as the policies' `skips` said.

        - `running`, `waiting`: requests.
        - `missed`: active experts that were not resident.
        """
        (steps, misses), cost = self._skips, max(missed, 1)
        if not steps or cost >= misses or not decode or waiting or running != self._running:
            return False
        self._skips = steps - 1, misses - cost
        self._skipped = self._skipped[0] + 1, self._skipped[1] + cost
        return True

    def _count_skipped(self) -> None:
        """Tells policies of the steps that were skipped."""
        if self._skipped[0]:
            for seat in self._seats:
                seat.state = cast(Any, seat.policy).skipped(seat.state, *self._skipped)
            self._skipped = 0, 0
        self._skips = 0, 0

    def rest(self, glance: Glance) -> bool:
        """Whether no policy needs a step that was read. Otherwise nothing has changed, and end_step
        must follow."""
        if self.skip(glance.decode, glance.running, glance.waiting, glance.missed):
            return True
        self._count_skipped()
        if not self.may_rest:
            return False
        states = []
        for seat in self._seats:
            if seat.rests is None or (state := seat.rests(seat.state, glance)) is None:
                return False
            states.append(state)
        for seat, state in zip(self._seats, states, strict=True):
            seat.state = state
        if not self.needs_tables:  # of which each step leaves a copy to be taken
            self._running = glance.running
            steps, misses = zip(*(seat.skips for seat in self._seats), strict=True)
            self._skips = min(steps), min(misses)
        return True

    def end_step(
        self,
        record: StepRecord,
        *,
        age: int,
        seconds: float,
        tables: Residency | None = None,
        needed: bool = False,
    ) -> None:
        """Asks policies after a step was read: at STEP_END, then at INTERVAL and TURN_END if due.

        - `age`: steps that were dispatched after this one.
        - `seconds`: from the start until the step was read.
        - `tables`: after the step, needed if needs_residency.
        - `needed`: whether `rest` was asked and said that a policy needs the step.
        """
        if tables is not None:
            self.see(tables)
        if not needed and self.all_rest and self.rest(glance_of(record, seconds)):
            return
        self._count_skipped()
        step = record.number
        if record.ahead is not None:
            self.staging.record_transfers(step, record.ahead)
        self.staging.settle(step, record.staged, self.tables)
        counts = None
        if self.staging.watching or "counts" in self.needs:
            counts = self._counts(record.ids)
            assert self.tables is not None or not self.staging.watching
            if self.tables is not None:
                self.staging.watch(step, counts > 0, record.missed, self.tables)
        self._hand_over()
        self._use = record.use
        for seat in self._seats:
            seat.count_step(len(record.ids), seconds, counts)
        shown = Shown(Moment.STEP_END, step, seconds, age, rows=record, counts=counts)
        self._ask_all(shown)
        for seat in self._seats:
            if seat.pass_interval():
                self._ask(seat, shown._replace(moment=Moment.INTERVAL, counts=seat.counts))
                seat.counts = None
        references = self._kv_references
        if references is not None:
            references.see(record.request, record.user, record.position)
        for request in record.finished:
            kv_refs = None if references is None else references.end(request)
            self._ask_all(shown._replace(moment=Moment.TURN_END, turn=request, kv_refs=kv_refs))

    def between_layers(
        self,
        moment: Moment,
        step: int,
        layer: int,
        *,
        seconds: float,
        rows: StepRows,
        routing: LayerRouting | None = None,
        tables: Residency | None = None,
        done: np.ndarray | None = None,
        link: LinkUse | None = None,
    ) -> list[Entry]:
        """Asks policies at a moment inside a step that runs layer by layer. Returns transfers to
        carry out now, before the rest of the step.

        - `rows`: rows of the step.
        - `routing`: of the layer, at ROUTED and EXPERTS_BEGIN.
        - `tables`: present tables, needed if needs_residency.
        - `done`: int32[S], 1 for each entry of the last list that was carried out; None if that
          list was settled or empty.
        - `link`: present state of the link, if a policy needs it.
        """
        if tables is not None:
            self.see(tables)
        if link is not None:
            self._log(Observed(step, moment, layer, link))
        if done is not None and self.settle_between_layers(done):
            self._ask_all(Shown(Moment.TRANSFER, step, seconds, layer=layer, link=link))
        counts = None
        if "counts" in self.needs and routing is not None:
            counts = self._counts(routing.ids, layer)
        known = {"rows": rows, "routing": routing, "counts": counts}
        self._ask_all(Shown(moment, step, seconds, layer=layer, link=link, **known))
        if (pool := self.pool) is not None and pool.pools:
            assert self.tables is not None, "a pool is looked at: give the controller the tables"
            active = None
            if routing is not None:
                active = routed_counts(routing.ids, self.spec.experts)[0] > 0
            self.tables = self.tables.copy()
            pool.look(step, self.tables, max(layer, 0), active, moment == Moment.EXPERTS_BEGIN)
        if self.tables is None or not any(seat.stages_between_layers for seat in self._seats):
            return []
        return self.staging.entries(step, self.tables, between_layers=True)

    def settle_between_layers(self, done: np.ndarray) -> bool:
        """Books the list that between_layers returned last.

        - `done`: int32[S], 1 for each entry that was carried out.

        Returns whether the list had entries.
        """
        settled = self.staging.settle_between_layers(done)
        self._hand_over()
        return settled

    def finish(self) -> None:
        """Ends the run, and logs transfers that were never used."""
        self.staging.finish()
        self._hand_over()

    def stats(self) -> dict[str, Any]:
        """Returns statistics as plain data. `transfers` has transfers.COUNTS by cause. `said` has
        the results of policies' own method `stats`, called with their state."""
        staging = self.staging
        said = {
            seat.name: say(seat.state)
            for seat in self._seats
            if (say := getattr(seat.policy, "stats", None)) is not None
        }
        return {
            "policies": [seat.name for seat in self._seats],
            "decisions": {seat.name: self._decisions[seat.name] for seat in self._seats},
            "transfers": {
                cause: {what: counts[what] for what in COUNTS}
                for cause, counts in staging.counts.items()
            },
            "queued": staging.queued,
            "in_flight": len(staging.in_flight),
            "budget_deferred": self.budget_deferred,
            **({"said": said} if said else {}),
            **staging.stats(self.tables),
        }

    # ---- asking

    def _ask_all(self, shown: Shown) -> None:
        for seat in self._seats if shown.moment in self.moments else ():
            if shown.moment in seat.active:
                self._ask(seat, shown)

    def _ask(self, seat: Seat, shown: Shown) -> None:
        self._count_skipped()
        observation = self._observe(seat, shown)
        when = f"{shown.moment.name} of step {shown.step}"
        try:
            began = time.perf_counter()
            answer = seat.policy.decide(seat.state, observation)
            self.policy_s += time.perf_counter() - began
        except Exception as error:
            error.add_note(f"in policy {seat.name} at {when}")
            error.add_note(
                f"fields of the observation that its `needs` lacks are None; it needs "
                f"{', '.join(sorted(seat.policy.needs)) or 'none'}"
            )
            raise
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise PolicyError(f"policy {seat.name} at {when}: decide must return (state, Decision)")
        state, decision = answer
        accepted = check_decision(decision, seat.policy, self.spec, when)
        seat.state = state
        self._accept(accepted, seat, shown)

    def _observe(self, seat: Seat, shown: Shown) -> Observation:
        """Returns what the policy sees: views of the step's arrays, which are read-only. Other
        fields keep their class's default, since setting each of 40 of a frozen dataclass took half
        of the time between layers."""
        fields = {name: getattr(shown, name) for name in _ALWAYS_SHOWN}
        fields["interval"] = seat.intervals
        for need in seat.observed_at(shown.moment):
            fields[need] = _read_only(self._value(need, seat, shown))
        observation = object.__new__(Observation)
        observation.__dict__.update(fields)
        return observation

    def _value(self, need: str, seat: Seat, shown: Shown) -> Any:
        if need in SEEN:
            routed = shown.routing is not None and SEEN[need] in LayerRouting._fields
            return getattr(shown.routing if routed else shown.rows, SEEN[need])
        if shown.link is not None and need in LinkUse._fields:
            return getattr(shown.link, need)
        if need in USES:
            return None if self._use is None else int(self._use[USES.index(need)])
        match need:
            case "counts" | "kv_refs":
                return getattr(shown, need)
            case "finished" | "retired":
                return tuple(seat.news.pop((need, shown.moment), ()))
            case "in_flight":
                return self.staging.in_flight
            case "costs":
                return self.spec.costs
            case "capacity":
                return self.staging.capacity
        tables = self.tables
        assert tables is not None, "a policy needs residency: give end_step the tables"
        match need:
            case "state":
                return self.staging.state(tables)
            case "version":
                return np.where(tables.address >= 0, tables.version, -1).astype(np.int8)
            case "cells":
                return np.sum(tables.cell_row >= 0, axis=1, dtype=np.int32)
            case "last_used":
                return last_used(tables)
        return getattr(tables, need).copy()  # the device may change what it let us look at

    def _counts(self, ids: np.ndarray, layer: int | None = None) -> np.ndarray:
        """Counts rows routed to each expert, int32[L, E], of ids [N, L, k], or [N, 1, k] of one
        layer."""
        counts = routed_counts(ids, self.spec.experts).astype(np.int32)
        if layer is None:
            return counts
        every = np.zeros((self.spec.layers, self.spec.experts), np.int32)
        every[layer] = counts[0]
        return every

    # ---- what was decided

    def _accept(self, decision: Decision, seat: Seat, shown: Shown) -> None:
        if all(getattr(decision, field) is None for field in seat.writes):
            return
        self._decisions[seat.name] += 1
        if self.listener is not None:
            self._log(Decided(shown.step, shown.moment, seat.name, decision))
        if decision.cells is not None:
            self.wanted_cells = decision.cells
        if decision.kv_pages is not None:
            self.wanted_kv_pages = decision.kv_pages
        self.max_running = decision.max_running or self.max_running
        if decision.map_rows is not None:
            self.changes.map_rows.append(decision.map_rows)
        if decision.pause_stages is not None:
            self.staging.paused = decision.pause_stages
        if decision.execute is not None or decision.load_order is not None:
            self._assign(decision, seat, shown)
        for field in TABLE_FIELDS:
            if (value := getattr(decision, field)) is not None:
                self._change(field, value.astype(np.int32, copy=False))
        for kind in ("transitions", "stages"):
            if (queue := getattr(decision, kind)) is not None:
                assert self.tables is not None, "a policy stages: give the controller the tables"
                self.staging.want(kind, queue, self.tables)

    def _assign(self, decision: Decision, seat: Seat, shown: Shown) -> None:
        """Takes the decisions on a layer's active experts. Raises PolicyError if no layer is
        routed, or if the number of decisions is not that of the active experts."""
        when = f"policy {seat.name} at {shown.moment.name} of step {shown.step}: "
        if shown.routing is None:
            raise PolicyError(f"{when}it may give experts only to a layer that is routed")
        active = np.flatnonzero(routed_counts(shown.routing.ids, self.spec.experts)[0])
        beside, order = np.zeros(self.spec.experts, bool), np.zeros(self.spec.experts, np.int32)
        if self._assigned is not None and self._assigned.layer == shown.layer:
            _, beside, order = self._assigned
        for field, target in (("execute", beside), ("load_order", order)):
            if (value := getattr(decision, field)) is None:
                continue
            if len(value) != len(active):
                raise PolicyError(
                    f"{when}{field} has {len(value)} entries, and {len(active)} experts are active"
                )
            target[active] = value
        self._assigned = Assigned(shown.layer, beside, order)

    def _change(self, field: str, value: np.ndarray) -> None:
        self._contents[field] = self.changes.contents[field] = value
        if self.tables is not None:
            self.tables = self.tables._replace(**{field: value})

    def _hand_over(self) -> None:
        """Passes ends and uses of transfers on to the policies that need them."""
        for name in ("finished", "retired"):
            news: list[StagedTransfer] = getattr(self.staging, name)
            if news:
                for seat in self._seats:
                    seat.tell(name, news)
                news.clear()

    def _log(self, event: Event) -> None:
        if self.listener is not None:
            self.listener(event)


def glance_of(record: StepRecord, seconds: float) -> Glance:
    """Returns the glance of a step by its record. A trace may lack some of it.

    - `seconds`: from the start until the step was read.
    """
    known = record.fills is not None and record.read_through is not None
    missed = record.fills.sum() + record.read_through.sum() if known else record.missed.sum()
    rows = len(record.ids) if record.rows is None else record.rows
    decode = bool(record.phase.all()) if record.kind is None else record.kind == "decode"
    use = [-1] * len(USES) if record.use is None else record.use.tolist()
    shown = (use[USES.index(name)] for name in Glance._fields[6:])
    compiled = bool(record.compiled)
    return Glance(decode, int(rows), int(missed), seconds, compiled, lambda: record.ids, *shown)


def _read_only(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value
