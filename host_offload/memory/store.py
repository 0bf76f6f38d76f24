"""The expert store: the records of every expert of every MoE layer, in pinned host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.device_memory import advise, shares_memory
from host_offload.memory.record_source import RecordSource, StackedRecords
from pallas_kernels.cpu.arrivals import Arrivals
from pallas_kernels.cpu.transpose import transpose
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.absent import AbsentRecords


def lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed because there is not enough memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an array of that shape, aligned as by aligned_empty."""


@dataclasses.dataclass(frozen=True)
class StoredVersion:
    """All experts in one version.

    - `array`: one of these. uint16[L, E, rows, D] in `pinned_host` memory of one device, L counted
      over MoE layers. AbsentRecords, if native threads read records from files. PinnedRecords
      (host_offload/queue/pinned.py), with arrays for each expert's matrices. CachedRecords
      (host_offload/queue/cached.py), with files and some such arrays. None, if nothing is computed.
    - `layers`: MoE layers of this version, ascending, if it lacks some; another version has those.
      Empty: it has all layers.
    - `files`: source of records that stay in files.
    """

    layout: RecordFormat
    array: Any = None
    layers: tuple[int, ...] = ()
    files: RecordSource | None = None

    @property
    def operand(self) -> jax.Array | AbsentRecords:
        """The records as programs take them."""
        held = isinstance(self.array, jax.Array | AbsentRecords)
        return self.array if held else self.array.absent

    @property
    def source(self) -> RecordSource:
        """The source from which native threads read the records."""
        return self.files or StackedRecords(self.layout, self.array)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Records that are read into a store which is used meanwhile."""

    done: Future[None]
    give_up: Callable[[], None]
    """Ends reading, also from a disk that does not answer."""
    unread: Callable[[], int]
    """Returns the bytes of the store that are not there yet."""
    builders: contextlib.ExitStack
    """Frees the store when nothing refers to it any more, unless it is full."""
    thread: threading.Thread
    """Reads, and ends soon after `done`."""


@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """All experts by version. Programs take them as parameters and must never donate them.

    - `reading`: what still fills the store; None: it is full.
    """

    versions: dict[str, StoredVersion]
    reading: Reading | None = None

    @property
    def unread(self) -> int:
        """Bytes that memory does not hold yet."""
        return 0 if self.reading is None else self.reading.unread()

    def wait(self) -> None:
        """Returns when the store is full. Raises what reading raises."""
        if self.reading is not None:
            wait([self.reading.done])
            self.check()

    def check(self) -> None:
        """Raises what reading raised. Results of native ops before that are right."""
        done = None if self.reading is None else self.reading.done
        if done is not None and done.done() and (error := done.exception()) is not None:
            raise error.with_traceback(None)  # each time anew, which would add up

    def stop(self) -> None:
        """Ends reading. Ops that wait for records go on without them."""
        if self.reading is not None:
            self.reading.give_up()
            self.reading.thread.join()

    @property
    def layouts(self) -> dict[str, RecordFormat]:
        return {version: held.layout for version, held in self.versions.items()}

    @property
    def arrays(self) -> dict[str, Any]:
        return {version: held.array for version, held in self.versions.items()}

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Layers of each version that lacks some."""
        return {version: held.layers for version, held in self.versions.items() if held.layers}

    @property
    def files(self) -> dict[str, RecordSource]:
        return {version: held.files for version, held in self.versions.items() if held.files}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the records take."""
        return sum(held.array.nbytes for held in self.versions.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of records that stay in files."""
        return sum(math.prod(f.shape) * f.format.nbytes for f in self.files.values())

    def only(self, versions: Sequence[str]) -> ExpertStore:
        """Returns the store of these versions, in this order, and frees the other versions at once,
        even if other objects refer to them. Raises KeyError for an unknown version."""
        self.wait()
        kept = ExpertStore({v: self.versions[v] for v in versions}, self.reading)
        ExpertStore({v: self.versions[v] for v in self.versions if v not in versions}).delete()
        return kept

    def places(self, version: str) -> tuple[int, ...] | None:
        """Returns each MoE layer's index in the version's array, −1 for a layer that it lacks; None
        if the version has every layer, in order."""
        held = self.versions[version].layers
        if not held:
            return None
        count = 1 + max(layer for each in self.layers.values() for layer in each)
        return tuple(held.index(layer) if layer in held else -1 for layer in range(count))

    def delete(self) -> None:
        """Ends reading and frees the arrays at once, even if other objects refer to them."""
        self.stop()
        if self.reading is not None:
            self.reading.builders.close()
        for held in self.versions.values():
            held.array.delete()


