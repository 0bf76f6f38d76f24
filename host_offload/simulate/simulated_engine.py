"""An engine without a model: policies beside the steps of a trace.

A step routes what the trace says. It is dispatched and read in the trace's order, so what a policy
decides reaches the same step as in the engine. The device is a Pager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.control.control import Control, Moved
from host_offload.control.controller import Controller
from host_offload.control.interface import MapRows, MapSearch, Moment
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import (
    COLUMNS,
    SEEN,
    USES,
    LayerRouting,
    LinkUse,
    StepRecord,
    StepRows,
)
from host_offload.control.transitions import Transitions
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry, HandOver, Residency
from host_offload.policies.prefetch.expert_map.in_step import (
    entries_of,
    entries_of_list,
    most_urgent,
    pool_entries,
    wanted_of,
)
from host_offload.policies.prefetch.expert_map.map_store import (
    FoundMaps,
    MapStore,
    Trajectory,
    empty_store,
)
from host_offload.traces.link import RecordedLink
from host_offload.traces.reader import Trace
from host_offload.traces.schema import BudgetMove, TraceError, TraceHeader
from host_offload.traces.step_sets import in_waves, step_set


class Staged(NamedTuple):
    """An expert moved ahead of need."""

    layer: int
    expert: int
    version: int
    row: int
    """The first arena row of its cell."""
    coming: int | None
    """The layer before whose experts it was queued, between layers; None: it was queued after its
    own layer's experts."""
    routed: bool
    """Whether that layer was routed already, for an expert queued between layers."""


