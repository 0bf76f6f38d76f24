"""How a model lies in the Orbax checkpoint that `moejax convert` writes: leaves and their chunks.

The checkpoint is one Orbax tree, ``{"params": LoadedModel.params, "experts": {version: [leaf of
each MoE layer]}}``, of plain zarr v3 arrays without compression (Orbax's use_ocdbt=False). A chunk
is a file of bare little-endian values, and an expert is a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.tensors import abstract_params
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
    def chunks(self) -> tuple[str, ...]:
        """The chunks' files inside the leaf's directory, by the index of the first axis."""
        return tuple(self.chunk(i) for i in range(self.shape[0] if self.stacked else 1))

    def chunk(self, index: int) -> str:
        """One of `chunks`."""
        return f"c/{index}" + "/0" * (len(self.shape) - 1)

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


def param_leaves(config: ModelConfig, dtype: np.dtype) -> dict[str, Leaf]:
    """The parameters outside of experts by their keys joined by dots ("runs.0.qkv"), in the order
    of jax.tree.leaves. dtype: the run's; a leaf with a dtype of its own keeps it."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))[0]:
        key = ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)
        leaves[key] = Leaf(f"params.{key}", leaf.dtype, leaf.shape, key.startswith("runs."))
    return leaves


def expert_leaf(config: ModelConfig, layout: RecordFormat, layer: int) -> Leaf:
    """All experts of a MoE layer, uint16[E, rows, D]."""
    shape = (config.num_experts, layout.rows, layout.hidden)
    return Leaf(f"experts.{layout.version}.{layer}", np.dtype(np.uint16), shape, True)


def expert_leaves(config: ModelConfig, layout: RecordFormat) -> tuple[Leaf, ...]:
    """`expert_leaf` of each MoE layer."""
    return tuple(expert_leaf(config, layout, i) for i in range(sum(config.moe_layers)))
