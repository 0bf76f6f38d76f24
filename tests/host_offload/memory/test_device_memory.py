"""What pages host memory is asked to be made of, by machines that a folder stands for."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from host_offload.memory import device_memory
from host_offload.memory.arena import allocate_arena
from host_offload.memory.device_memory import LEAST, advise, host_available_bytes, page_note


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


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


@pytest.mark.parametrize(
    ("line", "mount", "names", "groups", "left"),
    [
        ("0::/", "", V2, {}, 900),
        ("0::/a/b", "", V2, {"a": ("500", 300), "a/b": ("max", 200)}, 260),
        ("0::/a", "", V2, {"a": ("100", 200)}, 0),
        ("4:cpu,memory:/a", "memory", V1, {"a": ("700", 100), "": ("9223372036854771712", 1)}, 660),
        ("4:memory:/docker/of-the-host", "memory", V1, {"": ("300", 100)}, 260),
        ("3:cpuset:/a", "cpuset", V1, {"a": ("1", 0)}, 900),
    ],
)
def test_the_limit_of_a_control_group_is_the_memory_that_there_is(
    line, mount, names, groups, left, tmp_path
):
    """60 bytes of each group are files in the page cache, which the kernel gives back."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 900 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"7:pids:/x\n{line}\n")
    (tmp_path / "sys/fs/cgroup" / mount).mkdir(parents=True)
    limit, usage, kind = names
    for group, (most, used) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(str(int(most) << 10) if most.isdecimal() else most)
        (folder / usage).write_text(str(used << 10))
        stat = {"cache": 1, f"{kind}inactive_file": 40 << 10, f"{kind}active_file": 20 << 10}
        (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))
    assert host_available_bytes(tmp_path) == left << 10
