"""Two processors that take stated times (`driver=host,threads=…`): groups of a CPU's cores stand
for an accelerator and a second processor, so that placements can be compared without a GPU.

Whoever is done earlier waits; no bit depends on it.
"""

from __future__ import annotations

import time

from moejax.step.drivers.placed import PlacedRunner


class StatedRunner(PlacedRunner):
    """A PlacedRunner of SecondProcessor.stated."""

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        assert self.steps.second is not None and self.steps.second.stated is not None
        self._stated = self.steps.second.stated
        super()._compile_first(runs)

    def _routed(self) -> None:
        if self._ended is not None:
            _wait_until(self._ended + self._stated.attention)
        super()._routed()

    def _is_timed(self, beside: int) -> bool:
        every = self._stated.accelerator > 0 or self._stated.attention > 0
        return every or super()._is_timed(beside)

    def _accelerated(self, began: float, experts: int) -> float:
        return _wait_until(began + experts * self._stated.accelerator)

    def _computed_beside(self, began: float, experts: int, rows: int) -> float:
        takes = experts * self._stated.startup + rows * self._stated.per_token
        return _wait_until(began + takes)


def _wait_until(when: float) -> float:
    """Now, but not before `when`."""
    while (left := when - time.perf_counter()) > 0:
        time.sleep(left)
    return time.perf_counter()
