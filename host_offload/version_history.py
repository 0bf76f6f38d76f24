"""Which version each expert was in, step by step: from a trace of a run that changed versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.traces import Trace, TraceError

CAUSES = ("promotion", "demotion")


@dataclasses.dataclass(frozen=True)
class VersionHistory:
    """T steps of a run in which every expert is resident, L layers, E experts."""

    step: np.ndarray
    """int64[T]: number of the step."""
    tokens: np.ndarray
    """int64[T]: of the step."""
    version: np.ndarray
    """int8[T, L, E]: version number that the step computed with; 0 is the high one."""
    moved: Mapping[str, np.ndarray]
    """CAUSES → int64[T]: transfers carried out by the step."""
    bytes: np.ndarray
    """int64[T]: of those transfers."""
    waiting: np.ndarray
    """int64[T]: transitions that were wanted and not there when the step began."""
    version_bytes: np.ndarray
    """int64[V]: of one expert."""

    @property
    def resident_bytes(self) -> np.ndarray:
        """int64[T]: bytes of the experts' complete versions."""
        return self.version_bytes[self.version].sum(axis=(1, 2))


def version_history(trace: Trace) -> VersionHistory:
    """Raises TraceError for a trace of a run with one version or with paged experts, or of a
    converted one."""
    header = trace.header
    start = (header.spec.get("precision") or {}).get("start")
    if header.spec.get("paged") is not None:
        raise TraceError(
            f"{trace.directory} is of a run with paged experts, and a history is of runs in which "
            "every expert is resident; record one without paged=true"
        )
    if start is None:
        raise TraceError(
            f"{trace.directory} is of a run with one version of each expert; record one with "
            "--precision dynaexq --trace DIR"
        )
    step = trace.array("step.number")
    flips: dict[int, list[Any]] = {}
    moved = {cause: np.zeros(len(step), np.int64) for cause in CAUSES}
    nbytes, place = np.zeros(len(step), np.int64), {int(n): i for i, n in enumerate(step)}
    for transfer in trace.transfers():
        if transfer.cause in CAUSES and transfer.published >= 0:
            at = place[transfer.published]
            flips.setdefault(at, []).append(transfer)
            moved[transfer.cause][at] += 1
            nbytes[at] += transfer.bytes
    wanted_at = _wanted(trace)
    now = np.array(start, np.int8)
    queue: list[list[int]] = []
    version, waiting = np.empty((len(step), *now.shape), np.int8), np.zeros(len(step), np.int64)
    decided = sorted(wanted_at)
    for at, number in enumerate(step.tolist()):
        # What was decided after reading a step holds for those dispatched later.
        while decided and decided[0] < number:
            queue = wanted_at[decided.pop(0)]
        version[at] = now
        waiting[at] = sum(now[layer, expert] != wanted for layer, expert, wanted in queue)
        # A step's list is carried out behind its experts.
        for transfer in flips.get(at, ()):
            now[transfer.layer, transfer.expert] = transfer.version
    sizes = np.array(list(header.spec["version_bytes"].values()), np.int64)
    tokens = trace.array("step.tokens").astype(np.int64)
    return VersionHistory(step, tokens, version, moved, nbytes, waiting, sizes)


def _wanted(trace: Trace) -> dict[int, list[list[int]]]:
    """Step that was read → the queue of transitions decided then."""
    found: dict[int, list[list[int]]] = {}
    latest: list[list[int]] = []
    for line in trace.decisions():
        queue = line.get("decision", {}).get("transitions")
        if queue is None:
            continue
        latest = latest if queue == "as before" else queue
        found[line["step"]] = latest
    return found


def steps_to_converge(
    history: VersionHistory, wanted: np.ndarray, first: int, last: int, within: float = 0.1
) -> int | None:
    """Steps from `first` on until the high set agrees with `wanted` bool[L, E] in all but a share
    `within` of it; None where it does not before `last`. first, last: places in the history."""
    agree = np.sum((history.version[first:last] == 0) & wanted, axis=(1, 2)) / wanted.sum()
    found = np.flatnonzero(agree >= 1 - within)
    return int(found[0]) if len(found) else None
