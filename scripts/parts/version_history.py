"""Which version each expert was in, step by step: from a trace of a run that changed versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Transition
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import StepRecord
from host_offload.policies.eviction.names import POLICIES
from host_offload.simulate.simulated_engine import SimulatedStep
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, TraceError, TransferTrace

CAUSES = ("promotion", "demotion")


@dataclasses.dataclass(frozen=True)
class VersionHistory:
    """T steps of a run with two versions, L layers, E experts."""

    step: np.ndarray
    """int64[T]: number of the step."""
    tokens: np.ndarray
    """int64[T]: of the step."""
    version: np.ndarray
    """int8[T, L, E]: version that was resident when the step's layers began, which is what they
    computed with; 0 is the high one. −1: absent, missed if the step needed it."""
    moved: Mapping[str, np.ndarray]
    """CAUSES → int64[T]: transfers carried out by the step."""
    bytes: np.ndarray
    """int64[T]: of those transfers."""
    waiting: np.ndarray
    """int64[T]: transitions that were wanted and not there when the step's layers began; an absent
    expert waits for none."""
    version_bytes: np.ndarray
    """int64[V]: of one expert."""

    @property
    def resident_bytes(self) -> np.ndarray:
        """int64[T]: bytes of the experts' complete versions."""
        return np.append(self.version_bytes, 0)[self.version].sum(axis=(1, 2))


def version_history(trace: Trace) -> VersionHistory:
    """Where every expert is resident, the versions at the start and the transfers say it. Of paged
    experts the trace says who was missed, not who was evicted: the simulator runs its steps with
    the decisions that were written, and every miss and fill has to be the trace's.

    Raises TraceError for a trace of a run with one version or of a converted one, and for one of
    paged experts that comes out otherwise (the engine was not new when it began, or evicted by a
    policy that is not moejax's).
    """
    header = trace.header
    start = (header.spec.get("precision") or {}).get("start")
    paged = header.spec.get("paged") is not None
    if start is None and not paged:
        raise TraceError(
            f"{trace.directory} is of a run with one version of each expert; record one with "
            "--precision dynaexq --trace DIR"
        )
    step = trace.array("step.number")
    flips: dict[int, list[TransferTrace]] = {}
    moved = {cause: np.zeros(len(step), np.int64) for cause in CAUSES}
    nbytes, place = np.zeros(len(step), np.int64), {int(n): i for i, n in enumerate(step)}
    for transfer in trace.transfers():
        if transfer.cause in CAUSES and transfer.published >= 0:
            at = place[transfer.published]
            flips.setdefault(at, []).append(transfer)
            moved[transfer.cause][at] += 1
            nbytes[at] += transfer.bytes
    version = _simulated(trace) if start is None else _flipped(trace, start, flips)
    sizes = np.array(list(header.spec["version_bytes"].values()), np.int64)
    tokens = trace.array("step.tokens").astype(np.int64)
    waiting = _waiting(trace, step, version)
    return VersionHistory(step, tokens, version, moved, nbytes, waiting, sizes)


def _flipped(
    trace: Trace, start: list[list[int]], flips: Mapping[int, Iterable[TransferTrace]]
) -> np.ndarray:
    """VersionHistory.version where every expert is resident. flips: what each step carried out."""
    blocking = bool((trace.header.spec.get("resident") or {}).get("blocking"))
    now = np.array(start, np.int8)
    version = np.empty((trace.steps, *now.shape), np.int8)
    for at in range(trace.steps):
        if not blocking:  # a step's list is carried out behind its experts
            version[at] = now
        for transfer in flips.get(at, ()):
            now[transfer.layer, transfer.expert] = transfer.version
        if blocking:  # and before it, where the step waits for all of them
            version[at] = now
    return version


