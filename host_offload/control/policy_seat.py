"""A policy in the controller: its state, and what has gathered since it was last asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from host_offload.control.interface import Moment, Policy, Spec, Transfer
from host_offload.control.rules import BETWEEN_LAYERS, name_of, parse_interval


class Seat:
    def __init__(self, policy: Policy, spec: Spec):
        self.policy, self.name = policy, name_of(policy)
        self.observed = policy.needs - {"router"}
        self.stages_between_layers = bool(policy.moments & BETWEEN_LAYERS) and not (
            policy.writes.isdisjoint({"stages", "transitions"})
        )
        if "router" not in policy.needs:
            spec = dataclasses.replace(spec, router=None)
        try:
            self.state = policy.init(spec)
        except Exception as error:
            error.add_note(f"in policy {self.name} at its init")
            raise
        self.news: dict[tuple[str, Moment], list[Transfer]] = {}
        interval = getattr(policy, "interval", None)
        self._every = None if interval is None else parse_interval(interval, self.name)
        self._passed = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0}
        self._sums = self._every is not None and "counts" in policy.needs
        self.intervals = 0
        self.counts: np.ndarray | None = None

    def progress(self, rows: int, seconds: float, counts: np.ndarray | None) -> None:
        self._passed["steps"] += 1
        self._passed["tokens"] += rows
        self._passed["seconds"] = seconds
        if self._sums and counts is not None:
            self.counts = counts if self.counts is None else self.counts + counts

    @property
    def _whole(self) -> int:
        if self._every is None:
            return 0
        count, unit = self._every
        return int(self._passed[unit] // count)

    @property
    def interval_due(self) -> bool:
        return self._whole > self.intervals

    def next_interval(self) -> np.ndarray | None:
        """Begins one; returns the counts of the one that ended."""
        self.intervals, counts, self.counts = self._whole, self.counts, None
        return counts

    def tell(self, name: str, news: Sequence[Transfer]) -> None:
        if name in self.policy.needs:
            for moment in self.policy.moments:
                self.news.setdefault((name, moment), []).extend(news)
