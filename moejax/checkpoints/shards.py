"""Reads the safetensors files of a checkpoint. Each header is checked before it is used, and
tensors are read directly into their place.

Format (https://huggingface.co/docs/safetensors): an 8-byte length, JSON, then the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from host_offload.memory.bounded_reads import PIECE, open_within, read_within
from moejax.errors import UserError, shown
from moejax.models.directory import open_regular, read_json, require_own_file, stamp_of
from moejax.models.json_values import is_integer, parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
"""safetensors' name → numpy's name of each dtype that weights, codes and scales may have."""

MOST_HEADER = 100_000_000
"""Most bytes of a header; safetensors has the same limit."""

_PICKLES = (b"PK\3\4", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
"""First bytes of pickle and zip files. The length of a good header may be equal to them, so they
are compared only when the header is bad."""

_MOST_TENSORS = 200_000
"""Most tensors of a file; the largest models have 100,000 in all, in many files."""

_MOST_AXES = 32
"""Most axes of a tensor, which every version of numpy supports."""


@dataclasses.dataclass(frozen=True)
class Header:
    """The dtype, one of DTYPES' values, and the shape of a tensor, from the header of its file."""

    dtype: str
    shape: tuple[int, ...]


ReadRows = Callable[[int, np.ndarray], None]
"""read(first, out) fills out[n, width], which has the tensor's dtype, with n rows from row `first`
on. Rows are counted over all axes but the last. Raises UserError where the file is damaged or has
changed."""


class TensorReader(Protocol):
    """An open file of tensors. Several threads may read at once."""

    @property
    def splits(self) -> bool:
        """Whether some rows can be read without the others."""
        ...

    def rows(self, name: str, index: int | None = None, /) -> ReadRows:
        """Returns a function that reads rows of a tensor, or of its part at an index of the first
        axis."""
        ...


class TensorFile(Protocol):
    """Tensors under the names that transformers uses, whose headers are already read."""

    @property
    def path(self) -> pathlib.Path:
        """The file or directory, for messages."""
        ...

    @property
    def tensors(self) -> dict[str, Header]:
        """Name → header of each tensor."""
        ...

    def named(self, name: str, /) -> str:
        """File and name of a tensor, as its file has it, for messages."""
        ...

    def open(self) -> AbstractContextManager[TensorReader]:
        """Opens the file. Raises UserError, here or while reading, where it is damaged."""
        ...


@dataclasses.dataclass(frozen=True)
class Shard:
    """A TensorFile: one safetensors file and the headers of its tensors.

    begins: tensor → the offset of its bytes in the file. stamp: the file's size in bytes and its
    time of change in ns.
    """

    path: pathlib.Path
    tensors: dict[str, Header]
    begins: dict[str, int]
    stamp: tuple[int, ...]

    def named(self, name: str) -> str:
        return f"{self.path}: tensor {name}"

    @contextlib.contextmanager
    def open(self) -> Iterator[ShardReader]:
        """Opens the file. Raises UserError where that fails, and at either end of the `with` and
        after each read where the file has changed since its header was read."""
        try:
            descriptor = open_within(self.path)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        try:
            self.require_unchanged(descriptor)
            yield ShardReader(self, descriptor)
            self.require_unchanged(descriptor)
        finally:
            os.close(descriptor)

    def require_unchanged(self, descriptor: int) -> None:
        if stamp_of(os.fstat(descriptor)) != self.stamp:
            raise UserError(
                f"{self.path}: was written to while moejax read it; let that end, then try again"
            )


@dataclasses.dataclass(frozen=True)
class ShardReader:
    """A TensorReader of a shard.

    The file is read with pread and not mapped, so that a failing disk or a truncated file is an
    error and not a signal that ends the process.
    """

    shard: Shard
    descriptor: int

    splits = True

    def rows(self, name: str, index: int | None = None) -> ReadRows:
        *axes, width = self.shard.tensors[name].shape or (1,)
        begin = 0 if index is None else index * math.prod(axes[1:])
        return lambda first, out: self._read(name, (begin + first) * width, out)

    def _read(self, name: str, first: int, out: np.ndarray) -> None:
        """Fills `out`, which is contiguous, with the values of the flat tensor from `first` on."""
        header, path = self.shard.tensors[name], self.shard.path
        rest = out.reshape(-1).view(np.uint8).data
        offset = self.shard.begins[name] + first * np.dtype(header.dtype).itemsize
        while rest:
            try:
                piece = [rest[:PIECE]]
                read = read_within(
                    path, functools.partial(os.preadv, self.descriptor, piece, offset)
                )
            except OSError as error:
                raise _unreadable(path, error) from None
            if read == 0:
                raise _damage_error(path, f"ends within tensor {name}; it was whole a moment ago")
            rest, offset = rest[read:], offset + read
        self.shard.require_unchanged(self.descriptor)


