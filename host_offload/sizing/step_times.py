"""What misses cost, learned from how long steps take (docs/miss_curves.md): the slope of decode
steps' seconds over their misses is c_E; prefill steps say what a prompt token costs, r."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

DECAY = 0.999
"""Factor on what is known, once a step of the kind."""
PRIOR_STEPS = 64
"""The weight of the value to begin with."""
FIRST = 8
"""Steps of a kind until something is known of it: their median says what is usual."""
SLOW = 4.0
"""A step that takes so many times what is usual waited for something else."""
RANGE = 10.0
"""The estimate stays within this factor of the value to begin with."""


class Samples(NamedTuple):
    """Steps of a kind that take seconds s with m misses or tokens. Never changed in place."""

    sums: np.ndarray = np.zeros(6)
    """Decayed [n, Σm, Σs, Σm², Σm·s, Σ seconds by which steps are compared]."""
    first: tuple[np.ndarray, ...] = ()
    """The first ones, until they are FIRST."""

    def add(self, m: float, seconds: float, size: float = 1.0) -> Samples:
        """size: seconds are compared by it."""
        row = np.array([1.0, m, seconds, m**2, m * seconds, seconds / size])
        if not self.sums[0]:
            first = (*self.first, row)
            if len(first) < FIRST:
                return Samples(self.sums, first)
            usual = SLOW * np.median([each[5] for each in first])
            return Samples(sum((each for each in first if each[5] <= usual), np.zeros(6)))
        if row[5] > SLOW * self.sums[5] / self.sums[0]:
            return self
        return Samples(DECAY * self.sums + row)


class StepTimes(NamedTuple):
    """What was seen of steps. Never changed in place."""

    decode: Mapping[int, Samples] = {}
    """By bucket, of misses."""
    prefill_steps: Samples = Samples()
    """By prompt tokens, without what misses cost."""
    read_s: float = -1.0
    """When the last step was read; below 0: there was none."""

    def see(
        self, *, bucket: int, tokens: int, misses: int, read_s: float, usable: bool, miss_s: float
    ) -> StepTimes:
        """A step was read. tokens: of prompts, 0 for a decode step. usable: all its rows are of one
        kind and its executable had run before. miss_s: what a miss costs, for prefill steps."""
        seconds, times = read_s - self.read_s, self._replace(read_s=read_s)
        if not usable or self.read_s < 0 or seconds <= 0:
            return times
        if tokens:
            net = max(seconds - misses * miss_s, 0.0)
            return times._replace(prefill_steps=self.prefill_steps.add(tokens, net, tokens))
        known = self.decode.get(bucket, Samples())
        return times._replace(decode={**self.decode, bucket: known.add(misses, seconds)})

    def miss_s(self, prior: float) -> float:
        """c_E in seconds: the slope within buckets, mixed with `prior` by numbers of steps."""
        steps = spread = joint = 0.0
        for samples in self.decode.values():
            n, misses, seconds, squares, products, _ = samples.sums
            if n:
                steps += n
                spread += squares - misses**2 / n
                joint += products - misses * seconds / n
        # Where all steps miss as often there is nothing to learn from.
        return prior if spread < max(steps, 1) else _mixed(steps, joint / spread, prior)

    def token_s(self, prior: float) -> float:
        """r in seconds a prompt token, mixed with `prior` by numbers of prefill steps."""
        n, tokens, seconds, *_ = self.prefill_steps.sums
        return prior if not n else _mixed(n, seconds / tokens, prior)


def _mixed(steps: float, found: float, prior: float) -> float:
    mixed = (steps * found + PRIOR_STEPS * prior) / (steps + PRIOR_STEPS)
    return float(np.clip(mixed, prior / RANGE, prior * RANGE))
