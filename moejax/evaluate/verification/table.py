"""The result of a check."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """A line of the table."""

    name: str
    good: bool | None
    """None: there was nothing to check, and `said` has why."""
    said: str

    @property
    def verdict(self) -> str:
        return {True: "right", False: "WRONG", None: "not checked"}[self.good]