def renamed(shard: Shard, new_name: Callable[[str], str]) -> Shard:
    """The shard with other names of its tensors. Raises UserError where two get the same one."""
    names = {name: new_name(name) for name in shard.tensors}
    if len(set(names.values())) < len(names):
        old = {new: name for name, new in names.items()}
        twice = next(name for name, new in names.items() if old[new] != name)
        raise UserError(f"{shard.path}: {twice} and {old[names[twice]]} are the same tensor")
    tensors = {names[name]: header for name, header in shard.tensors.items()}
    begins = {names[name]: begin for name, begin in shard.begins.items()}
    return dataclasses.replace(shard, tensors=tensors, begins=begins)


def selected(shard: Shard, names: Mapping[str, str]) -> Shard:
    """The shard with some tensors alone, under other names.

    - `names`: a tensor's name → its new one.
    """
    tensors = {names[name]: header for name, header in shard.tensors.items() if name in names}
    begins = {names[name]: begin for name, begin in shard.begins.items() if name in names}
    return dataclasses.replace(shard, tensors=tensors, begins=begins)


def reshaped(shard: Shard, shape_of: Callable[..., tuple[int, ...]], config: Any) -> Shard:
    """The shard with tensors in other shapes of as many values. shape_of: see Family."""
    tensors = {
        name: dataclasses.replace(header, shape=shape_of(config, name, header.shape))
        for name, header in shard.tensors.items()
    }
    return dataclasses.replace(shard, tensors=tensors)


def find_shards(directory: pathlib.Path) -> tuple[Shard, ...]:
    """Reads the headers of a checkpoint's shards: model.safetensors, or the files that the index
    names.

    Raises UserError that names file and tensor, where a shard is missing or damaged, index and
    shards disagree, or a dtype is not one of DTYPES.
    """
    if os.path.lexists(directory / SINGLE):
        return (read_header(directory / SINGLE, directory),)
    if not os.path.lexists(directory / INDEX):
        raise UserError(_explain_nothing(directory))
    owner = _read_index(directory / INDEX)
    placed: dict[str, list[str]] = {}
    for name, file in owner.items():
        placed.setdefault(file, []).append(name)
    shards = []
    for file, names in sorted(placed.items()):
        path = directory / file
        if not os.path.lexists(path):
            raise UserError(f"{path}: shard missing, though {INDEX} names it; download it again")
        shard = read_header(path, directory)
        for name in shard.tensors:
            if owner.get(name) != file:
                elsewhere = f"places it in {owner[name]}" if name in owner else "does not know it"
                raise UserError(f"{path}: holds the tensor {name}, but {INDEX} {elsewhere}")
        shards.append(shard)
        absent = [name for name in names if name not in shard.tensors]
        if absent:
            raise UserError(f"{path}: lacks the tensor {absent[0]}, which {INDEX} places there")
    return tuple(shards)


