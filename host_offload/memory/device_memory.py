"""A device's free memory for the arena, and huge pages for host memory where Linux allows them.

A huge page of 2 MiB needs one entry of the processor's TLB, where pages of 4 KiB need 512. Asking
for huge pages is advice to the kernel, given before memory is touched. If the kernel ignores it,
steps take longer, but their bits are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # some ask for the host's memory before jax is imported
    import jax

SHARE = 0.85
"""The part of free memory that the arena may take if the size of activations is not known. The rest
is for activations and other processes."""

RESERVE = 0.03
"""The part of free memory that stays free if the size of activations is known. It is for memory of
later requests (counts of tokens, pages on their way) and for fragmentation."""

SYS = Path("/sys")

LEAST = 1 << 22
"""Memory of fewer bytes, two huge pages, gets no advice."""

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14  # linux/mman.h


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """A device's memory as an arena may take it."""

    free: int
    """Free bytes, once the parameters are on the device."""
    activations: int = 0
    """Bytes that steps need beside arena and parameters; 0: not known, so the reserve has them."""
    most: int | None = None
    """Bytes of an arena that can be allocated, if a larger one could not be."""

    @property
    def reserve(self) -> int:
        """Bytes that stay free for everything else."""
        return self.free - int(self.free * ((1 - RESERVE) if self.activations else SHARE))

    @property
    def available(self) -> int:
        """Bytes of the largest arena; free less activations and reserve, at most `most`."""
        left = max(self.free - self.activations - self.reserve, 0)
        return left if self.most is None else min(left, self.most)


def free_memory(device: jax.Device) -> FreeMemory:
    """Returns a device's free memory: of a GPU by its allocator, of a CPU the host's available
    memory, less what arenas of this process will still take of it. Raises RuntimeError if the
    device reports none; then give `memory`."""
    from pallas_kernels.cpu.arena import promised_bytes  # imports jax

    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return FreeMemory(int(statistics["bytes_limit"] - statistics["bytes_in_use"]))
    if device.platform == "cpu":
        return FreeMemory(max(host_available_bytes() - promised_bytes(), 0))
    raise RuntimeError(f"{device} does not report its free memory; give memory=")


def shares_memory(device: jax.Device) -> bool:
    """Whether `pinned_host` memory of the device is ordinary memory that jax takes without a copy
    (aligned as by aligned_empty)."""
    return device.platform == "cpu"


def host_available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that new allocations of this process can take now."""
    # MemAvailable counts what the kernel can give back, which sysconf's free pages do not.
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if (path := root / "proc/meminfo").exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                found = min(found, _group_bytes(root, place, v2=not controllers))
    return found


def _group_bytes(root: Path, place: str, *, v2: bool) -> int:
    """Bytes that a control group and those above it leave to new allocations; files in the page
    cache do not count. In a container the mount may begin at the group, so that its path is not
    there."""
    mount = root / "sys/fs/cgroup" / ("" if v2 else "memory")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    limit, usage, kind = ("memory.max", "memory.current", "") if v2 else names
    group, left = mount / place.lstrip("/"), sys.maxsize
    for each in (group, *group.parents) if group.is_dir() else (mount,):
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max", or a root without one
            most, used = (int((each / name).read_text()) for name in (limit, usage))
            stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            cached = sum(int(stat[f"{kind}{age}_file"]) for age in ("active", "inactive"))
            left = min(left, max(most - used + cached, 0))
        if each == mount:
            break
    return left


def huge_pages(root: Path = SYS) -> str:
    """Returns when the system gives huge pages: `always`, `madvise` (if a program asks) or `never`;
    empty if the system does not say."""
    try:
        text = (root / "kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def page_note(root: Path = SYS) -> str:
    """Describes the pages of host memory in a line for people."""
    allowed = huge_pages(root)
    if allowed in ("always", "madvise"):
        return "huge pages"
    return f"small pages (the system's huge pages: {allowed or 'not known'})"


def advise(address: int, nbytes: int) -> None:
    """Asks for huge pages for host memory that was not touched yet, of at least LEAST bytes."""
    if (pages := _whole_pages(address, nbytes)) is not None:
        libc, begin, length = pages
        libc.madvise(begin, length, _MADV_HUGEPAGE)


def remake_zeros(address: int, nbytes: int) -> None:
    """Asks for huge pages for private memory that holds zeros already. It gives the pages back to
    the kernel and touches the memory, for which the kernel gives new pages of zeros."""
    pages = _whole_pages(address, nbytes)
    if pages is None or huge_pages() == "always":
        return
    libc, begin, length = pages
    advise(address, nbytes)
    if libc.madvise(begin, length, _MADV_DONTNEED) == 0:
        ctypes.memset(begin, 0, length)


def _whole_pages(address: int, nbytes: int) -> tuple[ctypes.CDLL, int, int] | None:
    """Returns (libc, address of the first whole page, bytes of all whole pages); None if huge pages
    are not to be asked for."""
    libc, page = _libc(), os.sysconf("SC_PAGE_SIZE")
    if libc is None or nbytes < LEAST:
        return None
    begin = -(-address // page) * page
    return libc, begin, (address + nbytes) // page * page - begin


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Returns libc; None on systems other than Linux."""
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
