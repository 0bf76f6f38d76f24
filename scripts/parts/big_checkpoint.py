"""A checkpoint of random bfloat16 weights in the sizes of a known model, on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moejax.checkpoints.random_model import SPREAD, shape, shape_fields
from moejax.checkpoints.tensors import expected_tensors
from moejax.models.config import ModelConfig, parse_config
from moejax.start.report.model_info import model_info

SHARD = 512 * 2**20
"""Bytes of a file, at least."""

ROUTER_SPREAD = 0.1
"""Standard deviation of router weights: wide enough that rounding to bfloat16 seldom changes which
experts a token chooses. The other weights have SPREAD."""

DRAWN = 16_000_057
"""Random values drawn; a tensor repeats them from a place of its own. Odd, so that no two rows of
a tensor are equal."""

INDEX = "model.safetensors.index.json"


def checkpoint(directory: Path, name: str, size: int) -> Path:
    """The checkpoint of that shape and about that size below directory, written if absent."""
    config = sized(name, size)
    directory = directory / f"{name}-{config.num_hidden_layers}"
    write_checkpoint(directory, shape_fields(name, config.num_hidden_layers))
    return directory


def sized(name: str, size: int) -> ModelConfig:
    """The shape with as many layers as make about `size` bytes."""
    one, two = (sum(model_info(shape(name, layers)).bytes.values()) for layers in (1, 2))
    return shape(name, max(1, 1 + round((size - one) / (two - one))))


def write_checkpoint(directory: Path, fields: Mapping[str, Any], seed: int = 0) -> None:
    """Writes a checkpoint with this config.json and random weights, unless it is there."""
    if (directory / INDEX).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    random = np.random.default_rng(seed)
    drawn = random.standard_normal(DRAWN, np.float32)
    weights = (drawn * SPREAD).astype(ml_dtypes.bfloat16)
    routers = (drawn * ROUTER_SPREAD).astype(ml_dtypes.bfloat16)
    owner: dict[str, str] = {}
    tensors: dict[str, np.ndarray] = {}

    def write_shard() -> None:
        file = f"model-{len(set(owner.values())):05}.safetensors"
        save_file(tensors, directory / file)
        owner.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for name, place in expected_tensors(parse_config(dict(fields), directory.name), ()).items():
        if sum(tensor.nbytes for tensor in tensors.values()) > SHARD:
            write_shard()
        if len(place.shape) == 1:  # a norm
            tensors[name] = np.ones(place.shape, ml_dtypes.bfloat16)
            continue
        values = routers if name.endswith("mlp.gate.weight") else weights
        start = 2 * int(random.integers(DRAWN // 4))  # even, so that what follows is odd
        values = values[start : start + math.prod(place.shape)]
        tensors[name] = np.resize(values, place.shape)
    write_shard()
    # The index comes last: without it the next run begins anew.
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": owner}))
