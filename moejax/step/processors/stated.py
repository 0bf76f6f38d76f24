"""Two processors that take stated times (`driver=host,threads=…`): groups of a CPU's cores stand
for an accelerator and a second processor, so that placements can be compared without a GPU.

The one that is done earlier waits; no bit depends on it.
"""

from __future__ import annotations

import dataclasses
import time

from moejax.step.step_parts import StatedTimes


@dataclasses.dataclass(frozen=True)
class StatedClock:
    """A Clock of processors/in_place.py."""

    times: StatedTimes

    def is_timed(self, beside: int) -> bool:
        return beside > 0 or self.times.accelerator > 0 or self.times.attention > 0

    def attend(self, ended: float) -> None:
        _wait_until(ended + self.times.attention)

    def accelerated(self, began: float, experts: int) -> float:
        return _wait_until(began + experts * self.times.accelerator)

    def computed_beside(self, began: float, experts: int, rows: int) -> float:
        takes = experts * self.times.startup + rows * self.times.per_token
        return _wait_until(began + takes)


def _wait_until(when: float) -> float:
    """Now, but not before `when`."""
    while (left := when - time.perf_counter()) > 0:
        time.sleep(left)
    return time.perf_counter()
