"""How a model lies in the Orbax checkpoint that `moejax convert` writes: leaves and their chunks.

The checkpoint is one Orbax tree, ``{"params": LoadedModel.params, "experts": {version: [leaf of
each MoE layer]}}``, of plain zarr v3 arrays without compression (Orbax's use_ocdbt=False). A chunk
is a file of bare little-endian values, and an expert is a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.tensors import abstract_params
from moejax.errors import UserError, user_errors
from moejax.models.config import ModelConfig
from pallas_kernels.records import RecordFormat

DENSE = "dense"
"""The version of experts that a conversion writes."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the tree.

    name: its keys joined by dots, which is also the directory's name. stacked: a chunk is one index
    of the first axis, a layer or an expert; else the array is one chunk.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    stacked: bool

    @property
    def chunks(self) -> range:
        """The chunks' numbers: the indices of the first axis."""
        return range(self.shape[0] if self.stacked else 1)

    def file(self, tree: pathlib.Path, chunk: int) -> pathlib.Path:
        """Where a chunk is. tree: the directory of Orbax's tree."""
        return tree / self.name / (f"c/{chunk}" + "/0" * (len(self.shape) - 1))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (1, *self.shape[1:]) if self.stacked else self.shape

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def zarr(self) -> dict[str, Any]:
        """The array's zarr.json (zarr v3 core specification, "Array metadata")."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(self.chunk_shape)},
            },
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """What a checkpoint of ours holds. dtype: numpy's name of the weights' dtype."""

    directory: pathlib.Path
    config: ModelConfig
    dtype: str

    def layout(self, version: str = DENSE) -> RecordFormat:
        """How a version's records lie. Raises UserError for an unknown version."""
        dense = self.config.expert_layout(NUMPY_DTYPES[self.dtype].itemsize)
        if version == DENSE:
            return dense
        with user_errors(where=f"{self.directory}: "):
            return dataclasses.replace(dense, version=version, dtype=self.dtype)

    @functools.cached_property
    def params(self) -> dict[str, Leaf]:
        """The parameters outside of experts by their keys joined by dots ("runs.0.qkv"), in the
        order of jax.tree.leaves; a leaf with a dtype of its own keeps it."""
        tree, leaves = abstract_params(self.config, NUMPY_DTYPES[self.dtype]), {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            key = ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)
            leaves[key] = Leaf(f"params.{key}", leaf.dtype, leaf.shape, key.startswith("runs."))
        return leaves

    def params_tree(self, values: Iterable[Any]) -> Any:
        """LoadedModel.params of these values, one for each of `params`."""
        tree = abstract_params(self.config, NUMPY_DTYPES[self.dtype])
        return jax.tree.unflatten(jax.tree.structure(tree), values)

    def layers(self, version: str = DENSE) -> tuple[Leaf, ...]:
        """The experts of each MoE layer, uint16[E, rows, D]."""
        layout = self.layout(version)
        shape = (self.config.num_experts, layout.rows, layout.hidden)
        return tuple(
            Leaf(f"experts.{version}.{layer}", np.dtype(np.uint16), shape, True)
            for layer in range(sum(self.config.moe_layers))
        )


def orbax_files(
    params: Any, experts: Mapping[str, Mapping[int, Leaf]]
) -> tuple[str, dict[str, bytes]]:
    """(the directory of the tree, relative path → content) of all files but the chunks, which Orbax
    itself writes: of a tree of the same keys whose leaves are one byte, since it would want the
    arrays whole in memory, twice.

    params: the tree of parameters' leaves. experts: version → MoE layer → leaf; a list in the tree,
    or where layers are missing, a dict by number. Raises UserError if this Orbax names their
    directories in another way.
    """
    from orbax.checkpoint import v1  # seconds, and only what writes needs it

    tree = {"params": params, "experts": {v: _number_layers(each) for v, each in experts.items()}}
    byte = np.zeros(1, np.uint8)
    context = v1.Context()
    context.array.saving.use_ocdbt = False
    quiet = logging.getLogger("absl")
    level = quiet.level
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch) / "checkpoint"
        try:
            quiet.setLevel(logging.ERROR)  # Orbax warns that it finds nothing to merge
            with context:
                v1.save(str(root), jax.tree.map(lambda _: byte, tree))
        finally:
            quiet.setLevel(level)
        (name,) = [path.parent.name for path in root.glob("*/_METADATA")]
        directories = {path.name for path in (root / name).iterdir() if path.is_dir()}
        wanted = {leaf.name: leaf for leaf in jax.tree.leaves(tree)}
        if directories != set(wanted):
            version = importlib.metadata.version("orbax-checkpoint")
            raise UserError(
                f"orbax-checkpoint {version} keeps the leaves of a tree in other directories "
                f"({', '.join(sorted(directories)[:2])}) than moejax knows; install a version that "
                "moejax asks for"
            )
        files = {
            path.relative_to(root).as_posix(): path.read_bytes().replace(str(root).encode(), b"it")
            for path in sorted([*root.iterdir(), *(root / name).iterdir()])
            if path.is_file()
        }
    for leaf in wanted.values():
        files[f"{name}/{leaf.name}/zarr.json"] = json.dumps(leaf.zarr()).encode()
    return name, files


def _number_layers(layers: Mapping[int, Leaf]) -> list[Leaf] | dict[str, Leaf]:
    whole = list(layers) == list(range(len(layers)))
    return list(layers.values()) if whole else {str(i): leaf for i, leaf in layers.items()}
