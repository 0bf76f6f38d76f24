"""Reads files of token ids, the form in which training programs keep data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import UserError, shown

DTYPES = ("uint16", "uint32", "int32", "int64")
"""Types of a .bin file, little-endian; uint16 is that of nanoGPT's train.bin."""

_JSON_FIELDS = ("input_ids", "token_ids", "tokens")
_EXAMPLES = (
    "a .npy array of integers, one axis for a text or [documents, tokens]; a .bin file of bare "
    "little-endian numbers (--token-dtype); a .jsonl file with a list of ids a line, such as "
    '[17, 4, 256] or {"input_ids": [17, 4, 256]}'
)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Documents of token ids, each scored without the others as context."""

    documents: tuple[np.ndarray, ...] = dataclasses.field(repr=False)
    """int64[tokens] each."""
    sha256: str
    """SHA-256 of the file's bytes."""


def read_token_ids(path: str | os.PathLike[str], dtype: str = "uint16") -> TokenIds:
    """Reads the documents of a file, whose suffix says its format (.npy, .bin, .jsonl).

    - `dtype`: of a .bin file, one of DTYPES.

    Raises UserError for another suffix or dtype, and for a file that is empty, cannot be read or
    has other content than its suffix says.
    """
    if dtype not in DTYPES:
        raise UserError(f"token_dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    name, readers = Path(path), {".npy": _npy, ".bin": _bin, ".jsonl": _jsonl}
    if name.suffix not in readers:
        raise UserError(f"{path}: token ids are read from {_EXAMPLES}")
    try:
        data = name.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    documents = readers[name.suffix](path, data, dtype)
    if not sum(map(len, documents)):
        raise UserError(f"{path} is empty; there is nothing to score")
    return TokenIds(tuple(documents), hashlib.sha256(data).hexdigest())


def _npy(path: Any, data: bytes, dtype: str) -> Sequence[np.ndarray]:
    with open(path, "rb") as file:
        try:
            array = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"{path} is no .npy file ({error})") from None
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "ui"
        or array.ndim not in (1, 2)
    ):
        found = f"{getattr(array, 'dtype', '?')}{list(getattr(array, 'shape', ()))}"
        raise UserError(f"{path} holds {found}; token ids are {_EXAMPLES}")
    return list(np.atleast_2d(array.astype(np.int64)))


def _bin(path: Any, data: bytes, dtype: str) -> Sequence[np.ndarray]:
    kind = np.dtype(dtype).newbyteorder("<")
    if len(data) % kind.itemsize:
        raise UserError(
            f"{path} has {len(data)} bytes, no multiple of the {kind.itemsize} of {dtype}; "
            f"--token-dtype is one of {', '.join(DTYPES)}"
        )
    return [np.frombuffer(data, kind).astype(np.int64)]


def _jsonl(path: Any, data: bytes, dtype: str) -> Sequence[np.ndarray]:
    documents = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}, line {number}, is no JSON; token ids are {_EXAMPLES}"
            ) from None
        if isinstance(found, dict):
            found = next((found[field] for field in _JSON_FIELDS if field in found), None)
        ids = found if isinstance(found, list) else [None]
        if not all(type(one) is int and -(2**63) <= one < 2**63 for one in ids):
            text = shown(line.decode("utf-8", "replace"))
            raise UserError(
                f"{path}, line {number}, is no list of token ids but {text}; "
                "give a list of whole numbers a line, or an object with one as "
                f"{', '.join(_JSON_FIELDS)}"
            )
        documents.append(np.asarray(ids, np.int64))
    return documents
