"""Sources of expert records in memory or files: how to read a record, and how native threads find
it.

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

from host_offload.memory.bounded_reads import read_within
from host_offload.memory.device_memory import shares_memory
from pallas_kernels.cpu.checksums import KINDS, checksum
from pallas_kernels.cpu.gguf import BLOCK_MATRIX
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.cpu.sources import MEMORY, NOWHERE, PIECES, SOURCE, Sources
from pallas_kernels.records.format import RecordFormat

NO_BLOCKS = np.zeros(PIECES, BLOCK_MATRIX)


class RecordSource(Protocol):
    """The records of one version, in memory or in files."""

    @property
    def format(self) -> RecordFormat: ...

    @property
    def shape(self) -> tuple[int, int]:
        """(L, E)."""
        ...

    @property
    def verify(self) -> bool:
        """Whether reads are compared with a checksum."""
        ...

    @property
    def first_file(self) -> str:
        """The path of a file with a record; empty: the records are in memory."""
        ...

    @property
    def turned(self) -> tuple[int, int, int]:
        """The layout of the record's last part in the file, see Sources."""
        ...

    @property
    def blocks(self) -> np.ndarray:
        """BLOCK_MATRIX[PIECES], what lies in blocks of a file, see Sources."""
        ...

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        """Fills `record`, a contiguous uint16[rows, D]. Any thread may call it. Raises OSError,
        naming the file, if the bytes cannot be read or have changed."""
        ...

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        """Whether `record`, a contiguous uint16[rows, D], has the expert's bytes."""
        ...

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        """Returns SOURCE[L, E], where native threads find each record.

        - `number_file`: numbers a file by its path (NativeQueue.file_number), and opens the file.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StackedRecords:
    """Records in one array uint16[L, E, rows, D], in memory of this process or shared memory."""

    format: RecordFormat
    array: jax.Array

    verify, first_file, turned, blocks = False, "", (0, 0, 0), NO_BLOCKS

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
    """Records that are files of their own. A file must not change: every read compares its device,
    inode, size and time with those of the first look."""

    format: RecordFormat
    paths: tuple[tuple[str, ...], ...]
    """[L][E]: path of each record."""
    checksums: np.ndarray
    """uint64[L, E]: the first 64 bits of SHA-256."""
    crcs: np.ndarray | None = None
    """uint64[L, E]: CRC-32C; None if the checkpoint lacks some."""
    verify: bool = True
    """Whether reads compare checksums: CRC-32C if the records have one and the native library is
    there, which is a fifth of SHA-256's work."""
    identities: dict[str, tuple[int, ...]] = dataclasses.field(init=False, repr=False)
    """Device, inode, size and times of each file when this was made, which raises OSError for a
    missing file."""

    def __post_init__(self):
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.paths:
            each = functools.partial(lambda layer: {p: _identity(os.stat(p)) for p in layer}, layer)
            found |= read_within(layer[0], each)
        object.__setattr__(self, "identities", found)

    @property
    def shape(self) -> tuple[int, int]:
        return self.checksums.shape[0], self.checksums.shape[1]

    turned, blocks = (0, 0, 0), NO_BLOCKS

    @property
    def first_file(self) -> str:
        return self.paths[0][0]

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        path, into = self.paths[layer][expert], record.data.cast("B")
        read_within(path, lambda: self._fill(path, into), len(into))
        if not self.verify:
            return
        if self.crcs is None or why_not_cpu() is not None:
            same = self.holds(layer, expert, record)
        else:
            same = int(checksum("crc32c", into), 16) == int(self.crcs[layer, expert])
        if not same:
            raise OSError(f"{path}: the bytes do not have their checksum")

    def _fill(self, path: str, into: memoryview) -> None:
        there = 0
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            self._require_same(path, file.fileno())
            while there < len(into) and (count := file.readinto(into[there:])):
                there += count
            self._require_same(path, file.fileno())
        if there < len(into):
            raise OSError(f"{path}: ended after {there} of {len(into)} bytes")

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
        # A checksum shows all that the time of the last change would.
        count = -1 if self.verify else None
        if _identity(os.fstat(descriptor))[:count] != self.identities[path][:count]:
            raise OSError(f"{path}: changed since it was opened first")


def read_records(array: Any, layer: int, first: int, count: int) -> np.ndarray:
    """Reads the records of experts first … first + count − 1 from pinned memory.

    - `array`: uint16[L, E, rows, D], or PinnedRecords of that shape.

    Returns uint16[count, rows, D]: a view on the CPU; elsewhere a copy through the device's memory,
    which needs room for it.
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
    """Opens a file without blocking: a pipe in its place would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, and times of the last write, which a program can set back, and of the
    last change."""
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def locate_records(
    sources: Sequence[RecordSource],
    places: Sequence[Sequence[int] | None],
    layers: int,
    number_file: Callable[[str], int],
) -> Sources:
    """Returns where native threads find the records of all versions.

    - `places`: ExpertStore.places of each version.
    - `layers`: MoE layers of the model.
    - `number_file`: see RecordSource.locate; its errors are passed on.
    """
    table = np.zeros((len(sources), layers, sources[0].shape[1]), SOURCE)
    table["file"] = NOWHERE
    for mine, source, of_layers in zip(table, sources, places, strict=True):
        located = source.locate(number_file)
        for layer, place in enumerate(range(layers) if of_layers is None else of_layers):
            if place >= 0:
                mine[layer] = located[place]
    parts = tuple(source.format.waited for source in sources)
    turned, blocks = ([getattr(each, name) for each in sources] for name in ("turned", "blocks"))
    return Sources(table, parts, tuple(turned), tuple(blocks))


def place_parts(first: np.ndarray, record: RecordFormat) -> np.ndarray:
    """Returns int64[L, E, PIECES], where the parts of contiguous records begin.

    - `first`: int64[L, E], where the first part begins.
    """
    begins = [0, *np.cumsum(record.waited)[:-1].tolist()]
    return first[..., None] + np.array([*begins, *(0,) * PIECES][:PIECES], np.int64)
