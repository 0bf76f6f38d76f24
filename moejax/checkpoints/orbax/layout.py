"""The layout of the Orbax checkpoint that `moejax convert` writes: its leaves and their chunks.

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

    name: its keys joined by dots, which is also the name of its directory. stacked: each index of
    the first axis, a layer or an expert, is a chunk; else the whole array is one chunk.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    stacked: bool

    @property
    def chunks(self) -> range:
        """The numbers of the chunks: the indices of the first axis, or 0 alone."""
        return range(self.shape[0] if self.stacked else 1)

    def file(self, tree: pathlib.Path, chunk: int) -> pathlib.Path:
        """The file of a chunk.

        - `tree`: the directory of Orbax's tree.
        """
        return tree / self.name / (f"c/{chunk}" + "/0" * (len(self.shape) - 1))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (1, *self.shape[1:]) if self.stacked else self.shape

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
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
    """A model as moejax stores it: its parameters and expert records.

    dtype: numpy's name of the weights' dtype.
    """

    directory: pathlib.Path
    config: ModelConfig
    dtype: str

    def layout(self, version: str = DENSE) -> RecordFormat:
        """The format of a version's records. Raises UserError for an unknown version."""
        dense = self.config.expert_layout(NUMPY_DTYPES[self.dtype].itemsize)
        if version == DENSE:
            return dense
        with user_errors(where=f"{self.directory}: "):
            return dataclasses.replace(dense, version=version, dtype=self.dtype)

    @functools.cached_property
    def params(self) -> dict[str, Leaf]:
        """Key → leaf of the parameters outside of experts, in the order of jax.tree.leaves. The key
        is the path joined by dots, such as "runs.0.qkv". A family's wide_params keep float32."""
        tree, leaves = abstract_params(self.config, NUMPY_DTYPES[self.dtype]), {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            key = param_key(path)
            leaves[key] = Leaf(f"params.{key}", leaf.dtype, leaf.shape, key.startswith("runs."))
        return leaves

    def params_tree(self, values: Iterable[Any]) -> Any:
        """Builds the tree of LoadedModel.params.

        - `values`: one for each of `params`, in order.
        """
        tree = abstract_params(self.config, NUMPY_DTYPES[self.dtype])
        return jax.tree.unflatten(jax.tree.structure(tree), values)

    def layers(self, version: str = DENSE) -> tuple[Leaf, ...]:
        """A leaf for the experts of each MoE layer, uint16[E, rows, D]."""
        layout = self.layout(version)
        shape = (self.config.num_experts, layout.rows, layout.hidden)
        return tuple(
            Leaf(f"experts.{version}.{layer}", np.dtype(np.uint16), shape, True)
            for layer in range(sum(self.config.moe_layers))
        )


def param_key(path: Iterable[Any]) -> str:
    """The key in StoredModel.params of a leaf, by its path in the tree."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)


def orbax_files(
    params: Any, experts: Mapping[str, Mapping[int, Leaf]]
) -> tuple[str, dict[str, bytes]]:
    """Makes all files of the checkpoint except the chunks, by Orbax itself.

    Orbax saves a tree with the same keys whose leaves are one byte each, since saving the arrays
    would need them in memory twice.

    - `params`: the tree of the parameters' leaves.
    - `experts`: version → MoE layer → leaf. The layers are a list in the tree, or a dict by number
      where some are missing.

    Returns the name of the tree's directory, and relative path → content. Raises UserError if this
    version of Orbax gives the leaves other directories.
    """
    from orbax.checkpoint import v1  # takes seconds to import, and only writing needs it

    tree = {"params": params, "experts": {v: _number_layers(each) for v, each in experts.items()}}
    byte = np.zeros(1, np.uint8)
    context = v1.Context()
    context.array.saving.use_ocdbt = False
    quiet = logging.getLogger("absl")
    level = quiet.level
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch) / "checkpoint"
        try:
            quiet.setLevel(logging.ERROR)  # hides Orbax's warning that it finds nothing to merge
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
