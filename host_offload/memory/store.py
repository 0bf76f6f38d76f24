"""The expert store: every expert of every MoE layer, as records in pinned host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.device_memory import advise, shares_memory
from host_offload.memory.record_source import RecordSource, StackedRecords
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.absent import AbsentRecords

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an array of that shape, aligned as by aligned_empty."""


@dataclasses.dataclass(frozen=True)
class StoredVersion:
    """All experts in one version.

    array: uint16[L, E, rows, D] in `pinned_host` memory of one device, L counted over MoE layers;
    AbsentRecords of records that native threads read from files; PinnedRecords
    (host_offload/queue/pinned.py) of arrays for each expert's matrices; CachedRecords
    (host_offload/queue/cached.py) of files and some such arrays; None where only facts are asked.
    layers: the MoE layers that there are, ascending, where some are missing; each of those is there
    in another version. files: where records lie that stay in files.
    """

    layout: RecordFormat
    array: Any = None
    layers: tuple[int, ...] = ()
    files: RecordSource | None = None

    @property
    def operand(self) -> jax.Array | AbsentRecords:
        """What programs take for the records."""
        held = isinstance(self.array, jax.Array | AbsentRecords)
        return self.array if held else self.array.absent

    @property
    def source(self) -> RecordSource:
        """Where native threads find the records."""
        return self.files or StackedRecords(self.layout, self.array)


@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """All experts by version, ready to be passed to jit as parameters (never to be donated)."""

    versions: dict[str, StoredVersion]

    @property
    def layouts(self) -> dict[str, RecordFormat]:
        return {version: held.layout for version, held in self.versions.items()}

    @property
    def arrays(self) -> dict[str, Any]:
        return {version: held.array for version, held in self.versions.items()}

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Of versions that lack some."""
        return {version: held.layers for version, held in self.versions.items() if held.layers}

    @property
    def files(self) -> dict[str, RecordSource]:
        return {version: held.files for version, held in self.versions.items() if held.files}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(held.array.nbytes for held in self.versions.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of records that stay in files."""
        return sum(math.prod(f.shape) * f.format.nbytes for f in self.files.values())

    def only(self, versions: Sequence[str]) -> ExpertStore:
        """The store of these versions, in this order; frees the others now, whoever else refers to
        them. Raises KeyError for a version that is not there."""
        kept = ExpertStore({version: self.versions[version] for version in versions})
        ExpertStore({v: self.versions[v] for v in self.versions if v not in versions}).delete()
        return kept

    def places(self, version: str) -> tuple[int, ...] | None:
        """Each MoE layer's index in the version's array, −1 where it lacks the layer; None: it has
        every layer, in order."""
        held = self.versions[version].layers
        if not held:
            return None
        count = 1 + max(layer for each in self.layers.values() for layer in each)
        return tuple(held.index(layer) if layer in held else -1 for layer in range(count))

    def delete(self) -> None:
        """Frees the arrays now, whoever else refers to them."""
        for held in self.versions.values():
            held.array.delete()


