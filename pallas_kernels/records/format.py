"""The layout of one expert's record, in each version, as plain numbers.

A record is a number of arena rows of D = `hidden` uint16 elements. Its parts follow each other,
each beginning at a whole row (`RecordFormat.parts`). The rest of a part's last row is zero.

`dense`
    ``gate``, ``up`` (I rows of D values each), ``down`` (down transposed, I rows of D): the weights
    in the run's dtype. A float32 row takes two arena rows.

`int8`, `int4`, `int2` (N bits, P = 16/N codes to an element)
    ``gate_codes``, ``up_codes``, ``down_codes``, ``gate_scales``, ``up_scales``, ``down_scales``.

    gate and up are summed over D. They are ``[I, D/P]``: element e of row i holds in its bits
    N·j … N·j + N − 1 the code of column e + j·D/P, j = 0 … P − 1. down^T is summed over I. It is
    ``[J, D]`` with J = ⌈I/P⌉: element (r, c) holds the codes of rows r + j·J of column c (rows
    from I on: unspecified). So one load along the summed axis gives P tiles of it.

    Scales are float16, one for `group` consecutive weights of the summed axis: of gate and up
    ``[I, groups_in]``, of down^T ``[groups_out, D]``. A weight is (code − 2^(N−1))·scale for N = 8
    and 4, with codes 1 … 2^N − 1, and (code − 1.5)·scale for N = 2: exact in float32, then rounded
    once to the run's dtype.

`fp8-128x128-f32`, `fp4-32-e8m0`, `int4-32-bf16` … (what checkpoints have; read_name)
    The parts of int8 and int4. A code is a float of 8 or 4 bits (e4m3, e2m1) or an integer. A scale
    is for `group` weights of the reduced axis of `across` consecutive others: of gate and up
    ``[⌈I/across⌉, groups_in]``, of down^T ``[groups_out, ⌈D/across⌉]``, bytes one after the other.
    With "-zero", ``gate_zeros``, ``up_zeros`` and ``down_zeros`` follow, a byte for each scale: the
    code that means 0. With e4m3 scales ``gate_global``, ``up_global`` and ``down_global`` follow,
    each a float32 with which all scales of the matrix are multiplied (x) or divided (div).

`q8_0`, `q4_1`, `q5_k` … (what GGUF files have)
    The parts of int8 and int4, and some of these. ``gate_highs`` … : the bits of codes of 5 and 6
    bits above the lowest 4, laid out as codes of 1 and 2 bits. ``gate_mins`` …: a number for each
    scale, added to its weights. ``gate_supers`` …, ``gate_min_supers`` …: a float16 for each
    `super` scales or minimums along the reduced axis. Scales and minimums are then integers in
    bytes. Each is multiplied by its float16, and the minimum is subtracted.

`int4-32-bf16+int4-32-bf16+int8-32-bf16` … (gate, up and down in formats of their own)
    For each field that some of the matrices have, the parts of these matrices.

`lossless12` (bfloat16 only, the same bits)
    ``gate_bytes``, ``up_bytes``, ``down_bytes`` (laid out as int8's codes), ``gate_codes``,
    ``up_codes``, ``down_codes`` (as int4's), ``tables``.

    A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. The byte is sign and mantissa. The
    code is base − exponent, 0 … 14, with one base for each block of BLOCK rows of a matrix. Code 15
    is an escape: the byte is then an index into the block's table of exact values. ``tables`` is
    ``[3·blocks, 1 + escapes]``, blocks of gate, of up, of down^T: first the base, then the table.

If the experts have biases, every version ends with ``gate_bias`` and ``up_bias`` (I values in the
run's dtype) and ``down_bias`` (D values), each in whole rows of D values.

An expert whose gate is its up has no parts of gate (`RecordFormat.gated`). Only ``tables`` keep
blocks for it, unused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pkgutil
import types
from collections.abc import Mapping, Sequence

from pallas_kernels.records.encoding import GROUPS, Encoding, read_name

_PLACES = {
    "dense": "encoding:DENSE",
    "lossless12": "encoding:LOSSLESS12",
    "int8": "encoding:INT8",
    "int4": "encoding:INT4",
    "int2": "encoding:INT2",
}
"""Version → place of its Encoding. A new version is one file and a line here
(docs/extending/add_a_record_format.md)."""

VERSIONS: dict[str, Encoding] = {
    version: pkgutil.resolve_name(f"pallas_kernels.records.{place}")
    for version, place in _PLACES.items()
}
"""Version that moejax makes → its Encoding, from the most bytes to the fewest."""

LOSSY = tuple(version for version, encoding in VERSIONS.items() if encoding.lossy)


MATRICES = ("gate", "up", "down")


def encoding_of(name: str) -> Encoding:
    """How a format holds a matrix, one of VERSIONS or of a checkpoint (read_name). Raises
    ValueError for an unknown one."""
    if (found := VERSIONS.get(name) or read_name(name)) is None:
        raise ValueError(f"unknown expert version {name!r}; known: {', '.join(VERSIONS)}")
    return found


@functools.cache
def encodings_of(version: str) -> Mapping[str, Encoding]:
    """Matrix → how a version holds it.

    - `version`: the name of a format, or three joined by "+", for gate, up and down.

    Raises ValueError for an unknown one.
    """
    names = version.split("+")
    if len(names) not in (1, len(MATRICES)):
        raise ValueError(f"{version!r} must be one format, or those of gate, up and down")
    every = [encoding_of(name) for name in names] * (len(MATRICES) // len(names))
    return types.MappingProxyType(dict(zip(MATRICES, every, strict=True)))


def join_names(names: Sequence[str]) -> str:
    """The version whose gate, up and down are in these versions."""
    return names[0] if len({*names}) == 1 else "+".join(names)


BLOCK = 32
"""Rows that share a base exponent and a table in lossless12."""

ESCAPE = 15
"""lossless12's code for a weight in the table."""

