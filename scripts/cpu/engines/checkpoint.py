"""A random checkpoint of OLMoE on disk, for engines that must all read the same one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
"""config.json of allenai/OLMoE-1B-7B-0924."""

SPREAD = 0.02
"""Standard deviation of the weights, but for routers."""

ROUTER_SPREAD = 0.1
"""Wide enough that bfloat16's rounding seldom turns a choice of experts over."""

VARIED = 1.0
"""Standard deviation of embeddings with which a token's own, and not what attention adds of all
tokens before it, decides about its experts: decode steps then have few in common."""

DRAWN = 16_000_057
"""Values drawn; every tensor is these, around and around from a place of its own. A prime, so that
no two rows are equal."""


def write_checkpoint(
    directory: Path, config: dict[str, Any], seed: int = 0, embeddings: float = SPREAD
) -> None:
    """Writes config.json and a safetensors file a layer, in bfloat16. embeddings: their standard
    deviation."""
    random = np.random.default_rng(seed)
    drawn = random.standard_normal(DRAWN, np.float32)
    values = (drawn * SPREAD).astype(ml_dtypes.bfloat16)
    wide = (drawn * ROUTER_SPREAD).astype(ml_dtypes.bfloat16)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]

    def matrix(*shape: int, of: np.ndarray = values) -> np.ndarray:
        start, count = int(random.integers(DRAWN)), math.prod(shape)
        pieces, found = [], 0
        while found < count:
            pieces.append(of[start : start + count - found])
            found, start = found + len(pieces[-1]), 0
        return np.concatenate(pieces).reshape(shape)

    def ones(length: int) -> np.ndarray:
        return np.ones(length, ml_dtypes.bfloat16)

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = (config["vocab_size"], hidden)
    embedded = matrix(*vocabulary, of=(drawn * embeddings).astype(ml_dtypes.bfloat16))
    tensors = {"model.embed_tokens": embedded, "lm_head": matrix(*vocabulary)}
    index = _save(directory, "model-base", tensors | {"model.norm": ones(hidden)})
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": ones(hidden),
            "post_attention_layernorm": ones(hidden),
            "self_attn.q_norm": ones(hidden),
            "self_attn.k_norm": ones(kv),
            "self_attn.q_proj": matrix(hidden, hidden),
            "self_attn.k_proj": matrix(kv, hidden),
            "self_attn.v_proj": matrix(kv, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate": matrix(config["num_experts"], hidden, of=wide),
        }
        for expert in range(config["num_experts"]):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden))):
                parts[f"mlp.experts.{expert}.{name}_proj"] = matrix(*shape)
            parts[f"mlp.experts.{expert}.down_proj"] = matrix(hidden, width)
        named = {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
        index |= _save(directory, f"model-layer-{layer}", named)
    listed = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(listed)


def _save(directory: Path, stem: str, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Tensor → file."""
    named = {f"{name}.weight": value for name, value in tensors.items()}
    save_file(named, directory / f"{stem}.safetensors", {"format": "pt"})
    return dict.fromkeys(named, f"{stem}.safetensors")
