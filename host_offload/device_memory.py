"""How much memory a device has left for the arena."""

from __future__ import annotations

import os

import jax

SHARE = 0.85
"""Of the free memory the arena may take; the rest is for activations and other processes."""


def available_bytes(device: jax.Device) -> int:
    """Bytes an arena may take on the device now: SHARE of what is free.

    On a GPU what the allocator reports; on a CPU the host's available memory. Raises RuntimeError
    when the machine tells neither; give `memory` in that case.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int((statistics["bytes_limit"] - statistics["bytes_in_use"]) * SHARE)
    if device.platform == "cpu":
        return int(host_available_bytes() * SHARE)
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
