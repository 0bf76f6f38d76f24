"""A digest of a checkpoint's content, by which a job knows that its results fit the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import pathlib
from collections.abc import Iterator, Mapping

from moejax.checkpoints.orbax.steps import Step, find_items, is_orbax
from moejax.errors import UserError
from moejax.models.directory import checkpoint_directory, open_regular
from moejax.models.gguf_header import is_gguf, read_gguf

WHOLE = 1 << 25
"""Most bytes of a file that is read whole."""
SAMPLES, SAMPLE = 2048, 512
"""Larger files are read at SAMPLES places, SAMPLE bytes at each, and at the places of tensors."""


def fingerprint(path: str | os.PathLike[str], step: Step = None) -> str:
    """A digest of a checkpoint's files, in hexadecimal. It does not depend on where the files are.

    Files of at most WHOLE bytes are read whole: config, tokenizer, templates, and the manifest with
    the checksums of a converted checkpoint. Larger files are sampled, so that a checkpoint of
    terabytes takes seconds: the digest has their size, samples, and for safetensors the header and
    samples of every tensor. A tensor with other weights changes the digest, unless only a few of
    its values differ.

    - `path`: a directory or GGUF file that `load_checkpoint` takes.
    - `step`: the step to read, for a directory with steps of a training run.

    Raises UserError for a directory that does not exist or cannot be read.
    """
    directory = checkpoint_directory(path)
    try:
        if is_gguf(directory):
            files, directory = [each.path for each in read_gguf(directory)], directory.parent
        elif not is_orbax(directory):
            files = [*directory.iterdir()]
        else:
            items = find_items(directory, step)
            files = [file for around in items.directories for file in around.iterdir()]
            files += [file for item in items.items.values() for file in item.rglob("*")]
        counting = sorted(f for f in set(files) if _counts(f) and f.is_file())
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    return _digest({os.path.relpath(file, directory): file for file in counting})


def _counts(file: pathlib.Path) -> bool:
    """Whether the file belongs to the model. Model cards, licences, results that a job writes there
    and leftovers of a download do not."""
    return not (file.name.startswith((".", "LICENSE")) or file.suffix in (".md", ".jsonl"))


def file_fingerprint(path: str | os.PathLike[str]) -> str:
    """`fingerprint` of a directory, or of a single file. Raises UserError as that does."""
    return fingerprint(path) if os.path.isdir(path) else _digest({"": pathlib.Path(path)})


def _digest(files: Mapping[str, pathlib.Path]) -> str:
    """The first 64 bits, in hexadecimal, of the SHA-256 of file names and contents.

    - `files`: name in the digest → path.

    Raises UserError for a file that cannot be read.
    """
    found = hashlib.sha256()
    for name, path in files.items():
        found.update(name.encode())
        try:
            for piece in _pieces(path):
                found.update(piece)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return found.hexdigest()[:16]


def _pieces(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the bytes of a file that its digest has: its size, then all bytes or samples."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        yield size.to_bytes(8, "little")
        if size <= WHOLE:
            yield file.read()
            return
        places = [*(size * i // SAMPLES for i in range(SAMPLES)), size - SAMPLE]
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            yield (header := file.read(min(length, size)))
            places += (place for place in _tensor_places(header) if 0 <= place < size)
        for place in places:
            file.seek(place)
            yield file.read(SAMPLE)


def _tensor_places(header: bytes) -> list[int]:
    """Where in a safetensors file to take samples: the begin, middle and end of each tensor."""
    places, data = [], 8 + len(header)
    # Nothing is raised for a wrong header here: loading the file explains it.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
        for first, last in (each["data_offsets"] for each in tensors):
            middle, end = (first + last) // 2, max(first, last - SAMPLE)
            places += [data + operator.index(place) for place in (first, middle, end)]
    return places
