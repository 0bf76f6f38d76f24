"""A checkpoint of random weights as `moejax convert` would write it, without a source on disk."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.conversion_source import Source
from moejax.checkpoints.convert import write_checkpoint
from moejax.checkpoints.orbax.destination import free_destination
from moejax.checkpoints.orbax.layout import Leaf
from moejax.checkpoints.orbax.manifest import MANIFEST
from moejax.checkpoints.random_model import SPREAD, shape_fields
from moejax.models.config import parse_config

BLOCK = 1 << 22
"""Random values that are drawn; every weight is one of them."""


def converted(folder: Path, name: str, layers: int | None) -> Path:
    """The checkpoint of a shape of random_model.SHAPES below a folder, written if absent: bfloat16,
    equal for equal arguments. Raises UserError and OSError."""
    raw = shape_fields(name, layers)
    return written(folder, f"{name}-{parse_config(raw, name).num_hidden_layers}", raw)


def written(folder: Path, name: str, raw: dict[str, Any]) -> Path:
    """The same of a model by its config.json and a name. Raises UserError and OSError."""
    config = parse_config(raw, name)
    directory = folder / f"{name}.orbax"
    if (directory / MANIFEST).exists():
        return directory
    folder.mkdir(parents=True, exist_ok=True)
    bfloat16 = NUMPY_DTYPES["bfloat16"]
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * SPREAD

    def chunks(leaf: Leaf, nonfinite: Counter[str]) -> Iterator[np.ndarray]:
        dtype = bfloat16 if leaf.dtype == np.uint16 else leaf.dtype
        values, rng = block.astype(dtype), np.random.default_rng(zlib.crc32(leaf.name.encode()))
        for _ in leaf.chunks:
            made = np.resize(np.roll(values, rng.integers(BLOCK)), math.prod(leaf.chunk_shape))
            if leaf.name.endswith("norm"):
                made = np.ones(leaf.chunk_shape, leaf.dtype)
            yield made.view(leaf.dtype).reshape(leaf.chunk_shape)

    source = Source(
        directory=Path(name),
        config=config,
        dtype="bfloat16",
        nonfinite={},
        files={},
        copied={"config.json": json.dumps(raw).encode()},
        chunks=chunks,
    )
    return write_checkpoint(source, free_destination(directory)).directory