class SimulatedStep:
    """The result of a step: L layers of E experts in V versions. One of the step's waves needs each
    active expert.

    - `kind`: None if the trace does not know.
    - `link_bytes`: int64[V, L], bytes of an expert over the link.
    """

    def __init__(
        self, number: int, kind: str | None, waves: int, experts: int, link_bytes: np.ndarray
    ):
        self.number, self.kind, self.waves, self._link_bytes = number, kind, waves, link_bytes
        shape = link_bytes.shape[1], experts
        self.active = np.zeros(shape, bool)
        """bool[L, E]: experts that were needed."""
        self.missed = np.zeros(shape, bool)
        """bool[L, E]: needed experts that were not resident."""
        self.placed = np.zeros(shape, bool)
        """bool[L, E]: missed experts that a second processor computed."""
        self.row = np.full(shape, -1, np.int32)
        """int32[L, E]: first arena row of the cell that a needed expert was computed from; −1: it
        had no cell, and was read through or placed."""
        self.version = np.zeros(shape, np.int8)
        """int8[L, E]: the version that a needed expert was computed in; 0 for all others."""
        self._begin: tuple[int, ...] | None = None
        self.stages: list[Staged] = []
        """Experts moved ahead of need, by the step's list and between layers, in their order."""

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Returns where a layer's row of missed, row and version begins: numpy takes longer to say
        so than a layer to be referenced."""
        if self._begin is None:
            self._begin = tuple(a.ctypes.data for a in (self.missed, self.row, self.version))
        first, place = self._begin, layer * self.row.shape[1]
        return first[0] + place, first[1] + 4 * place, first[2] + place

    @property
    def hits(self) -> np.ndarray:
        """int[L]"""
        return np.count_nonzero(self.active & ~self.missed, axis=1)

    @functools.cached_property
    def moves(self) -> np.ndarray:
        """int64[3, L, V]: experts that crossed the link in each way of cost_model.MOVES."""
        versions, layers = self._link_bytes.shape
        found = np.zeros((3, layers, versions), np.int64)
        filled = self.missed & (self.row >= 0)
        through = self.missed & ~filled & ~self.placed
        for version in range(versions):
            mine = self.version == version
            found[0, :, version] = np.count_nonzero(filled & mine, axis=1)
            found[1, :, version] = np.count_nonzero(through & mine, axis=1)
        for move in self.stages:
            found[2, move.layer, move.version] += 1
        return found

    @property
    def fills(self) -> np.ndarray:
        """int64[L]: experts that filled cells; read_through and staged have the same form."""
        return self.moves[0].sum(axis=1)

    @property
    def read_through(self) -> np.ndarray:
        return self.moves[1].sum(axis=1)

    @property
    def staged(self) -> np.ndarray:
        return self.moves[2].sum(axis=1)

    @property
    def moved(self) -> np.ndarray:
        """int64[L]: bytes over the link."""
        return np.sum(self.moves.sum(axis=0) * self._link_bytes.T, axis=1)


class PagerDevice(Pager):
    """A host_offload.control.control.Device without bytes: its steps are sets of experts.

    - `link_bytes`: int64[V, L], bytes of an expert over the link.
    """

    def __init__(self, tables: Residency, link_bytes: np.ndarray):
        super().__init__(tables, len(link_bytes))
        self._link_bytes = link_bytes
        self._carried_out = np.zeros(0, np.int32)
        self._assigned: tuple[int, np.ndarray] | None = None
        self.maps: MapStore | None = None
        """The maps that decode steps search, if any."""
        self.search: MapSearch | None = None
        """How they search them."""
        self.link_use: Callable[[], LinkUse] = LinkUse
        """See Device.link_use."""
        self.step = self.begin_step(-1, None, 1)

    # ---- a step

    def begin_step(self, number: int, kind: str | None, waves: int) -> SimulatedStep:
        """Begins a step and returns it, with nothing known yet."""
        experts = self.tables.address.shape[1]
        self.step = SimulatedStep(number, kind, waves, experts, self._link_bytes)
        self._assigned = None
        return self.step

    def compute(self, active: np.ndarray, layer: int | None = None) -> None:
        """References all layers, or one, to their sets of active experts bool[M, E]. Misses that
        are given to a second processor get no cell, and none of their bytes crosses the link."""
        span = slice(None) if layer is None else slice(layer, layer + 1)
        tables, step, kept = self.tables, self.step, None
        if self._assigned is not None and self._assigned[0] == layer:
            beside = self._assigned[1] & active[0] & (tables.address[layer] < 0)
            step.placed[layer], self._assigned = beside, None
            kept = tables.fill_version[layer].copy()
            tables.fill_version[layer][beside] = -1
        step.active[span] = active
        plan = None if layer is None else self.layer_plan
        for due in in_waves(active, step.waves):
            if plan is not None and layer is not None:
                plan(layer, due[0], step.addresses(layer))
                continue
            step.missed[span] |= self.reference(due, layer).missing
            np.copyto(step.row[span], tables.address[span], where=due)
            np.copyto(step.version[span], tables.version[span], where=due)
        if kept is not None:
            tables.fill_version[layer] = kept

    def stage(
        self,
        entries: Sequence[Entry],
        *,
        layer: int | None = None,
        coming: int | None = None,
        routed: bool = False,
    ) -> np.ndarray:
        """Stages experts like Pager.stage, and notes for `carried_out` a list from between layers,
        before `coming`.

        - `routed`: whether the layer `coming` was routed already.
        """
        done = super().stage(entries, layer=layer, coming=coming)
        if coming is not None:
            self._carried_out = done
        for (of, expert, version, cell), carried_out in zip(entries, done.tolist(), strict=True):
            if carried_out:
                row = int(self.tables.cell_row[of, cell])
                self.step.stages.append(Staged(of, expert, version, row, coming, routed))
        return done

    def foresee(self, layer: int, found: FoundMaps, top_k: int) -> np.ndarray:
        """Makes what the found maps say about a coming layer its prior. Returns float32[E], what it
        wants. As moejax.step.map_search.Lookahead.foresee."""
        assert self.maps is not None, "only a step that searches finds anything"
        tables = self.tables
        said = wanted_of(self.maps, found, layer, top_k)
        if said is None:
            return np.zeros(tables.address.shape[1], np.float32)
        tables.prior[layer], wanted = said
        return wanted

    def fetch(self, layer: int, wanted: np.ndarray, due: np.ndarray, coming: int) -> np.ndarray:
        """Carries out the transfers to a coming layer, as moejax.step.map_search.Lookahead.fetch.
        Returns the entries for StepRecord.ahead.

        - `coming`: as in stage.
        """
        assert self.search is not None
        size = entries_of_list(self.search, len(wanted))
        if self.search.pooled:
            entries = self._take_from_pool(
                layer, coming - 1, self.search.distance, wanted, due, size
            )
        else:
            entries = entries_of(self.tables, layer, wanted, due, size)
        done = self.stage(entries, coming=coming)
        chosen = [(of, expert, cell) for of, expert, _, cell in entries]
        return np.column_stack([np.array(chosen, np.int32).reshape(-1, 3), done])

    def _take_from_pool(
        self, layer: int, now: int, near: int, wanted: np.ndarray, due: np.ndarray, size: int
    ) -> list[Entry]:
        """As moejax.step.map_search.take_from_pool."""
        found = pool_entries(self.tables, layer, now, near, wanted, due, size, np)
        entries = []
        for each in zip(*(a.tolist() for a in found), strict=True):
            fits, expert, cell, comes, giver, place, owner = each
            if fits:
                if comes:
                    self.hand_over([HandOver(giver, place, owner, layer, cell)])
                entries.append(Entry(layer, expert, 0, cell))
        return entries

    # ---- for a Control

    def prepare(self, controller: Controller) -> None:
        if (search := controller.search) is not None:
            self.search = search
            spec = controller.spec
            self.maps = empty_store(spec.layers, spec.experts, spec.hidden, search.capacity)

    def snapshot(self) -> Callable[[], Residency]:
        copy = self.copy()
        return lambda: copy

    def look(self) -> Residency:
        return self.tables

    def write_maps(self, rows: MapRows) -> None:
        assert self.maps is not None, "asked of devices whose controller has a search"
        self.maps.write(rows)

    def carried_out(self) -> np.ndarray:
        return self._carried_out

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """The order of loads changes no table."""
        self._assigned = layer, beside


class StepSearch:
    """A decode step's searches for expert maps and what they fetch, in the order of
    moejax.step.map_search.Lookahead: before the first layer, and after each layer's experts."""

    def __init__(self, device: PagerDevice, step: StepRecord, top_k: int):
        assert step.embedding is not None and step.probabilities is not None
        assert device.maps is not None and device.search is not None
        maps = device.maps
        self._device, self._maps, self._search, self._top_k = device, maps, device.search, top_k
        self._probabilities: np.ndarray = step.probabilities
        self._trajectory: Trajectory = maps.trajectory(len(step.ids))
        self._wanted = np.zeros(device.tables.address.shape, np.float32)
        self.chosen: list[np.ndarray] = []
        """The entries of StepRecord.ahead, one array for each search and layer."""
        self._fetch(range(self._search.distance), maps.nearest_embedding(step.embedding), -1)

    def after_layer(self, layer: int) -> None:
        """Searches and fetches after a layer's experts."""
        target, last = layer + self._search.distance, len(self._wanted) - 1
        if target > last and self._search.most is None:
            return
        said = self._probabilities[:, layer]
        self._trajectory, found = self._maps.nearest_map(self._trajectory, layer, said)
        self._fetch([target] if target <= last else [], found, layer)

    def _fetch(self, targets: Sequence[int], found: FoundMaps, now: int) -> None:
        """Foresees what layers want, and fetches for them or, with `most`, for all to come."""
        wanted, device, most = self._wanted, self._device, self._search.most
        due = np.ones(wanted.shape, bool)
        for target in targets:
            wanted[target] = device.foresee(target, found, self._top_k)
            if most is None:
                self.chosen.append(device.fetch(target, wanted[target], due[target], now + 1))
        if most is None:
            return
        due = most_urgent(wanted, device.tables.address, now, most, np)
        for target in range(now + 1, min(now + 1 + self._search.distance, len(wanted))):
            self.chosen.append(device.fetch(target, wanted[target], due[target], now + 1))


