"""Reads of files with a deadline.

Nothing ends a read of a disk or a network file system that does not answer. So files are read in
threads of their own: a caller waits for READ_S, or until Ctrl-C, and leaves the thread behind. Such
a thread keeps the memory that it reads into.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import io
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

READ_S = 60.0
"""Seconds that a file may take to open, or for PIECE bytes of it."""
PIECE = 16 << 20


class _Thread:
    """A thread that reads one file after the other."""

    def __init__(self):
        self.asked: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="moejax-file", daemon=True).start()

    def _serve(self) -> None:
        while True:
            future, read = self.asked.get()
            settle, result = future.set_result, None
            try:
                result = read()
            except BaseException as error:
                settle, result = future.set_exception, error
            _idle.append(self)
            with contextlib.suppress(InvalidStateError):  # it was given up
                settle(result)
            del future, read, settle, result


_idle: collections.deque[_Thread] = collections.deque()
os.register_at_fork(after_in_child=_idle.clear)
_here = threading.local()


def read_within(path: str | os.PathLike[str], read: Callable[[], T], nbytes: int = 0) -> T:
    """Returns read(), which reads a file.

    - `path`: the file, for messages.
    - `nbytes`: how many bytes it reads; READ_S counts for each PIECE of them.

    Raises OSError, naming the file, if that takes too long. `read` may then still run, so it must
    not use a descriptor after the first read of it: others may have its number by then.
    """
    reads: Reads | None = getattr(_here, "reads", None)
    future: Future[T] = Future()
    if reads is not None:
        reads.add(future)
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.asked.put((future, read))
    try:
        return future.result(READ_S * (1 + nbytes // PIECE))
    except TimeoutError:
        if future.done():
            raise
        text = f"no answer within {READ_S:g} s"
        raise OSError(errno.ETIMEDOUT, text, str(path)) from None
    finally:
        if reads is not None:
            reads.waiting.discard(future)


class Reads:
    """The reads of a pool's threads, which can be given up together."""

    def __init__(self):
        self.waiting: set[Future] = set()
        self._given_up = False

    def new_pool(self, threads: int, name: str = "moejax-read") -> ThreadPoolExecutor:
        """A pool whose reads these are."""
        return ThreadPoolExecutor(threads, name, self._enter)

    def _enter(self) -> None:
        _here.reads = self

    def add(self, future: Future) -> None:
        """Notes a read that begins. Raises OSError if they were given up."""
        if self._given_up:
            raise OSError(errno.ECANCELED, "the read was given up")
        self.waiting.add(future)

    def give_up(self) -> None:
        """Ends every wait for a read, now and from now on, with an OSError."""
        self._given_up = True
        for future in tuple(self.waiting):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(OSError(errno.ECANCELED, "the read was given up"))


@contextlib.contextmanager
def reading_pool(threads: int, reads: Reads | None = None) -> Iterator[ThreadPoolExecutor]:
    """Yields a pool for reads. If the `with` ends by an exception, such as Ctrl-C, it does not wait
    for reads under way.

    - `reads`: where others can give them up.
    """
    reads = Reads() if reads is None else reads
    pool = reads.new_pool(threads)
    try:
        yield pool
    except BaseException:
        reads.give_up()
        raise
    finally:
        pool.shutdown()


def open_within(path: str | os.PathLike[str]) -> int:
    """Opens a file for reading and returns the descriptor. Raises OSError, also if that takes too
    long. A pipe is opened without waiting for a writer."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    return read_within(path, lambda: os.open(path, flags))


class BoundedFile(io.FileIO):
    """A file whose reads raise OSError if they take too long.

    - `descriptor`: of `open_within`.
    """

    def __init__(self, path: str | os.PathLike[str], descriptor: int):
        super().__init__(descriptor)
        self._path = pathlib.Path(path)

    def readinto(self, into: Any, /) -> int:
        piece = memoryview(into).cast("B")[:PIECE]
        return read_within(self._path, functools.partial(super().readinto, piece)) or 0

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        return read_within(self._path, functools.partial(super().read, size), size) or b""

    def readall(self) -> bytes:
        size = os.fstat(self.fileno()).st_size
        return read_within(self._path, super().readall, size)
