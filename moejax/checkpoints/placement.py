"""Every tensor of a file to its place: read, checked, converted and transposed by several threads.

A tensor's bytes go from the file straight into parameter or store where dtype and order are the
same; otherwise they pass through a buffer that stays in the processor's cache.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np

from host_offload.memory.store import copy_transposed
from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS
from host_offload.versions.store_versions import as_bits
from moejax.checkpoints.safetensors.shards import ShardReader, TensorFile, TensorReader
from moejax.checkpoints.tensors import ExpertPlace, ParamPlace, Place
from moejax.errors import UserError
from pallas_kernels.records import RecordFormat

T, S = TypeVar("T"), TypeVar("S")

_CHUNK = 1 << 20
"""Bytes read at once: enough for the disk, and still in the cache when they are checked."""

_PIECE = 64 << 20
"""Bytes of a large parameter that one thread reads."""


class RecordSink(Protocol):
    """Takes expert records; host_offload.memory.store.StoreBuilder is one."""

    @property
    def layout(self) -> RecordFormat: ...

    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> AbstractContextManager[np.ndarray]:
        """uint16[experts, rows, D] to be filled, from any thread."""
        ...


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows first … first + rows − 1 of a tensor, counted over all axes but the last. expert: which
    one's they are, of a tensor stacked over experts."""

    name: str
    expert: int | None
    first: int
    rows: int


def load_file(
    file: TensorFile,
    places: Mapping[str, Place],
    dtype: np.dtype,
    param: Callable[[ParamPlace], np.ndarray] | None,
    experts: RecordSink | None,
    nonfinite: Counter[str],
) -> Generator[int, None, None]:
    """Puts every tensor of a file that has a place there; yields the bytes read, piece by piece.

    dtype: the run's. param: gives the parameter of a layer whose rows a tensor becomes. param,
    experts: may be None where no place is one of theirs. nonfinite: counts each tensor's values
    that are NaN or infinite. Raises UserError where the file cannot be read or a finite value would
    become infinite.
    """
    scratch = threading.local()
    with file.open() as reader, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:

        def load(piece: _Piece) -> tuple[_Piece, int, int]:
            place, header = places[piece.name], file.tensors[piece.name]
            target = _target(piece, place, dtype, param, experts)
            source = _source(reader, piece, place, header.shape)
            transposed = isinstance(place, ExpertPlace) and place.matrix == "down"
            with target as out:
                bad = _fill(
                    out.T if transposed else out,
                    source,
                    NUMPY_DTYPES[header.dtype],
                    transposed,
                    scratch,
                    f"{file.path}: tensor {piece.name}",
                )
            nbytes = out.size * NUMPY_DTYPES[header.dtype].itemsize
            return piece, bad, nbytes

        pieces = _pieces(file, places, split=isinstance(reader, ShardReader))
        with contextlib.closing(in_order(pool, load, pieces)) as loaded:
            for piece, bad, nbytes in loaded:
                if bad:
                    nonfinite[piece.name] += bad
                yield nbytes


