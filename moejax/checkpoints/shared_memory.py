"""Memory that processes of one machine share, so that the experts of a checkpoint are held once.

The first process makes files in SHM, which is memory, and fills them. The other processes map the
files for reading and load nothing. The files lie in a directory whose name is a digest of their
content.

Each process holds a lock on a file there while it uses the memory; the kernel releases the lock
however the process ends. A process that closes the memory removes the directory if no other process
holds the lock. A process that opens shared memory removes the unused directories of killed
processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from host_offload.memory.budget import format_bytes
from moejax.errors import UserError

SHM = Path("/dev/shm")

_LOCK, _COMPLETE = "lock", "complete"


class NoSharedMemory(UserError):
    """This machine has no shared memory, or not enough."""


class SharedMemory:
    """Arrays in shared memory, from `open_shared`. All processes make them in the same order.

    filled: another process has filled the arrays, and they are read-only. Otherwise this process
    fills them and then calls `complete`.
    """

    def __init__(self, directory: Path, lock: int, filled: bool):
        self.filled = filled
        self._directory = directory
        self._lock: int | None = lock
        """The descriptor of the lock's file; None once closed."""
        self._count = 0
        self._filling: list[np.ndarray] = []
        """The arrays that this process fills."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The next array, aligned to pages, and read-only where another process has filled it.

        Raises NoSharedMemory where there is no room for the array or a program has changed it, and
        RuntimeError where the process that filled it made it in another size.
        """
        path, nbytes = self._directory / f"{self._count}", math.prod(shape) * dtype.itemsize
        self._count += 1
        if not self.filled:  # a killed process may have left a read-only file
            path.unlink(missing_ok=True)
        with path.open("rb" if self.filled else "w+b") as file:
            if self.filled and os.fstat(file.fileno()).st_size != nbytes:
                raise RuntimeError(f"{path} does not have the expected {nbytes} bytes")
            if not self.filled:
                try:
                    # All pages are allocated now: one that is missing later ends the process.
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                except OSError as error:
                    free = shutil.disk_usage(self._directory).free
                    raise NoSharedMemory(
                        f"store='shared' needs {format_bytes(nbytes)} in {SHM}, of which "
                        f"{format_bytes(free)} are free ({error.strerror}); make it larger (mount "
                        "-o remount,size=…; docker: --shm-size), or use store='memory'"
                    ) from error
            access = mmap.ACCESS_READ if self.filled else mmap.ACCESS_WRITE
            memory = mmap.mmap(file.fileno(), nbytes, access=access)
        found = np.frombuffer(memory, dtype).reshape(shape)
        if not self.filled:
            self._filling.append(found)
        elif _digest(found) != self._digests()[self._count - 1]:
            raise NoSharedMemory(
                f"{path} is not what it was filled with: a program changed it; end the processes "
                "that use it, which removes it, or use store='memory'"
            )
        return found

    def complete(self) -> None:
        """Makes the filled arrays read-only and lets other processes use them. Does nothing where
        another process has filled them."""
        if not self.filled:
            assert self._lock is not None
            digests = [_digest(array) for array in self._filling]
            for number, array in enumerate(self._filling):
                (self._directory / f"{number}").chmod(0o400)
                _protect(array)
            self._filling.clear()
            written = self._directory / f"{_COMPLETE}.new"
            written.write_text(json.dumps(digests))
            written.replace(self._directory / _COMPLETE)
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _digests(self) -> list[str]:
        return json.loads((self._directory / _COMPLETE).read_text())

    def close(self) -> None:
        """Ends the use of the memory, and removes it if no other process uses it. Arrays that are
        already mapped stay valid. May be called twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            # The own lock is released first, so that of several processes that close at once the
            # last one finds the memory unused.
            os.close(lock)
            _remove_unused(self._directory)


def open_shared(content: object) -> SharedMemory:
    """Opens the shared memory of this content. Waits while another process fills it.

    - `content`: plain data for JSON that has everything the bytes depend on.

    Raises NoSharedMemory where this machine has no shared memory or none can be made.
    """
    if not SHM.is_dir():
        raise NoSharedMemory(f"store='shared' needs {SHM}, which is Linux's; use store='memory'")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    prefix = f"moejax-{os.getuid()}-"
    directory = SHM / f"{prefix}{digest}"
    for other in SHM.glob(f"{prefix}*"):  # killed processes may have left unused directories
        if other != directory and other.stat().st_uid == os.getuid():
            _remove_unused(other)
    while True:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                raise NoSharedMemory(
                    f"{directory} is another user's; remove it, or use store='memory'"
                )
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed in between
            continue
        except OSError as error:
            raise NoSharedMemory(f"{directory} cannot be made ({error.strerror})") from error
        if memory := _enter(directory, lock):
            return memory
        os.close(lock)


def _enter(directory: Path, lock: int) -> SharedMemory | None:
    """Waits for the lock. Returns the memory, or None if the directory was removed meanwhile."""
    for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        fcntl.flock(lock, kind)
        try:
            if not os.path.samestat(os.stat(directory / _LOCK), os.fstat(lock)):
                return None
        except FileNotFoundError:
            return None
        if (directory / _COMPLETE).exists():
            fcntl.flock(lock, fcntl.LOCK_SH)
            return SharedMemory(directory, lock, True)
    # A process that was killed while it filled the memory may have left files: overwrite them.
    return SharedMemory(directory, lock, False)


def content_of(directory: Path, files: Iterable[Path]) -> list[object]:
    """Data for `open_shared` that changes when one of these files does: names, inodes, sizes, and
    times of writing and change."""
    found: list[object] = [str(directory.resolve())]
    for path in sorted(files):
        stat = path.stat()
        # A program can set back the time of writing, but not the time of change.
        times = stat.st_mtime_ns, stat.st_ctime_ns
        found.append([str(path), stat.st_ino, stat.st_size, *times])
    return found


_PIECE = 1 << 24


def _digest(array: np.ndarray) -> str:
    """A digest of an array's bytes, which several threads compute, since an expert store has
    gigabytes."""
    data = array.reshape(-1).view(np.uint8)
    pieces = [data[first : first + _PIECE] for first in range(0, data.size, _PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as pool:
        found = pool.map(zlib.crc32, pieces)
        return hashlib.sha256(repr([*found]).encode()).hexdigest()


def _protect(array: np.ndarray) -> None:
    """Makes an array's pages read-only, so that a process which writes into them ends with a
    signal. Raises NoSharedMemory where that fails."""
    if array.nbytes and ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), _PROT_READ
    ):
        raise NoSharedMemory(f"{SHM} cannot be made read-only")


_PROT_READ = 1


def _remove_unused(directory: Path) -> None:
    """Removes a directory that no process uses."""
    with contextlib.suppress(OSError), (directory / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have made the directory anew since the lock was opened; keep it then.
        if os.path.samestat(os.stat(directory / _LOCK), os.fstat(lock.fileno())):
            shutil.rmtree(directory, ignore_errors=True)
