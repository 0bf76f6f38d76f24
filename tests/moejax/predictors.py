"""Small random models whose checkpoints have a layer that predicts a further token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.moejax.checkpoints.random_checkpoint import write
from tests.moejax.models.families import SMALL, config_of, weights_of

DEEPSEEK = {
    "model.enorm.weight": "enorm.weight",
    "model.hnorm.weight": "hnorm.weight",
    "model.eh_proj.weight": "eh_proj.weight",
    "model.norm.weight": "shared_head.norm.weight",
    "lm_head.weight": "shared_head.head.weight",
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.layers.0.": "",
}
QWEN = {
    "model.enorm.weight": "pre_fc_norm_embedding.weight",
    "model.hnorm.weight": "pre_fc_norm_hidden.weight",
    "model.eh_proj.weight": "fc.weight",
    "model.norm.weight": "norm.weight",
    "model.layers.0.": "layers.0.",
}


def published(layer: dict, layers: int, qwen: bool) -> dict:
    """The tensors of such a layer, which is given as a model of one layer, by their names in
    published checkpoints of so many layers."""
    start, table = ("mtp.", QWEN) if qwen else (f"model.layers.{layers}.", DEEPSEEK)
    found = {}
    for name, tensor in layer.items():
        for begin, theirs in table.items():
            if name.startswith(begin):
                found[start + theirs + name.removeprefix(begin)] = tensor
    return found


def write_predicted(
    directory: Path, architecture: str, damped: float = 0.03, **fields: Any
) -> Path:
    """The family's small model with such a layer. Each token's head is another token's embedding,
    so that one follows the other where layers add little; and the layer, which projects the
    embedding of the next token to itself, is often right.

    - `damped`: the scale of what layers add; with less, it is right more often.
    """
    config, own = config_of(architecture, **fields), {**fields}
    if "layer_types" in SMALL[architecture]:
        own["layer_types"] = ["full_attention"]
    own |= {"num_hidden_layers": 1, "mlp_only_layers": [], "first_k_dense_replace": 0}
    model, layer = weights_of(config), weights_of(config_of(architecture, **own), seed=1)
    model["lm_head.weight"] = np.roll(model["model.embed_tokens.weight"], 1, axis=0)
    shared = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    layer |= {name: model[name] for name in shared}
    for tensors in (model, layer):
        for name in tensors:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[name] = (tensors[name].astype(np.float32) * damped).astype(
                    tensors[name].dtype
                )
    hidden, dtype = config["hidden_size"], layer["lm_head.weight"].dtype
    rng = np.random.default_rng(2)
    beside = 1e-3 * rng.standard_normal((hidden, hidden))
    size = np.std(layer["model.embed_tokens.weight"].astype(np.float32))
    layer["model.eh_proj.weight"] = np.hstack([size * np.eye(hidden), beside]).astype(dtype)
    qwen = architecture.startswith("Qwen")  # whose norms add one
    layer["model.enorm.weight"] = np.full(hidden, 0 if qwen else 1, dtype)
    layer["model.hnorm.weight"] = np.full(hidden, 0 if qwen else 1, dtype)
    if qwen:
        del layer["lm_head.weight"], layer["model.embed_tokens.weight"]
    return write(directory, model | published(layer, config["num_hidden_layers"], qwen), config)
