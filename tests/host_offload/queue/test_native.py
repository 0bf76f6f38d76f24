"""The queue of native threads: the same order as the one without, bytes, files, errors."""

import hashlib
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

from host_offload.memory import bounded_reads
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import DEMAND, Load, QueueError, Source, Transfer
from pallas_kernels.cpu.checksums import checksum
from pallas_kernels.cpu.library import why_not_cpu
from tests.faults import Faults, inject

pytestmark = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")
"""The library of native CPU ops is not built; .ci/run builds it and skips none of these."""

RNG = np.random.default_rng(0)
BYTES = RNG.integers(256, size=100_003, dtype=np.uint8)


def transfer(cell=0, cause="prefetch", priority=0):
    return Transfer(1, cell, 0, cell, cause, priority)


def cell(size=BYTES.size):
    return np.zeros(size, np.uint8)


def from_memory(to, parts=None, first=0, **fields):
    source = Source(address=BYTES.ctypes.data + first)
    return Load(parts or (to.size,), source, to.ctypes.data, **fields)


@pytest.fixture
def queue():
    with NativeQueue(chunk_bytes=4096) as queue:
        yield queue


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(BYTES.tobytes())
    return path


def from_file(path, to, first=0, parts=None, checksum=""):
    source = Source(path=str(path), offset=first, checksum=checksum)
    return Load(parts or (to.size,), source, to.ctypes.data)


# ---- bytes


@pytest.mark.parametrize("size", [(256 << 10) - 1, (256 << 10) + 64 * 4 + 3, 1_048_575])
@pytest.mark.parametrize(("to_shift", "from_shift"), [(0, 0), (16, 33), (63, 7)])
def test_a_large_copy_wherever_it_lies_writes_its_bytes_alone(size, to_shift, from_shift):
    source = RNG.integers(256, size=(1 << 20) + 64, dtype=np.uint8)
    to = np.full((1 << 20) + 256, 7, np.uint8)
    first = -to.ctypes.data % 64 + 64 + to_shift
    came = source.ctypes.data + from_shift
    with NativeQueue(chunk_bytes=1 << 20) as queue:
        load = Load((size,), Source(address=came), to.ctypes.data + first)
        assert queue.wait(queue.submit(transfer(), load)).state == "done"
    np.testing.assert_array_equal(to[first : first + size], source[from_shift : from_shift + size])
    assert (to[:first] == 7).all() and (to[first + size :] == 7).all()


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("first", [0, 4096, 5000])
def test_bytes_of_a_file_wherever_they_lie(path, threads, direct, first):
    """Places in the file and in memory that agree in blocks, and that do not."""
    memory = np.zeros(BYTES.size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    with NativeQueue(threads=threads, chunk_bytes=9000, direct=direct) as queue:
        for shift in (0, first % 4096, 64):
            to = memory[start + shift : start + shift + 50_001]
            to[:] = 0
            settled = queue.wait(queue.submit(transfer(), from_file(path, to, first)))
            assert settled and settled.state == "done", settled
            np.testing.assert_array_equal(to, BYTES[first : first + to.size])
        tail = memory[start : start + 777]
        queue.wait(queue.submit(transfer(), from_file(path, tail, BYTES.size - 777)))
        np.testing.assert_array_equal(tail, BYTES[-777:])
        queue.reads_past_the_cache(path)


def test_a_part_is_waited_for_and_the_entry_flips_at_the_end(queue):
    to, entry = cell(), np.zeros(1, np.int32)
    load = from_memory(to, (40_000, 40_000, 20_003), entry=entry.ctypes.data, value=7)
    ticket = queue.submit(transfer(), load)
    queue.wait(ticket, 0)
    np.testing.assert_array_equal(to[:40_000], BYTES[:40_000])
    settled = queue.wait(ticket)
    assert settled and settled.state == "done"
    assert entry[0] == 7
    np.testing.assert_array_equal(to, BYTES)


@pytest.mark.parametrize("threads", [1, 3])
def test_three_parts_of_an_expert_pass_at_once(threads):
    """PreScope's three sub-transfers: a chunk as large as the largest part, and a thread for each.
    With one thread they pass one after the other."""
    to, parts = cell(), (40_000, 40_000, 20_003)
    with NativeQueue(threads=threads, chunk_bytes=max(parts)) as queue:
        inject(queue, Faults(seed=3, delay=0.03))
        queue.record()
        for _ in range(4):
            queue.wait(queue.submit(transfer(), from_memory(to, parts)))
            np.testing.assert_array_equal(to, BYTES)
            to[:] = 0
        at_once = 0
        for _, spans in itertools.groupby(queue.spans(), lambda span: span.ticket):
            three = [*spans]
            assert sorted(span.first for span in three) == [0, 40_000, 80_000]
            at_once += max(s.begin for s in three) < min(s.end for s in three)
    assert at_once >= 2 if threads == 3 else at_once == 0


def test_parts_that_are_not_there(queue):
    to = cell()
    with NativeQueue(threads=0) as still:
        ticket = still.submit(transfer(), from_memory(to))
        with pytest.raises(QueueError, match="there is no part -1"):
            still.wait(ticket, -1)
        with pytest.raises(QueueError, match="has no part 1"):
            still.wait(ticket, 1)
        with pytest.raises(QueueError, match="cell 0 has no part 1"):
            still.wait_cell(0, 1)
    with pytest.raises(QueueError, match="no ticket 5, or its end"):
        queue.wait(5)


def test_what_an_op_waits_for_is_a_demand():
    to = [cell(5000) for _ in range(3)]
    with NativeQueue(threads=0, chunk_bytes=5000) as queue:
        queue.record()
        for number, memory in enumerate(to):
            queue.submit(transfer(number, priority=number), from_memory(memory))
        assert queue.wait_cell(2) == "done"
        assert [s.transfer.cause for s in queue.observe().settled] == [DEMAND]
        assert [span.ticket for span in queue.spans()] == [3]
        queue.keep_settled(False)
        assert queue.wait_cell(1) == "done" and not queue.observe().settled


def test_a_queue_may_be_closed_under_those_who_wait():
    to, ends = cell(), []
    queue = NativeQueue(chunk_bytes=4096, rate=5e5)
    first = queue.submit(transfer(0), from_memory(to, (4096, len(BYTES) - 4096)))
    last = queue.submit(transfer(1), from_memory(cell()))
    queue.wait(first, 0)  # it has begun: what has not is cancelled

    def wait():
        try:
            ends.append(queue.wait(last))
        except QueueError as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    queue.close()
    thread.join(10)
    assert len(ends) == 1
    np.testing.assert_array_equal(to, BYTES)


# ---- checksums


def test_checksums_are_those_of_the_standards():
    for size in (0, 1, 55, 56, 63, 64, 119, 120, 4097, BYTES.size):
        data = BYTES[:size].tobytes()
        assert checksum("sha256", data) == hashlib.sha256(data).hexdigest()[:16]
    assert checksum("crc32c", b"123456789") == "e3069283"
    crc = 0xFFFFFFFF
    for byte in data[:200]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    assert checksum("crc32c", data[:200]) == f"{crc ^ 0xFFFFFFFF:08x}"


@pytest.mark.parametrize("kind", ["sha256", "crc32c"])
def test_a_flipped_bit_is_found(path, kind):
    right, to = checksum(kind, BYTES.tobytes()), cell()
    with NativeQueue(threads=3, chunk_bytes=3000) as queue:
        settled = queue.wait(queue.submit(transfer(), from_file(path, to, checksum=right)))
        assert settled and settled.state == "done"
    data = bytearray(BYTES.tobytes())
    data[70_000] ^= 4
    path.write_bytes(data)
    with NativeQueue(threads=3, chunk_bytes=3000) as queue:
        settled = queue.wait(queue.submit(transfer(), from_file(path, to, checksum=right)))
        assert settled and settled.state == "failed"
        assert settled.message == f"{path}: the bytes do not have their checksum"
        assert queue.wait_cell(0) == "failed"


@pytest.mark.parametrize("text", ["abc", "x" * 16, "0x345678"])
def test_refuses_what_is_no_checksum(queue, text):
    load = Load((1,), Source(address=BYTES.ctypes.data, checksum=text), cell().ctypes.data)
    with pytest.raises(QueueError, match="is not 16 hex digits of SHA-256 or 8 of CRC-32C"):
        queue.submit(transfer(), load)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_leaves_the_queue_to_its_parent(queue, path):
    """Its threads are not in the child, which would wait for them."""
    assert queue.wait(queue.submit(transfer(), from_file(path, cell()))).state == "done"
    if (child := os.fork()) == 0:
        queue.close()
        os._exit(5)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 5
    assert queue.wait(queue.submit(transfer(), from_file(path, cell()))).state == "done"


# ---- files that do not stay


def test_a_file_that_changes_or_vanishes_fails_its_transfers_alone(queue, path, tmp_path):
    to, other = cell(), tmp_path / "other.bin"
    other.write_bytes(BYTES.tobytes())

    def read(file):
        settled = queue.wait(queue.submit(transfer(), from_file(file, to)))
        assert settled
        return settled

    assert (read(path).state, read(other).state) == ("done", "done")
    path.write_bytes(BYTES.tobytes())  # the same bytes, at another time
    assert read(path).message == f"{path}: changed since it was opened first"
    path.unlink()
    os.mkfifo(path)  # nobody writes into it
    assert read(path).message == f"{path}: changed since it was opened first"
    path.unlink()
    assert read(path).message == f"{path}: No such file or directory"
    assert read(other).state == "done"


def shorten(path):
    os.truncate(path, 34_567)


def rewrite(path):
    with open(path, "r+b") as file:
        file.write(b"other")
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorten, "a short read: it ends at byte 34567, 40000 are needed"),
        (rewrite, "changed while it was read"),
    ],
)
def test_a_file_that_changes_under_a_read(path, change, message):
    to = cell()
    with NativeQueue(threads=0, chunk_bytes=10_000) as queue:
        ticket = queue.submit(transfer(), from_file(path, to))
        queue.step()
        change(path)
        settled = queue.wait(ticket)
    assert settled and (settled.state, settled.message) == ("failed", f"{path}: {message}")


HANGING = [np.zeros(BYTES.size, np.uint8) for _ in range(3)]
"""Memory that reads may write into after their test."""


def test_a_read_without_an_answer_fails_what_waits_and_keeps_its_cell(path, monkeypatch):
    monkeypatch.setattr(bounded_reads, "READ_S", 0.2)
    with NativeQueue(threads=1, chunk_bytes=BYTES.size) as queue:
        inject(queue, Faults(seed=1, delay=3.0))
        tickets = [queue.submit(transfer(i), from_file(path, HANGING[i])) for i in range(2)]
        message = f"{path}: no answer within 0.2 s"
        for ticket in tickets:  # the second one waits for the only thread
            settled = queue.wait(ticket)
            assert settled and (settled.state, settled.message) == ("failed", message)
        assert queue.wait_cell(0) == queue.wait_cell(1) == "failed"
        with pytest.raises(QueueError, match=r"reads of 1 experts have had no answer for 0\.2 s"):
            queue.require_answers()
        with pytest.raises(QueueError, match="has a transfer under way"):
            queue.submit(transfer(0), from_file(path, HANGING[0]))
        inject(queue, Faults())
        for _ in range(1000):
            try:
                queue.require_answers()
                break
            except QueueError:
                time.sleep(0.01)
        monkeypatch.undo()
        assert queue.wait(queue.submit(transfer(0), from_file(path, HANGING[0]))).state == "done"


def test_closing_waits_for_no_read_without_an_answer(path, monkeypatch):
    monkeypatch.setattr(bounded_reads, "READ_S", 0.2)
    queue = NativeQueue(threads=1, chunk_bytes=BYTES.size)
    inject(queue, Faults(seed=1, delay=4.0))
    queue.submit(transfer(2), from_file(path, HANGING[2]))
    time.sleep(0.1)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < 2


def test_refuses_files_that_cannot_be_read(queue, path, tmp_path):
    to = cell(10)
    with pytest.raises(QueueError, match=r"missing\.bin: No such file"):
        queue.submit(transfer(), from_file(tmp_path / "missing.bin", to))
    with pytest.raises(QueueError, match=r": (not a regular file|Is a directory)"):
        queue.submit(transfer(), from_file(tmp_path, to))
    with pytest.raises(QueueError, match=r"has 100003 bytes, not 10 from 99999 on"):
        queue.submit(transfer(), from_file(path, to, 99_999))


# ---- errors


def test_a_failed_chunk_fails_one_transfer_and_its_cell(path):
    to = cell()
    with NativeQueue(chunk_bytes=1000) as queue:
        inject(queue, Faults(seed=1, errors=1.0))
        settled = queue.wait(queue.submit(transfer(3), from_file(path, to)))
        assert settled and settled.message == f"{path}: an injected error"
        assert queue.wait_cell(3) == "failed"
        inject(queue, Faults())
        queue.wait(queue.submit(transfer(3), from_file(path, to)))
        assert queue.wait_cell(3) == "done"


def test_short_reads_are_read_on(path):
    to = cell()
    with NativeQueue(chunk_bytes=20_000) as queue:
        inject(queue, Faults(seed=2, short_reads=0.7))
        settled = queue.wait(queue.submit(transfer(), from_file(path, to)))
    assert settled and settled.state == "done"
    np.testing.assert_array_equal(to, BYTES)


@pytest.mark.parametrize(
    "options", [{"threads": -1}, {"chunk_bytes": 0}, {"rate": -1.0}, {"latency": float("nan")}]
)
def test_refuses_options_that_make_no_sense(options):
    with pytest.raises(QueueError, match=r"threads, chunks of .* bytes"):
        NativeQueue(**options)


def test_close_waits_for_a_chunk_in_a_callers_hands():
    to = cell()
    queue = NativeQueue(threads=0)
    inject(queue, Faults(delay=0.5))
    queue.submit(transfer(0), from_memory(to))
    caller = threading.Thread(target=queue.step)
    caller.start()
    while not queue.observe().flying[0].begun:
        time.sleep(0.001)
    queue.close()
    np.testing.assert_array_equal(to, BYTES)
    caller.join()


def test_a_cancelled_retry_leaves_the_cell_failed(path):
    to = cell()
    with NativeQueue(threads=0) as queue:
        failed = queue.submit(transfer(3), from_file(path, to, checksum="00000000"))
        settled = queue.wait(failed)
        assert settled and settled.state == "failed"
        for _ in range(2):
            assert queue.cancel(queue.submit(transfer(3), from_memory(to)))
            assert queue.wait_cell(3) == "failed"
        queue.wait(queue.submit(transfer(3), from_memory(to)))
        assert queue.wait_cell(3) == "done"
