"""An engine without a model: policies beside the steps of a trace, as moejax.engine.control runs
them beside those of a device.

A step routes what the trace says. It is dispatched and read in the trace's order, so what a policy
decides reaches the same step as in the engine. The device is a Pager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Moment
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import USES, StepRecord
from host_offload.control.transitions import Transitions
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry
from host_offload.sizing.version_counts import VersionCounter, VersionCounts
from host_offload.traces.schema import BudgetMove, TraceError, TraceHeader
from host_offload.traces.step_sets import in_waves, step_set

ARRAYS = {"probs": "probabilities", "gate_input": "gate_input", "embedding": "embedding"}
"""Optional arrays: the name in an Observation → the name in a trace."""

COLUMNS = {
    **{name: f"token.{name}" for name in ("request", "position", "phase", "weights")},
    **dict.fromkeys(USES, "step.use"),
    "kv_refs": "token.request",
    "compiled": "step.compiled",
    "bucket": "step.rows",
}
"""What else an Observation takes from a column that a converted trace may lack."""


class SimulatedStep(NamedTuple):
    """What a step did."""

    number: int
    kind: str | None
    """None where the trace does not know."""
    hits: np.ndarray
    """int[L]"""
    fills: np.ndarray
    """int[L]"""
    read_through: np.ndarray
    """int[L]"""
    missed: np.ndarray
    """bool[L, E]"""
    staged: np.ndarray
    """int[L]: experts moved ahead of need, by the step's list and between layers."""
    moved: np.ndarray
    """int64[L]: bytes over the link."""
    versions: VersionCounts | None = None
    """None where there is one version."""


