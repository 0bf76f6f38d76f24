"""Flint: Qwen3-MoE with a sink for each head and a shared expert, routing by sigmoid; layers with a
sliding window rotate q and k, the others do not."""

from __future__ import annotations

from moejax.models.families.qwen3_moe import sparse_layers
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    router_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """FlintConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 49)
    experts = fields.integer("num_experts", 256, least=0)
    if not fields.has("mlp_only_layers"):
        fields = Fields(fields.raw | {"mlp_only_layers": [0, 1]}, fields.source)
    moe_layers = sparse_layers(fields, layers, experts)
    full = [i < 2 or i % 4 == 1 or i == layers - 1 for i in range(layers)]
    sliding = fields.layer_types([not i for i in full])
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 4, hidden=2048, head_dim=128),
        intermediate_size=fields.integer("intermediate_size", 6144),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 512),
        shared_width=fields.integer("shared_expert_intermediate_size", 1024),
        **fields.routing(experts, 6),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scoring_func="sigmoid",
        moe_layers=moe_layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=fields.integer("sliding_window", 513) if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        rope_layers=None if all(sliding) else sliding,
        **fields.decoder(eps=1e-6, max_positions=262144, vocabulary=150144),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    params["sinks"] = (("self_attn.softmax_offset", (config.num_attention_heads,)),)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    shared = feed_forward_params(config, config.shared_width, "mlp.shared_expert.", "shared_")
    return params | router_params(config) | shared


FAMILY = Family("FlintForCausalLM", "flint", parse, layer_params)
