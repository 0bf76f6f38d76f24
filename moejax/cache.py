"""The cache on disk: compiled executables, checked kernels and measured costs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import jax
from jax._src import compilation_cache  # jax has no public way to check entries
from jax._src.compilation_cache_interface import CacheInterface

from moejax.errors import UserError

IMPORTED_AT = time.time()
"""When this process began to import what computes; code that was written later may not be what it
runs."""


def cache_root() -> Path:
    """The directory of moejax's cache: $XDG_CACHE_HOME/moejax or ~/.cache/moejax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"


def checked_folder() -> Path:
    """The folder of the tables of checked kernels."""
    return cache_root() / "verified"


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and makes its directory if there is none. Raises UserError
    where that fails."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def use_compilation_cache() -> None:
    """Keeps compiled executables on disk, so that the second start is quick. The directory is
    JAX_COMPILATION_CACHE_DIR if jax has that setting, else moejax's cache, where each executable
    has a digest.

    Raises UserError where other users could write into moejax's cache, since it holds code that
    runs.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_root() / "xla"
    own_directory("xla")
    plain = compilation_cache.get_file_cache

    def checked(path: str) -> tuple[CacheInterface, str] | None:
        found = plain(path)
        if found is None or path != str(directory):
            return found
        return CheckedCache(found[0]), found[1]

    compilation_cache.get_file_cache = checked
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def uses_own_cache() -> bool:
    """Whether jax keeps executables in moejax's cache, and not in a directory that the user gave,
    nor nowhere."""
    values = jax.config.values
    own = values["jax_compilation_cache_dir"] == str(cache_root() / "xla")
    return own and values["jax_enable_compilation_cache"]


def own_directory(name: str) -> Path | None:
    """Makes a directory of moejax's cache that only this user may write into. Returns None where
    the home cannot be written. Raises UserError as require_own."""
    directory = cache_root() / name
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        require_own(directory.parent, mend=True)
        require_own(directory)
    except OSError:
        return None
    return directory


def require_own(directory: Path, *, mend: bool = False) -> None:
    """Raises UserError unless this user alone may write into the directory.

    - `mend`: takes the right to write from other users, if the directory is this user's.
    """
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise UserError(
            f"{directory} is a cache of moejax and belongs to another user; name another directory "
            "in XDG_CACHE_HOME"
        )
    if mend:
        directory.chmod(status.st_mode & ~0o022 & 0o7777)
    elif status.st_mode & 0o022:
        raise UserError(
            f"{directory} is a cache of moejax and others may write into it; chmod go-w {directory}"
        )


_DIGEST_BYTES = hashlib.sha256().digest_size


_bypassed: ContextVar[bool] = ContextVar("bypassed", default=False)


@contextlib.contextmanager
def bypass_compilation_cache() -> Iterator[None]:
    """What is compiled in this block is new: on a CPU, XLA writes an executable that it has read
    without some of its functions."""
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


class CheckedCache(CacheInterface):
    """jax's cache of executables, with a digest of key and content at the end of each entry. An
    entry that is damaged or has another entry's key is removed, and jax compiles it again."""

    def __init__(self, cache: CacheInterface):
        self._cache, self._path = cache, cache._path

    def get(self, key: str) -> bytes | None:
        if _bypassed.get():
            return None
        try:
            entry = self._cache.get(key)
        except OSError:
            entry = b""
        if entry is None:
            return None
        content, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
        if digest == _digest(key, content):
            return content
        with contextlib.suppress(OSError):
            (Path(str(self._path)) / f"{key}-cache").unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        if not _bypassed.get():
            self._cache.put(key, value + _digest(key, value))


def read_checked(path: Path) -> bytes | None:
    """What write_checked wrote; None if there is no such file. A damaged file, or one of another
    name, is deleted."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    content, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if digest == _digest(path.name, content):
        return content
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return None


def write_checked(path: Path, content: bytes, most: int) -> None:
    """Writes a file whole or not at all, with a digest of its name and content at its end. Raises
    OSError where that fails.

    - `most`: files of the directory; more, and the oldest are deleted.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content + _digest(path.name, content))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for file in files[:-most]:
        file.unlink(missing_ok=True)


def _digest(key: str, content: bytes) -> bytes:
    found = hashlib.sha256(key.encode())
    found.update(content)
    return found.digest()