class StoreBuilder:
    """Fills a store piece by piece. Host memory holds the store and the pieces in flight.

    The array is allocated once, without passing through device memory. On the CPU, whose
    `pinned_host` memory is ordinary memory, pieces are written straight into the array; elsewhere
    each piece updates the array in place (donation). Pieces may come in any order and from several
    threads, but each row exactly once: `finish` raises if a row is missing, because fresh memory of
    a GPU is not zeroed.
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
        """Allocates the array. Raises MemoryError if the device's pinned host memory cannot hold
        it.

        - `layers`, `experts`: L and E.
        - `memory`: allocates the array of a device that shares the host's memory (default:
          aligned_empty).
        - `filled`: whether this memory has all records already.
        """
        self.layout = layout
        self._sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._shape = (layers, experts, layout.rows, layout.hidden)
        self._memory: np.ndarray | None = None
        self._array: jax.Array | None = None
        self._open = True
        try:
            self._allocate(device, memory or aligned_empty)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not lacks_memory(error):
                raise
            gib = layers * experts * layout.nbytes / 2**30
            raise MemoryError(
                f"cannot allocate {gib:.1f} GiB of pinned host memory for the expert store; "
                "on a GPU the driver limits it, and the environment variable "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before jax starts"
            ) from error
        self._written = np.full(self._shape[:3], filled)
        self._left = np.full(layers * experts, layout.rows)
        self.arrivals: Arrivals | None = None
        self._lock = threading.Lock()

    def _allocate(self, device: jax.Device, memory: Allocate) -> None:
        """Allocates the memory of the records. Raises MemoryError or jax's RESOURCE_EXHAUSTED."""
        if shares_memory(device):
            self._memory = memory(self._shape, np.dtype(np.uint16))
        else:
            if (staging := allocate_staging(self._shape, self._sharding)) is not None:
                staging.delete()
            self._array = allocate_pinned(self._shape, self._sharding)

    def put(
        self, layer: int, first_expert: int, records: np.ndarray | jax.Array, first_row: int = 0
    ) -> None:
        """Writes a piece: rows first_row … first_row + r − 1 of n consecutive experts.

        - `layer`: counted over MoE layers.
        - `records`: uint16[n, r, D], r = rows for whole records. A GPU copies arrays of its own
          memory itself. Each new shape may compile once.

        Raises ValueError for a piece that lies outside of the store, overlaps rows already written,
        or comes after `finish`.
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
        """Yields memory uint16[experts, rows, D] to fill, which is written at the end of the
        `with`. It is the store's own memory on a device that shares the host's. Arguments and
        errors are those of `put`. If the block raises, the rows stay missing.
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
        if self.arrivals is not None:
            first = layer * self._shape[1] + first_expert
            for number in range(first, first + experts):
                with self._lock:
                    self._left[number] -= rows
                    whole = self._left[number] == 0
                if whole:
                    self.arrivals.arrive(number)

    def ahead(self) -> jax.Array | None:
        """The array that `finish` will return, before its first piece. Only native ops may read it
        until then: they wait for each record (`arrivals`). None where these ops cannot run, or jax
        does not take the memory as it is."""
        if self._memory is None:
            return None
        address = self._memory.ctypes.data
        array = jax.device_put(self._memory, self._sharding, may_alias=True)
        if array.unsafe_buffer_pointer() != address:
            return None
        count = self._shape[0] * self._shape[1]
        self.arrivals = Arrivals.begin(address, self.layout.nbytes, count)
        if self.arrivals is None:
            return None
        self._array = array
        return array

    def _write(
        self, records: np.ndarray | jax.Array, layer: int, first_expert: int, first_row: int
    ) -> None:
        """Writes a piece to the array."""
        with self._lock:
            self._array = _updater(self._sharding)(
                self._array, records[None], layer, first_expert, first_row
            )

    def _claim(self, layer: int, first_expert: int, n: int, first_row: int, r: int):
        """Marks a piece as written. Returns its index in the array. Raises as `put` does."""
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
        """Returns the filled store and ends the builder. Raises ValueError if a row is missing."""
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
        """Returns the records once all are written."""
        if self._memory is not None and self._array is None:
            self._array = jax.device_put(self._memory, self._sharding, may_alias=True)
        array, self._array, self._memory = jax.block_until_ready(self._array), None, None
        if self.arrivals is not None:
            self.arrivals.end()
        return array

    def close(self) -> None:
        """Frees the array of a store that was not finished."""
        if self.arrivals is not None:
            self.arrivals.end()
        self._open, self._memory = False, None
        if self._array is not None:
            self._array.delete()
            self._array = None


