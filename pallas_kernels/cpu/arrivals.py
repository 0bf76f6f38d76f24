"""A store that is filled while steps run: native ops wait for the records that they need."""

from __future__ import annotations

import ctypes
import dataclasses

from pallas_kernels.cpu.library import bind, why_not_cpu


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Which records of a store are there, and which ones ops wait for. Any thread may call it."""

    name: int
    """Of the store, never given twice."""

    @staticmethod
    def begin(address: int, record_bytes: int, count: int) -> Arrivals | None:
        """Makes native ops wait for the records of a store that nothing reads yet; None without the
        library.

        - `address`: of the first of `count` records, which lie side by side.
        """
        if why_not_cpu():
            return None
        return Arrivals(_call("begin", "ass", address, record_bytes, count))

    def arrive(self, number: int) -> None:
        """Tells that all bytes of a record are there."""
        _call("arrive", "ss", self.name, number)

    def next_wanted(self) -> int | None:
        """Returns a record that an op waits for, each once; None if there is none."""
        number = _call("next_wanted", "s", self.name)
        return None if number < 0 else number

    def end(self) -> None:
        """Lets all ops go on, also those whose records are not there. Idempotent."""
        _call("end", "s", self.name)


def _call(name: str, arguments: str, *values: int) -> int:
    returns = ctypes.c_int64 if name in ("begin", "next_wanted") else None
    function = bind(f"moejax_arrivals_{name}", arguments, returns)
    assert function is not None
    return function(*values)
