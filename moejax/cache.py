"""The cache on disk: compiled executables, checked kernels and measured costs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import jax
from jax._src import compilation_cache  # jax has no public way to check entries
from jax._src.compilation_cache_interface import CacheInterface

from moejax.errors import UserError


def cache_root() -> Path:
    """The directory of moejax's cache: $XDG_CACHE_HOME/moejax or ~/.cache/moejax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"


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
    with contextlib.suppress(OSError):  # a home that cannot be written has no cache
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        require_own(directory.parent, mend=True)
        require_own(directory)
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


def require_own(directory: Path, *, mend: bool = False) -> None:
    """Raises UserError unless this user alone may write into the directory.

    - `mend`: takes the right to write from other users, if the directory is this user's.
    """
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise UserError(
            f"{directory} holds compiled code and belongs to another user; name another directory "
            "in XDG_CACHE_HOME"
        )
    if mend:
        directory.chmod(status.st_mode & ~0o022 & 0o7777)
    elif status.st_mode & 0o022:
        raise UserError(
            f"{directory} holds compiled code and others may write into it; chmod go-w {directory}"
        )


_DIGEST_BYTES = hashlib.sha256().digest_size


class CheckedCache(CacheInterface):
    """jax's cache of executables, with a digest of key and content at the end of each entry. An
    entry that is damaged or has another entry's key is removed, and jax compiles it again."""

    def __init__(self, cache: CacheInterface):
        self._cache, self._path = cache, cache._path

    def get(self, key: str) -> bytes | None:
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
        self._cache.put(key, value + _digest(key, value))


def _digest(key: str, content: bytes) -> bytes:
    found = hashlib.sha256(key.encode())
    found.update(content)
    return found.digest()