def allocate_pinned(shape: tuple[int, ...], sharding: SingleDeviceSharding) -> jax.Array:
    """Allocates uint16 of that shape in pinned host memory, not initialised. jax's allocator asks
    the driver for the next power of two, unless its limit is below that (moejax.device)."""
    empty = functools.partial(jax.lax.empty, shape, jnp.uint16)
    return jax.block_until_ready(jax.jit(empty, out_shardings=sharding)())


def allocate_staging(shape: tuple[int, ...], sharding: SingleDeviceSharding) -> jax.Array | None:
    """Makes jax's pool of pinned memory take STAGING_BYTES, before records of that shape are asked
    for. Copies of pageable arrays go through the pool, and a pool that was refused a large array
    asks for nothing smaller later (`started_backpedal_` in older XLA's bfc_allocator.cc).

    Returns an array that holds these bytes; None for records that are not more, or without memory.
    """
    if 2 * math.prod(shape) <= STAGING_BYTES:
        return None
    try:
        return allocate_pinned((STAGING_BYTES // 2,), sharding)
    except jax.errors.JaxRuntimeError as error:
        if not lacks_memory(error):
            raise
        return None


STAGING_BYTES = 1 << 30
"""Bytes of pinned memory for copies of pageable arrays. jax copies larger ones without it."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates like np.empty, aligned so that jax on the CPU takes the array without a copy, and
    in huge pages if the system gives them. Raises MemoryError if there is not enough."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    except ValueError as error:  # more bytes than addresses
        raise MemoryError(str(error)) from error
    advise(memory.ctypes.data, memory.nbytes)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


_ALIGNMENT = 64
"""Alignment in bytes that XLA needs of a CPU buffer."""


def update(store: jax.Array, records: jax.Array, *place: jax.Array | int) -> jax.Array:
    """Writes records[1, n, r, D] at a layer, expert and row, in place if the store is donated.
    Returns the store."""
    # Not Space.Host: on CPU a pinned_host array is typed as device memory while tracing.
    records = jax.device_put(records, jax.typeof(store).memory_space)
    start = [jnp.asarray(i, jnp.int32) for i in (*place, 0)]
    return jax.lax.dynamic_update_slice(store, records, start)


@functools.cache
def _updater(sharding: SingleDeviceSharding):
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def copy_transposed(out: np.ndarray, matrix: np.ndarray) -> None:
    """Computes out[:] = matrix.T for unsigned[N, M] and unsigned[M, N], natively or in tiles that
    fit caches. These are four times as fast as numpy, whose inner loop strides over whole rows."""
    if transpose(out, matrix):
        return
    rows, columns = matrix.shape
    inner, outer = math.gcd(rows, 16), math.gcd(columns, 32)
    # A ufunc keeps the order of the axes, which an assignment would change.
    np.positive(
        matrix.reshape(rows // inner, inner, columns // outer, outer).transpose(2, 0, 3, 1),
        out=out.reshape(columns // outer, outer, rows // inner, inner).transpose(0, 2, 1, 3),
        order="C",
    )
