"""The safetensors files of a checkpoint and the tensors that their headers announce."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.safetensors.headers import Header, damaged, file_stamp, read_header
from moejax.errors import UserError
from moejax.models.directory import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorReader(Protocol):
    """An open file of tensors. Several threads may read at once; what they get is theirs."""

    def get_tensor(self, name: str, /) -> np.ndarray:
        """The whole tensor, of the announced dtype and shape."""
        ...

    def get_rows(self, name: str, index: int | slice, /) -> np.ndarray:
        """tensor[index], without reading the rest where the format allows."""
        ...


class TensorFile(Protocol):
    """Tensors under the names of transformers' checkpoints, known before they are read."""

    @property
    def path(self) -> pathlib.Path:
        """The file or directory, for messages."""
        ...

    @property
    def tensors(self) -> dict[str, Header]:
        """What it holds, by name."""
        ...

    def open(self) -> AbstractContextManager[TensorReader]:
        """Raises UserError, here or while reading, where the file is damaged."""
        ...


@dataclasses.dataclass(frozen=True)
class Shard:
    """One safetensors file and the headers of its tensors, by name; a TensorFile.

    begins: tensor → where its bytes begin in the file. stamp: the file's file_stamp.
    """

    path: pathlib.Path
    tensors: dict[str, Header]
    begins: dict[str, int]
    stamp: tuple[int, int]

    @contextlib.contextmanager
    def open(self) -> Iterator[ShardReader]:
        """Raises UserError where the file cannot be opened any more, and, at either end of the
        `with`, where it is not the one whose header was read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        try:
            self._require_unchanged(descriptor)
            yield ShardReader(self, descriptor)
            self._require_unchanged(descriptor)
        finally:
            os.close(descriptor)

    def _require_unchanged(self, descriptor: int) -> None:
        if file_stamp(descriptor) != self.stamp:
            raise UserError(
                f"{self.path}: was written to while moejax read it; let that end, then try again"
            )


@dataclasses.dataclass(frozen=True)
class ShardReader:
    """An open shard; a TensorReader.

    Read with pread rather than mapped: a disk that fails, or a file that is cut off meanwhile, is
    an error then and not a signal that ends the process.
    """

    shard: Shard
    descriptor: int

    def get_tensor(self, name: str) -> np.ndarray:
        header = self.shard.tensors[name]
        values = np.empty(header.shape, NUMPY_DTYPES[header.dtype])
        self.read_into(name, 0, values)
        return values

    def get_rows(self, name: str, index: int | slice) -> np.ndarray:
        header = self.shard.tensors[name]
        rows = range(header.shape[0])[index]
        one = isinstance(rows, int)
        rows = range(rows, rows + 1) if one else rows
        assert rows.step == 1, "rows that lie one after the other"
        values = np.empty((len(rows), *header.shape[1:]), NUMPY_DTYPES[header.dtype])
        self.read_into(name, rows.start * math.prod(header.shape[1:]), values)
        return values[0] if one else values

    def read_into(self, name: str, first: int, out: np.ndarray) -> None:
        """Reads from value number `first` of the flat tensor on, until out is full.

        out: contiguous, of the tensor's dtype. Raises UserError where the file cannot be read or
        has become shorter.
        """
        header, path = self.shard.tensors[name], self.shard.path
        rest = out.reshape(-1).view(np.uint8).data
        offset = self.shard.begins[name] + first * NUMPY_DTYPES[header.dtype].itemsize
        while rest:
            try:
                read = os.preadv(self.descriptor, [rest], offset)
            except OSError as error:
                raise _unreadable(path, error) from None
            if read == 0:
                raise damaged(path, f"ends within tensor {name}; it was whole a moment ago")
            rest, offset = rest[read:], offset + read


def find_shards(directory: pathlib.Path) -> tuple[Shard, ...]:
    """The shards of a checkpoint: model.safetensors, or the files that the index names.

    Reads headers only. Raises UserError, naming file and tensor, where a shard is missing or
    damaged, index and shards disagree, or a dtype is not one of FLOAT_DTYPES.
    """
    if os.path.lexists(directory / SINGLE):
        return (_shard(directory / SINGLE, directory),)
    if not os.path.lexists(directory / INDEX):
        raise UserError(_nothing_found(directory))
    owner = _read_index(directory / INDEX)
    placed: dict[str, list[str]] = {}
    for name, file in owner.items():
        placed.setdefault(file, []).append(name)
    shards = []
    for file, names in sorted(placed.items()):
        path = directory / file
        if not os.path.lexists(path):
            raise UserError(f"{path}: shard missing, though {INDEX} names it; download it again")
        shard = _shard(path, directory)
        for name in shard.tensors:
            if owner.get(name) != file:
                elsewhere = f"places it in {owner[name]}" if name in owner else "does not know it"
                raise UserError(f"{path}: holds the tensor {name}, but {INDEX} {elsewhere}")
        shards.append(shard)
        absent = [name for name in names if name not in shard.tensors]
        if absent:
            raise UserError(f"{path}: lacks the tensor {absent[0]}, which {INDEX} places there")
    return tuple(shards)


def _shard(path: pathlib.Path, directory: pathlib.Path) -> Shard:
    return Shard(path, *read_header(path, directory))


def _unreadable(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read: {error.strerror or error}")


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name → file name, each a plain path inside the checkpoint's directory."""
    owner = read_json(path).get("weight_map")
    if not isinstance(owner, dict) or not owner:
        raise UserError(f"{path}: weight_map must be an object of tensor names and file names")
    for name, file in owner.items():
        # Only the text is checked here; read_header sees where a link leads.
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


_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle")


def _nothing_found(directory: pathlib.Path) -> str:
    wanted = f"neither {SINGLE} nor {INDEX} found"
    if any(True for pattern in _PICKLES for _ in directory.glob(pattern)):
        return (
            f"{directory}: {wanted}, only PyTorch .bin or .pth files, which moejax does not read "
            "since pickles can run code; convert them where you trust them: transformers' "
            "from_pretrained, then save_pretrained"
        )
    if any(directory.glob("*.gguf")):
        return (
            f"{directory}: {wanted}, only GGUF files, which moejax does not read; "
            "use the model's safetensors checkpoint"
        )
    return f"{directory}: {wanted}"
