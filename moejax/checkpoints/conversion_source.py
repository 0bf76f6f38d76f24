"""A checkpoint to be converted: its tensors, leaf by leaf, and the files that are copied."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.layout import ExpertLayout
from moejax.checkpoint import plan_tensors
from moejax.checkpoints.directory import read_json, require_own_file
from moejax.checkpoints.orbax_layout import Leaf, expert_leaves, param_leaves
from moejax.checkpoints.placement import RecordSink, load_file
from moejax.checkpoints.shards import NUMPY_DTYPES, TensorFile
from moejax.checkpoints.tensors import ExpertPlace, Place
from moejax.models.config import ModelConfig

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
)
"""Files of the source that belong to the model; those that are there are copied."""


@dataclasses.dataclass(frozen=True)
class Source:
    """dtype: of the result. places: by parameter (run, key, layer) and by MoE layer, the tensors
    that each is made of and where they go."""

    directory: pathlib.Path
    config: ModelConfig
    dtype: str
    files: Sequence[TensorFile]
    places: dict[tuple[int | None, str, int] | int, dict[str, Place]]

    @property
    def layout(self) -> ExpertLayout:
        return self.config.expert_layout(NUMPY_DTYPES[self.dtype].itemsize)

    @property
    def params(self) -> dict[str, Leaf]:
        return param_leaves(self.config, NUMPY_DTYPES[self.dtype])

    @property
    def layers(self) -> tuple[Leaf, ...]:
        return expert_leaves(self.config, self.layout)


def open_source(
    directory: pathlib.Path, config: ModelConfig, files: Sequence[TensorFile], dtype: str
) -> Source:
    """Checks all tensors. dtype: as in load_checkpoint. Raises UserError as load_tensors does."""
    config, dtype, places = plan_tensors(config, files, dtype, str(directory))
    groups: dict[tuple[int | None, str, int] | int, dict[str, Place]] = {}
    for name, place in places.items():
        expert = isinstance(place, ExpertPlace)
        group = place.layer if expert else (place.run, place.key, place.layer)
        groups.setdefault(group, {})[name] = place
    return Source(directory, config, dtype, files, groups)


def param_chunks(
    source: Source, key: str, nonfinite: Counter[str] | None = None
) -> Iterator[np.ndarray]:
    """The chunks of a parameter of `source.params`, one at a time. nonfinite: as in load_file."""
    leaf = source.params[key]
    run, _, name = key.removeprefix("runs.").rpartition(".")
    for layer in range(leaf.shape[0] if leaf.stacked else 1):
        array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
        # As load_tensors sees the parameters, with nothing but this one in them.
        tree = {"runs": {int(run): {name: {layer: array}}}} if run else {name: array}
        _read(source, (int(run) if run else None, name, layer), tree, None, nonfinite)
        yield array


class _LayerRecords:
    """The records of one layer; a RecordSink."""

    def __init__(self, layout: ExpertLayout, experts: int):
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


def expert_chunks(
    source: Source, layer: int, nonfinite: Counter[str] | None = None
) -> Iterator[np.ndarray]:
    """The records uint16[rows, D] of a MoE layer's experts; the layer is in memory at once.
    nonfinite: as in load_file."""
    sink = _LayerRecords(source.layout, source.config.num_experts)
    _read(source, layer, {}, sink, nonfinite)
    assert sink.written.all(), "rows without a tensor"
    yield from sink.records


def _read(
    source: Source,
    group: Any,
    params: dict[str, Any],
    experts: RecordSink | None,
    nonfinite: Counter[str] | None,
) -> None:
    """Puts a group's tensors into params and experts, just as load_tensors does with all."""
    places, dtype = source.places[group], NUMPY_DTYPES[source.dtype]
    for file in source.files:
        if not file.tensors.keys().isdisjoint(places):
            for _ in load_file(file, places, dtype, params, experts, nonfinite):
                pass


def source_files(source: Source) -> dict[str, list[int]]:
    """Size and time of change (ns) of each file that decides the result."""
    paths = sorted((*(file.path for file in source.files), *_copied(source)))
    found = {path.relative_to(source.directory).as_posix(): path.stat() for path in paths}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def copied_files(source: Source) -> dict[str, bytes]:
    """The files to copy; config.json with the dtype that the weights now have."""
    copies = {
        path.relative_to(source.directory).as_posix(): path.read_bytes() for path in _copied(source)
    }
    if source.config.dtype != source.dtype:
        config = read_json(source.directory / "config.json")
        config.pop("torch_dtype", None)
        copies["config.json"] = json.dumps({**config, "dtype": source.dtype}, indent=2).encode()
    return copies


def _copied(source: Source) -> list[pathlib.Path]:
    """Raises UserError for a link out of the checkpoint, whose target is nobody's to copy."""
    paths = [source.directory / name for name in COPIED]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += source.directory.glob("additional_chat_templates/*")
    for path in paths:
        require_own_file(path, source.directory)
    return paths
