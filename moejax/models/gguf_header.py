"""Reads the headers of GGUF files: metadata, and the type, shape and place of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package maps a file and
believes its counts. Here each count and size is compared with the file before it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pathlib
import re
import struct
from typing import Any, BinaryIO

import numpy as np

from moejax.errors import UserError, shown
from moejax.models.directory import open_regular, require_own_file, stamp_of

SUFFIX = ".gguf"

MOST_HEADER = 128 << 20
"""Most bytes of a header. Those of 260,000 tokens and their merges have 15 MB."""

MOST_VALUES = 4_000_000
"""Most metadata values of a file, those of arrays counted one by one."""

MOST_TENSORS = 100_000
"""Most tensors of a file, and most keys."""

MOST_FILES = 1000
"""Most files of a model."""

_MOST_AXES = 4
"""Most axes of a tensor, as in ggml."""

_MOST_NAME = 65_535
"""Most bytes of a key, as the format says."""

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Number of a type of values → numpy's name of it."""

_STRING, _ARRAY = 8, 9

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    type: str
    """The name of its ggml type, such as "Q8_0"."""
    shape: tuple[int, ...]
    """Rows are the last axis, as in numpy."""
    begin: int
    """Where its bytes begin in the file."""
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """The header of a file."""

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    stamp: tuple[int, ...]
    """The file's size in bytes, and its times of the last write and change in ns."""


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether this is the path of a GGUF file, by its name."""
    return str(path).endswith(SUFFIX) and pathlib.Path(path).expanduser().is_file()


def read_gguf(path: str | os.PathLike) -> tuple[GgufHeader, ...]:
    """Reads the headers of a model's files: one, or all that NAME-00001-of-00003.gguf has beside
    it. The first has the metadata.

    Raises UserError that names file and key or tensor, for damaged files and missing ones.
    """
    path = pathlib.Path(path).expanduser()
    header = _read(path)
    found = _SPLIT.fullmatch(path.name)
    count = header.metadata.get("split.count", 1)
    if count == 1:
        return (header,)
    if not isinstance(count, int) or not 0 < count <= MOST_FILES:
        raise UserError(f"{path}: split.count is {shown(count)}; at most {MOST_FILES} are read")
    if found is None or int(found[3]) != count:
        raise UserError(
            f"{path}: one of {count} files, whose names must end in -00001-of-{count:05}.gguf"
        )
    names = [f"{found[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    for number, part in enumerate(map(path.with_name, names), 1):
        if not os.path.lexists(part):
            raise UserError(
                f"{part}: no such file; it is part {number} of {count} of this model: put it "
                "beside the others under that name"
            )
    headers = tuple(_read(path.with_name(name)) for name in names)
    for number, each in enumerate(headers):
        if each.metadata.get("split.no") != number or each.metadata.get("split.count") != count:
            raise UserError(f"{each.path}: not file {number + 1} of {count}, by its split.no")
    names = [name for each in headers for name in each.tensors]
    if len({*names}) != len(names):
        raise UserError(f"{path}: a tensor is in two of the {count} files")
    return headers


def _read(path: pathlib.Path) -> GgufHeader:
    require_own_file(path)
    return _read_once(path, stamp_of(path.stat()))


@functools.lru_cache(maxsize=4)
def _read_once(path: pathlib.Path, stamp: tuple[int, ...]) -> GgufHeader:
    """Config, tokenizer and weights of a file each ask for its header."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise UserError(
            f"{path}: a GGUF file, which needs the package gguf: pip install 'moejax[gguf]'"
        ) from None
    types = {int(each): (each.name, *GGML_QUANT_SIZES[each]) for each in GGMLQuantizationType}
    try:
        with io.BufferedReader(open_regular(path), 1 << 20) as file:
            return _Header(file, stamp[0], types).parse(path, stamp)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: damaged or truncated GGUF file ({error}); download it again"
        ) from None


