"""A store of separate pinned arrays, each of which one copy brings to the device.

jax copies only whole arrays beside compute. A program would have to cut a part out of a stacked
store, in stream order with the steps. So each matrix of an expert, or each piece of one, is an
array.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.budget import format_bytes
from host_offload.memory.device_memory import shares_memory
from host_offload.memory.store import Allocate, StoreBuilder, allocate_staging, lacks_memory
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.format import RecordFormat

log = logging.getLogger("moejax")


@dataclasses.dataclass(frozen=True)
class Given:
    """A record of pinned memory that a transfer asked for. It has the methods of cached.Asked."""

    arrays: list[jax.Array]

    def there(self) -> bool:
        return True

    def pieces(self) -> list[jax.Array]:
        return self.arrays

    def urge(self, demand: bool, priority: int) -> None:
        """Does nothing, since the record is there."""

    def wait(self) -> None:
        """Does nothing, since the record is there."""

    def release(self) -> None:
        """Does nothing, since the store keeps the record."""


class InPieces:
    """Records of uint16 that come to the device as several arrays each."""

    shape: tuple[int, ...]
    """[L, E, rows, D]."""
    edges: tuple[int, ...]
    """Rows of a record where its pieces begin, then the row where the last one ends."""

    dtype = np.dtype(np.uint16)
    ndim = 4

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each piece."""
        row = self.shape[3] * self.dtype.itemsize
        return tuple((b - a) * row for a, b in itertools.pairwise(self.edges))

    @property
    def absent(self) -> AbsentRecords:
        """The placeholder of the records in programs."""
        return AbsentRecords(self.shape, tuple(b - a for a, b in itertools.pairwise(self.edges)))


@dataclasses.dataclass(frozen=True)
class PinnedRecords(InPieces):
    """Every expert of one version in `pinned_host` memory of one device, or, as far as that does
    not hold them, in pageable memory, which copies leave at a fraction of the link's rate."""

    shape: tuple[int, ...]
    edges: tuple[int, ...]
    pieces: list[list[list[jax.Array | np.ndarray | None]]]
    """[L][E][P] uint16[edges[p + 1] − edges[p], D]; numpy arrays in pageable memory."""
    device: jax.Device

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the records take."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def of(self, layer: int, expert: int) -> list[Any]:
        """Returns an expert's pieces in the order of its rows. Raises RuntimeError once they are
        freed."""
        if not self.pieces:
            raise RuntimeError("the records have been deleted")
        found = [piece for piece in self.pieces[layer][expert] if piece is not None]
        assert len(found) == len(self.edges) - 1
        return found

    def devices(self) -> set[jax.Device]:
        """Returns the arrays' device, like jax.Array.devices."""
        return {self.device}

    def read(self, layer: int, first: int, count: int) -> np.ndarray:
        """Copies consecutive experts' records. Returns uint16[count, rows, D]."""
        experts = (self.of(layer, first + i) for i in range(count))
        return np.stack([np.concatenate([*map(np.asarray, pieces)]) for pieces in experts])

    def ask(self, layer: int, expert: int, *, demand: bool, priority: int) -> Given:
        """Returns an expert's record for a transfer."""
        return Given(self.of(layer, expert))

    def delete(self) -> None:
        """Frees the arrays at once, even if other objects refer to them. Idempotent."""
        for piece in itertools.chain.from_iterable(itertools.chain.from_iterable(self.pieces)):
            if isinstance(piece, jax.Array) and not piece.is_deleted():
                piece.delete()
        self.pieces.clear()


def view_record(
    records: jax.Array | PinnedRecords, host: jax.Device, layer: int, expert: int
) -> jax.Array:
    """Returns an expert's record uint16[rows, D] as an array of a CPU device. It is a view, which
    must not be used once the records are freed.

    - `records`: a store of one array uint16[L, E, rows, D], or of separate ones.
    - `host`: the CPU device.

    Raises ValueError for records in several pieces, and if the CPU cannot read the memory in place.
    """
    if isinstance(records, jax.Array):
        shape = records.shape[2:]
        before = (layer * records.shape[1] + expert) * shape[0] * shape[1] * 2
        first = records.unsafe_buffer_pointer() + before
    else:
        pieces = records.of(layer, expert)
        if len(pieces) != 1:
            raise ValueError(f"a record of {len(pieces)} pieces is not in one place")
        shape, first = pieces[0].shape, _address(pieces[0])
    numbers = (ctypes.c_uint16 * (shape[0] * shape[1])).from_address(first)
    found = jax.device_put(np.ctypeslib.as_array(numbers).reshape(shape), host)
    if found.unsafe_buffer_pointer() != first:
        raise ValueError("jax copies this memory to the CPU; it cannot be read in place")
    return found