class StoreBuilder:
    """Fills a store piece by piece; host memory is the store and the pieces in flight.

    The array is allocated once, without passing through device memory. On the CPU, whose
    `pinned_host` memory is ordinary memory, pieces are written straight into what becomes the
    array; elsewhere each piece updates it in place (donation). Pieces may come in any order and
    from several threads, each row exactly once: `finish` raises where one is missing, because on a
    GPU fresh memory holds whatever was there before.
    """

    def __init__(
        self,
        layout: RecordFormat,
        layers: int,
        experts: int,
        device: jax.Device,
        memory: Allocate | None = None,
        filled: bool = False,
    ):
        """layers, experts: L and E. memory: where the array is, of a device that shares the host's
        (default: aligned_empty). filled: all of it is there already. Raises MemoryError if the
        device's pinned host memory cannot hold the array."""
        self.layout = layout
        self._sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._shape = (layers, experts, layout.rows, layout.hidden)
        self._memory: np.ndarray | None = None
        self._array: jax.Array | None = None
        self._open = True
        try:
            self._allocate(device, memory or aligned_empty)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and (
                "RESOURCE_EXHAUSTED" not in str(error)
            ):
                raise
            gib = layers * experts * layout.nbytes / 2**30
            raise MemoryError(
                f"cannot allocate {gib:.1f} GiB of pinned host memory for the expert store; "
                "on a GPU the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before "
                "jax starts, raises the limit of 64 GiB"
            ) from error
        self._written = np.full(self._shape[:3], filled)
        self._lock = threading.Lock()

    def _allocate(self, device: jax.Device, memory: Allocate) -> None:
        """What pieces are written to. Raises MemoryError or jax's RESOURCE_EXHAUSTED."""
        if shares_memory(device):
            self._memory = memory(self._shape, np.dtype(np.uint16))
        else:
            empty = functools.partial(jax.lax.empty, self._shape, jnp.uint16)
            allocate = jax.jit(empty, out_shardings=self._sharding)
            self._array = jax.block_until_ready(allocate())

    def put(
        self, layer: int, first_expert: int, records: np.ndarray | jax.Array, first_row: int = 0
    ) -> None:
        """Writes a piece: rows first_row … first_row + r − 1 of n consecutive experts.

        layer: counted over MoE layers. records: uint16[n, r, D], r = rows for whole records; a GPU
        writes those that it has itself. Each new shape of records may compile once. Raises
        ValueError for a piece that lies outside of the store, overlaps rows already written, or
        comes after finish.
        """
        hidden = self._shape[3]
        if records.dtype != np.uint16 or records.ndim != 3 or records.shape[2] != hidden:
            raise ValueError(
                f"records must be uint16[n, r, {hidden}], not {records.dtype}{list(records.shape)}"
            )
        n, r = records.shape[:2]
        if self._memory is None and isinstance(records, jax.Array):
            self._claim(layer, first_expert, n, first_row, r)
            self._write(records, layer, first_expert, first_row)
            return
        with self.piece(layer, first_expert, n, first_row, r) as rows:
            rows[:] = records

    @contextlib.contextmanager
    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> Iterator[np.ndarray]:
        """uint16[experts, rows, D] to be filled inside of the `with`, and written then: the store's
        own memory where that can be. The arguments and errors are put's. Where the block raises,
        the rows stay missing.
        """
        region = self._claim(layer, first_expert, experts, first_row, rows)
        try:
            if self._memory is not None:
                yield self._memory[region]
            else:
                records = np.empty((experts, rows, self._shape[3]), np.uint16)
                yield records
                self._write(records, layer, first_expert, first_row)
        except BaseException:
            self._written[region] = False
            raise

    def _write(
        self, records: np.ndarray | jax.Array, layer: int, first_expert: int, first_row: int
    ) -> None:
        """Puts a piece where it belongs."""
        with self._lock:
            self._array = _updater(self._sharding)(
                self._array, records[None], layer, first_expert, first_row
            )

    def _claim(self, layer: int, first_expert: int, n: int, first_row: int, r: int):
        """The index of a piece, now marked as written."""
        with self._lock:
            if not self._open:
                raise ValueError("the store is finished; build another one")
            layers, experts, rows, _ = self._shape
            named = f"layer {layer}, experts {first_expert}+{n}, rows {first_row}+{r}"
            # Checked here because XLA clamps an update that lies outside instead of refusing it.
            if not (
                0 <= layer < layers
                and 0 <= first_expert <= experts - n
                and 0 <= first_row <= rows - r
            ):
                raise ValueError(f"{named} lie outside of the store [{layers}, {experts}, {rows}]")
            region = np.s_[layer, first_expert : first_expert + n, first_row : first_row + r]
            if self._written[region].any():
                raise ValueError(f"{named}: written twice")
            self._written[region] = True
            return region

    def finish(self) -> ExpertStore:
        """The filled store; the builder is used up. Raises ValueError if a row is missing."""
        if not self._open:
            raise ValueError("the store is finished; build another one")
        missing = np.argwhere(~self._written)
        if missing.size:
            layer, expert, row = missing[0]
            raise ValueError(
                f"{len(missing)} rows were never written, "
                f"first: layer {layer}, expert {expert}, row {row}"
            )
        self._open = False
        records = self._finished()
        return ExpertStore({self.layout.version: StoredVersion(self.layout, records)})

    def _finished(self) -> Any:
        """The records, all written."""
        if self._memory is not None:
            self._array = jax.device_put(self._memory, self._sharding, may_alias=True)
        array, self._array, self._memory = jax.block_until_ready(self._array), None, None
        return array

    def close(self) -> None:
        """Frees the array of a store that was not finished."""
        self._open, self._memory = False, None
        if self._array is not None:
            self._array.delete()
            self._array = None


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """np.empty, aligned so that jax on the CPU takes it without a copy, of pages as
    host_offload.memory.device_memory asks for. Raises MemoryError."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    except ValueError as error:  # more than an address can say
        raise MemoryError(str(error)) from error
    advise(memory.ctypes.data, memory.nbytes)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


_ALIGNMENT = 64
"""Bytes; what XLA asks of a CPU buffer."""


def update(store: jax.Array, records: jax.Array, *place: jax.Array | int) -> jax.Array:
    """store with records[1, n, r, D] written at a layer, expert and row; in place if donated."""
    # Not Space.Host: on CPU a pinned_host array is typed as device memory while tracing.
    records = jax.device_put(records, jax.typeof(store).memory_space)
    start = [jnp.asarray(i, jnp.int32) for i in (*place, 0)]
    return jax.lax.dynamic_update_slice(store, records, start)


@functools.cache
def _updater(sharding: SingleDeviceSharding):
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def copy_transposed(out: np.ndarray, matrix: np.ndarray) -> None:
    """out[:] = matrix.T for unsigned[N, M] and unsigned[M, N], in tiles that suit the caches: four
    times as fast as numpy's own, whose inner loop strides over whole rows."""
    rows, columns = matrix.shape
    inner, outer = math.gcd(rows, 16), math.gcd(columns, 32)
    # A ufunc, since an assignment would put the axes in an order of its own.
    np.positive(
        matrix.reshape(rows // inner, inner, columns // outer, outer).transpose(2, 0, 3, 1),
        out=out.reshape(columns // outer, outer, rows // inner, inner).transpose(0, 2, 1, 3),
        order="C",
    )
