"""A device's memory: how much is left for the arena, and, where it is the host's, what pages it is
made of: huge ones where Linux allows it.

A page of 2 MiB needs one entry of the processor's address cache where pages of 4 KiB need 512. It
is advice to the kernel, given before memory is touched: what it does not do costs time, no bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import platform
from pathlib import Path

import jax

SHARE = 0.85
"""The part of free memory that the arena may take where nothing is known of activations; the rest
is for them and for other processes."""

RESERVE = 0.03
"""The part of free memory that is left where activations are known: for what requests bring later
(counts of tokens, pages on their way) and for fragments."""

SYS = Path("/sys")

LEAST = 1 << 22
"""Bytes below which memory is left as it comes, two huge pages."""

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14  # linux/mman.h


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


def shares_memory(device: jax.Device) -> bool:
    """Whether `pinned_host` memory of the device is ordinary memory that jax takes without a copy
    (aligned as by aligned_empty)."""
    return device.platform == "cpu"


def host_available_bytes() -> int:
    """Bytes of host memory that new allocations can take now."""
    # MemAvailable counts what the kernel can give back, which sysconf's free pages do not.
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def huge_pages(root: Path = SYS) -> str:
    """When the system gives huge pages: `always`, `madvise` (where a program asks) or `never`;
    empty where it does not say."""
    try:
        text = (root / "kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def page_note(root: Path = SYS) -> str:
    """What is asked for of host memory, a line for people."""
    allowed = huge_pages(root)
    if allowed in ("always", "madvise"):
        return "huge pages"
    return f"small pages (the system's huge pages: {allowed or 'not known'})"


def advise(address: int, nbytes: int) -> None:
    """Asks for huge pages under host memory that nobody has touched. Memory below LEAST bytes is
    left as it comes."""
    if (pages := _whole_pages(address, nbytes)) is not None:
        libc, begin, length = pages
        libc.madvise(begin, length, _MADV_HUGEPAGE)


def remake_zeros(address: int, nbytes: int) -> None:
    """As advise, for private memory that holds zeros already: its pages go back to the kernel,
    which hands out new ones, zeros again, while this touches them."""
    pages = _whole_pages(address, nbytes)
    if pages is None or huge_pages() == "always":
        return
    libc, begin, length = pages
    advise(address, nbytes)
    if libc.madvise(begin, length, _MADV_DONTNEED) == 0:
        ctypes.memset(begin, 0, length)


def _whole_pages(address: int, nbytes: int) -> tuple[ctypes.CDLL, int, int] | None:
    """(libc, the first whole page's address, bytes of all whole pages); None where nothing is to be
    asked for."""
    libc, page = _libc(), os.sysconf("SC_PAGE_SIZE")
    if libc is None or nbytes < LEAST:
        return None
    begin = -(-address // page) * page
    return libc, begin, (address + nbytes) // page * page - begin


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """None where this is no Linux."""
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
