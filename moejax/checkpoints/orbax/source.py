"""A checkpoint of our own Orbax format as the source of another one."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from host_offload.memory.layout import ExpertLayout
from moejax.checkpoints.conversion_source import COPIED, TEMPLATES, file_times
from moejax.checkpoints.orbax.layout import DENSE, Leaf
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.orbax.own import check_files, open_stored, read_param, read_record
from moejax.checkpoints.placement import WORKERS
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES
from moejax.models.config import ModelConfig


class OrbaxSource:
    """What `moejax convert` or `moejax quantize` wrote; a Source of its parameters and its dense
    experts, in the dtype they have."""

    def __init__(self, directory: pathlib.Path):
        """Raises UserError for whatever is missing or damaged but contents of chunks, which are
        verified when they are read."""
        self._stored = open_stored(directory)
        check_files(self._stored, {DENSE: range(len(self.layers))})
        self.directory = directory

    @property
    def config(self) -> ModelConfig:
        return self._stored.config

    @property
    def dtype(self) -> str:
        return self._stored.manifest.dtype

    @property
    def layout(self) -> ExpertLayout:
        return self._stored.layout

    @property
    def params(self) -> dict[str, Leaf]:
        return self._stored.params

    @property
    def layers(self) -> tuple[Leaf, ...]:
        return self._stored.layers(DENSE)

    @property
    def nonfinite(self) -> dict[str, int]:
        return self._stored.manifest.nonfinite

    def param_chunks(self, key: str, nonfinite: Counter[str] | None = None) -> Iterator[np.ndarray]:
        leaf = self.params[key]
        with ThreadPoolExecutor(WORKERS) as pool:
            weights = read_param(self._stored, key, leaf.dtype, pool)
        yield from weights if leaf.stacked else [weights]

    def expert_chunks(
        self, layer: int, nonfinite: Counter[str] | None = None
    ) -> Iterator[np.ndarray]:
        dtype, leaf = NUMPY_DTYPES[self.dtype], self._stored.layer(DENSE, layer)
        for expert in range(self.config.num_experts):
            record = np.empty(leaf.shape[1:], np.uint16)
            read_record(self._stored, DENSE, layer, expert, dtype, record)
            yield record

    def files(self) -> dict[str, list[int]]:
        """The manifest's, which has checksums of all others."""
        return file_times([self.directory / MANIFEST], self.directory)

    def copied(self) -> dict[str, bytes]:
        return {
            name: (self.directory / name).read_bytes()
            for name in self._stored.manifest.files
            if name in COPIED or name.startswith(f"{TEMPLATES}/")
        }