class _Header:
    """Reads the parts of a header one after the other. Its methods raise ValueError.

    - `types`: number of a ggml type → its name, weights in a block, and bytes of a block.
    """

    def __init__(self, file: BinaryIO, size: int, types: dict[int, tuple[str, int, int]]):
        self._file, self._size, self._types = file, size, types
        self._at, self._values = 0, 0

    def parse(self, path: pathlib.Path, stamp: tuple[int, ...]) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in (2, 3):
            big = version & 0xFFFF == 0
            raise UserError(
                f"{path}: GGUF {'of big-endian numbers' if big else f'version {version}'} is not "
                "supported, only versions 2 and 3 of little-endian numbers"
            )
        tensors, keys = self._number("<Q"), self._number("<Q")
        for count, what in ((tensors, "tensors"), (keys, "keys")):
            if count > MOST_TENSORS:
                raise ValueError(f"{count} {what}; at most {MOST_TENSORS} are read of a file")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key", _MOST_NAME)
            if key in metadata or not key.isprintable():
                raise ValueError(f"the key {key[:200]!a} is unprintable or there twice")
            metadata[key] = self._value(key, self._number("<I"))
        infos = [self._tensor() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 0 < align <= 1 << 20 or align & (align - 1):
            raise ValueError(f"general.alignment is {shown(align)}, not a power of two")
        return GgufHeader(path, metadata, self._places(infos, align), stamp)

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > min(self._size, MOST_HEADER):
            most = "more than its header may have" if end > MOST_HEADER else "more than there are"
            raise ValueError(f"{count} bytes at byte {self._at} are {most}")
        found = self._file.read(count)
        if len(found) != count:
            raise ValueError(f"it ends at byte {self._at + len(found)}")
        self._at = end
        return found

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _string(self, what: str, most: int = MOST_HEADER) -> str:
        length = self._number("<Q")
        if length > most:
            raise ValueError(f"{what} of {length} bytes; at most {most} are read")
        return self._bytes(length).decode("utf-8")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise ValueError(f"{key} has type {kind}, which the format does not have")
        kind, count = self._number("<I"), self._number("<Q")
        self._values += count
        if self._values > MOST_VALUES:
            raise ValueError(f"{key} has {count} values; at most {MOST_VALUES} are read of a file")
        if kind == _STRING:
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{key} is an array of type {kind}, which is not read")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        raw = self._bytes(count * dtype.itemsize)
        return np.frombuffer(raw, np.uint8 if kind == 7 else dtype).astype(dtype).tolist()

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, offset and bytes of a tensor."""
        name = self._string("the name of a tensor", _MOST_NAME)
        if not name.isprintable():
            raise ValueError(f"the tensor name {name[:200]!a} has unprintable characters")
        axes = self._number("<I")
        if not 0 < axes <= _MOST_AXES:
            raise ValueError(f"tensor {name} has {axes} axes; 1 to {_MOST_AXES} are read")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._types:
            raise ValueError(f"tensor {name} is of type {kind}, which the package gguf lacks")
        type_, weights, nbytes = self._types[kind]
        if shape[-1] % weights:
            raise ValueError(
                f"tensor {name} has rows of {shape[-1]} weights, and {type_} has blocks of "
                f"{weights}"
            )
        return name, type_, shape, offset, math.prod(shape) // weights * nbytes

    def _places(
        self, infos: list[tuple[str, str, tuple[int, ...], int, int]], align: int
    ) -> dict[str, GgufTensor]:
        """Name → tensor. Tensors must lie in the file, at multiples of `align`, and apart."""
        begin, end, tensors = -(-self._at // align) * align, 0, {}
        for name, type_, shape, offset, nbytes in sorted(infos, key=lambda info: info[3]):
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            if offset < end or offset % align:
                raise ValueError(f"tensor {name} begins at {offset}, which is no place of its own")
            end = offset + nbytes
            if begin + end > self._size:
                raise ValueError(
                    f"tensor {name} of shape {list(shape)} ends at byte {begin + end} of "
                    f"{self._size}"
                )
            tensors[name] = GgufTensor(type_, shape, begin + offset, nbytes)
        return tensors
