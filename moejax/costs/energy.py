"""Energy that the machine's processors took, where the operating system lets a process read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
"""Linux's counters of energy, RAPL's: Intel's and, with a newer kernel, AMD's processors, and not
in most virtual machines; since 2020 root alone may read them."""

Counters = Mapping[Path, int]
"""Counter → microjoules so far."""


def read_energy(root: Path = POWERCAP) -> Counters:
    """The counters of whole packages; none where there are none or they may not be read."""
    found = {}
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith("package"):
                found[zone] = int((zone / "energy_uj").read_text())
        except (OSError, ValueError):
            continue
    return found


def joules(begin: Counters, end: Counters) -> float | None:
    """Joules between two readings, of all packages and everything that ran on them; None where
    they have no counter in common. A counter that began again has done so once."""
    both = begin.keys() & end.keys()
    if not both:
        return None
    total = 0
    for zone in both:
        spent = end[zone] - begin[zone]
        if spent < 0:
            spent += int((zone / "max_energy_range_uj").read_text())
        total += spent
    return total / 1e6
