"""What pages host memory is asked to be made of, by machines that a folder stands for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from host_offload.memory import device_memory
from host_offload.memory.arena import allocate_arena
from host_offload.memory.device_memory import HUGE_PAGES, LEAST, advise, page_note


def machine(folder, enabled: str | None, nodes: str | None):
    if enabled is not None:
        place = folder / "kernel/mm/transparent_hugepage"
        place.mkdir(parents=True)
        (place / "enabled").write_text(enabled)
    if nodes is not None:
        place = folder / "devices/system/node"
        place.mkdir(parents=True)
        (place / "has_memory").write_text(nodes)
    return folder


@pytest.mark.parametrize(
    ("enabled", "nodes", "said"),
    [
        ("always [madvise] never\n", "0\n", "huge pages, 1 NUMA node"),
        ("[always] madvise never\n", "0-1\n", "huge pages, spread over 2 NUMA nodes"),
        ("always madvise [never]\n", "0,2-3\n", "never), spread over 3 NUMA nodes"),
        (None, None, "not known), 1 NUMA node"),
    ],
)
def test_what_is_in_effect_is_said(tmp_path, monkeypatch, enabled, nodes, said):
    monkeypatch.setattr(device_memory, "_mbind", lambda: 237)
    root = machine(tmp_path, enabled, nodes)
    assert page_note(root).endswith(said)
    monkeypatch.setenv(HUGE_PAGES, "0")
    assert page_note(root).startswith("small pages (MOEJAX_HUGE_PAGES=0)")
    monkeypatch.setattr(device_memory, "_mbind", lambda: None)
    assert ("not spread" in page_note(root)) == ("spread" in said)


class Kernel:
    """What would be asked of the kernel."""

    def __init__(self):
        self.calls = []

    def madvise(self, *args):
        self.calls.append(("madvise", *args))
        return 0

    def syscall(self, *args):
        self.calls.append(("syscall", *(getattr(arg, "value", arg) for arg in args)))


@pytest.mark.parametrize("small", [False, True])
def test_whole_pages_are_advised_and_spread(tmp_path, monkeypatch, small):
    kernel, page = Kernel(), 4096
    monkeypatch.setattr(device_memory, "_libc", lambda: kernel)
    monkeypatch.setattr(device_memory, "_mbind", lambda: 237)
    monkeypatch.setattr(device_memory.os, "sysconf", lambda name: page)
    monkeypatch.setenv(HUGE_PAGES, "0" if small else "1")
    root = machine(tmp_path, "always [madvise] never", "0-1")
    advise(10 * page + 1, LEAST + page, root)
    (first, begin, length, how), spread = kernel.calls
    assert (first, begin, length, how) == ("madvise", 11 * page, LEAST, 15 if small else 14)
    assert spread[:5] == ("syscall", 237, 11 * page, LEAST, 3) and spread[6:] == (65, 0)
    kernel.calls.clear()
    advise(10 * page, LEAST - 1, root)
    assert not kernel.calls, "little memory is left as it comes"
    advise(page, LEAST, machine(tmp_path / "one", "[always]", "0"))
    assert [name for name, *_ in kernel.calls] == ["madvise"], "one node has nothing to spread"


def test_an_arena_is_zeros_and_stays_writable():
    """Its pages were given back to the kernel and are new ones."""
    arena = allocate_arena(2 * LEAST // 256, 128, jax.devices("cpu")[0])
    assert arena.nbytes == 2 * LEAST and not np.asarray(arena).any()
    assert int(jax.jit(lambda a: a.at[-1, -1].set(7))(arena)[-1, -1]) == 7
