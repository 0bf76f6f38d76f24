"""Experts that processes of one machine share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from host_offload.memory.store import StoreBuilder
from moejax.checkpoints import shared_memory
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.shared_memory import NoSharedMemory, open_shared
from moejax.models.hub import model_directory
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slow,  # nothing here depends on the version of Python or jax
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm"),
]

UINT16 = np.dtype(np.uint16)


@pytest.fixture(autouse=True)
def shm(tmp_path, monkeypatch):
    """A directory in the place of /dev/shm; what another test left is not here."""
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    return tmp_path


def fill(memory, value: int) -> np.ndarray:
    array = memory.array((4, 8), UINT16)
    array[:] = value
    memory.complete()
    return array


def change_first_value(shm, value: int) -> None:
    """As another program of the same user can."""
    (path,) = shm.glob("*/0")
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(value.to_bytes(2, "little"))


def test_who_writes_into_what_is_full_ends(shm):
    program = """
import sys, numpy as np
from pathlib import Path
from moejax.checkpoints import shared_memory
shared_memory.SHM = Path(sys.argv[1])
memory = shared_memory.open_shared("a")
array = memory.array((4096,), np.dtype(np.uint16))
array[:] = 7
memory.complete()
print("full", flush=True)
array[5] = 1
print("written", flush=True)
"""
    command = [sys.executable, "-c", program, str(shm)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("full\n", -signal.SIGSEGV)


def test_the_first_fills_and_the_others_read(shm):
    first = open_shared(["a"])
    assert not first.filled
    written = fill(first, 7)
    second = open_shared(["a"])
    read = second.array((4, 8), UINT16)
    assert second.filled and (read == 7).all() and not read.flags.writeable
    change_first_value(shm, 9)
    assert written[0, 0] == read[0, 0] == 9  # the same memory
    with pytest.raises(NoSharedMemory, match="0 is not what it was filled with: a program changed"):
        open_shared(["a"]).array((4, 8), UINT16)
    assert not open_shared(["b"]).filled
    with pytest.raises(RuntimeError, match="does not have the expected 2 bytes"):
        open_shared(["a"]).array((1,), UINT16)
    first.close()
    assert any(shm.iterdir()) and (read == 7).sum() == 31


def test_the_last_one_removes_it(shm):
    first = open_shared("a")
    fill(first, 1)
    second = open_shared("a")
    first.close()
    first.close()
    third = open_shared("a")
    assert third.filled
    second.close()
    assert list(shm.iterdir())
    third.close()
    assert not list(shm.iterdir())
    assert not open_shared("a").filled


def test_others_wait_until_it_is_full(shm):
    first, found = open_shared("a"), []
    thread = threading.Thread(target=lambda: found.append(open_shared("a")))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    fill(first, 3)
    thread.join(10)
    assert found[0].filled and (found[0].array((4, 8), UINT16) == 3).all()


def test_what_a_killed_process_left_is_filled_anew_or_swept(shm):
    def left(content: str, complete: bool) -> None:
        code = (
            "import os, pathlib, numpy\n"
            "from moejax.checkpoints import shared_memory as s\n"
            f"s.SHM = pathlib.Path({str(shm)!r})\n"
            f"m = s.open_shared({content!r}); m.array((4, 8), numpy.dtype('u2'))[:] = 5\n"
            f"{'m.complete()' if complete else ''}\n"
            "os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9

    left("a", False)
    again = open_shared("a")
    assert not again.filled
    fill(again, 6)
    left("b", True)
    assert len(list(shm.iterdir())) == 2
    kept = open_shared("b")  # sweeps others than its own
    assert kept.filled and len(list(shm.iterdir())) == 2
    kept.close()
    left("b", True)
    open_shared("c")
    assert len(list(shm.iterdir())) == 2  # a, which is used, and c


def test_no_room(shm, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = open_shared("a")
    with pytest.raises(NoSharedMemory, match=r"needs 64 B in .*No space left.*store='memory'"):
        memory.array((4, 8), UINT16)
    memory.close()
    assert not list(shm.iterdir())
    monkeypatch.setattr(shared_memory, "SHM", shm / "no")
    with pytest.raises(NoSharedMemory, match="which is Linux's"):
        open_shared("a")


def test_a_model_s_experts_are_there_once(shm, monkeypatch):
    directory = model_directory("demo")
    plain, first = load_checkpoint(directory), load_checkpoint(directory, shared=True)
    monkeypatch.setattr(StoreBuilder, "piece", None)  # nothing is read into the second one
    second = load_checkpoint(directory, shared=True)
    assert first.shared is not None and second.shared is not None and second.shared.filled
    arrays = [np.asarray(one.store.arrays["dense"]) for one in (plain, first, second)]
    assert (arrays[0] == arrays[1]).all() and (arrays[0] == arrays[2]).all()
    # Without a copy: a byte that is changed below is seen by both.
    change_first_value(shm, 0xAA55)
    assert arrays[1].flat[0] == arrays[2].flat[0] == 0xAA55
    embed = [np.asarray(one.params["embed"]) for one in (plain, second)]
    assert (embed[0] == embed[1]).all()
    for one in (first, second):
        one.store.delete()
        one.shared.close()
    assert not list(shm.iterdir())
