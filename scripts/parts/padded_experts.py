"""A trained model's experts padded with zeros: its routing and its outputs, with experts of a size
whose products and transfers take milliseconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  so that numpy knows bfloat16
import numpy as np
from safetensors.numpy import load_file, save_file

from moejax import UserError
from moejax.models.directory import model_directory

WIDTH = "moe_intermediate_size"
PADDED = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
"""Axis of an expert's width in each of its matrices, [out, in]."""


def padded_experts(model: str, width: int, directory: Path) -> Path:
    """A copy of a checkpoint below directory whose experts have that width, written if absent: the
    further rows of gate and up are zeros, and so is what they add (silu(0) · 0). Raises UserError
    for a width below the model's own, and for a model whose experts are not tensors of their own.
    """
    source = Path(model_directory(model))
    config = json.loads((source / "config.json").read_text())
    if width < config.get(WIDTH, 0) or WIDTH not in config:
        raise UserError(
            f"--expert-width must be at least {WIDTH} of {model}, {config.get(WIDTH)}, not {width}"
        )
    target = directory / f"{source.name}-experts-of-{width}"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    padded = 0
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                *_, matrix, _ = ("", *name.split("."))
                if ".experts." not in name or matrix not in PADDED:
                    continue
                more = [(0, 0), (0, 0)]
                more[PADDED[matrix]] = 0, width - config[WIDTH]
                tensors[name], padded = np.pad(tensor, more), padded + 1
            save_file(tensors, target / file.name)
        elif file.is_file() and file.name != "config.json":
            shutil.copy(file, target)
    if not padded:
        raise UserError(f"{model} has no experts as tensors of their own, such as Qwen3-MoE's")
    # Comes last: without it the next run begins anew.
    (target / "config.json").write_text(json.dumps({**config, WIDTH: width}))
    return target
