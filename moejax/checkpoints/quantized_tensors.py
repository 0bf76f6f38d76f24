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
"""Bits of the words into which pack-quantized packs its codes."""


def _as_they_are(codes: np.ndarray, encoding: Encoding, width: int) -> np.ndarray:
    return codes.view(np.uint8)


def _offset(codes: np.ndarray, encoding: Encoding, width: int) -> np.ndarray:
    """Codes from 0 to 255 of signed 8-bit integers."""
    return codes.view(np.uint8) ^ np.uint8(0x80)


def _nibbles(codes: np.ndarray, encoding: Encoding, width: int) -> np.ndarray:
    """Unpacks two codes from each byte, the lower half first."""
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :width]


def _words(codes: np.ndarray, encoding: Encoding, width: int) -> np.ndarray:
    """Unpacks eight 4-bit or four 8-bit codes from each 32-bit word, the lowest bits first."""
    whole = codes.view("<i4").view(np.uint8)
    return whole[:, :width] if encoding.bits == 8 else _nibbles(whole, encoding, width)


class Layout(NamedTuple):
    """How a quantized matrix, or a stack of them, is stored. The names of its tensors begin alike;
    fields are what follows."""

    codes: str
    """The name of the tensor of codes."""
    scales: str
    dtypes: Mapping[str, tuple[str, ...]]
    """Name → the dtypes that the tensor may have."""
    unpack: Callable[[np.ndarray, Encoding, int], np.ndarray] = _as_they_are
    """(codes as stored, encoding, width of a row) → uint8[rows, width]."""
    pack: Callable[[int, int], int] = lambda width, bits: width
    """(width of a row, bits of a code) → how many stored values hold a row of codes."""
    shapes: tuple[str, ...] = ()
    """The names of tensors that hold the matrix's shape."""
    name: str = ".weight"
    """The name of the matrix that the tensors are read as."""
    blocks: int = 0
    """Codes have one more axis, of this size; 0: they have not."""


