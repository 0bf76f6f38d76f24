"""The cache of pinned arrays over files: who has room, what is read first, what fails."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from host_offload.memory.record_source import RecordFiles
from host_offload.queue.cached import CachedRecords, CacheSpec, least_records
from host_offload.queue.device import DeviceQueue, TransferLost
from host_offload.queue.transfer import DEMAND
from pallas_kernels.cpu.checksums import checksum
from tests.host_offload.queue.test_device_copies import (
    EXPERTS,
    FORMAT,
    LAYERS,
    PIECE,
    VALUES,
    Link,
    Mark,
    transfer,
)
from tests.pallas_kernels.contract import NATIVE

RECORD = 3 * PIECE


class Gated(CachedRecords):
    """Reads wait until they are let through, and are noted in the order of their begin."""

    open: bool = True

    def __init__(self, files: RecordFiles, *args):
        super().__init__(files, *args)
        self.files, self.source = files, self
        self.began: list[tuple[int, int]] = []
        self.turns = threading.Semaphore(0)

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        self.began.append((layer, expert))
        if not self.open:
            assert self.turns.acquire(timeout=20)
        self.files.read(layer, expert, record)


def files_in(directory, *, crcs: bool = False, verify: bool = True) -> RecordFiles:
    paths, sums, cyclic = [], np.zeros((LAYERS, EXPERTS), np.uint64), None
    if crcs:
        cyclic = np.zeros_like(sums)
    for layer in range(LAYERS):
        paths.append(tuple(str(directory / f"{layer}.{expert}") for expert in range(EXPERTS)))
        for expert, path in enumerate(paths[-1]):
            content = VALUES[layer, expert].tobytes()
            with open(path, "wb") as file:
                file.write(content)
            sums[layer, expert] = int(hashlib.sha256(content).hexdigest()[:16], 16)
            if cyclic is not None:
                cyclic[layer, expert] = int(checksum("crc32c", content), 16)
    return RecordFiles(FORMAT, tuple(paths), sums, cyclic, verify)


def cache(directory, records: int, threads: int = 1, **files) -> Gated:
    spec = CacheSpec(records * RECORD + 5, threads)
    return Gated(files_in(directory, **files), jax.devices()[0], spec)


def until(holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(5e-3)
    raise AssertionError("it never came")


def wanted(records: CachedRecords, expert: int, *, demand=True, priority=0, layer=0):
    return records.ask(layer, expert, demand=demand, priority=priority)


def read(records: CachedRecords, expert: int):
    asked = wanted(records, expert)
    until(asked.there)
    return asked


def test_what_is_held_stays_and_the_one_used_longest_ago_goes(tmp_path):
    records = cache(tmp_path, 2)
    first, second = read(records, 0), read(records, 1)
    third = wanted(records, 2)
    third.wait()
    assert not third.there() and records.began == [(0, 0), (0, 1)]
    assert records.nbytes == 2 * RECORD
    second.release()
    second.release()
    until(third.there)
    assert records.began[2:] == [(0, 2)] and records.nbytes == 2 * RECORD
    np.testing.assert_array_equal(np.concatenate(first.pieces()), VALUES[0, 0])
    first.release()
    third.release()
    read(records, 0).release()  # there, and now used last
    read(records, 1).release()  # instead of 2
    assert records.began[3:] == [(0, 1)]
    read(records, 0).release()
    totals = records.totals()
    assert (totals.hits, totals.misses, totals.bytes_read) == (2, 4, 4 * RECORD)
    records.delete()


def test_demands_are_read_first_and_what_is_needed_now_becomes_one(tmp_path):
    records = cache(tmp_path, 6, threads=3)
    records.open = False
    spare = [wanted(records, e, layer=1) for e in range(3)]  # every thread has one
    until(lambda: len(records.began) == 3)
    ahead = [wanted(records, e, demand=False, priority=e) for e in range(3)]
    ahead[2].urge(demand=True, priority=0)
    records.turns.release(1)
    until(lambda: len(records.began) == 4)
    assert records.began[3] == (0, 2)
    records.turns.release(9)
    until(lambda: all(asked.there() for asked in (*spare, *ahead)))
    records.delete()


def test_what_is_ahead_of_need_leaves_room_for_demands(tmp_path):
    records = cache(tmp_path, 4, threads=2)
    ahead = [wanted(records, e, demand=False) for e in range(4)]
    until(lambda: ahead[0].there() and ahead[1].there())
    assert [asked.there() for asked in ahead] == [True, True, False, False]
    assert least_records(2, records.spec) == records.capacity
    assert read(records, 3).there() and read(records, 2).there()
    ahead[0].release()
    until(ahead[2].there)
    records.delete()


def test_what_was_given_up_before_it_was_read_is_not_read(tmp_path):
    records = cache(tmp_path, 3)
    records.open = False
    first, second = wanted(records, 0), wanted(records, 1)
    until(lambda: len(records.began) == 1)
    second.release()
    assert records.nbytes == RECORD
    second.release()  # once more, which changes nothing
    first.release()  # it is being read, and stays
    third = wanted(records, 2)
    records.turns.release(2)
    until(third.there)
    assert records.began == [(0, 0), (0, 2)] and records.nbytes == 2 * RECORD
    records.delete()


def flip(path: str) -> None:
    times = os.stat(path)
    content = bytearray(Path(path).read_bytes())
    content[70] ^= 1
    Path(path).write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def shorten(path: str) -> None:
    os.truncate(path, 11)


@pytest.mark.parametrize(
    ("harm", "files", "message"),
    [
        (flip, {}, "0.1: the bytes do not have their checksum"),
        pytest.param(flip, {"crcs": True}, "0.1: the bytes do not have", marks=NATIVE),
        (os.unlink, {"verify": False}, "No such file or directory: .*0.1"),
        (shorten, {"verify": False}, "0.1: changed since it was opened first"),
    ],
)
def test_a_file_that_is_not_what_it_was_fails_those_who_asked(harm, files, message, tmp_path):
    records = cache(tmp_path, 2, **files)
    harm(records.files.paths[0][1])
    with pytest.raises(OSError, match=message):
        read(records, 1).pieces()
    broken, good = wanted(records, 1), read(records, 2)
    until(broken.there)
    np.testing.assert_array_equal(np.concatenate(good.pieces()), VALUES[0, 2])
    assert records.nbytes == RECORD  # nothing is kept of what failed
    broken.release()
    records.delete()
    assert records.totals().bytes_read == RECORD


def test_a_file_that_ends_while_it_is_read(tmp_path, monkeypatch):
    """It changes after the first look at it within a read."""
    records = cache(tmp_path, 2, verify=False)
    monkeypatch.setattr(RecordFiles, "_require_same", lambda *_: None)
    shorten(records.files.paths[0][0])
    with pytest.raises(OSError, match=f"0.0: ended after 11 of {RECORD} bytes"):
        read(records, 0).pieces()
    records.delete()


# ---- with the queue


def queue_of(records: CachedRecords, link: Link) -> DeviceQueue:
    return DeviceQueue([records], jax.devices()[0], put=link)


def test_a_copy_begins_when_its_record_is_read_and_lets_go_of_it_when_it_has_ended(tmp_path):
    records, link = cache(tmp_path, 1), Link()
    records.open = False
    queue = queue_of(records, link)
    first = queue.submit(transfer(0, 0, DEMAND))
    second = queue.submit(transfer(0, 1, DEMAND))
    queue.begin()
    assert link.begun == [] and queue.totals().flying == 2
    records.turns.release(2)
    marks: list[Mark] = []

    def move(pieces):
        marks.append(Mark())
        return marks[-1]

    queue.take(first, move)
    assert link.begun == ["0.0 g", "0.0 u", "0.0 d"]
    queue.begin()
    # The copy has not ended, and there is room for one.
    assert records.began == [(0, 0)]
    marks[0].there = True
    assert queue.wait(second).state == "done"
    assert records.began == [(0, 0), (0, 1)] and records.nbytes == RECORD
    queue.take(second, move)
    assert queue.totals().demand_bytes == 2 * RECORD
    queue.close()
    records.delete()


def test_a_read_that_fails_fails_its_transfer_alone(tmp_path):
    records, link = cache(tmp_path, 4), Link()
    os.unlink(records.files.paths[0][1])
    queue = queue_of(records, link)
    bad, good = (queue.submit(transfer(0, expert, DEMAND)) for expert in (1, 2))
    with pytest.raises(TransferLost, match=r"FileNotFoundError: .*0\.1"):
        queue.take(bad, lambda pieces: pytest.fail("there is nothing to move"))
    assert queue.wait(good).state == "done"
    assert queue.totals().failed == 1
    queue.close()
    records.delete()
