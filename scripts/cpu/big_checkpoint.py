"""A checkpoint of random bfloat16 weights in the sizes of a known model, on disk."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moejax.checkpoints.random_model import SHAPES, shape, shape_fields
from moejax.checkpoints.tensors import expected_tensors
from moejax.models.config import ModelConfig
from moejax.sizes import parse_size
from moejax.start.report.info import model_info

SHARD = 512 * 2**20
"""Bytes of a file, at least."""


def add_checkpoint(parser: argparse.ArgumentParser, size: str) -> None:
    """The arguments of checkpoint_of. size: the default."""
    parser.add_argument("directory", type=Path, help="where the checkpoint is, or will be written")
    parser.add_argument("--shape", default="olmoe", help=f"{', '.join(SHAPES)} (default: olmoe)")
    parser.add_argument("--size", default=size, help="about; whole layers (default: %(default)s)")


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The checkpoint that the arguments of add_checkpoint name. Raises UserError and OSError."""
    return checkpoint(args.directory, args.shape, parse_size(args.size))


def checkpoint(directory: Path, name: str, size: int) -> Path:
    """The checkpoint of that shape and about that size below directory, written if absent."""
    config = sized(name, size)
    directory = directory / f"{name}-{config.num_hidden_layers}"
    if (directory / "model.safetensors.index.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    raw = shape_fields(name, config.num_hidden_layers)
    (directory / "config.json").write_text(json.dumps(raw))
    values = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02
    values = values.astype(ml_dtypes.bfloat16)
    owner: dict[str, str] = {}
    tensors: dict[str, np.ndarray] = {}

    def write() -> None:
        file = f"model-{len(set(owner.values())):05}.safetensors"
        save_file(tensors, directory / file)
        owner.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for tensor, place in expected_tensors(config, ()).items():
        if sum(t.nbytes for t in tensors.values()) > SHARD:
            write()
        # Of no more values than it takes: a view would hold all of them.
        tensors[tensor] = np.resize(values[: math.prod(place.shape)], place.shape)
    write()
    # The index comes last: without it the next run begins anew.
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    return directory


def sized(name: str, size: int) -> ModelConfig:
    """The shape with as many layers as make about `size` bytes."""
    one, two = (sum(model_info(shape(name, layers)).bytes.values()) for layers in (1, 2))
    return shape(name, max(1, 1 + round((size - one) / (two - one))))
