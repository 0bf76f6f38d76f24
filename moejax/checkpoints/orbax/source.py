"""A checkpoint of our own Orbax format as the source of another one."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from moejax.checkpoints.conversion_source import COPIED, Source, file_times
from moejax.checkpoints.orbax.layout import Leaf
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.orbax.own import check_files, open_stored, read_chunk
from moejax.requests.tokenizer import TEMPLATES


def orbax_source(directory: pathlib.Path) -> Source:
    """The parameters and dense experts of what `moejax convert` or `moejax quantize` wrote, in the
    dtype they have. Raises UserError for whatever is missing or damaged but contents of chunks,
    which are verified when they are read."""
    stored = open_stored(directory)
    check_files(stored, stored.layers())

    def chunks(leaf: Leaf, nonfinite: Counter[str]) -> Iterator[np.ndarray]:
        for number in leaf.chunks:
            chunk = np.empty(leaf.chunk_shape, leaf.dtype)
            read_chunk(stored, leaf, number, chunk)
            yield chunk

    copied = (n for n in stored.manifest.files if n in COPIED or n.startswith(f"{TEMPLATES}/"))
    return Source(
        directory,
        stored.config,
        stored.dtype,
        stored.manifest.nonfinite,
        # The manifest has checksums of all others.
        files=file_times([directory / MANIFEST], directory),
        copied={name: (directory / name).read_bytes() for name in copied},
        chunks=chunks,
    )
