"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k and v, softmax-top-k experts beside a
shared expert with a gate of its own, dense layers in between where the config says so."""

from __future__ import annotations

from moejax.models.families.qwen3_moe import sparse_layers
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    router_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Qwen2MoeConfig's fields and defaults."""
    experts = fields.integer("num_experts", 60, least=0)
    moe_layers = sparse_layers(fields, fields.integer("num_hidden_layers", 24), experts)
    slides = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window", 4096) if slides else None
    until = fields.integer("max_window_layers", 28, least=0)
    sliding = fields.layer_types(
        [slides and i % 2 == 0 and i < until for i in range(len(moe_layers))]
    )
    if any(sliding) and window is None:
        raise fields.refuse(
            "layers with sliding_attention need use_sliding_window and a sliding_window; without "
            "windows take layer_types out of the file"
        )
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=len(moe_layers),
        **fields.heads(16, 16, hidden=2048),
        intermediate_size=fields.integer("intermediate_size", 5632),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 1408),
        **fields.routing(experts, 4),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        moe_layers=moe_layers,
        attention_bias=fields.flag("qkv_bias", True),
        sliding_window=window,
        window_layers=sliding,
        shared_width=fields.integer("shared_expert_intermediate_size", 5632),
        **fields.decoder(eps=1e-6, max_positions=32768, vocabulary=151936),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=False)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    return params | gated_moe_params(config)


def gated_moe_params(config: ModelConfig) -> dict[str, Parts]:
    """The router, and a shared expert with a gate."""
    shared = feed_forward_params(config, config.shared_width, "mlp.shared_expert.", "shared_")
    gate: Parts = (("mlp.shared_expert_gate.weight", (1, config.hidden_size)),)
    return router_params(config) | shared | {"shared_gate": gate}


FAMILY = Family("Qwen2MoeForCausalLM", "qwen2_moe", parse, layer_params)
