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
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from moejax.cache import (
    IMPORTED_AT,
    own_directory,
    read_checked,
    uses_own_cache,
    write_checked,
)
from moejax.device import THREADS

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
            _versions(),
            str(tree),
            *map(_describe, leaves),
            device.client.platform_version,
        ]
        self._made_from = pickle.dumps((spec, made_from))

    @classmethod
    def of(cls, spec: Any, arrays: Any, device: jax.Device) -> KeptPrograms | None:
        """Returns the programs in moejax's cache; None on another device than a CPU, and where jax
        does not use moejax's cache, the code on disk may not be what runs, or the programs depend
        on what has no name."""
        if device.platform != "cpu" or not uses_own_cache() or _edited():
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
        if _edited():  # code that is imported late is then not that of the digest
            return
        with contextlib.suppress(
            ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError
        ):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            write_checked(self._path(key), content, MOST_KEPT)

    def _path(self, key: Any) -> Path:
        # A program is traced when it is first needed, and settings may have changed since.
        made_from = self._made_from + pickle.dumps((_settings(), key))
        name = hashlib.sha256(made_from).hexdigest()
        return self._directory / name


def _describe(array: Any) -> str:
    """What a program knows of an array. Raises TypeError for what is none."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"no array: {array!r}")
    sharding = getattr(array, "sharding", None)
    return f"{array.dtype}{array.shape} {getattr(array, 'weak_type', False)} {sharding}"


@functools.cache
def _versions() -> tuple[str, ...]:
    """The code that makes a program, versions, and the processor, which stay those of a process."""
    digest = hashlib.sha256()
    for path in sorted(_files()):
        digest.update(path.encode() + Path(path).read_bytes())
    return (
        digest.hexdigest(),
        sys.version,
        *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")),
        str(len(os.sched_getaffinity(0))),
        _processor(),
    )


def _settings() -> list[str]:
    """Settings of jax and XLA, which a process may change between two programs."""
    values = jax.config.values.items()
    variables = ("XLA_", "JAX_PLATFORM", THREADS)
    return [
        *(f"{k}={v}" for k, v in values if not any(part in k for part in _PLACES)),
        *(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(variables)),
    ]


def _edited() -> bool:
    """Whether code was written since this process imported moejax, which may then run other code
    than that on disk."""
    with contextlib.suppress(FileNotFoundError):
        return any(os.stat(path).st_ctime > IMPORTED_AT for path in _files())
    return True


def _files() -> list[str]:
    """The files of code of moejax and of the packages beside it."""
    root = Path(__file__).parents[2]
    return [
        os.path.join(place, name)
        for package in ("moejax", "host_offload", "pallas_kernels")
        for place, _, names in os.walk(root / package)
        for name in names
        if name.endswith((".py", ".cc", ".h", ".so"))
    ]


_OF_CODE = ("model name", "flags", "CPU ", "Features")
"""Beginnings of lines of /proc/cpuinfo, on x86 and Arm, of what compiled code depends on."""


def _processor() -> str:
    """The processor's name and instructions, which compiled code depends on."""
    lines = processor_lines()
    return "\n".join(line for line in lines if line.startswith(_OF_CODE)) if lines else "unknown"


def processor_lines() -> list[str]:
    """Lines of /proc/cpuinfo on the first processor; none where there is no such file."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return file.read(1 << 14).partition("\n\n")[0].splitlines()
    return []
