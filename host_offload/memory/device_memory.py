"""A device's memory: how much is left for the arena, and, where it is the host's, what pages it is
made of: huge ones where Linux allows it, spread over the NUMA nodes where there are several.

A page of 2 MiB needs one entry of the processor's address cache where pages of 4 KiB need 512. Both
are advice to the kernel, given before memory is touched: what it does not do costs time, no bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import platform
from pathlib import Path

import jax
import numpy as np

SHARE = 0.85
"""The part of free memory that the arena may take where nothing is known of activations; the rest
is for them and for other processes."""

RESERVE = 0.03
"""The part of free memory that is left where activations are known: for what requests bring later
(counts of tokens, pages on their way) and for fragments."""

SYS = Path("/sys")

HUGE_PAGES = "MOEJAX_HUGE_PAGES"
"""Environment variable: 0 asks for small pages, for measurements."""

LEAST = 1 << 22
"""Bytes below which memory is left as it comes, two huge pages."""

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15  # linux/mman.h
_MPOL_INTERLEAVE = 3  # linux/mempolicy.h
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Machine → number of the system call."""


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


def memory_nodes(root: Path = SYS) -> tuple[int, ...]:
    """The NUMA nodes that have memory, by number; none where the system does not say."""
    try:
        text = (root / "devices/system/node/has_memory").read_text().strip()
    except OSError:
        return ()
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def page_note(root: Path = SYS) -> str:
    """What is asked for of host memory, a line for people."""
    allowed, nodes = huge_pages(root), memory_nodes(root)
    huge = "huge pages"
    if os.environ.get(HUGE_PAGES) == "0":
        huge = f"small pages ({HUGE_PAGES}=0)"
    elif allowed not in ("always", "madvise"):
        huge = f"small pages (the system's huge pages: {allowed or 'not known'})"
    if len(nodes) < 2:
        return f"{huge}, 1 NUMA node"
    if _mbind() is None:
        return f"{huge}, {len(nodes)} NUMA nodes, not spread: mbind cannot be called here"
    return f"{huge}, spread over {len(nodes)} NUMA nodes"


def advise(address: int, nbytes: int, root: Path = SYS) -> None:
    """Asks for huge pages under host memory that nobody has touched, and spreads it over the NUMA
    nodes, as page_note says. Memory below LEAST bytes is left as it comes."""
    pages = _whole_pages(address, nbytes)
    if pages is None:
        return
    libc, begin, length = pages
    # numpy asks for huge pages by itself, so small ones must be asked for too.
    small = os.environ.get(HUGE_PAGES) == "0"
    libc.madvise(begin, length, _MADV_NOHUGEPAGE if small else _MADV_HUGEPAGE)
    nodes, number = memory_nodes(root), _mbind()
    if len(nodes) > 1 and number is not None:
        mask = node_mask(nodes)
        # The kernel reads one bit less than it is told.
        last = ctypes.c_ulong(mask.nbytes * 8 + 1), 0
        where = ctypes.c_void_p(begin), ctypes.c_ulong(length)
        libc.syscall(number, *where, _MPOL_INTERLEAVE, ctypes.c_void_p(mask.ctypes.data), *last)


def remake_zeros(address: int, nbytes: int) -> None:
    """As advise, for private memory that holds zeros already: its pages go back to the kernel,
    which hands out new ones, zeros again, while this touches them."""
    pages = _whole_pages(address, nbytes)
    if pages is None or (huge_pages() == "always" and len(memory_nodes()) < 2):
        return
    libc, begin, length = pages
    advise(address, nbytes)
    if libc.madvise(begin, length, _MADV_DONTNEED) == 0:
        ctypes.memset(begin, 0, length)


def node_mask(nodes: tuple[int, ...]) -> np.ndarray:
    """A bit for each node, in words of 64, as mbind takes them."""
    words = np.zeros(max(nodes) // 64 + 1, np.uint64)
    for node in nodes:
        words[node // 64] |= np.uint64(1) << np.uint64(node % 64)
    return words


def _whole_pages(address: int, nbytes: int) -> tuple[ctypes.CDLL, int, int] | None:
    """(libc, the first whole page's address, bytes of all whole pages); None where nothing is to be
    asked for."""
    libc, page = _libc(), os.sysconf("SC_PAGE_SIZE")
    if libc is None or nbytes < LEAST:
        return None
    begin = -(-address // page) * page
    return libc, begin, (address + nbytes) // page * page - begin


def _mbind() -> int | None:
    """The number of mbind here; None: it is not known."""
    return _MBIND.get(platform.machine()) if _libc() is not None else None


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """None where this is no Linux."""
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc
