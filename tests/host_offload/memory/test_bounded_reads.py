"""Reads that take too long are errors that name the file, and nothing waits for them."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from host_offload.memory import bounded_reads
from host_offload.memory.bounded_reads import BoundedFile, open_within, read_within, reading_pool


@pytest.fixture
def never():
    """A function that returns once the test has ended."""
    ended = threading.Event()
    yield ended.wait
    ended.set()


def test_a_read_has_a_deadline_and_its_own_errors(never, monkeypatch, tmp_path):
    assert read_within("a", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        read_within("a", lambda: 1 // 0)
    monkeypatch.setattr(bounded_reads, "READ_S", 0.05)
    with pytest.raises(OSError, match=r"no answer within 0\.05 s: 'some/file'"):
        read_within("some/file", never)
    monkeypatch.setattr(os, "open", lambda *_: never())
    with pytest.raises(OSError, match="no answer"):
        open_within(tmp_path / "file")
    assert read_within("a", lambda: 4) == 4


def test_a_file_has_its_bytes(tmp_path, monkeypatch):
    path, content = tmp_path / "file", bytes(range(256))
    path.write_bytes(content)
    monkeypatch.setattr(bounded_reads, "PIECE", 100)
    with BoundedFile(path, open_within(path)) as file:
        assert (file.read(3), file.read()) == (content[:3], content[3:])
        file.seek(10)
        into = bytearray(150)
        assert (file.readinto(into), file.readinto(into)) == (100, 100)
        assert into[:100] == content[110:210]


def test_a_pool_that_ends_by_an_error_waits_for_no_read(never):
    futures, began = [], time.monotonic()

    def fail():
        with reading_pool(2) as pool:
            futures.extend(pool.submit(read_within, "a", never) for _ in range(5))
            time.sleep(0.1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert time.monotonic() - began < 5
    assert all("given up" in str(future.exception()) for future in futures)


def test_ctrl_c_ends_a_wait_for_a_read(never):
    def interrupt():
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                read_within("a", never)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 2