def _address(array: jax.Array | np.ndarray) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


def piece_edges(
    record: RecordFormat, chunk_bytes: int | None, *, whole: bool = False
) -> tuple[int, ...]:
    """Returns the rows where the pieces of a record begin, then its end.

    Pieces of a dense record are its matrices. An encoded record is one piece, since its matrices
    end in the middle of a row.

    - `chunk_bytes`: cuts matrices further, into pieces of at most so many bytes, but at least a
      row; None: does not.
    - `whole`: makes the record one piece, so that a second processor can read it in place.
    """
    if whole or record.version != "dense":
        return (0, record.rows)
    rows = record.rows
    if chunk_bytes is not None:
        rows = max(1, chunk_bytes // (record.hidden * 2))
    begins = []
    for matrix in record.matrices:
        first, count = record.parts[matrix]
        begins += range(first, first + count, rows)
    return (*begins, record.rows)


def pin(array: np.ndarray, sharding: SingleDeviceSharding) -> jax.Array:
    """Copies an array to pinned host memory."""
    return jax.device_put(array, sharding)


class PinnedBuilder(StoreBuilder):
    """A StoreBuilder of PinnedRecords. A piece becomes a pinned array when its last row is written,
    so host memory holds the store and incomplete pieces. Once no more memory can be pinned, pieces
    stay in pageable memory.

    - `chunk_bytes`, `whole`: arguments of piece_edges.
    """

    def __init__(
        self,
        layout: RecordFormat,
        layers: int,
        experts: int,
        device: jax.Device,
        *,
        chunk_bytes: int | None = None,
        whole: bool = False,
    ):
        self._edges = piece_edges(layout, chunk_bytes, whole=whole)
        super().__init__(layout, layers, experts, device)

    def _allocate(self, device: jax.Device, memory: Allocate) -> None:
        layers, experts = self._shape[:2]
        count = len(self._edges) - 1
        self._device, self._pins = device, True
        # Held while pieces take the rest of the pool.
        self._staging = None
        if not shares_memory(device):
            self._staging = allocate_staging(self._shape, self._sharding)
        self._pieces: list[list[list[jax.Array | np.ndarray | None]]] = [
            [[None] * count for _ in range(experts)] for _ in range(layers)
        ]
        self._partial: dict[tuple[int, int, int], tuple[np.ndarray, int]] = {}
        """(rows, how many of them are missing) of incomplete pieces, by (layer, expert, piece)."""

    def _write(self, records: np.ndarray, layer: int, first_expert: int, first_row: int) -> None:
        end_row = first_row + records.shape[1]
        for expert, rows in enumerate(records, first_expert):
            for number, (begin, end) in enumerate(itertools.pairwise(self._edges)):
                first, last = max(begin, first_row), min(end, end_row)
                if first >= last:
                    continue
                key = layer, expert, number
                with self._lock:
                    if key not in self._partial:
                        empty = np.empty((end - begin, rows.shape[1]), np.uint16)
                        self._partial[key] = empty, end - begin
                    whole, missing = self._partial.pop(key)
                    whole[first - begin : last - begin] = rows[first - first_row : last - first_row]
                    missing -= last - first
                    if missing:
                        self._partial[key] = whole, missing
                if not missing:
                    self._pieces[layer][expert][number] = self._pin(whole)

    def _pin(self, rows: np.ndarray) -> jax.Array | np.ndarray:
        """Returns a copy in pinned memory, or the array itself if that is full."""
        if self._pins:
            try:
                return pin(rows, self._sharding)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not lacks_memory(error):
                    raise
                with self._lock:
                    said, self._pins = not self._pins, False
                if said:
                    return rows
                pieces = itertools.chain.from_iterable(itertools.chain.from_iterable(self._pieces))
                held = sum(piece.nbytes for piece in pieces if piece is not None)
                log.warning(
                    "%s of experts are pinned, and no more can be; the others stay in pageable "
                    "memory, from which copies are slower",
                    format_bytes(held),
                )
        return rows

    def _finished(self) -> PinnedRecords:
        self._free_staging()
        pieces, self._pieces = jax.block_until_ready(self._pieces), []
        return PinnedRecords(self._shape, self._edges, pieces, self._device)

    def _free_staging(self) -> None:
        if self._staging is not None:
            self._staging.delete()
            self._staging = None

    def close(self) -> None:
        """Frees the arrays of a store that was not finished."""
        super().close()
        self._free_staging()
        PinnedRecords(self._shape, self._edges, self._pieces, self._device).delete()
        self._pieces, self._partial = [], {}
