"""What pages host memory is asked to be made of, by machines that a folder stands for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from host_offload.memory import device_memory
from host_offload.memory.arena import allocate_arena
from host_offload.memory.device_memory import LEAST, advise, page_note


@pytest.mark.parametrize(
    ("enabled", "said"),
    [
        ("always [madvise] never\n", "huge pages"),
        ("[always] madvise never\n", "huge pages"),
        ("always madvise [never]\n", "small pages (the system's huge pages: never)"),
        (None, "small pages (the system's huge pages: not known)"),
    ],
)
def test_what_is_in_effect_is_said(tmp_path, enabled, said):
    if enabled is not None:
        place = tmp_path / "kernel/mm/transparent_hugepage"
        place.mkdir(parents=True)
        (place / "enabled").write_text(enabled)
    assert page_note(tmp_path) == said


class Kernel:
    """What would be asked of the kernel."""

    def __init__(self):
        self.calls = []

    def madvise(self, *args):
        self.calls.append(args)
        return 0


def test_whole_pages_are_advised(monkeypatch):
    kernel, page = Kernel(), 4096
    monkeypatch.setattr(device_memory, "_libc", lambda: kernel)
    monkeypatch.setattr(device_memory.os, "sysconf", lambda name: page)
    advise(10 * page + 1, LEAST + page)
    assert kernel.calls == [(11 * page, LEAST, 14)]
    advise(10 * page, LEAST - 1)
    assert len(kernel.calls) == 1, "little memory is left as it comes"


def test_an_arena_is_zeros_and_stays_writable():
    """Its pages were given back to the kernel and are new ones."""
    arena = allocate_arena(2 * LEAST // 256, 128, jax.devices("cpu")[0])
    assert arena.nbytes == 2 * LEAST and not np.asarray(arena).any()
    assert int(jax.jit(lambda a: a.at[-1, -1].set(7))(arena)[-1, -1]) == 7