def _waiting(trace: Trace, step: np.ndarray, version: np.ndarray) -> np.ndarray:
    """VersionHistory.waiting."""
    wanted_at, queue = _wanted(trace), []
    waiting = np.zeros(len(step), np.int64)
    decided = sorted(wanted_at)
    for at, number in enumerate(step.tolist()):
        # What was decided after reading a step holds for those dispatched later.
        while decided and decided[0] < number:
            queue = wanted_at[decided.pop(0)]
        now = version[at]
        waiting[at] = sum(0 <= now[layer, expert] != wanted for layer, expert, wanted in queue)
    return waiting


def _wanted(trace: Trace) -> dict[int, list[list[int]]]:
    """Step that was read → the queue of transitions decided then."""
    found: dict[int, list[list[int]]] = {}
    for line in trace.decided():
        if "transitions" in line["decision"]:
            found[line["step"]] = line["decision"]["transitions"]
    return found


# ---- paged experts


@dataclasses.dataclass(frozen=True)
class _Written:
    """Decides again what a run wrote into decisions.jsonl."""

    after: Mapping[int, Decision]
    """By the step that was read."""
    before: Mapping[int, Decision]
    """By the step to come."""
    writes: frozenset[str]
    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN, Moment.STEP_END})
    needs: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        begins = observation.moment == Moment.STEP_BEGIN
        return None, (self.before if begins else self.after).get(observation.step, Decision())


@dataclasses.dataclass(frozen=True)
class _Residents:
    """Notes which versions are resident after each step, and decides nothing."""

    seen: dict[int, np.ndarray]
    """By step: int8[L, E], −1: absent."""
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"version"})
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        assert observation.version is not None
        self.seen[observation.step] = observation.version
        return None, Decision()


def _simulated(trace: Trace) -> np.ndarray:
    """VersionHistory.version where experts are paged."""
    eviction = trace.header.spec.get("eviction")
    if eviction not in POLICIES:
        raise TraceError(
            f"{trace.directory}: eviction was by {eviction!r}, which is no policy of moejax, so "
            "who was resident is not known"
        )
    residents = _Residents({})
    steps = trace.step_traces()

    def check(found: SimulatedStep) -> None:
        was: StepRecord = next(steps)
        same = np.array_equal(found.missed, was.missed) and np.array_equal(found.fills, was.fills)
        if not same:
            raise TraceError(
                f"{trace.directory}: the misses of step {found.number} do not follow from the "
                "steps before it, so who was resident is not known; record one of a new engine"
            )

    written = _written(trace, type(POLICIES[eviction]()).__name__)
    policies = [*written, residents]
    simulate(trace, eviction=eviction, policies=policies, budgets=trace.budgets(), watcher=check)
    cold = np.full((trace.header.layers, trace.header.experts), -1, np.int8)
    after = [residents.seen[number] for number in trace.array("step.number").tolist()]
    return np.stack([cold, *after[:-1]])


def _written(trace: Trace, eviction: str) -> list[_Written]:
    """What the policies of the run decided, as one policy, without the one that evicts; none where
    none decided. Of several decisions at a time the last one of each field holds."""
    fields: dict[tuple[bool, int], dict[str, Any]] = {}
    for line in trace.decided():
        if line.get("policy") in (None, eviction):
            continue
        moment, decision = Moment[line["moment"]], dict(line["decision"])
        if moment in BETWEEN_LAYERS:
            raise TraceError(
                f"{trace.directory}: {line['policy']} decided between layers, so who was resident "
                "is not known"
            )
        if (named := decision.get("transitions")) is not None:
            decision["transitions"] = tuple(Transition(*t) for t in named)
        fields.setdefault((moment == Moment.STEP_BEGIN, line["step"]), {}).update(decision)
    writes = frozenset().union(*fields.values())
    if not writes:
        return []
    decisions = {place: Decision(**values) for place, values in fields.items()}
    after, before = ({s: d for (b, s), d in decisions.items() if b == x} for x in (False, True))
    return [_Written(after, before, writes)]
