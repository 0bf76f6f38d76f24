"""Where moejax keeps what it can make again: executables, checked kernels, measured costs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

from moejax.errors import UserError


def cache_root() -> Path:
    """Where moejax keeps what it can make again: $XDG_CACHE_HOME/moejax or ~/.cache/moejax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"


def write_whole(path: Path, text: str) -> None:
    """Writes the file whole or not at all, its directory too. Raises UserError where that is not
    possible."""
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
    """Keeps compiled executables on disk, so that the second start is quick: where jax's own
    setting says (JAX_COMPILATION_CACHE_DIR), else in the cache directory."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