LAYOUTS: dict[str, Layout] = {
    "fp8": Layout(
        "",
        "_scale_inv",
        {"": ("float8_e4m3fn",), "_scale_inv": (*_FLOATS, "float8_e8m0fnu")},
        name="",
    ),
    "mxfp4": Layout(
        BLOCKS,
        "_scales",
        {BLOCKS: ("uint8",), "_scales": ("uint8", "float8_e8m0fnu")},
        _nibbles,
        lambda width, bits: width * bits // 8,
        name=BLOCKS,
        blocks=16,
    ),
    "float-quantized": Layout(
        ".weight",
        ".weight_scale",
        {".weight": ("float8_e4m3fn",), ".weight_scale": _FLOATS},
    ),
    "int-quantized": Layout(
        ".weight",
        ".weight_scale",
        {".weight": ("int8",), ".weight_scale": _FLOATS},
        _offset,
    ),
    "pack-quantized": Layout(
        ".weight_packed",
        ".weight_scale",
        {
            ".weight_packed": ("int32",),
            ".weight_scale": _FLOATS,
            ".weight_shape": ("int32", "int64"),
        },
        _words,
        lambda width, bits: -(-width * bits // _PER_WORD),
        (".weight_shape",),
    ),
    "mxfp4-pack-quantized": Layout(
        ".weight_packed",
        ".weight_scale",
        {".weight_packed": ("uint8",), ".weight_scale": ("uint8", "float8_e8m0fnu")},
        _nibbles,
        lambda width, bits: -(-width * bits // 8),
    ),
}
"""Scheme.layout → how its matrices are stored."""

_SCALES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""Dtype of scales → the part of a record format's name, if the scheme leaves it to them."""


class Stored(NamedTuple):
    """A quantized matrix: the shards and names of its codes and scales, and its shape [out, in]; or
    a stack of them."""

    layout: Layout
    version: str
    """The record format of its codes and scales."""
    codes: tuple[Shard, str]
    scales: tuple[Shard, str]
    shape: tuple[int, ...]
    said: tuple[tuple[Shard, str], ...]
    """Tensors that must hold the shape."""

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

    def version_of(self, name: str) -> str | None:
        """The record format of a tensor; None: it is not quantized."""
        return self.matrices[name].version if name in self.matrices else None

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

        Raises UserError that names the tensor, for codes or scales that give no finite weights.
        """
        stored = self.file.matrices[name]
        encoding = stored.encoding
        try:
            stored_codes = self._read(*stored.codes, index)
            stored_codes = stored_codes.reshape(len(stored_codes), -1)
            codes = stored.layout.unpack(stored_codes, encoding, stored.shape[-1])
            scales = as_scales(self._read(*stored.scales, index), encoding)
            matrix = QuantizedMatrix(np.ascontiguousarray(codes), scales, encoding)
            for shard, tensor in stored.said:
                if (said := self._read(shard, tensor)).tolist() != [*stored.shape]:
                    raise QuantizedError(f"has {tensor}, which says {said.tolist()}")
            matrix.check(dtype)
        except QuantizedError as error:
            of = "" if index is None else f"expert {index} of "
            raise UserError(f"{self.file.path}: {of}matrix {name} {error}") from None
        return matrix

    def _read(self, shard: Shard, name: str, index: int | None = None) -> np.ndarray:
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
        schemes = [s for s in quantization.schemes if scales.endswith(LAYOUTS[s.layout].scales)]
        for number, scheme in enumerate(schemes, 1):
            base = scales.removesuffix(LAYOUTS[scheme.layout].scales)
            try:
                stored = _stored(base, scheme, owner)
            except UserError:
                if number == len(schemes):
                    raise
                continue
            name = base + stored.layout.name
            if number == len(schemes) or stored.shape == shape_of(name):
                found[id(stored.codes[0])][name] = stored
                used |= {base + suffix for suffix in stored.layout.dtypes}
                break
    files = []
    for shard in shards:
        matrices = found[id(shard)]
        plain = {name: header for name, header in shard.tensors.items() if name not in used}
        virtual = {name: Header("float32", stored.shape) for name, stored in matrices.items()}
        files.append(QuantizedShard(shard, plain | virtual, matrices))
    return tuple(files)


def _stored(base: str, scheme: Scheme, owner: Mapping[str, Shard]) -> Stored:
    """A matrix in a scheme. Raises UserError where its tensors do not fit the scheme.

    - `base`: what the names of its tensors begin with.
    - `owner`: tensor → its shard.
    """
    layout = LAYOUTS[scheme.layout]
    codes, scales = base + layout.codes, base + layout.scales
    for name in (base + suffix for suffix in layout.dtypes):
        if name not in owner:
            raise UserError(f"{owner[scales].path}: tensor {scales} has no {name} beside it")
    _check(base, layout, owner)
    for whole in ({base, f"{base}.weight"} - {codes}) & owner.keys():
        raise UserError(f"{owner[whole].path}: tensor {whole} is there beside {codes}")
    version = scheme.version(_SCALES.get(owner[scales].tensors[scales].dtype, ""))
    said = tuple((owner[base + suffix], base + suffix) for suffix in layout.shapes)
    places = (owner[codes], codes), (owner[scales], scales)
    return Stored(layout, version, *places, _shape(base, layout, encoding_of(version), owner), said)


def _check(base: str, layout: Layout, owner: Mapping[str, Shard]) -> None:
    """Raises UserError for a part of a matrix whose dtype this format does not allow, and for a
    shape tensor that does not hold two numbers.

    - `base`: what the names of its tensors begin with.
    - `owner`: tensor → its shard.
    """
    for suffix, dtypes in layout.dtypes.items():
        shard = owner[base + suffix]
        if (dtype := shard.tensors[base + suffix].dtype) not in dtypes:
            raise UserError(
                f"{shard.path}: tensor {base + suffix} has dtype {dtype}; this format has it in "
                f"{' or '.join(dtypes)}"
            )
        if suffix in layout.shapes and (shape := shard.tensors[base + suffix].shape) != (2,):
            raise UserError(
                f"{shard.path}: tensor {base + suffix} must hold two numbers, not {list(shape)}"
            )


def _shape(
    base: str, layout: Layout, encoding: Encoding, owner: Mapping[str, Shard]
) -> tuple[int, ...]:
    """The shape [out, in] of a matrix, or [n, out, in] of a stack. Raises UserError where the
    shapes of its codes and scales do not fit together.

    - `base`: what the names of its tensors begin with.
    - `owner`: tensor → its shard.
    """
    names = base + layout.codes, base + layout.scales
    shard = owner[names[0]]
    codes, scales = (owner[name].tensors[name].shape for name in names)
    rows = codes
    if layout.blocks and codes[-1:] == (layout.blocks,):
        rows = *codes[:-2], math.prod(codes[-2:])
    if len(rows) not in (2, 3) or len(scales) != len(rows) or 0 in (*codes, *scales):
        blocks = f" and blocks of {layout.blocks} bytes" if layout.blocks else ""
        raise UserError(
            f"{shard.path}: tensors {names[0]} and {names[1]} must have two axes, or three of a "
            f"stack{blocks}, not the shapes {list(codes)} and {list(scales)}"
        )
    *stack, out, stored = rows
    group = encoding.groups[0]
    # The stored values of a row give the width, with the padding of the last word, if any.
    per_value = layout.pack(1 << 20, encoding.bits)
    width = stored * (1 << 20) // per_value
    wanted = *stack, -(-out // encoding.across), -(-width // (group or width))
    if scales != wanted:
        raise UserError(
            f"{shard.path}: tensor {names[1]} has shape {list(scales)}, but {names[0]} of shape "
            f"{list(codes)} asks for {list(wanted)} ({math.prod(wanted)} scales)"
        )
    return *stack, out, width
