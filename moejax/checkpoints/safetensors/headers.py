"""The header of a safetensors file, checked before anything in it is believed.

Format: https://huggingface.co/docs/safetensors, an 8-byte length, JSON, then the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Any

from moejax.errors import UserError, shown
from moejax.models.directory import open_regular, require_own_file
from moejax.models.json_values import is_integer, parse_json

FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' name → numpy's, of the dtypes a checkpoint may hold."""

MOST_HEADER = 100_000_000
"""Bytes of a header; safetensors' own limit."""

_PICKLES = (b"PK\3\4", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
"""What they begin with; a header's length may, so this is looked at where the header is bad."""

_MOST_TENSORS = 200_000
"""Tensors of a file; the largest models have 100,000 in all, in many files."""

_MOST_AXES = 32
"""What every numpy can hold."""

_ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}


@dataclasses.dataclass(frozen=True)
class Header:
    """One tensor as its file announces it: dtype is one of FLOAT_DTYPES' values."""

    dtype: str
    shape: tuple[int, ...]


def file_stamp(descriptor: int) -> tuple[int, int]:
    """Size and time of change (ns), which say whether a header still is the file's."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def damaged(path: pathlib.Path, error: Exception | str) -> UserError:
    """The error for a file that is no whole safetensors file."""
    return UserError(
        f"{path}: damaged or truncated safetensors file ({error}); download it again "
        "(if it is a Git LFS pointer of a few hundred bytes: git lfs pull)"
    )


def read_header(
    path: pathlib.Path, directory: pathlib.Path | None = None
) -> tuple[dict[str, Header], dict[str, int], tuple[int, int]]:
    """(tensor → what it is, tensor → where its bytes begin in the file, the file's file_stamp).

    directory: the checkpoint's, for require_own_file. Raises UserError unless the tensors lie one
    after the other, without gap or overlap, to the file's end and have dtypes of FLOAT_DTYPES.
    """
    require_own_file(path, directory)
    start = b""
    try:
        with open_regular(path) as file:
            stamp = file_stamp(file.fileno())
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
        return *_tensors(path, parse_json(text), 8 + length, size), stamp
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if start.startswith(_PICKLES):
            raise UserError(
                f"{path}: a pickle or zip file under another name, as PyTorch writes them; moejax "
                "never loads pickles, which can run code; use the model's safetensors checkpoint"
            ) from None
        raise damaged(path, error) from None


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
        dtype = _float_dtype(path, name, entry["dtype"])
        nbytes = math.prod(shape) * _ITEMSIZE[entry["dtype"]]
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


def _float_dtype(path: pathlib.Path, name: str, dtype: Any) -> str:
    if isinstance(dtype, str) and dtype in FLOAT_DTYPES:
        return FLOAT_DTYPES[dtype]
    if not isinstance(dtype, str):
        raise ValueError(f"dtype of tensor {name} must be a name, {shown(dtype)}")
    if dtype.startswith("F8"):
        why = "the checkpoint is quantized to FP8"
    elif dtype.startswith(("I", "U")):
        why = "packed integers, as in GPTQ, AWQ or bitsandbytes checkpoints"
    else:
        why = "not a dtype of weights that moejax reads"
    named = shown(dtype).strip("'")
    raise UserError(
        f"{path}: tensor {name} has dtype {named} ({why}), which is not supported; "
        "use the model's bfloat16, float16 or float32 checkpoint"
    )
