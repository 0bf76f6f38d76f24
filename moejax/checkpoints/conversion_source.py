"""A checkpoint to be converted: its tensors, leaf by leaf, and the files that are copied."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS
from moejax.checkpoints.checkpoint import ArraySink, Checkpoint, run_tasks
from moejax.checkpoints.loaded_model import run_dtype
from moejax.checkpoints.orbax.layout import DENSE, Leaf, StoredModel
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.orbax.own import MOST_FILES, open_stored
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.models.directory import read_json, require_own_file
from moejax.requests.tokenizer import FILES, TEMPLATES

COPIED = (
    "config.json",
    "generation_config.json",
    *FILES,
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
)
"""Files of the source that belong to the model; those that are there are copied, and what is in
TEMPLATES."""


@dataclasses.dataclass(frozen=True)
class Source(StoredModel):
    """A checkpoint to be written as ours, in the dtype that the result has."""

    checkpoint: Checkpoint
    files: dict[str, list[int]]
    """Size and time of change (ns) of each file that decides the result."""
    copied: dict[str, bytes]
    """The files to copy; config.json with the dtype that the weights have in the result."""

    def chunks(self, leaf: Leaf) -> Iterator[np.ndarray]:
        """The chunks of a parameter, one at a time, or the dense experts of a layer, which are in
        memory at once."""
        kind, _, key = leaf.name.partition(".")
        with self.checkpoint.open() as reader, ThreadPoolExecutor(WORKERS) as pool:
            if kind == "params":
                for chunk in leaf.chunks:
                    array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
                    run_tasks(pool, reader.read_param(key, chunk, array))
                    yield array
                return
            layer = int(key.rpartition(".")[2])
            sink = ArraySink(self.layout(), np.empty(leaf.shape, leaf.dtype))
            tasks = reader.read_experts(DENSE, [layer], sink, NUMPY_DTYPES[self.dtype])
            run_tasks(pool, tasks)
            assert sink.written.all(), "rows without a tensor"
            yield from sink.records


def open_source(directory: pathlib.Path, dtype: str) -> Source:
    """A Hugging Face checkpoint whose tensors are all checked. dtype: as in load_checkpoint.
    Raises UserError as that does."""
    opened = open_tensors(directory, "safetensors")
    dtype = run_dtype(dtype, opened.dtype)
    copied = _copied(directory)
    if opened.config.dtype != dtype:
        fields = read_json(directory / "config.json")
        fields.pop("torch_dtype", None)
        copied["config.json"] = json.dumps({**fields, "dtype": dtype}, indent=2).encode()
    paths = [*(file.path for file in opened.files), *map(directory.joinpath, copied)]
    return Source(directory, opened.config, dtype, opened, file_times(paths, directory), copied)


def orbax_source(directory: pathlib.Path) -> Source:
    """The parameters and dense experts of what `moejax convert` or `moejax quantize` wrote, in the
    dtype they have. Raises UserError for whatever is missing or damaged but contents of chunks,
    which are verified when they are read."""
    stored = open_stored(directory)
    stored.hold(stored.dtype, (DENSE,))
    names = (n for n in stored.manifest.files if n in COPIED or n.startswith(f"{TEMPLATES}/"))
    copied = {name: (directory / name).read_bytes() for name in names}
    # The manifest has checksums of all others.
    files = file_times([directory / MANIFEST], directory)
    return Source(directory, stored.config, stored.dtype, stored, files, copied)


def file_times(paths: Iterable[pathlib.Path], directory: pathlib.Path) -> dict[str, list[int]]:
    """Path within the directory → size and time of change (ns)."""
    found = {path.relative_to(directory).as_posix(): path.stat() for path in sorted(paths)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _copied(directory: pathlib.Path) -> dict[str, bytes]:
    """The files of COPIED by their path within the directory. Raises UserError for a link out of
    the checkpoint, whose target is nobody's to copy."""
    paths = [directory / name for name in COPIED]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += directory.glob(f"{TEMPLATES}/*")
    copied, left = {}, MOST_FILES
    for path in paths:
        left -= require_own_file(path, directory, left, "all files but the weights")
        copied[path.relative_to(directory).as_posix()] = path.read_bytes()
    return copied
