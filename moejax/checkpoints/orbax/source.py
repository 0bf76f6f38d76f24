"""A checkpoint of our own Orbax format as the source of another one."""

from __future__ import annotations

import functools
import pathlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moejax.checkpoints.conversion_source import COPIED, Source, file_times
from moejax.checkpoints.orbax.layout import DENSE
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.orbax.own import (
    StoredCheckpoint,
    check_files,
    open_stored,
    read_param,
    read_record,
)
from moejax.checkpoints.placement import WORKERS
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES
from moejax.requests.tokenizer import TEMPLATES


def orbax_source(directory: pathlib.Path) -> Source:
    """The parameters and dense experts of what `moejax convert` or `moejax quantize` wrote, in the
    dtype they have. Raises UserError for whatever is missing or damaged but contents of chunks,
    which are verified when they are read."""
    stored = open_stored(directory)
    layers = stored.layers(DENSE)
    check_files(stored, {DENSE: range(len(layers))})
    copied = (n for n in stored.manifest.files if n in COPIED or n.startswith(f"{TEMPLATES}/"))
    return Source(
        directory,
        stored.config,
        stored.manifest.dtype,
        stored.layout,
        stored.params,
        layers,
        stored.manifest.nonfinite,
        # The manifest has checksums of all others.
        files=file_times([directory / MANIFEST], directory),
        copied={name: (directory / name).read_bytes() for name in copied},
        param_chunks=functools.partial(_param_chunks, stored),
        expert_chunks=functools.partial(_expert_chunks, stored),
    )


def _param_chunks(
    stored: StoredCheckpoint, key: str, nonfinite: Counter[str] | None
) -> Iterator[np.ndarray]:
    leaf = stored.params[key]
    with ThreadPoolExecutor(WORKERS) as pool:
        weights = read_param(stored, key, leaf.dtype, pool)
    yield from weights if leaf.stacked else [weights]


def _expert_chunks(
    stored: StoredCheckpoint, layer: int, nonfinite: Counter[str] | None
) -> Iterator[np.ndarray]:
    dtype, leaf = NUMPY_DTYPES[stored.manifest.dtype], stored.layer(DENSE, layer)
    for expert in range(stored.config.num_experts):
        record = np.empty(leaf.shape[1:], np.uint16)
        read_record(stored, DENSE, layer, expert, dtype, record)
        yield record
