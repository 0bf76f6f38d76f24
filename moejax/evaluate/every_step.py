"""Yields the steps of a training run as they appear."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Collection, Iterator

from moejax.checkpoints.orbax.steps import finished_steps

INTERVAL_S = 1.0
"""Seconds between two looks at the root (Orbax's own `seconds_to_sleep`)."""


def new_steps(
    root: str | os.PathLike[str],
    done: Collection[int] = (),
    *,
    timeout: float | None = None,
    until_step: int | None = None,
) -> Iterator[int]:
    """Yields each step of an Orbax root once it is completely written, the lowest of several first.

    - `done`: steps to leave out.
    - `timeout`: end when no new step came for so many seconds. 0 ends with the present steps; None
      never ends.
    - `until_step`: end after a step of this number or a higher one.

    The names are those of orbax.checkpoint's checkpoints_iterator, which gives only the newest
    step. Raises UserError like finished_steps.
    """
    seen, directory, since = set(done), pathlib.Path(root), time.monotonic()
    while True:
        waiting = [step for step in finished_steps(directory) if step not in seen]
        if until_step is not None and any(step >= until_step for step in seen):
            waiting = [step for step in waiting if step < until_step]
            if not waiting:
                return
        if waiting:
            seen.add(waiting[0])
            yield waiting[0]
            since = time.monotonic()
            continue
        left = None if timeout is None else since + timeout - time.monotonic()
        if left is not None and left <= 0:
            return
        time.sleep(INTERVAL_S if left is None else min(INTERVAL_S, left))