def in_order(
    pool: concurrent.futures.Executor, function: Callable[[T], S], items: Iterable[T]
) -> Generator[S, None, None]:
    """What the function makes of each item, computed by the pool. No more than a few are under way,
    so that little waits in memory and an error ends it soon."""
    waiting: collections.deque[concurrent.futures.Future[S]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _pieces(file: TensorFile, places: Mapping[str, Place], split: bool) -> Iterator[_Piece]:
    """split: large parameters are read in several pieces."""
    for name, header in file.tensors.items():
        place = places.get(name)
        if place is None:
            continue
        rows, width = math.prod(header.shape[:-1]), header.shape[-1]
        if isinstance(place, ExpertPlace) and place.expert is None:
            each = rows // header.shape[0]
            yield from (_Piece(name, e, e * each, each) for e in range(header.shape[0]))
        elif isinstance(place, ExpertPlace) or not split:
            yield _Piece(name, None, 0, rows)
        else:
            step = max(1, _PIECE // (width * NUMPY_DTYPES[header.dtype].itemsize))
            for first in range(0, rows, step):
                yield _Piece(name, None, first, min(step, rows - first))


@contextlib.contextmanager
def _target(
    piece: _Piece,
    place: Place,
    dtype: np.dtype,
    param: Callable[[ParamPlace], np.ndarray] | None,
    experts: RecordSink | None,
) -> Iterator[np.ndarray]:
    """What the piece becomes, [rows, width] in the dtype that is kept; down transposed."""
    if isinstance(place, ParamPlace):
        assert param is not None
        rows = param(place)[place.row : place.row + place.shape[0]]
        yield rows.reshape(-1, place.shape[-1])[piece.first : piece.first + piece.rows]
        return
    assert experts is not None
    expert = place.expert if place.expert is not None else piece.expert
    assert expert is not None
    third = experts.layout.rows // 3
    first = {"gate": 0, "gate_up": 0, "up": third, "down": 2 * third}[place.matrix]
    count = 2 * third if place.matrix == "gate_up" else third
    with experts.piece(place.layer, expert, 1, first, count) as rows:
        # An arena row of 16-bit values is a weight row; a float32 row takes two.
        yield rows.reshape(-1).view(dtype).reshape(-1, experts.layout.hidden)


def _source(
    reader: TensorReader, piece: _Piece, place: Place, shape: tuple[int, ...]
) -> Callable[[int, np.ndarray], None]:
    """read(first, out[n, width]): the piece's rows from `first` on."""
    if isinstance(reader, ShardReader):

        def read_into(first: int, out: np.ndarray) -> None:
            reader.read_into(piece.name, (piece.first + first) * shape[-1], out)

        return read_into
    if piece.expert is None:
        whole = reader.get_tensor(piece.name)
    else:
        whole = reader.get_rows(piece.name, piece.expert)
    matrix = whole.reshape(-1, shape[-1])

    def copy_into(first: int, out: np.ndarray) -> None:
        out[:] = matrix[first : first + len(out)]

    return copy_into


def _fill(
    out: np.ndarray,
    read: Callable[[int, np.ndarray], None],
    stored: np.dtype,
    transposed: bool,
    scratch: threading.local,
    named: str,
) -> int:
    """Reads all of out, [rows, width] in the file's order; returns how many values are not finite.

    stored: the file's dtype. transposed: out is the transpose of contiguous memory. named: the
    tensor, for messages.
    """
    rows, width = out.shape
    step, bad = max(1, _CHUNK // (width * stored.itemsize)), 0
    if transposed:
        step = max(16, step - step % 16)  # whole tiles of copy_transposed
    for first in range(0, rows, step):
        into = out[first : first + step]
        straight = stored == out.dtype and not transposed
        values = into if straight else _buffer(scratch, "values", stored, into.shape)
        read(first, values)
        found = count_nonfinite(values)
        bad += found
        if straight:
            continue
        if stored != out.dtype:
            converted = _buffer(scratch, "converted", out.dtype, into.shape) if transposed else into
            cast(values, converted, found, named)
            values = converted
        if transposed:
            copy_transposed(as_bits(into.T), as_bits(values))
    return bad


def cast(values: np.ndarray, into: np.ndarray, nonfinite: int, named: str) -> None:
    """Fills an array of another dtype; UserError if a finite value becomes infinite. nonfinite: how
    many of the values are not finite. named: where they are from, for messages."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, values, casting="unsafe")
    if count_nonfinite(into) > nonfinite:
        raise UserError(
            f"{named} has values that {into.dtype.name} cannot hold; "
            "run with dtype float32 or the checkpoint's own"
        )


def _buffer(
    scratch: threading.local, key: str, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    """Uninitialized memory of this thread, the same for every chunk."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = getattr(scratch, key, None)
    if memory is None or memory.nbytes < nbytes:
        memory = np.empty(nbytes, np.uint8)
        setattr(scratch, key, memory)
    return memory[:nbytes].view(dtype).reshape(shape)


_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""The bits that are all set in NaN and infinity, and in nothing else."""


def count_nonfinite(values: np.ndarray) -> int:
    """How many values are NaN or infinite; values: contiguous, of a dtype of NUMPY_DTYPES.

    As integers, with and without sign, they are the largest: two maxima, at the memory's speed,
    tell that there are none.
    """
    mask, bits = _EXPONENTS[values.dtype.name], as_bits(values)
    sign = 1 << (8 * values.itemsize - 1)
    signed = bits.view(np.dtype(f"int{8 * values.itemsize}"))
    if not values.size or (signed.max() < mask and bits.max() < (sign | mask)):
        return 0
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))
