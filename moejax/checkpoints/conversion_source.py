"""A checkpoint to be converted: its tensors, leaf by leaf, and the files that are copied."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from moejax.checkpoints.load import plan_tensors
from moejax.checkpoints.orbax.layout import Leaf, expert_leaves, param_leaves
from moejax.checkpoints.placement import RecordSink, load_file
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES, TensorFile
from moejax.checkpoints.tensors import ExpertPlace, Place
from moejax.models.config import ModelConfig
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
class Source:
    """A checkpoint to be written as ours."""

    directory: pathlib.Path
    config: ModelConfig
    dtype: str
    """The result's."""
    layout: RecordFormat
    """How an expert's dense record lies."""
    params: dict[str, Leaf]
    """The leaves of the result: parameters by key, and `layers`, the experts of each MoE layer."""
    layers: tuple[Leaf, ...]
    nonfinite: dict[str, int]
    """What is known before anything is read, as in Manifest.nonfinite."""
    files: dict[str, list[int]]
    """Size and time of change (ns) of each file that decides the result."""
    copied: dict[str, bytes]
    """The files to copy; config.json with the dtype that the weights have in the result."""
    param_chunks: Callable[[str, Counter[str] | None], Iterator[np.ndarray]]
    """(key, nonfinite) → the chunks of a parameter, one at a time. nonfinite: as in load_file."""
    expert_chunks: Callable[[int, Counter[str] | None], Iterator[np.ndarray]]
    """(MoE layer, nonfinite) → the dense records uint16[rows, D] of its experts."""


def open_source(
    directory: pathlib.Path, config: ModelConfig, files: Sequence[TensorFile], dtype: str
) -> Source:
    """A Hugging Face checkpoint whose tensors are all checked. files: its shards. dtype: as in
    load_checkpoint. Raises UserError as load_tensors does."""
    config, dtype, places = plan_tensors(config, files, dtype, str(directory))
    groups: dict[tuple[int | None, str, int] | int, dict[str, Place]] = {}
    for name, place in places.items():
        expert = isinstance(place, ExpertPlace)
        group = place.layer if expert else (place.run, place.key, place.layer)
        groups.setdefault(group, {})[name] = place
    layout = config.expert_layout(NUMPY_DTYPES[dtype].itemsize)
    params = param_leaves(config, NUMPY_DTYPES[dtype])
    tensors = _Tensors(files, groups, NUMPY_DTYPES[dtype], params, layout, config.num_experts)
    copied = _copied(directory)
    copies = {path.relative_to(directory).as_posix(): path.read_bytes() for path in copied}
    if config.dtype != dtype:
        fields = read_json(directory / "config.json")
        fields.pop("torch_dtype", None)
        copies["config.json"] = json.dumps({**fields, "dtype": dtype}, indent=2).encode()
    return Source(
        directory,
        config,
        dtype,
        layout,
        params,
        layers=expert_leaves(config, layout),
        nonfinite={},
        files=file_times((*(file.path for file in files), *copied), directory),
        copied=copies,
        param_chunks=tensors.param_chunks,
        expert_chunks=tensors.expert_chunks,
    )


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """The tensors of shards, put together leaf by leaf. places: by parameter (run, key, layer) and
    by MoE layer, the tensors that each is made of and where they go. dtype: the result's."""

    files: Sequence[TensorFile]
    places: dict[tuple[int | None, str, int] | int, dict[str, Place]]
    dtype: np.dtype
    params: dict[str, Leaf]
    layout: RecordFormat
    experts: int

    def param_chunks(self, key: str, nonfinite: Counter[str] | None) -> Iterator[np.ndarray]:
        leaf = self.params[key]
        run, _, name = key.removeprefix("runs.").rpartition(".")
        for layer in range(leaf.shape[0] if leaf.stacked else 1):
            array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
            # As load_tensors sees the parameters, with nothing but this one in them.
            tree = {"runs": {int(run): {name: {layer: array}}}} if run else {name: array}
            self._read((int(run) if run else None, name, layer), tree, None, nonfinite)
            yield array

    def expert_chunks(self, layer: int, nonfinite: Counter[str] | None) -> Iterator[np.ndarray]:
        """The layer is in memory at once."""
        sink = _LayerRecords(self.layout, self.experts)
        self._read(layer, {}, sink, nonfinite)
        assert sink.written.all(), "rows without a tensor"
        yield from sink.records

    def _read(
        self,
        group: tuple[int | None, str, int] | int,
        params: dict[str, Any],
        experts: RecordSink | None,
        nonfinite: Counter[str] | None,
    ) -> None:
        """Puts a group's tensors into params and experts, just as load_tensors does with all."""
        places = self.places[group]
        for file in self.files:
            if not file.tensors.keys().isdisjoint(places):
                for _ in load_file(file, places, self.dtype, params, experts, nonfinite):
                    pass


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


def _copied(directory: pathlib.Path) -> list[pathlib.Path]:
    """Raises UserError for a link out of the checkpoint, whose target is nobody's to copy."""
    paths = [directory / name for name in COPIED]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += directory.glob(f"{TEMPLATES}/*")
    for path in paths:
        require_own_file(path, directory)
    return paths
