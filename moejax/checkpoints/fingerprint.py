"""What a checkpoint is, by its content: results of a job are bound to it."""

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

WHOLE = 1 << 25
"""Files up to so many bytes are read whole."""
SAMPLES, SAMPLE = 2048, 512
"""Places at which larger files are read beside those of tensors, and bytes at each."""


def fingerprint(path: str | os.PathLike[str], step: Step = None) -> str:
    """A digest of a checkpoint's files, in hexadecimal; the same wherever the files lie.

    Files of at most WHOLE bytes count whole (config, tokenizer, templates, the manifest with the
    checksums of a converted checkpoint). Of larger ones the size, samples, and of safetensors the
    header and samples of every tensor count, so that a checkpoint of terabytes takes seconds: other
    weights are noticed, be it in one tensor, unless they differ in few values only.

    - `path`: a directory that `load_checkpoint` takes.
    - `step`: of a directory with steps of a training run; other steps do not count.

    Raises UserError for a directory that is not there or cannot be read.
    """
    directory = checkpoint_directory(path)
    try:
        files = [*directory.iterdir()]
        if is_orbax(directory):
            items = find_items(directory, step)
            files = [file for around in items.directories for file in around.iterdir()]
            files += [file for item in items.items.values() for file in item.rglob("*")]
        counting = sorted(f for f in set(files) if _counts(f) and f.is_file())
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    return _digest({os.path.relpath(file, directory): file for file in counting})


def _counts(file: pathlib.Path) -> bool:
    """Not a model card, a licence, results that a job writes there, or what a download left."""
    return not (file.name.startswith((".", "LICENSE")) or file.suffix in (".md", ".jsonl"))


def file_fingerprint(path: str | os.PathLike[str]) -> str:
    """The same of one file, or of a directory's files. Raises UserError."""
    return fingerprint(path) if os.path.isdir(path) else _digest({"": pathlib.Path(path)})


def _digest(files: Mapping[str, pathlib.Path]) -> str:
    """Of files by the names that count. Raises UserError."""
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
    """What counts of a file."""
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
    """Where the samples of a safetensors file are: each tensor's begin, middle and end."""
    places, data = [], 8 + len(header)
    # Loading the file says what is wrong with a header.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
        for first, last in (each["data_offsets"] for each in tensors):
            middle, end = (first + last) // 2, max(first, last - SAMPLE)
            places += [data + operator.index(place) for place in (first, middle, end)]
    return places
