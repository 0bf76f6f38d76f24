"""Random small models of transformers, to compare moejax with. torch is imported inside: see
tests/conftest.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
"""What every random model's config is where a test says nothing else."""

_NARROW = {"moe_intermediate_size": 32}
_LATENT = {
    **_NARROW,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

OF_FAMILY: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**_NARROW, "head_dim": 16, "num_experts": 6, "norm_topk_prob": True},
    "Mixtral": {"intermediate_size": 32, "num_local_experts": 6},
    "Olmoe": {"intermediate_size": 32, "num_experts": 6},
    "Qwen2Moe": {**_NARROW, "shared_expert_intermediate_size": 48, "num_experts": 6},
    "Phimoe": {"intermediate_size": 32, "num_local_experts": 6},
    "DeepseekV2": _LATENT,
    "DeepseekV3": {**_LATENT, "n_group": 4, "topk_group": 2},
    "Glm4Moe": {
        **_NARROW,
        "head_dim": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "Glm4MoeLite": {k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"},
    "Dots1": {
        **_NARROW,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "SolarOpen": {**_NARROW, "head_dim": 16, "n_routed_experts": 8},
    "MiniMaxM2": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 6,
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "Ernie4_5_Moe": {**_NARROW, "moe_num_experts": 6, "tie_word_embeddings": False},
    "GraniteMoe": {"intermediate_size": 32, "num_local_experts": 6, "attention_multiplier": 0.25},
}
"""Family, as in transformers' class names → what its random models have over SMALL."""


def random_model(family: str = "Qwen3Moe", seed: int = 0, **config: Any):
    """A float32 model of transformers, of a family in OF_FAMILY, whose every parameter is random,
    biases and norms included.

    config: the fields over SMALL and OF_FAMILY. Weights are scaled so that each layer's part of the
    residual stream and the logits have a standard deviation of about 1 to 3: at transformers' own
    0.02 most errors would hide below the tolerance.
    """
    import torch
    import transformers

    # With more, torch's threads spin against XLA's: seconds for products of microseconds.
    torch.set_num_threads(1)
    of_family = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        of_family(**{**SMALL, **OF_FAMILY[family], **config}),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    corrections = [item for item in model.named_buffers() if "correction_bias" in item[0]]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.split(".")[-2] and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("correction_bias"):
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:  # matrices and stacks of them, [..., out, in]; the embedding may be the head too
                parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def save(model: Any, directory: Path, *, older_keys: bool = False, **options: Any) -> Path:
    """Writes the checkpoint with save_pretrained. older_keys: config.json under the names that
    transformers 4 wrote. options: save_pretrained's, such as max_shard_size."""
    model.save_pretrained(directory, **options)
    if older_keys:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        # "type" is the oldest name of the key; newer files say "rope_type".
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if rope["type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        if model.config.model_type == "qwen3_moe":
            config["num_experts"] = config.pop("num_local_experts")
        path.write_text(json.dumps(config))
    return directory


def logprobs(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """log p(next token) after every token of the sequence, float64[n, V], without a cache."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()