SCALE_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
}

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """The layout of an expert's record in one version.

    Raises ValueError for an unknown version or dtype and for a shape that the version cannot hold.
    """

    version: str
    """As encodings_of knows it."""
    hidden: int
    """D: values of a weight row, and uint16 elements of an arena row."""
    width: int
    """I: the expert's intermediate size."""
    dtype: str
    """The run's dtype, and that of decoded weights: "bfloat16", "float16" or "float32"."""
    biases: bool = False
    """Whether the results of gate, up and down have biases."""
    gated: bool = True
    """False: gate is up, and records have it once."""
    alone: bool = False
    """Whether a record is up alone: rows of a matrix that is no expert's."""

    def __post_init__(self):
        encodings = encodings_of(self.version)
        if self.dtype not in _ITEMSIZES:
            raise ValueError(f"dtype must be one of {', '.join(_ITEMSIZES)}, not {self.dtype!r}")
        if self.hidden < 1 or self.width < 1:
            raise ValueError(f"an expert needs D and I ≥ 1, not {self.hidden} and {self.width}")
        for matrix, encoding in encodings.items():
            if self.dtype not in (dtypes := encoding.dtypes):
                raise ValueError(
                    f"{self.version} holds {dtypes[0]} weights, not {self.dtype}; run in "
                    f"{dtypes[0]}, or use another version"
                )
            planes = 16 // encoding.high if encoding.high else self.planes_of(matrix)
            if self.hidden % planes:
                raise ValueError(
                    f"{self.version} needs a hidden size D that is a multiple of {planes}, not "
                    f"{self.hidden}; use another version"
                )

    @property
    def itemsize(self) -> int:
        """Bytes of a decoded value."""
        return _ITEMSIZES[self.dtype]

    def bias_rows(self, matrix: str) -> int:
        """Rows of D values in the run's dtype that hold the bias of a matrix."""
        values = self.hidden if matrix == "down" else self.width
        return -(-values // self.hidden) if self.biases else 0

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices of a record, in order."""
        if self.alone:
            return ("up",)
        return MATRICES if self.gated else MATRICES[1:]

    @property
    def values(self) -> int:
        """Weights of an expert, without biases."""
        return len(self.matrices) * self.width * self.hidden

    @property
    def weight_rows(self) -> int:
        """Rows of D values in the run's dtype of a decoded expert: I of each matrix, and those of
        biases."""
        return len(self.matrices) * self.width + sum(map(self.bias_rows, self.matrices))

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """Matrix → its encoding."""
        return encodings_of(self.version)

    @property
    def encoding(self) -> Encoding:
        """The encoding of gate; up and down have the same in every version but a checkpoint's."""
        return self.encodings["gate"]

    @property
    def lossy(self) -> bool:
        """Whether decoded weights may differ from the encoded ones."""
        return any(encoding.lossy for encoding in self.encodings.values())

    @property
    def bits(self) -> int:
        """N, the bits of a code; 0: there are no codes."""
        return self.encoding.bits

    @property
    def zero(self) -> float:
        """A lossy version's weight is (code − zero)·scale."""
        return self.encoding.zero

    @property
    def planes(self) -> int:
        """P, the codes in an element, each of another part of the summed axis; 1: no codes."""
        return self.planes_of("gate")

    def planes_of(self, matrix: str) -> int:
        """P of a matrix whose encoding may not be that of gate."""
        bits = self.encodings[matrix].bits
        return 16 // bits if bits else 1

    @property
    def group_in(self) -> int:
        """Consecutive weights along D that share a scale, of gate and up."""
        return self.group_of("gate")

    @property
    def group_out(self) -> int:
        """Consecutive weights along I that share a scale, of down."""
        return self.group_of("down")

    @property
    def groups_in(self) -> int:
        """⌈D / group_in⌉."""
        return -(-self.hidden // self.group_in)

    @property
    def groups_out(self) -> int:
        """⌈I / group_out⌉."""
        return -(-self.width // self.group_out)

    def group_of(self, matrix: str) -> int:
        """Consecutive weights along the summed axis of a matrix that share a scale."""
        axis = self.width if matrix == "down" else self.hidden
        groups = [group or axis for group in self.encodings[matrix].groups or GROUPS]
        return next((group for group in groups if axis % group == 0), groups[-1])

    def integer_unit(self, matrix: str) -> int:
        """Weights of a sum of integers, 16 or 32 (pallas_kernels.records.integers); 0: this matrix
        has no integers."""
        axis, group = self.width if matrix == "down" else self.hidden, self.group_of(matrix)
        if self.encodings[matrix].integers is None or axis % 32 or group % 16:
            return 0
        return math.gcd(group, 32)

    def scale_shape(self, matrix: str) -> tuple[int, int]:
        """How many scales a matrix [I, D] has along its axes."""
        across, group = self.encodings[matrix].across, self.group_of(matrix)
        if matrix == "down":
            return -(-self.width // group), -(-self.hidden // across)
        return -(-self.width // across), -(-self.hidden // group)

    def field_shape(self, matrix: str, field: str) -> tuple[int, int]:
        """How many numbers a field has along the axes of a matrix: one for a scale, or for
        `super` of them."""
        first, second = self.scale_shape(matrix)
        each = self.encodings[matrix].super if field.endswith("supers") else 1
        return (-(-first // each), second) if matrix == "down" else (first, -(-second // each))

    def row_bytes(self, field: str) -> int:
        """Bytes of a row of up in a field whose rows have each their own."""
        encoding = self.encodings["up"]
        if bits := {"codes": encoding.bits, "highs": encoding.high}.get(field):
            return self.hidden * bits // 8
        return self.field_shape("up", field)[1] * SCALE_BYTES[encoding.dtype_of(field)]

    @property
    def blocks(self) -> int:
        """Row blocks of one matrix in lossless12."""
        return -(-self.width // BLOCK)

    @property
    def escapes(self) -> int:
        """Entries of a row block's table in lossless12: 31, 63, 127 or 255, about one for 256
        weights. Of normally distributed weights about one in 5,000 needs an entry."""
        return min(256, max(32, 1 << (BLOCK * self.hidden // 256 - 1).bit_length())) - 1

    @property
    def parts(self) -> Mapping[str, tuple[int, int]]:
        """Name → (first row, rows), in order of rows."""
        return _parts(self)

    @property
    def spans(self) -> Mapping[str, tuple[int, int]]:
        """The same, with what fills the record up in the last part."""
        *others, last = self.parts.items()
        return {**dict(others), last[0]: (last[1][0], self.rows - last[1][0])}

    @property
    def rows(self) -> int:
        """Arena rows of one record. The number is even, so that 32-bit views see whole values in
        every cell of a slot, except for a dense record, which is as long as its weights."""
        rows = sum(rows for _, rows in self.parts.values())
        return rows if self.version == "dense" else rows + rows % 2

    @property
    def nbytes(self) -> int:
        return self.rows * self.hidden * 2

    @property
    def waited(self) -> tuple[int, ...]:
        """Bytes of the parts that ops wait for one by one: the matrices of a dense record, down
        with the biases, and the whole of any other record, whose matrices are spread over several
        parts."""
        if self.version != "dense":
            return (self.nbytes,)
        before = [self.parts[matrix][1] * self.hidden * 2 for matrix in self.matrices[:-1]]
        return *before, self.nbytes - sum(before)


@functools.cache
def _parts(fmt: RecordFormat) -> Mapping[str, tuple[int, int]]:
    first, parts = 0, {}
    encodings = fmt.encodings
    for field in dict.fromkeys(field for each in encodings.values() for field in each.fields):
        having = [matrix for matrix in fmt.matrices if field in encodings[matrix].fields]
        for matrix in having if field != "tables" else ("",):
            name = "_".join(filter(None, (matrix, field.removeprefix("weights"))))
            parts[name] = (first, _rows(fmt, field, matrix))
            first += parts[name][1]
    for matrix in fmt.matrices if fmt.biases else ():
        parts[f"{matrix}_bias"] = (first, fmt.bias_rows(matrix) * fmt.itemsize // 2)
        first += parts[f"{matrix}_bias"][1]
    return types.MappingProxyType(parts)


def _rows(fmt: RecordFormat, field: str, matrix: str) -> int:
    """Arena rows of a field: P rows of codes of gate and up, or P planes of down, fill one row."""
    match field:
        case "weights":
            return fmt.width * fmt.itemsize // 2
        case "bytes":
            return -(-fmt.width // 2)
        case "codes":
            return -(-fmt.width // fmt.planes_of(matrix))
        case "highs":
            return -(-fmt.width * fmt.encodings[matrix].high // 16)
        case "scales" | "zeros" | "mins" | "supers" | "min_supers":
            itemsize = SCALE_BYTES[fmt.encodings[matrix].dtype_of(field)]
            return -(-math.prod(fmt.field_shape(matrix, field)) * itemsize // (2 * fmt.hidden))
        case "global":
            return -(-2 // fmt.hidden)
        case "tables":
            return -(-3 * fmt.blocks * (1 + fmt.escapes) // fmt.hidden)
    raise ValueError(f"records have no field {field!r}")
