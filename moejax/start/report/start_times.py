"""How long each phase of a start takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class StartTimes:
    """Seconds by phase, for phases that follow one another.

    seconds: "backend" (options, jax's backend), "headers" (config and headers of the weights),
    "allocate" (memory for them), "read" (from the files to their places, conversion included),
    "transfer" (the dense part to the device), "load" (what else loading took), "engine" (arena and
    executables), "tokenizer" (waiting for it; it is read meanwhile).
    """

    def __init__(self):
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """A phase ends now. parts: phases within it, which are taken from its own time."""
        now, parts = time.perf_counter(), parts or {}
        self.seconds |= parts
        self.seconds[phase] = now - self._last - sum(parts.values())
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds until the last phase ended."""
        return sum(self.seconds.values())

    def report(self) -> dict[str, Any]:
        """The part of LLM.stats()["time"]: load_s until the weights are in their places, start_s
        for all, and the phases."""
        after = ("engine", "tokenizer")
        load_s = sum(s for phase, s in self.seconds.items() if phase not in after)
        return {"load_s": load_s, "start_s": self.total_s, "start": dict(self.seconds)}

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
