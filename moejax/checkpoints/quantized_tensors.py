"""Reads safetensors files whose matrices are already quantized.

Such a matrix is stored as several tensors and read as one: codes and scales for records, and
dequantized weights for everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from host_offload.versions.quantized import QuantizedError, QuantizedMatrix, as_scales
from moejax.checkpoints.shards import Header, ReadRows, Shard, ShardReader
from moejax.checkpoints.tensors import BLOCKS
from moejax.errors import UserError
from moejax.models.quantization import Quantization, Scheme
from pallas_kernels.records.encoding import Encoding
from pallas_kernels.records.format import encoding_of

Shape = tuple[int, ...]

_FLOATS = ("bfloat16", "float16", "float32")
_PER_WORD = 32
"""Bits of the words into which codes are packed."""

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word AWQ has the codes of eight consecutive rows."""


def _as_they_are(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes.view(np.uint8)


def _offset(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes from 0 to 255 of signed 8-bit integers."""
    return codes.view(np.uint8) ^ np.uint8(0x80)


def _nibbles(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks two codes from each byte, the lower half first."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def _signed_nibbles(codes: np.ndarray, bits: int) -> np.ndarray:
    return _nibbles(codes.view(np.uint8), bits)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks eight 4-bit or four 8-bit codes from each 32-bit word, the lowest bits first."""
    whole = np.ascontiguousarray(codes).view("<i4").view(np.uint8)
    return whole if bits == 8 else _nibbles(whole, bits)


def _turned_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The transpose, with words along the first axis."""
    return _words(codes.T, bits).T


def _awq(codes: np.ndarray, bits: int) -> np.ndarray:
    found = _words(codes, bits).reshape(len(codes), -1, len(_AWQ_ORDER))
    return found[..., _AWQ_ORDER].reshape(len(codes), -1)


def _gptq_zeros(zeros: np.ndarray, bits: int) -> np.ndarray:
    """The first version of GPTQ stores zeros less 1, subtracted from words as integers."""
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    return _words(zeros.view(np.uint32) + ones, bits)


def _one(bits: int) -> int:
    return 1


def _two(bits: int) -> int:
    return 2


def _in_words(bits: int) -> int:
    return _PER_WORD // bits


Tensor = tuple[str, tuple[str, ...]]
"""What the tensor's name ends with, and the dtypes that it may have."""
Unpack = Callable[[np.ndarray, int], np.ndarray]
"""unpack(values as stored, bits of a code) → uint8 of the same axes, one code in each element."""


class Layout(NamedTuple):
    """How a quantized matrix, or a stack of them, is stored. The names of its tensors begin
    alike."""

    codes: Tensor
    scales: Tensor
    unpack: Unpack = _as_they_are
    per: Callable[[int], int] = _one
    """Bits of a code → how many codes are packed into a value."""
    turned: bool = False
    """Whether tensors are transposed: [in, out]."""
    packed: int = 1
    """The axis of the stored codes along which they are packed."""
    zeros: Tensor | None = None
    """Codes that mean 0, packed along the axis of `out`, if the format has them."""
    unpack_zeros: Unpack = _as_they_are
    whole: Tensor | None = None
    """A number with which all scales of the matrix are multiplied or divided."""
    shape: Tensor | None = None
    """Holds the matrix's shape."""
    order: Tensor | None = None
    """Holds the group of each column."""
    unused: tuple[str, ...] = ()
    """Tensors that may be there, about activations and KV."""
    name: str = ".weight"
    """The end of the name of the matrix that the tensors are read as."""
    blocks: int = 0
    """Codes have one more axis, of this size; 0: they have not."""

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Name → dtypes of each tensor that a matrix has."""
        every = self.codes, self.scales, self.zeros, self.whole, self.shape, self.order
        return dict(tensor for tensor in every if tensor is not None)

    def matrix_shape(self, codes: Shape, bits: int) -> Shape:
        """The shape [out, in] of a matrix whose codes are stored in this shape, with the padding of
        the last word, if any; or [n, out, in] of a stack."""
        *stack, rows, columns = codes
        found = [rows, columns]
        found[self.packed] *= self.per(bits)
        return *stack, *(found[::-1] if self.turned else found)

    def scale_shape(self, shape: Shape, encoding: Encoding) -> Shape:
        """The shape in which the scales of a matrix of this shape are stored."""
        *stack, out, into = shape
        found = -(-out // encoding.across), -(-into // (encoding.groups[0] or into))
        return *stack, *(found[::-1] if self.turned else found)

    def zero_shape(self, scales: Shape, bits: int) -> Shape:
        """The shape in which zeros are stored.

        - `scales`: that of the scales.
        """
        found = [*scales]
        axis = -1 if self.turned else -2
        found[axis] = -(-found[axis] // self.per(bits))
        return tuple(found)


_INT32, _F8 = ("int32",), ("float8_e4m3fn",)

LAYOUTS: dict[str, Layout] = {
    "fp8": Layout(("", _F8), ("_scale_inv", (*_FLOATS, "float8_e8m0fnu")), name=""),
    "fp8-scale": Layout((".weight", _F8), (".scale", ("float32", "float8_e8m0fnu"))),
    "mxfp4-scale": Layout(
        (".weight", ("int8", "uint8")),
        (".scale", ("uint8", "float8_e8m0fnu")),
        _signed_nibbles,
        _two,
    ),
    "mxfp4": Layout(
        (BLOCKS, ("uint8",)),
        ("_scales", ("uint8", "float8_e8m0fnu")),
        _nibbles,
        _two,
        name=BLOCKS,
        blocks=16,
    ),
    "float-quantized": Layout((".weight", _F8), (".weight_scale", _FLOATS)),
    "int-quantized": Layout(
        (".weight", ("int8",)),
        (".weight_scale", _FLOATS),
        _offset,
        zeros=(".weight_zero_point", ("int8",)),
        unpack_zeros=_offset,
    ),
    "pack-quantized": Layout(
        (".weight_packed", _INT32),
        (".weight_scale", _FLOATS),
        _words,
        _in_words,
        zeros=(".weight_zero_point", _INT32),
        unpack_zeros=_turned_words,
        shape=(".weight_shape", ("int32", "int64")),
    ),
    "mxfp4-pack-quantized": Layout(
        (".weight_packed", ("uint8",)),
        (".weight_scale", ("uint8", "float8_e8m0fnu")),
        _nibbles,
        _two,
    ),
    "nvfp4-pack-quantized": Layout(
        (".weight_packed", ("uint8",)),
        (".weight_scale", _F8),
        _nibbles,
        _two,
        whole=(".weight_global_scale", ("float32",)),
        unused=(".input_global_scale",),
    ),
    "modelopt": Layout(
        (".weight", ("uint8",)),
        (".weight_scale", _F8),
        _nibbles,
        _two,
        whole=(".weight_scale_2", ("float32",)),
        unused=(".input_scale", ".k_scale", ".v_scale"),
    ),
    "awq": Layout(
        (".qweight", _INT32),
        (".scales", _FLOATS),
        _awq,
        _in_words,
        turned=True,
        zeros=(".qzeros", _INT32),
        unpack_zeros=_awq,
    ),
    "gptq": Layout(
        (".qweight", _INT32),
        (".scales", _FLOATS),
        _turned_words,
        _in_words,
        turned=True,
        packed=0,
        zeros=(".qzeros", _INT32),
        unpack_zeros=_gptq_zeros,
        order=(".g_idx", _INT32),
    ),
}
LAYOUTS["gptq_v2"] = LAYOUTS["gptq"]._replace(unpack_zeros=_words)
"""Scheme.layout → how its matrices are stored."""

_SCALES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""Dtype of scales → the part of a record format's name, if the scheme leaves it to them."""


class Stored(NamedTuple):
    """A quantized matrix, or a stack of them."""

    layout: Layout
    base: str
    """What the names of its tensors begin with."""
    version: str
    """The record format of its codes and scales."""
    shape: Shape
    """[out, in], or [n, out, in] of a stack."""
    shards: Mapping[str, Shard]
    """What a tensor's name ends with → its shard."""

    @property
    def encoding(self) -> Encoding:
        return encoding_of(self.version)


@dataclasses.dataclass(frozen=True)
class QuantizedShard:
    """A TensorFile: a shard whose quantized matrices look like float32 tensors, with the names and
    shapes of a checkpoint that is not quantized. Reading rows dequantizes them.

    tensors: the matrices, as float32, and the shard's other tensors. matrices: name → how a matrix
    is stored.
    """

    shard: Shard
    tensors: dict[str, Header]
    matrices: dict[str, Stored]

    @property
    def path(self) -> pathlib.Path:
        return self.shard.path

    def named(self, name: str) -> str:
        return self.shard.named(name)

    def version_of(self, name: str) -> str | None:
        """The record format of a tensor; None: it is not quantized."""
        return self.matrices[name].version if name in self.matrices else None

    def count_bytes(self, name: str) -> int:
        """Bytes of a tensor in the files, with its scales and zeros."""
        headers = [self.tensors[name]]
        if (stored := self.matrices.get(name)) is not None:
            parts = stored.shards.items()
            headers = [shard.tensors[stored.base + end] for end, shard in parts]
        return sum(math.prod(h.shape) * np.dtype(h.dtype).itemsize for h in headers)

    @contextlib.contextmanager
    def open(self) -> Iterator[QuantizedReader]:
        with contextlib.ExitStack() as stack:
            yield QuantizedReader(self, stack.enter_context(self.shard.open()))


@dataclasses.dataclass(frozen=True)
class QuantizedReader:
    """An open QuantizedShard; a TensorReader."""

    file: QuantizedShard
    reader: ShardReader

    @property
    def splits(self) -> bool:
        """Whether some rows can be read without the others: not with matrices, which are unpacked
        whole."""
        return not self.file.matrices

    def rows(self, name: str, index: int | None = None) -> ReadRows:
        if name not in self.file.matrices:
            return self.reader.rows(name, index)
        matrix = self.matrix(name, NUMPY_DTYPES["float32"], index)
        return matrix.dequantize

    def matrix(self, name: str, dtype: np.dtype, index: int | None = None) -> QuantizedMatrix:
        """Reads the codes and scales of a matrix.

        - `dtype`: the run's.
        - `index`: which one of a stack.

        Raises UserError that names the tensor, for codes or scales that give no finite weights, and
        as check_order.
        """
        self.check_order(name)
        stored = self.file.matrices[name]
        layout, encoding = stored.layout, stored.encoding
        out, width = stored.shape[-2:]
        try:
            codes = self._read(stored, layout.codes, index)
            codes = layout.unpack(codes.reshape(len(codes), -1), encoding.bits)
            scales = as_scales(self._read(stored, layout.scales, index), encoding)
            zeros = whole = None
            if layout.zeros is not None and layout.zeros[0] in stored.shards:
                zeros = self._read(stored, layout.zeros, index)
                zeros = layout.unpack_zeros(zeros, encoding.bits)
                zeros = zeros[: scales.shape[0], : scales.shape[1]]
            if layout.turned:
                codes, scales, zeros = codes.T, scales.T, None if zeros is None else zeros.T
            if "zeros" not in encoding.fields and zeros is not None:
                if (zeros != int(encoding.zero)).any():
                    raise QuantizedError("has zero points, though config.json says symmetric")
                zeros = None
            if layout.whole is not None:
                whole = self._read(stored, layout.whole).reshape(1)
            said = [] if layout.shape is None else self._read(stored, layout.shape).tolist()
            if layout.shape is not None and said != [out, width]:
                raise QuantizedError(f"has {layout.shape[0]}, which says {said}")
            matrix = QuantizedMatrix(np.ascontiguousarray(codes), scales, encoding, zeros, whole)
            matrix.check(dtype)
        except QuantizedError as error:
            of = "" if index is None else f"expert {index} of "
            raise UserError(f"{self.file.path}: {of}matrix {name} {error}") from None
        return matrix

    def check_order(self, name: str) -> None:
        """Raises UserError for a matrix whose columns are not in the order of their groups."""
        stored = self.file.matrices[name]
        if stored.layout.order is None:
            return
        width = stored.shape[-1]
        groups = np.arange(width) // (stored.encoding.groups[0] or width)
        if (self._read(stored, stored.layout.order) != groups).any():
            raise UserError(
                f"{self.file.path}: matrix {name} has columns ordered by activation (desc_act, in "
                "g_idx), which is not supported; use a checkpoint made with desc_act=False, or one "
                "in another format of docs/how-to/quantized_checkpoints.md"
            )

    def _read(self, stored: Stored, tensor: Tensor, index: int | None = None) -> np.ndarray:
        shard, name = stored.shards[tensor[0]], stored.base + tensor[0]
        header = shard.tensors[name]
        shape = header.shape if index is None else header.shape[1:]
        values = np.empty(shape, np.dtype(header.dtype))
        with contextlib.ExitStack() as stack:
            mine = shard is self.file.shard
            reader = self.reader if mine else stack.enter_context(shard.open())
            reader.rows(name, index)(0, values)
        return values


def find_quantized(
    quantization: Quantization, shards: Sequence[Shard], shape_of: Callable[[str], Shape | None]
) -> tuple[QuantizedShard, ...]:
    """Finds the quantized matrices of the shards. The tensors of a matrix say in which of the
    schemes it is.

    - `shape_of`: name of a matrix → the shape that it must have; None: there is no such matrix.

    Raises UserError that names the tensor, where codes or scales are missing, or their shapes or
    dtypes do not fit any scheme.
    """
    owner = {name: shard for shard in shards for name in shard.tensors}
    found: dict[int, dict[str, Stored]] = {id(shard): {} for shard in shards}
    used = set()
    for scales in owner:
        schemes = [s for s in quantization.schemes if scales.endswith(LAYOUTS[s.layout].scales[0])]
        for number, scheme in enumerate(schemes, 1):
            base = scales.removesuffix(LAYOUTS[scheme.layout].scales[0])
            try:
                stored = _stored(base, scheme, owner)
            except UserError:
                if number == len(schemes):
                    raise
                continue
            name = base + stored.layout.name
            if number == len(schemes) or shape_of(name) in (None, stored.shape):
                found[id(stored.shards[stored.layout.codes[0]])][name] = stored
                used |= {base + suffix for suffix in stored.shards}
                break
    unused = tuple(n for s in quantization.schemes for n in LAYOUTS[s.layout].unused)
    used |= {name for name in owner if name.endswith(unused)}
    files = []
    for shard in shards:
        matrices = found[id(shard)]
        plain = {name: header for name, header in shard.tensors.items() if name not in used}
        virtual = {name: Header("float32", stored.shape) for name, stored in matrices.items()}
        files.append(QuantizedShard(shard, plain | virtual, matrices))
    return tuple(files)


def check_orders(files: Sequence[QuantizedShard]) -> None:
    """Reads the order of columns of one matrix of each file, and raises as
    QuantizedReader.check_order. A checkpoint is made with one setting, so that the others are most
    likely alike; the order of each is checked when it is read."""
    for file in files:
        ordered = (name for name, stored in file.matrices.items() if stored.layout.order)
        if (name := next(ordered, None)) is not None:
            with file.open() as reader:
                reader.check_order(name)


def missing_scales(quantization: Quantization, name: str, dtype: str) -> tuple[str, ...]:
    """The names that the scales of a tensor may have, if it could be the codes of a matrix whose
    scales are missing."""
    layouts = (LAYOUTS[scheme.layout] for scheme in quantization.schemes)
    ends = [(*layout.codes, layout.scales[0]) for layout in layouts]
    return tuple(
        name.removesuffix(codes) + scales
        for codes, dtypes, scales in ends
        if name.endswith(codes) and dtype in dtypes
    )


def _stored(base: str, scheme: Scheme, owner: Mapping[str, Shard]) -> Stored:
    """A matrix in a scheme. Raises UserError where its tensors do not fit the scheme.

    - `base`: what the names of its tensors begin with.
    - `owner`: tensor → its shard.
    """
    layout = LAYOUTS[scheme.layout]
    tensors = layout.tensors
    if layout.zeros is not None and not scheme.zeros and base + layout.zeros[0] not in owner:
        del tensors[layout.zeros[0]]
    codes, scales = base + layout.codes[0], base + layout.scales[0]
    for name in (base + suffix for suffix in tensors):
        if name not in owner:
            raise UserError(f"{owner[scales].path}: tensor {scales} has no {name} beside it")
    for whole in ({base, f"{base}.weight"} - {codes}) & owner.keys():
        raise UserError(f"{owner[whole].path}: tensor {whole} is there beside {codes}")
    shards = {suffix: owner[base + suffix] for suffix in tensors}
    for suffix, dtypes in tensors.items():
        if (dtype := shards[suffix].tensors[base + suffix].dtype) not in dtypes:
            raise UserError(
                f"{shards[suffix].path}: tensor {base + suffix} has dtype {dtype}; this format has "
                f"it in {' or '.join(dtypes)}"
            )
    version = scheme.version(_SCALES.get(owner[scales].tensors[scales].dtype, ""))
    shape = _shape(base, layout, encoding_of(version), shards)
    return Stored(layout, base, version, shape, shards)


def _shape(base: str, layout: Layout, encoding: Encoding, shards: Mapping[str, Shard]) -> Shape:
    """The shape [out, in] of a matrix, or [n, out, in] of a stack. Raises UserError where the
    shapes of its tensors do not fit together.

    - `base`, `shards`: as in Stored.
    """
    shapes = {suffix: shard.tensors[base + suffix].shape for suffix, shard in shards.items()}
    path, (codes, scales) = shards[layout.codes[0]].path, (layout.codes[0], layout.scales[0])
    rows = shapes[codes]
    if layout.blocks and rows[-1:] == (layout.blocks,):
        rows = *rows[:-2], math.prod(rows[-2:])
    if len(rows) not in (2, 3) or len(shapes[scales]) != len(rows) or 0 in (*rows, *shapes[scales]):
        blocks = f" and blocks of {layout.blocks} bytes" if layout.blocks else ""
        raise UserError(
            f"{path}: tensors {base}{codes} and {base}{scales} must have two axes, or three of a "
            f"stack{blocks}, not the shapes {list(shapes[codes])} and {list(shapes[scales])}"
        )
    found = layout.matrix_shape(rows, encoding.bits)
    wanted: dict[str, Shape] = {scales: layout.scale_shape(found, encoding)}
    if layout.zeros is not None and layout.zeros[0] in shapes:
        wanted[layout.zeros[0]] = layout.zero_shape(wanted[scales], encoding.bits)
    if layout.order is not None:
        wanted[layout.order[0]] = (found[-1],)
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise UserError(
                f"{path}: tensor {base}{name} has shape {list(shapes[name])}, but {base}{codes} of "
                f"shape {list(shapes[codes])} asks for {list(shape)}"
            )
    for tensor, count, words in ((layout.shape, 2, "two numbers"), (layout.whole, 1, "one number")):
        if tensor is not None and math.prod(shapes[tensor[0]]) != count:
            raise UserError(
                f"{path}: tensor {base}{tensor[0]} must hold {words}, not {list(shapes[tensor[0]])}"
            )
    return found