class TraceResizer:
    """Moves budgets before the steps at which the trace says they moved.

    - `budgets`: None: budgets move as soon as a policy wants it, as if KV never blocked a move; the
      decision checks the size of the arena.

    Raises TraceError for a move of the trace that no policy wanted.
    """

    def __init__(self, pager: Pager, controller: Controller, budgets: Sequence[BudgetMove] | None):
        self._pager, self._controller = pager, controller
        self._budgets = None if budgets is None else by_step(budgets)
        self._step = -1
        self._moved: list[BudgetMove] = []
        """Moves of the trace that a policy made before this step and that the simulation has not
        met yet."""
        self._kv_slots: list[int] = []
        """Slots that experts gave to KV, where every expert is resident."""

    def begin_step(self, step: int) -> None:
        """Begins a step, before Control.before_step: carries out moves that were made by hand."""
        moved = (self._budgets or {}).get(step, ())
        self._step, self._moved = step, [budget for budget in moved if not budget.by_hand]
        for budget in moved:
            if budget.by_hand:
                self._pager.regrant(np.array(budget.cells))

    def end_step(self) -> None:
        """Ends a step, after Control.before_step."""
        if self._moved:
            raise TraceError(
                f"before step {self._step} a budget was carried out that no policy wanted; give "
                "the policies of the run"
            )

    def move(self, cells: np.ndarray | None, kv_pages: int | None) -> Moved:
        moved, self._moved = self._moved, []
        if (transitions := self._controller.transitions) is not None:
            if kv_pages is not None:
                self._move_slots(transitions, kv_pages, moved)
            return Moved(bool(moved) and moved[0].settled, bool(moved))
        settled = True
        if self._budgets is not None:
            if not moved:
                return Moved(False, False)
            cells, settled = np.array(moved[0].cells), moved[0].settled
        if cells is not None:
            self._pager.regrant(cells)
        return Moved(settled, True)

    def limit(self, max_running: int) -> None: ...

    def _move_slots(
        self, transitions: Transitions, pages: int, moved: Sequence[BudgetMove]
    ) -> None:
        """Moves slots between experts and KV if every expert is resident. The trace says when KV
        gives slots; transitions of experts decide when experts do."""
        spec = self._controller.spec
        slot_bytes = spec.slot_bytes or max(int(n.max()) for n in spec.version_bytes.values())
        total, per_slot = spec.budget_bytes // slot_bytes, max(slot_bytes // spec.page_bytes, 1)
        had = transitions.slots
        # Their numbers mean nothing here; they only must differ.
        self._kv_slots += transitions.aim(total - -(-pages // per_slot))
        has = total - moved[0].kv_pages // per_slot if moved else transitions.slots
        if (more := has - transitions.slots) > 0:
            first = max(*transitions.pools.slots, *self._kv_slots, total) + 1
            kept = [*self._kv_slots, *range(first, first + more)]
            transitions.add(kept[:more])
            self._kv_slots = kept[more:]
        if has != transitions.slots or (transitions.slots != had and not moved):
            raise TraceError(
                f"before step {self._step} experts come to have {transitions.slots} slots, in the "
                f"trace {has if moved else had}; give the policies of the run"
            )


class SimulatedEngine:
    """Runs the steps of a trace on a device under a controller that asks for something.

    - `budgets`: what moves before which step, see TraceResizer.
    - `clock`: see simulator.simulate.

    Raises TraceError for data that a policy needs and the trace does not have.
    """

    def __init__(
        self,
        trace: Trace,
        device: PagerDevice,
        controller: Controller,
        budgets: Sequence[BudgetMove] | None = None,
        clock: Callable[[int], float] | None = None,
    ):
        header = trace.header
        _check_needs(header, controller)
        self.header, self.controller, self._device = header, controller, device
        self._resizer = TraceResizer(device, controller, budgets)
        self._control = Control(device, controller, self._resizer)
        self._making = -1
        self._clock = clock
        self._link = RecordedLink(trace.link(), f"the trace {trace.directory}")
        self._between = controller.moments & BETWEEN_LAYERS
        self._reading: list[tuple[StepRecord, StepRecord]] = []
        """Steps that were dispatched and not read, as in the trace and as simulated."""
        self._timed = not {"step.start_s", "step.read_s"} & {*header.absent}
        """Whether the trace has times. Without times a step is read when the next one was
        dispatched, and seconds are 0."""

    def run(self, steps: Iterable[StepRecord]) -> Iterator[SimulatedStep]:
        """Runs the steps in order; yields each one when it was dispatched."""
        for step in steps:
            while self._reading and self._is_read_before(self._reading[0][0], step):
                self._read()
            yield self._dispatch(step)
        while self._reading:
            self._read()
        self.controller.finish()

    def _dispatch(self, step: StepRecord) -> SimulatedStep:
        control, device = self._control, self._device
        self._making = step.number
        self._resizer.begin_step(step.number)
        entries = control.before_step(step.number)
        self._resizer.end_step()
        active, waves = step_set(step, self.header.experts)
        done = device.begin_step(step.number, step.kind, waves)
        carried_out = np.zeros(len(entries), np.int32)
        seen = _without_drafts(step) if self._between else step
        rows = StepRows(*(getattr(seen, name) for name in StepRows._fields))
        search = self._search_of(step)
        if self._between and self._control.looks_at(Moment.EMBEDDED):
            self._look(Moment.EMBEDDED, -1, rows)
        for layer in range(len(active)) if self._between or search else [None]:
            if layer is not None and self._between:
                self._look_between(seen, rows, layer)
            device.compute(active if layer is None else active[layer : layer + 1], layer)
            # A layer's transfers follow its experts, so hooks of the next layer find them done.
            if entries:
                carried_out |= device.stage(entries, layer=layer)
            if layer is not None and search is not None:
                search.after_layer(layer)
        control.after_dispatch(step.number)
        found = step._replace(
            missed=done.missed,
            fills=done.fills,
            read_through=done.read_through,
            placed=done.placed,
            staged=carried_out if entries else None,
            ahead=None if search is None else np.concatenate(search.chosen),
        )
        self._reading.append((step, found))
        return done

    def _search_of(self, step: StepRecord) -> StepSearch | None:
        """Returns the search of a decode step, or None without one. Raises TraceError for a trace
        that lacks router inputs or embeddings."""
        if self.controller.search is None or step.kind != "decode":
            return None
        for name in ("embedding", "probs"):
            _check_array(self.header, name, "a decode step searches")
        if step.rejected is not None and step.rejected.any():
            raise TraceError(
                f"step {step.number} also searched maps for rejected drafts, whose embeddings and "
                "probabilities no trace has; record it without speculative_config"
            )
        return StepSearch(self._device, step, self.header.top_k)

    def _look_between(self, step: StepRecord, rows: StepRows, layer: int) -> None:
        routing = None
        for moment in (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN):
            if not self._control.looks_at(moment):
                continue
            if moment != Moment.LAYER_BEGIN and routing is None:
                fields = (getattr(step, name) for name in LayerRouting._fields[1:])
                rest = (None if field is None else field[:, layer : layer + 1] for field in fields)
                routing = LayerRouting(step.ids[:, layer : layer + 1], *rest)
            self._look(moment, layer, rows, routing)

    def _look(
        self, moment: Moment, layer: int, rows: StepRows, routing: LayerRouting | None = None
    ) -> None:
        # Compute this only if a policy sees it.
        self._device.link_use = functools.partial(self._link.find, self._making, moment, layer)
        if entries := self._control.between_layers(moment, layer, rows, routing):
            self._device.stage(entries, coming=max(layer, 0), routed=routing is not None)

    def _read(self) -> None:
        step, found = self._reading.pop(0)
        if self._clock is not None:
            found = found._replace(start_s=0.0, read_s=self._clock(step.number))
        elif not self._timed:
            found = found._replace(start_s=0.0, read_s=0.0)
        if step.use is not None:
            for name, value in zip(USES, step.use.tolist(), strict=True):
                if value < 0 and name in self.controller.needs:
                    raise TraceError(
                        f"a policy needs {name!r}, which step {step.number} does not say"
                    )
        self._control.after_read(found)

    def _is_read_before(self, step: StepRecord, following: StepRecord) -> bool:
        """Whether the step is read before the other one is dispatched. If policies look between its
        layers the engine reads first, whatever the trace's run did."""
        if self._control.looks_between_layers:
            return True
        if not self._timed:
            return following.number > step.number + 1
        return step.read_s < following.start_s


def _without_drafts(step: StepRecord) -> StepRecord:
    """Returns the step as policies see it between layers: with a token of each request, which those
    of accepted drafts follow, and with the tokens of all drafts."""
    if step.kind != "decode" or step.request is None or step.position is None:
        return step
    order = np.lexsort((step.position, step.request))
    _, first = np.unique(step.request[order], return_index=True)
    if len(first) == len(order):
        return step
    own = np.sort(order[first])
    by_token = {n: getattr(step, n) for n, column in COLUMNS.items() if column.per == "token"}
    seen = step._replace(**{n: a[own] for n, a in by_token.items() if a is not None})
    if step.token is None or step.draft_token is None:
        return seen
    accepted = np.delete(step.token, own)
    return seen._replace(draft_token=np.concatenate([accepted, step.draft_token]))


def by_step(budgets: Iterable[BudgetMove]) -> Mapping[int, Sequence[BudgetMove]]:
    """Returns the moves before each step, in order."""
    found: dict[int, list[BudgetMove]] = {}
    for budget in budgets:
        found.setdefault(budget.step, []).append(budget)
    return found


def _check_needs(header: TraceHeader, controller: Controller) -> None:
    """Raises TraceError for data that a policy needs and the trace does not have."""
    fields = {**SEEN, **dict.fromkeys(USES, "use"), "kv_refs": "request"}
    for name in sorted(controller.needs & fields.keys()):
        field = fields[name]
        column = f"{COLUMNS[field].per}.{field}"
        _check_array(header, name, "a policy needs", field)
        if column in header.absent and field != "missed":  # it is what comes out
            raise TraceError(
                f"a policy needs {name!r}, and this trace, which was converted or generated, has "
                f"no {column}"
            )


def _check_array(header: TraceHeader, name: str, what: str, field: str | None = None) -> None:
    """Raises TraceError for an array that is needed and not in the trace.

    - `what`: what needs it, for the message.
    - `field`: field of the StepRecord, if policies see it by another name than in SEEN.
    """
    field = field or SEEN[name]
    if COLUMNS[field].optional and not getattr(header, field):
        raise TraceError(
            f"{what} {name!r}, which this trace does not have; record one with --trace "
            f"DIR,arrays={'token' if name.startswith('draft_') else name}"
        )
