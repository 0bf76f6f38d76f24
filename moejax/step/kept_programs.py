"""Compiled programs on disk, found without tracing.

jax's own cache saves XLA's work, and finds an executable only by the lowered program. Tracing and
lowering took half of a warm start on a CPU. Here a program is found by all that it is made from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from moejax.cache import own_directory, read_checked, uses_own_cache, write_checked

MOST_KEPT = 1000
"""Most programs on disk, of about 100 KB each; the oldest are deleted."""

_PLACES = ("compilation_cache", "persistent_cache")
"""Parts of the names of jax's settings that say where results are kept, not what they are."""


class KeptPrograms:
    """The compiled programs of one engine on a CPU, in moejax's cache.

    - `spec`, `arrays`: what `Programs` makes every program from: settings, and the arrays of the
      model, store, arena and tables.
    - `device`: runs them.
    """

    def __init__(self, directory: Path, spec: Any, arrays: Any, device: jax.Device):
        self._directory, self._device = directory, device
        leaves, tree = jax.tree.flatten(arrays)
        made_from = [
            _environment(),
            str(tree),
            *map(_describe, leaves),
            device.client.platform_version,
        ]
        self._made_from = pickle.dumps((spec, made_from))

    @classmethod
    def of(cls, spec: Any, arrays: Any, device: jax.Device) -> KeptPrograms | None:
        """Returns the programs in moejax's cache; None on another device than a CPU, and where jax
        does not use moejax's cache, or the programs depend on what has no name."""
        if device.platform != "cpu" or not uses_own_cache():
            return None
        if (directory := own_directory("programs")) is None:
            return None
        try:
            return cls(directory, spec, arrays, device)
        except (TypeError, AttributeError, pickle.PicklingError):
            return None

    def load(self, key: Any) -> jax.stages.Compiled | None:
        """Returns a program, or None if it is not kept or its file is damaged."""
        found = read_checked(self._path(key))
        if found is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(found),
                backend=self._device.client,
                execution_devices=[self._device],
            )
        except Exception:  # jax says by many types that it cannot read it: it is compiled again
            return None

    def keep(self, key: Any, compiled: jax.stages.Compiled) -> None:
        """Writes a program. A failure is not told: it costs only the next start's time."""
        with contextlib.suppress(
            ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError
        ):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            write_checked(self._path(key), content, MOST_KEPT)

    def _path(self, key: Any) -> Path:
        name = hashlib.sha256(self._made_from + pickle.dumps(key)).hexdigest()
        return self._directory / name


def _describe(array: Any) -> str:
    """What a program knows of an array. Raises TypeError for what is none."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"no array: {array!r}")
    sharding = getattr(array, "sharding", None)
    return f"{array.dtype}{array.shape} {getattr(array, 'weak_type', False)} {sharding}"


@functools.cache
def _environment() -> tuple[str, ...]:
    """All but the engine that decides a program: the code that makes it, versions, settings of jax
    and XLA, and the processor."""
    settings = jax.config.values.items()
    return (
        _sources(),
        sys.version,
        *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")),
        *(f"{k}={v}" for k, v in settings if not any(part in k for part in _PLACES)),
        *(f"{k}={v}" for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_PLATFORM"))),
        str(len(os.sched_getaffinity(0))),
        _processor(),
    )


def _sources() -> str:
    """A digest of the code of moejax and of the packages beside it."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("moejax", "host_offload", "pallas_kernels"):
        for path in sorted(_files(root / package)):
            digest.update(path.encode() + Path(path).read_bytes())
    return digest.hexdigest()


def _files(directory: Path) -> Sequence[str]:
    """The files of code below a directory."""
    kinds = (".py", ".cc", ".h", ".so")
    return [
        os.path.join(place, name)
        for place, _, names in os.walk(directory)
        for name in names
        if name.endswith(kinds)
    ]


def _processor() -> str:
    """The processor's name and instructions, which compiled code depends on."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = file.read(1 << 14).partition("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags")))
    return "unknown"
