"""The share of the processors that other programs take, beside which no measurement is worth
much."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.15
"""The share from which on costs are not trusted."""

LOOK_S = 0.1


class ProcessorWatch:
    """Watches the processors from its making on."""

    def __init__(self):
        self._began = _processor_times()

    def others(self) -> float | None:
        """Returns the share of the processors, 0 to 1, that other programs (and other machines of
        the same host) have taken so far; None where the system does not say it."""
        now = _processor_times()
        if self._began is None or now is None:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        return min(max((busy - own) / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def is_busy(others: float | None) -> bool:
    """Whether other programs took so much that what was measured beside them says little."""
    return others is not None and others > BUSY


def is_busy_now() -> bool:
    watch = ProcessorWatch()
    time.sleep(LOOK_S)
    return is_busy(watch.others())


def _processor_times() -> tuple[float, float, float] | None:
    """Returns seconds: the clock, all processors at work, this process at work."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, first[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
