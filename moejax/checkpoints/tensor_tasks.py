"""Tasks that read tensors into their places, and check, convert and transpose them.

The bytes of a tensor go from the file directly into parameter or store where dtype and order are
the same. Otherwise they go through a buffer that stays in the processor's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator

import numpy as np

from host_offload.memory.store import copy_transposed
from host_offload.versions.encoders import NUMPY_DTYPES
from host_offload.versions.quantized import QuantizedError, put_values
from host_offload.versions.store_versions import as_bits
from moejax.checkpoints.checkpoint import ExpertTask, RecordSink, Task
from moejax.checkpoints.gguf_tensors import GgufReader
from moejax.checkpoints.orbax.layout import DENSE
from moejax.checkpoints.quantized_tensors import QuantizedReader
from moejax.checkpoints.shards import ReadRows, TensorFile, TensorReader
from moejax.checkpoints.tensors import ExpertPlace, ParamPlace
from moejax.errors import UserError, user_errors
from pallas_kernels.records import RecordFormat

_CHUNK = 4 << 20
"""Bytes read at once. Each chunk waits several times for the interpreter, up to 5 ms each while
another thread traces: beside such a one 3.2 GB of experts came in 8 to 13 s, in 12 to 25 by 1 MiB
(two cores of a Zen 4 under load, page cache warm, 2026-11-29)."""

_PIECE = 64 << 20
"""Bytes of a large parameter that one thread reads."""

_scratch = threading.local()


@dataclasses.dataclass(frozen=True)
class OpenTensor:
    """A tensor of an open file. Reading raises UserError that names it, for values that are NaN or
    infinite."""

    file: TensorFile
    reader: TensorReader
    name: str

    def read_param(self, place: ParamPlace, out: np.ndarray) -> Iterator[Task]:
        """Yields the tasks that fill this tensor's rows of a parameter.

        - `out`: the parameter of one layer, of any dtype.
        """
        matrix = out[place.row : place.row + place.shape[0]].reshape(-1, place.shape[-1])
        width, step = matrix.shape[1], len(matrix)
        if self.reader.splits:
            step = max(1, _PIECE // (width * self._stored.itemsize))
        for first in range(0, len(matrix), step):
            yield functools.partial(self._read, matrix[first : first + step], first)

    def read_experts(
        self, place: ExpertPlace, layer: int, sink: RecordSink, dtype: np.dtype
    ) -> Iterator[ExpertTask]:
        """Yields the tasks that fill this tensor's part of one record, or of all records of a layer
        where the tensor is stacked.

        - `layer`: the sink's layer.
        - `dtype`: of the weights in the sink.
        """
        for expert in range(place.shape[0]) if place.expert is None else (place.expert,):
            at = layer, expert
            yield at, functools.partial(self.read_record, place, expert, at, sink, dtype)

    def read_record(
        self,
        place: ExpertPlace,
        expert: int,
        at: tuple[int, int],
        sink: RecordSink,
        dtype: np.dtype,
    ) -> int:
        """Fills this tensor's part of one expert's record. Returns the bytes read.

        - `at`: layer and expert of the sink.
        - `dtype`: of the weights in the sink.
        """
        index = expert if place.expert is None else None
        if place.is_bias:
            return self._put_bias(place, expert, at, sink, dtype)
        if "codes" in sink.layout.encodings[place.matrices[0]].fields:
            return self._put_codes(place, index, at, sink, dtype)
        parts = [sink.layout.spans[matrix] for matrix in place.matrices]
        with sink.piece(*at, 1, parts[0][0], sum(count for _, count in parts)) as records:
            # An arena row of 16-bit values is a weight row; a float32 row takes two.
            count = math.prod(place.shape[-2:]) * dtype.itemsize // 2
            flat = records.reshape(-1)
            flat[count:] = 0  # what fills up a record of several formats
            weights = flat[:count].view(dtype).reshape(-1, sink.layout.hidden)
            if place.interleaved:
                return self._read_interleaved(place, weights, index)
            out = weights.T if (place.matrix == "down") != place.turned else weights
            return self._read(out, 0, index)

    def _read_interleaved(self, place: ExpertPlace, weights: np.ndarray, index: int | None) -> int:
        """Fills gate and up from a tensor in which they alternate. Returns the bytes read.

        - `weights`: [2·I, D], gate rows before up rows.
        - `index`: as in _read.
        """
        rows, width = place.shape[-2:]
        step = max(2, _CHUNK // (width * weights.itemsize) & ~1)
        for first in range(0, rows, step):
            some = _buffer("interleaved", weights.dtype, (min(step, rows - first), width))
            self._read(some, first, index)
            last = first + len(some)
            for number, into in enumerate(np.split(weights, 2)):
                if place.turned:
                    into[:, first:last] = some[:, number::2].T
                else:
                    into[first // 2 : last // 2] = some[number::2]
        return rows * width * self._stored.itemsize

    def read_coded(self, layout: RecordFormat, record: np.ndarray) -> Iterator[Task]:
        """Yields the tasks that fill a record of this tensor's rows.

        - `record`: uint16, flat.
        """
        rows, width = self.file.tensors[self.name].shape
        if layout.version == DENSE:
            weights = record.view(NUMPY_DTYPES[layout.dtype]).reshape(rows, width)
            yield functools.partial(self._read, weights, 0)
            return
        step = max(2, _PIECE // (4 * width) & ~1) if self.reader.splits else rows
        for first in range(0, rows, step):
            yield functools.partial(self._put_rows, layout, record, first, min(step, rows - first))

    def _put_rows(self, layout: RecordFormat, record: np.ndarray, first: int, count: int) -> int:
        """Puts rows [first, first + count) into their places in a record, and zeros behind the last
        ones. Returns the bytes read.

        - `first`: even, since the numbers of a row may have an odd number of bytes.
        """
        parts = {}
        for field in layout.encodings["up"].fields:
            begin, height = layout.parts[f"up_{field}"]
            part = record[begin * layout.hidden : (begin + height) * layout.hidden]
            bytes_of_row = layout.row_bytes(field)
            end = None if first + count == layout.width else bytes_of_row * (first + count) // 2
            parts[field] = part[bytes_of_row * first // 2 : end]
        dtype = NUMPY_DTYPES[layout.dtype]
        if isinstance(self.reader, GgufReader):
            self.reader.put(self.name, dtype, "up", parts, slice(first, first + count))
        else:
            assert isinstance(self.reader, QuantizedReader)
            self.reader.matrix(self.name, dtype).put("up", parts)
        return count * layout.hidden * self._stored.itemsize

    def _put_bias(
        self,
        place: ExpertPlace,
        expert: int,
        at: tuple[int, int],
        sink: RecordSink,
        dtype: np.dtype,
    ) -> int:
        """Puts the biases of one expert into its record. Returns the bytes read."""
        values = np.empty((1, place.shape[-1]), dtype)
        nbytes = self._read(values, expert if place.expert is None else 0)
        for number, name in enumerate(place.matrices):
            with sink.piece(*at, 1, *sink.layout.spans[name]) as part:
                put_values(values[0, place.rows(number)], part)
        return nbytes

    def _put_codes(
        self,
        place: ExpertPlace,
        index: int | None,
        at: tuple[int, int],
        sink: RecordSink,
        dtype: np.dtype,
    ) -> int:
        """Puts the codes and scales of a quantized matrix, or of gate and up, into a record.
        Returns the bytes read."""
        reader, whole = self.reader, None
        if not isinstance(reader, GgufReader):
            assert isinstance(reader, QuantizedReader)
            whole = reader.matrix(self.name, dtype, index)
        for number, name in enumerate(place.matrices):
            with user_errors(QuantizedError, where=f"{self.file.path}: matrix {self.name} "):
                matrix = None if whole is None else whole.rows(place.rows(number))
            with contextlib.ExitStack() as stack:
                parts = {
                    field: stack.enter_context(
                        sink.piece(*at, 1, *sink.layout.spans[f"{name}_{field}"])
                    )
                    for field in sink.layout.encodings[name].fields
                }
                if matrix is not None:
                    matrix.put(name, parts)
                elif isinstance(reader, GgufReader):
                    reader.put(self.name, dtype, name, parts)
        return math.prod(place.shape[-2:]) * self._stored.itemsize

    @property
    def _stored(self) -> np.dtype:
        return np.dtype(self.file.tensors[self.name].dtype)

    def _read(self, out: np.ndarray, first: int, index: int | None = None) -> int:
        """Fills `out`, [rows, width] in the file's order, with rows from `first` on. Returns the
        bytes read.

        - `index`: reads only the part at this index of the first axis.
        """
        read, named = self.reader.rows(self.name, index), self.file.named(self.name)
        _fill(out, first, read, self._stored, named)
        return out.size * self._stored.itemsize


def _fill(out: np.ndarray, begin: int, read: ReadRows, stored: np.dtype, named: str) -> None:
    """Fills `out`.

    - `out`: [rows, width] in the file's order, contiguous or the transpose of contiguous memory.
    - `begin`: the first row to read.
    - `stored`: the dtype in the file.
    - `named`: the tensor, for messages.
    """
    rows, width = out.shape
    transposed = not out.flags.c_contiguous
    step = max(1, _CHUNK // (width * stored.itemsize))
    if transposed:
        step = max(16, step - step % 16)  # whole tiles of copy_transposed
    for first in range(0, rows, step):
        into = out[first : first + step]
        straight = stored == out.dtype and not transposed
        values = into if straight else _buffer("values", stored, into.shape)
        read(begin + first, values)
        require_finite(values, named)
        if straight:
            continue
        if stored != out.dtype:
            converted = _buffer("converted", out.dtype, into.shape) if transposed else into
            cast(values, converted, named)
            values = converted
        if transposed:
            copy_transposed(as_bits(into.T), as_bits(values))


def require_finite(values: np.ndarray, named: str) -> None:
    """Raises UserError for values that are NaN or infinite.

    - `values`: contiguous.
    - `named`: where the values come from.
    """
    if count_nonfinite(values):
        raise UserError(f"{named} has values that are NaN or infinite")


def cast(values: np.ndarray, into: np.ndarray, named: str) -> None:
    """Converts finite `values` to the dtype of `into`.

    - `named`: where the values come from, for messages.

    Raises UserError if a value becomes infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(into, values, casting="unsafe")
    if count_nonfinite(into):
        raise UserError(
            f"{named} has values that {into.dtype.name} cannot hold; "
            "run with dtype float32 or the checkpoint's own"
        )


def _buffer(key: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Uninitialized memory that this thread uses again for every chunk."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = getattr(_scratch, key, None)
    if memory is None or memory.nbytes < nbytes:
        memory = np.empty(nbytes, np.uint8)
        setattr(_scratch, key, memory)
    return memory[:nbytes].view(dtype).reshape(shape)


EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""The bits that are all set in NaN and infinity, and in nothing else."""


def count_nonfinite(values: np.ndarray) -> int:
    """How many values are NaN or infinite.

    As integers, NaN and infinities are larger than all finite values of the same sign. So two
    maxima, of the signed and of the unsigned integers, show at the speed of memory that there are
    none.

    - `values`: contiguous. Only numbers of NUMPY_DTYPES are looked at.
    """
    if values.dtype.name not in EXPONENTS:
        return 0
    mask, bits = EXPONENTS[values.dtype.name], as_bits(values)
    sign = 1 << (8 * values.itemsize - 1)
    signed = bits.view(np.dtype(f"int{8 * values.itemsize}"))
    if not values.size or (signed.max() < mask and bits.max() < (sign | mask)):
        return 0
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))
