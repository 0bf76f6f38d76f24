"""Where the records of experts lie, how one is read from there, and what native threads know of it.

An expert's key is (layer, expert), layers counted over the MoE layers that the version has.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from host_offload.memory.device_memory import shares_memory
from pallas_kernels.cpu.checksums import KINDS, checksum
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.cpu.sources import MEMORY, NOWHERE, SOURCE, Sources
from pallas_kernels.records.format import RecordFormat


class RecordSource(Protocol):
    """The records of one version, wherever their bytes lie."""

    @property
    def format(self) -> RecordFormat: ...

    @property
    def shape(self) -> tuple[int, int]:
        """(L, E)."""
        ...

    @property
    def verify(self) -> bool:
        """Whether what is read is compared with a checksum."""
        ...

    @property
    def first_file(self) -> str:
        """The path of a file with a record; empty: they are in memory."""
        ...

    @property
    def turned(self) -> tuple[int, int]:
        """How the record's last part lies in the file, see Sources."""
        ...

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        """Fills `record`, a contiguous uint16[rows, D]. From any thread. Raises OSError, naming the
        file, where the bytes cannot be read or are others than they were."""
        ...

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        """Whether `record`, a contiguous uint16[rows, D], has the expert's bytes."""
        ...

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        """SOURCE[L, E]: where native threads find each record. number_file: of a file's path
        (NativeQueue.file_number), which looks at the file."""
        ...


@dataclasses.dataclass(frozen=True)
class StackedRecords:
    """Records in one array uint16[L, E, rows, D] of memory that this process addresses: its own, or
    what processes share."""

    format: RecordFormat
    array: jax.Array

    verify, first_file, turned = False, "", (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        record[:] = read_records(self.array, layer, expert, 1)[0]

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        return np.array_equal(read_records(self.array, layer, expert, 1)[0], record)

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        table = np.zeros(self.shape, SOURCE)
        numbers = np.arange(table.size).reshape(self.shape)
        first = self.array.unsafe_buffer_pointer() + numbers * self.format.nbytes
        table["place"], table["file"] = place_parts(first, self.format), MEMORY
        return table


@dataclasses.dataclass(frozen=True)
class RecordFiles:
    """Records each of which is a whole file, that must stay what it is when it is first looked at:
    device, inode, size and time are compared at every read."""

    format: RecordFormat
    paths: tuple[tuple[str, ...], ...]
    """[L][E]."""
    checksums: np.ndarray
    """uint64[L, E]: SHA-256's first 64 bits."""
    crcs: np.ndarray | None = None
    """uint64[L, E]: CRC-32C; None where the checkpoint has not all of them."""
    verify: bool = True
    """By CRC-32C where it is known and there is a library to compute it: a fifth of the work."""
    identities: dict[str, tuple[int, ...]] = dataclasses.field(init=False, repr=False)
    """What the files are at the first look, now. Raises OSError for one that is not there."""

    def __post_init__(self):
        found = {path: _identity(os.stat(path)) for layer in self.paths for path in layer}
        object.__setattr__(self, "identities", found)

    @property
    def shape(self) -> tuple[int, int]:
        return self.checksums.shape[0], self.checksums.shape[1]

    turned = 0, 0

    @property
    def first_file(self) -> str:
        return self.paths[0][0]

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        path, into, there = self.paths[layer][expert], record.data.cast("B"), 0
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            self._require_same(path, file.fileno())
            while there < len(into) and (count := file.readinto(into[there:])):
                there += count
            self._require_same(path, file.fileno())
        if there < len(into):
            raise OSError(f"{path}: ended after {there} of {len(into)} bytes")
        if not self.verify:
            return
        if self.crcs is None or why_not_cpu() is not None:
            same = self.holds(layer, expert, record)
        else:
            same = int(checksum("crc32c", into), 16) == int(self.crcs[layer, expert])
        if not same:
            raise OSError(f"{path}: the bytes do not have their checksum")

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        digest = hashlib.sha256(record.data).digest()[:8]
        return int.from_bytes(digest, "big") == int(self.checksums[layer, expert])

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        table = np.zeros(self.shape, SOURCE)
        files = [[number_file(path) for path in layer] for layer in self.paths]
        table["file"] = np.array(files)[..., None]
        table["place"] = place_parts(np.zeros(self.shape, np.int64), self.format)
        if self.verify and self.crcs is not None:
            table["checksum"], table["check"] = self.crcs, KINDS["crc32c"]
        elif self.verify:
            table["checksum"], table["check"] = self.checksums, KINDS["sha256"]
        return table

    def _require_same(self, path: str, descriptor: int) -> None:
        if _identity(os.fstat(descriptor)) != self.identities[path]:
            raise OSError(f"{path}: changed since it was opened first")


def read_records(array: Any, layer: int, first: int, count: int) -> np.ndarray:
    """uint16[count, rows, D]: records of experts first … first + count − 1, from pinned memory.

    array: uint16[L, E, rows, D], or PinnedRecords of that shape. On the CPU a view; elsewhere
    through the device's memory, which needs room for them.
    """
    if not isinstance(array, jax.Array):
        return array.read(layer, first, count)
    if shares_memory(next(iter(array.devices()))):
        return np.asarray(array)[layer, first : first + count]
    return np.asarray(_reader(count)(array, layer, first))


@functools.cache
def _reader(count: int):
    def read(array: jax.Array, layer: jax.Array, first: jax.Array) -> jax.Array:
        found = jax.lax.dynamic_slice(array, (layer, first, 0, 0), (1, count, *array.shape[2:]))
        return jax.device_put(found, jax.memory.Space.Device)[0]

    return jax.jit(read)


def _open_at_once(path: str, flags: int) -> int:
    """A pipe in the file's place would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def locate_records(
    sources: Sequence[RecordSource],
    places: Sequence[Sequence[int] | None],
    layers: int,
    number_file: Callable[[str], int],
) -> Sources:
    """What native threads know of all versions. places: ExpertStore.places of each version.
    layers: of the model. Raises what number_file does."""
    table = np.zeros((len(sources), layers, sources[0].shape[1]), SOURCE)
    table["file"] = NOWHERE
    for mine, source, of_layers in zip(table, sources, places, strict=True):
        located = source.locate(number_file)
        for layer, place in enumerate(range(layers) if of_layers is None else of_layers):
            if place >= 0:
                mine[layer] = located[place]
    parts = tuple(source.format.waited for source in sources)
    return Sources(table, parts, tuple(source.turned for source in sources))


def place_parts(first: np.ndarray, record: RecordFormat) -> np.ndarray:
    """int64[L, E, 3]: where the parts of records in one piece begin. first: int64[L, E], the
    first part's."""
    begins = [0, *np.cumsum(record.waited)[:-1].tolist()]
    return first[..., None] + np.array([*begins, 0, 0][:3], np.int64)
