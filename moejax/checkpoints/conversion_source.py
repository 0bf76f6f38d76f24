"""A checkpoint to be converted: its tensors, leaf by leaf, and the files that are copied."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.load import plan_tensors
from moejax.checkpoints.orbax.layout import DENSE, Leaf, StoredModel
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.orbax.own import MOST_FILES, check_files, open_stored, read_chunk
from moejax.checkpoints.placement import RecordSink, load_file
from moejax.checkpoints.safetensors.shards import Shard, find_shards
from moejax.checkpoints.tensors import ExpertPlace, Place
from moejax.models.config import ModelConfig, load_config
from moejax.models.directory import read_json, require_own_file
from moejax.requests.tokenizer import FILES, TEMPLATES
from pallas_kernels.records import RecordFormat

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
    """A checkpoint to be written as ours, with what the result holds."""

    nonfinite: dict[str, int]
    """What is known before anything is read, as in Manifest.nonfinite."""
    files: dict[str, list[int]]
    """Size and time of change (ns) of each file that decides the result."""
    copied: dict[str, bytes]
    """The files to copy; config.json with the dtype that the weights have in the result."""
    chunks: Callable[[Leaf, Counter[str]], Iterator[np.ndarray]]
    """(leaf, nonfinite) → the chunks of a parameter or of the dense experts of a layer, one at a
    time. nonfinite: as in load_file."""


def open_source(directory: pathlib.Path, dtype: str) -> Source:
    """A Hugging Face checkpoint whose tensors are all checked. dtype: as in load_checkpoint.
    Raises UserError as load_tensors does."""
    files = find_shards(directory)
    config, dtype, places = plan_tensors(load_config(directory), files, dtype, str(directory))
    copied = _copied(directory)
    if config.dtype != dtype:
        fields = read_json(directory / "config.json")
        fields.pop("torch_dtype", None)
        copied["config.json"] = json.dumps({**fields, "dtype": dtype}, indent=2).encode()
    return Source(
        directory,
        config,
        dtype,
        nonfinite={},
        files=file_times(
            [*(file.path for file in files), *map(directory.joinpath, copied)], directory
        ),
        copied=copied,
        chunks=_Tensors(files, _by_leaf(places), config, NUMPY_DTYPES[dtype]).chunks,
    )


def _by_leaf(places: dict[str, Place]) -> dict[str, dict[str, Place]]:
    """Leaf name → the tensors that the leaf is made of, and where they go."""
    leaves: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        if isinstance(place, ExpertPlace):
            leaf = f"experts.{DENSE}.{place.layer}"
        else:
            run = "" if place.run is None else f"runs.{place.run}."
            leaf = f"params.{run}{place.key}"
        leaves.setdefault(leaf, {})[name] = place
    return leaves


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """The tensors of shards, put together leaf by leaf. places: as of _by_leaf. dtype: the result's
    dtype."""

    files: Sequence[Shard]
    places: dict[str, dict[str, Place]]
    config: ModelConfig
    dtype: np.dtype

    def chunks(self, leaf: Leaf, nonfinite: Counter[str]) -> Iterator[np.ndarray]:
        """As Source.chunks; all experts of a layer are in memory at once."""
        places = self.places[leaf.name]
        if leaf.name.startswith("experts."):
            layout = self.config.expert_layout(self.dtype.itemsize)
            sink = _LayerRecords(layout, self.config.num_experts)
            self._read(places, None, sink, nonfinite)
            assert sink.written.all(), "rows without a tensor"
            yield from sink.records
            return
        for layer in leaf.chunks:
            array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
            here = {name: place for name, place in places.items() if place.layer == layer}
            self._read(here, array, None, nonfinite)
            yield array

    def _read(
        self,
        places: dict[str, Place],
        param: np.ndarray | None,
        experts: RecordSink | None,
        nonfinite: Counter[str],
    ) -> None:
        """Puts the tensors of a leaf into it, just as load_tensors does with all."""
        into = None if param is None else lambda _: param
        for file in self.files:
            if not file.tensors.keys().isdisjoint(places):
                for _ in load_file(file, places, self.dtype, into, experts, nonfinite):
                    pass


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


class _LayerRecords:
    """The records of one layer; a RecordSink."""

    def __init__(self, layout: RecordFormat, experts: int):
        self.layout = layout
        self.records = np.empty((experts, layout.rows, layout.hidden), np.uint16)
        self.written = np.zeros((experts, layout.rows), bool)

    @contextlib.contextmanager
    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> Iterator[np.ndarray]:
        place = np.s_[first_expert : first_expert + experts, first_row : first_row + rows]
        yield self.records[place]
        self.written[place] = True


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
