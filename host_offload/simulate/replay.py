"""Runs a trace again unchanged, and compares the result with what the engine wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.control.controller import Decided, Event, Observed
from host_offload.control.interface import Policy, Spec, StagedTransfer
from host_offload.control.rules import name_of
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.placement.placement_names import with_placement
from host_offload.policies.prefetch.prefetch_names import with_prefetch
from host_offload.simulate.auto import auto_of
from host_offload.simulate.simulated_engine import SimulatedStep
from host_offload.simulate.simulator import Simulation, simulate
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError, TransferTrace


def replay(
    trace: Trace,
    *,
    policies: Sequence[Policy] = (),
    prefetch: str | None = None,
    spec: Spec | None = None,
) -> Simulation:
    """Runs a trace with the policies that it was made with, and compares: the numbers of hits,
    fills and experts read through, the missing experts, and the bytes of every step and layer;
    every decision; every transfer, with the steps at which it was issued, published and first used.

    - `policies`: those of the run beside its `eviction` and `prefetch`, which the trace knows.
    - `prefetch`: NAME=PATH, if that file has moved.
    - `spec`: as in simulate; a policy that needs `router` needs a spec with it.

    Returns the simulation, which equals what the engine did. Budgets move when they did in the run,
    by policies or by hand (Trace.budgets). Raises TraceError at the first difference, naming the
    step, and for a trace that no engine wrote; otherwise like simulate.
    """
    if trace.header.absent:
        raise TraceError(
            f"{trace.directory} was converted or generated, so there is no run to replay; use "
            "simulate"
        )
    settings = trace.header.spec
    if settings.get("auto") is not None:
        policies = (auto_of(settings["auto"]), *policies)  # in the engine's order
    policies = with_prefetch(prefetch or settings.get("prefetch"), policies)
    policies = with_placement(settings.get("placement"), policies)
    said = settings.get("eviction")
    if said not in POLICIES and said not in [name_of(p) for p in policies]:
        raise TraceError(
            f"{trace.directory}: eviction was by {said!r}, which is no policy of moejax; give the "
            "policies of the run"
        )
    check = _Check(trace)
    simulation = simulate(
        trace,
        eviction=said if said in POLICIES else None,
        policies=policies,
        spec=spec,
        budgets=trace.budgets(),
        listener=check.event,
        watcher=check.step,
        as_run=True,
    )
    check.finish()
    return simulation


class _Check:
    """Follows a simulation along the trace. Raises TraceError at the first difference."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self._steps = trace.step_traces()
        self._transfers = trace.transfers()
        self._decisions = trace.policy_decisions()
        self._next = 0

    def step(self, step: SimulatedStep) -> None:
        wanted = next(self._steps)
        if step.number != self._next:
            raise TraceError(
                f"{self.trace.directory}: step {self._next} is not in the trace (it failed, or the "
                "trace began later), so what it left resident is not known; use simulate"
            )
        self._next += 1
        for name in ("hits", "fills", "read_through", "missed", "placed"):
            found, was = getattr(step, name), getattr(wanted, name)
            if was is None:  # not recorded: there was no second processor
                was = np.zeros_like(found)
            if not np.array_equal(found, was):
                layer = int(np.flatnonzero((found != was).reshape(len(was), -1).any(axis=1))[0])
                raise self._differs(
                    f"step {step.number} ({step.kind}), layer {layer}: {name}",
                    _show(was[layer]),
                    _show(found[layer]),
                )
        moved = int(step.moved.sum())
        if moved != wanted.bytes.sum():
            raise self._differs(f"step {step.number}: bytes", wanted.bytes.sum(), moved)

    def event(self, event: Event) -> None:
        if isinstance(event, Observed):
            return  # it is the trace's
        if isinstance(event, StagedTransfer):
            found = TransferTrace(*(getattr(event, name) for name in TransferTrace._fields))
            self._compare("transfer", self._transfers, found)
        else:
            self._compare("decision", self._decisions, _plain(event))

    def finish(self) -> None:
        for what, rest in (("transfer", self._transfers), ("decision", self._decisions)):
            if self.trace.complete and (left := next(rest, None)) is not None:
                raise self._differs(what, _short(left), "none")

    def _compare(self, what: str, rest: Iterator[Any], found: Any) -> None:
        wanted = next(rest, None)
        # After a crash the newest ones are not in the trace.
        if found != wanted and (wanted is not None or self.trace.complete):
            raise self._differs(what, _short(wanted), _short(found))

    def _differs(self, what: str, was: Any, found: Any) -> TraceError:
        return TraceError(
            f"{self.trace.directory}: {what}: the trace has {was}, the replay {found}; give the "
            "policies of the run, with their settings (an engine that was not new when the trace "
            "began cannot be replayed)"
        )


def _plain(event: Decided) -> dict[str, Any]:
    """Returns a decision in the form that JSON gives back."""
    wanted = {name: value for name, value in vars(event.decision).items() if value is not None}
    if event.decision.map_rows is not None:  # a trace has their places
        wanted["map_rows"] = event.decision.map_rows.place
    fields = {"moment": event.moment.name, "policy": event.policy, "decision": wanted}
    return json.loads(json.dumps({"step": event.step, **fields}, default=lambda a: a.tolist()))


def _show(values: np.ndarray) -> str:
    return str(np.flatnonzero(values).tolist() if values.ndim else int(values))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:200] + "…"
