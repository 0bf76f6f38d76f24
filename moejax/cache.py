"""Where moejax keeps what it can make again: executables, checked kernels, measured costs."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_root() -> Path:
    """Where moejax keeps what it can make again: $XDG_CACHE_HOME/moejax or ~/.cache/moejax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"


def use_compilation_cache(cache_dir: str | os.PathLike[str] | None) -> None:
    """Keeps compiled executables on disk, so that the second start is quick."""
    if cache_dir is None:
        if jax.config.values["jax_compilation_cache_dir"] is not None:
            return
        cache_dir = cache_root() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache_dir) or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