class SimulatedEngine:
    """Runs the steps of a trace through a pager under a controller that asks something.

    budgets: what moves before which step, as Trace.budgets: a policy's wish waits for it. None:
    wishes are granted at once. clock: as of simulator.simulate.

    Raises TraceError for what a policy needs and the trace does not have, and for a budget that
    no policy wanted.
    """

    def __init__(
        self,
        header: TraceHeader,
        pager: Pager,
        controller: Controller,
        budgets: Sequence[BudgetMove] | None = None,
        clock: Callable[[int], float] | None = None,
    ):
        self.header, self.pager, self.controller = header, pager, controller
        self._budgets = None if budgets is None else by_step(budgets)
        self._clock = clock
        self._kv_slots: list[int] = []
        """Slots that experts gave to KV, where every expert is resident."""
        self._link_bytes = np.stack([*controller.spec.link_bytes.values()])
        self._between = controller.moments & BETWEEN_LAYERS
        self._reading: list[tuple[StepRecord, dict[str, Any]]] = []
        """Steps that were dispatched and not read, with what end_step is told of them."""
        self._timed = not {"step.start_s", "step.read_s"} & {*header.absent}
        """Without times a step is read when the next one was dispatched, and seconds are 0."""
        self._seconds, self._origin_s = 0.0, math.nan
        self._dispatched = -1
        self._versions: VersionCounter | None = None
        """Of the step that is carried out."""
        self._handed: np.ndarray | None = None
        """What became of the list that the controller gave out last between layers."""
        _check_needs(header, controller)
        pager.set(controller.take_update())

    def run(self, steps: Iterable[StepRecord]) -> Iterator[SimulatedStep]:
        """The steps in order; each is yielded when it was dispatched."""
        for step in steps:
            while self._reading and self._is_read_before(self._reading[0][0], step):
                self._read()
            yield self._dispatch(step)
        while self._reading:
            self._read()
        self.controller.finish()

    # ---- a step, as moejax.engine.control.Control.before_step and after_dispatch

    def _dispatch(self, step: StepRecord) -> SimulatedStep:
        controller, pager = self.controller, self.pager
        for budget in (self._budgets or {}).get(step.number, ()):
            if budget.by_hand:
                pager.regrant(np.array(budget.cells))
        if controller.needs_residency and controller.tables is None:
            controller.see(pager.copy())
        if self._timed and math.isnan(self._origin_s):
            self._origin_s = step.start_s
        controller.begin_step(step.number, seconds=self._seconds)
        self._move_budget(step.number)
        entries = self._stages(step.number)
        while controller.spec.blocking and entries:
            controller.settle_now(step.number, pager.stage(entries))
            entries = self._stages(step.number)
        layers, experts = self.header.layers, self.header.experts
        counts = np.zeros((3, layers), np.int64)
        missed = np.zeros((layers, experts), bool)
        active, waves = step_set(step, layers, experts)
        moved, staged, staged_bytes = np.zeros((3, layers), np.int64)
        carried_out = np.zeros(len(entries), np.int32)
        self._versions = VersionCounter(pager) if pager.versions > 1 else None
        for layer in range(layers) if self._between else [None]:
            if layer is not None:
                self._look_between(step, layer, staged, staged_bytes)
            span = slice(None) if layer is None else slice(layer, layer + 1)
            for due in in_waves(active[span], waves):
                done = pager.reference(due, layer)
                counts[:, span] += done[:3]
                missed[span] |= done.missing
                moved[span] += self._demand(done.missing, span)
                if self._versions is not None:
                    self._versions.referenced(due, done.missing, span)
            # A layer's transfers follow its experts, so hooks of the next layer find them done.
            carried_out |= self._stage(entries, staged, staged_bytes, layer=layer)
        self._dispatched = step.number
        if self._handed is not None:
            controller.settle_between_layers(self._handed)
            self._handed = None
        told = {
            "missed": missed,
            "staged": carried_out if entries else None,
            "tables": pager.copy() if controller.needs_residency else None,
        }
        self._reading.append((step, told))
        hits, fills, read_through = counts
        return SimulatedStep(
            number=step.number,
            kind=step.kind,
            hits=hits,
            fills=fills,
            read_through=read_through,
            missed=missed,
            staged=staged,
            moved=moved + staged_bytes,
            versions=None if self._versions is None else self._versions.counts,
        )

    def _stages(self, step: int) -> list[Entry]:
        entries = self.controller.stages(step)
        self.pager.move(self.controller.take_moves())
        self.pager.set(self.controller.take_update())
        return entries

    def _demand(self, missing: np.ndarray, span: slice) -> np.ndarray:
        """int64[M]: bytes of experts that were filled or read through."""
        if len(self._link_bytes) == 1:
            return np.count_nonzero(missing, axis=1) * self._link_bytes[0, span]
        # What a fill moved, and what a miss without a cell was computed from.
        version = self.pager.tables.version[span]
        layers = np.arange(len(self.pager.tables.clock))[span, None]
        return np.sum(self._link_bytes[version, layers] * missing, axis=1)

    def _stage(
        self,
        entries: Sequence[Entry],
        staged: np.ndarray,
        moved: np.ndarray,
        **only: int | None,
    ) -> np.ndarray:
        """int32[S]: as of Pager.stage; adds to the experts and bytes of each layer."""
        done = self.pager.stage(entries, **only)
        for entry, carried_out in zip(entries, done.tolist(), strict=True):
            staged[entry.layer] += carried_out
            moved[entry.layer] += carried_out * self._link_bytes[entry.version, entry.layer]
        if self._versions is not None:
            self._versions.staged(entries, done)
        return done

    def _move_budget(self, step: int) -> None:
        """Where budgets are not given, as if KV were never in the way; the size of the arena is
        checked with the decision."""
        controller = self.controller
        if controller.transitions is not None:
            self._move_slots(step, controller.transitions)
            return
        cells, settled = controller.wanted_cells, True
        wanted = cells is not None or controller.wanted_kv_pages is not None
        if self._budgets is not None:
            moved = [b for b in self._budgets.get(step, ()) if not b.by_hand]
            if moved and not wanted:
                raise _unwanted(step)
            if wanted and not moved:
                controller.settle_budget(False)
                return
            cells, settled = (np.array(moved[0].cells), moved[0].settled) if moved else (None, True)
        if not wanted:
            return
        if cells is not None:
            self.pager.regrant(cells)
        controller.settle_budget(settled)
        if controller.needs_residency:
            controller.see(self.pager.copy())

    def _move_slots(self, step: int, transitions: Transitions) -> None:
        """Where every expert is resident: slots change sides, as
        moejax.engine.resize.ResidentResizer has them. When KV gives slots is the trace's; when
        experts do follows from their transitions."""
        controller, spec = self.controller, self.controller.spec
        pages = controller.wanted_kv_pages
        moved = [b for b in (self._budgets or {}).get(step, ()) if not b.by_hand]
        if moved and pages is None:
            raise _unwanted(step)
        if pages is None:
            return
        slot_bytes = spec.slot_bytes or max(int(n.max()) for n in spec.version_bytes.values())
        total, per_slot = spec.budget_bytes // slot_bytes, max(slot_bytes // spec.page_bytes, 1)
        had = transitions.slots
        # Their numbers mean nothing here; they only must differ.
        self._kv_slots += transitions.aim(min(total - -(-pages // per_slot), had))
        has = total - moved[0].kv_pages // per_slot if moved else transitions.slots
        if (more := has - transitions.slots) > 0:
            first = max(*transitions.pools.slots, *self._kv_slots, total) + 1
            kept = [*self._kv_slots, *range(first, first + more)]
            transitions.add(kept[:more])
            self._kv_slots = kept[more:]
        if has != transitions.slots or (transitions.slots != had and not moved):
            raise TraceError(
                f"before step {step} experts come to have {transitions.slots} slots, in the trace "
                f"{has if moved else had}; give the policies of the run"
            )
        controller.settle_budget(bool(moved) and moved[0].settled)

    # ---- between layers, as Control.between_layers and HostRunner

    def _look_between(
        self, step: StepRecord, layer: int, staged: np.ndarray, moved: np.ndarray
    ) -> None:
        rows = slice(layer, layer + 1)
        routed: dict[str, Any] = {"ids": step.ids[:, rows]}
        if step.weights is not None:
            routed["weights"] = step.weights[:, rows]
        asked = self.controller.needs_at(frozenset({Moment.ROUTED, Moment.EXPERTS_BEGIN}))
        for name in ("probs", "gate_input"):
            if name in asked:
                routed[name] = getattr(step, ARRAYS[name])[:, rows]
        for moment in (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN):
            if moment not in self.controller.moments and self._handed is None:
                continue
            settled, self._handed = self._handed, None
            entries = self.controller.between_layers(
                moment,
                step.number,
                layer,
                seconds=self._seconds,
                facts={} if moment == Moment.LAYER_BEGIN else routed,
                tables=self.pager.copy() if self.controller.needs_residency else None,
                done=settled,
            )
            self.pager.set(self.controller.take_update())
            if entries:
                self._handed = self._stage(entries, staged, moved, coming=layer)

    # ---- reading, as Control.after_read

    def _read(self) -> None:
        step, told = self._reading.pop(0)
        if self._clock is not None:
            self._seconds = self._clock(step.number)
        elif self._timed:
            self._seconds = step.read_s - self._origin_s
        use = {} if step.use is None else dict(zip(USES, step.use.tolist(), strict=True))
        for name, value in use.items():
            if value < 0 and name in self.controller.needs:
                raise TraceError(f"a policy needs {name!r}, which step {step.number} does not say")
        names = ("request", "user", "position", "phase", "ids", "weights", "compiled")
        facts = {name: getattr(step, name) for name in names}
        facts |= {name: getattr(step, stored) for name, stored in ARRAYS.items()}
        facts |= {"missed": told["missed"], "bucket": step.rows, **use}
        self.controller.end_step(
            step.number,
            age=self._dispatched - step.number,
            seconds=self._seconds,
            facts=facts,
            tables=told["tables"],
            staged=told["staged"],
            finished=step.finished,
        )

    def _is_read_before(self, step: StepRecord, following: StepRecord) -> bool:
        """Whether the step was read before the other one was dispatched."""
        if not self._timed:
            return following.number > step.number + 1
        return step.read_s < following.start_s


def _unwanted(step: int) -> TraceError:
    return TraceError(
        f"before step {step} a budget was carried out that no policy wanted; give the policies of "
        "the run"
    )


def by_step(budgets: Iterable[BudgetMove]) -> Mapping[int, Sequence[BudgetMove]]:
    """What moves before each step, in order."""
    found: dict[int, list[BudgetMove]] = {}
    for budget in budgets:
        found.setdefault(budget.step, []).append(budget)
    return found


def _check_needs(header: TraceHeader, controller: Controller) -> None:
    """Raises TraceError for what a policy needs and the trace does not have."""
    for name, stored in ARRAYS.items():
        if name in controller.needs and not getattr(header, stored):
            raise TraceError(
                f"a policy needs {name!r}, which this trace does not have; record one with "
                f"--trace-arrays {name}"
            )
    for name, column in COLUMNS.items():
        if name in controller.needs and column in header.absent:
            raise TraceError(
                f"a policy needs {name!r}, and this trace, which was converted or generated, has "
                f"no {column}"
            )
