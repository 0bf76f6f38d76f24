"""How much memory a device has left for the arena."""

from __future__ import annotations

import dataclasses
import os

import jax

SHARE = 0.85
"""The part of free memory that the arena may take where nothing is known of activations; the rest
is for them and for other processes."""

RESERVE = 0.03
"""The part of free memory that is left where activations are known: for what requests bring later
(counts of tokens, pages on their way) and for fragments."""


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """What of a device's memory an arena may take."""

    free: int
    """Bytes, once the parameters are there."""
    activations: int = 0
    """Bytes that steps need beside arena and parameters; 0: not known, they are in the reserve."""

    @property
    def reserve(self) -> int:
        """Bytes left for everything else."""
        return self.free - int(self.free * ((1 - RESERVE) if self.activations else SHARE))

    @property
    def available(self) -> int:
        """Bytes of the largest arena; free less activations and reserve."""
        return max(self.free - self.activations - self.reserve, 0)


def free_memory(device: jax.Device) -> FreeMemory:
    """What a device has now: on a GPU what the allocator reports, on a CPU the host's available
    memory. Raises RuntimeError when the machine tells neither; give `memory` in that case."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return FreeMemory(int(statistics["bytes_limit"] - statistics["bytes_in_use"]))
    if device.platform == "cpu":
        return FreeMemory(host_available_bytes())
    raise RuntimeError(f"{device} does not report its free memory; give memory=")


def host_available_bytes() -> int:
    """Bytes of host memory that new allocations can take now."""
    # MemAvailable counts what the kernel can give back, which sysconf's free pages do not.
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