def _unreadable(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read: {error.strerror or error}")


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name → file name. Raises UserError for a path that leads out of the checkpoint's
    directory."""
    owner = read_json(path).get("weight_map")
    if not isinstance(owner, dict) or not owner:
        raise UserError(f"{path}: weight_map must be an object of tensor names and file names")
    for name, file in owner.items():
        # Only the text is checked here; read_header checks where a link leads.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or not file.isprintable()
            or not name.isprintable()
            or (pathlib.PurePath(file).is_absolute() or ".." in pathlib.PurePath(file).parts)
        ):
            shown = name if name.isprintable() else ascii(name)
            raise UserError(
                f"{path}: tensor {shown} is placed in {file!r}, which is not a "
                ".safetensors file inside the checkpoint's directory"
            )
    return owner


_PICKLE_FILES = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle")


def _explain_nothing(directory: pathlib.Path) -> str:
    wanted = f"neither {SINGLE} nor {INDEX} found"
    if any(True for pattern in _PICKLE_FILES for _ in directory.glob(pattern)):
        return (
            f"{directory}: {wanted}, only PyTorch .bin or .pth files, which moejax does not read "
            "since pickles can run code; convert them where you trust them: transformers' "
            "from_pretrained, then save_pretrained"
        )
    if any(directory.glob("*.gguf")):
        return (
            f"{directory}: {wanted}, only GGUF files; name one of them as the model, DIR/NAME.gguf"
        )
    return f"{directory}: {wanted}"


def _damage_error(path: pathlib.Path, error: Exception | str) -> UserError:
    """The error for a damaged or truncated safetensors file."""
    return UserError(
        f"{path}: damaged or truncated safetensors file ({error}); download it again "
        "(if it is a Git LFS pointer of a few hundred bytes: git lfs pull)"
    )


def read_header(path: pathlib.Path, directory: pathlib.Path | None = None) -> Shard:
    """Reads the header of a safetensors file.

    - `directory`: the checkpoint's, which a link may not leave (require_own_file).

    Raises UserError unless the tensors have dtypes of DTYPES and lie one after the other, without
    gap or overlap, to the end of the file.
    """
    require_own_file(path, directory)
    start = b""
    try:
        with open_regular(path) as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            size = stamp[0]
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise ValueError(f"its {size} bytes are less than its header")
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length} bytes; at most {MOST_HEADER} are read")
            text = file.read(length)
        if text[:1] != b"{":
            raise ValueError("the header is not a JSON object")
        return Shard(path, *_tensors(path, parse_json(text), 8 + length, size), stamp)
    except UserError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        if start.startswith(_PICKLES):
            raise UserError(
                f"{path}: a pickle or zip file under another name, as PyTorch writes them; moejax "
                "never loads pickles, which can run code; use the model's safetensors checkpoint"
            ) from None
        raise _damage_error(path, error) from None


def _tensors(
    path: pathlib.Path, table: dict[str, Any], begin: int, size: int
) -> tuple[dict[str, Header], dict[str, int]]:
    if len(table) > _MOST_TENSORS:
        raise ValueError(f"{len(table)} tensors; at most {_MOST_TENSORS} are read of a file")
    headers, spans = {}, []
    for name, entry in table.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
                raise ValueError("__metadata__ must be an object of strings")
            continue
        if not name.isprintable():
            raise ValueError(f"the tensor name {name!a} has unprintable characters")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"tensor {name} must have dtype, shape and data_offsets alone")
        shape, offsets = _sizes(name, entry, "shape"), _sizes(name, entry, "data_offsets")
        if len(offsets) != 2:
            raise ValueError(f"data_offsets of tensor {name} must be two numbers")
        if len(shape) > _MOST_AXES:
            raise ValueError(f"tensor {name} has {len(shape)} axes; at most {_MOST_AXES} are read")
        dtype = _dtype(path, name, entry["dtype"])
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if offsets[1] - offsets[0] != nbytes:
            raise ValueError(
                f"tensor {name} of shape {shown(list(shape))} needs {shown(nbytes)} bytes, "
                f"its data_offsets are {shown(list(offsets))}"
            )
        headers[name] = Header(dtype, shape)
        spans.append((offsets, name))
    end = 0
    for (first, last), name in sorted(spans):
        if first != end:
            raise ValueError(
                f"tensor {name} begins at byte {shown(first)}, where the one before ends at {end}"
            )
        end = last
    if begin + end != size:
        raise ValueError(f"the tensors end at byte {shown(begin + end)} of {size}")
    return headers, {name: begin + first for (first, _), name in spans}


def _sizes(name: str, entry: dict, key: str) -> tuple[int, ...]:
    values = entry[key]
    if not isinstance(values, list) or not all(is_integer(v) and v >= 0 for v in values):
        raise ValueError(f"{key} of tensor {name} must be a list of numbers, {shown(values)}")
    return tuple(values)


def _dtype(path: pathlib.Path, name: str, dtype: Any) -> str:
    if not isinstance(dtype, str):
        raise ValueError(f"dtype of tensor {name} must be a name, {shown(dtype)}")
    if dtype not in DTYPES:
        named = shown(dtype).strip("'")
        why = "FP8 of another kind" if dtype.startswith("F8") else "not a dtype of weights"
        raise UserError(
            f"{path}: tensor {name} has dtype {named} ({why}), which is not supported; use a "
            "checkpoint in a format of docs/how-to/quantized_checkpoints.md, or in bfloat16"
        )
    return DTYPES[dtype]
