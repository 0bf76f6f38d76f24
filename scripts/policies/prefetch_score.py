"""How good a prefetch was: recall, precision and wasted bytes, which say nothing one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from host_offload.traces.reader import Trace

VERSION_CHANGES = frozenset({"promotion", "demotion"})
"""Causes of transfers that bring no expert that was absent."""


@dataclasses.dataclass(frozen=True)
class PrefetchScore:
    """The score of one run. A transfer is an expert copied into a cell ahead of need; its first use
    is the first step that needs the expert and finds it. What a step needs and does not find is a
    miss, whether it then fills a cell or is read through."""

    transfers: int
    """Carried out."""
    used: int
    """Transfers found by a step before they were evicted."""
    misses: int
    """Experts that steps needed and did not find, one for each step and layer."""
    bytes: int
    """Moved ahead."""
    wasted_bytes: int
    """Moved for transfers that were never used."""

    @property
    def precision(self) -> float:
        """used / transfers; 0 without any."""
        return self.used / self.transfers if self.transfers else 0.0

    @property
    def recall(self) -> float:
        """used / (used + misses): of what the link had to bring, how much came ahead; 0 where it
        had to bring nothing. A need that older residents meet counts on neither side. What a
        transfer displaced and is missed later counts as a miss."""
        brought = self.used + self.misses
        return self.used / brought if brought else 0.0

    @property
    def wasted_share(self) -> float:
        """wasted_bytes / bytes; 0 without any."""
        return self.wasted_bytes / self.bytes if self.bytes else 0.0


def score_of_trace(trace: Trace) -> PrefetchScore:
    """From a trace of an engine, by its transfers and by the experts that its steps missed. Counts
    what the trace knows: all transfers once the run was closed. Raises TraceError for a trace that
    was converted or generated."""
    transfers = used = moved = wasted = 0
    for transfer in trace.transfers():
        if transfer.cause in VERSION_CHANGES or transfer.published < 0:
            continue
        transfers += 1
        moved += transfer.bytes
        if transfer.first_use >= 0:
            used += 1
        else:
            wasted += transfer.bytes
    misses = 0
    for chunk in trace.chunks:
        misses += int(chunk.array("step.fills").sum() + chunk.array("step.read_through").sum())
    return PrefetchScore(transfers, used, misses, moved, wasted)


def score_of_stats(
    transfers: Mapping[str, Mapping[str, Any]], misses: int, expert_bytes: int
) -> PrefetchScore:
    """From `stats()["control"]["transfers"]` of an engine, or Simulation.control["transfers"], once
    the run has ended. misses: fills and experts read through. expert_bytes: of one expert, since
    these counts know the bytes of all transfers and not of the unused."""
    counts = [count for cause, count in transfers.items() if cause not in VERSION_CHANGES]
    total = {name: sum(int(count[name]) for count in counts) for name in ("done", "used", "bytes")}
    unused = total["done"] - total["used"]
    return PrefetchScore(
        total["done"], total["used"], misses, total["bytes"], unused * expert_bytes
    )
