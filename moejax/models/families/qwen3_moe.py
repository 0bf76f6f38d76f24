"""Qwen3-MoE: grouped-query attention with a norm on each head of q and k, rotary positions,
softmax-top-k experts, dense layers in between where the config says so."""

from __future__ import annotations

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
    """Qwen3MoeConfig's fields and defaults."""
    experts = fields.experts("num_experts", "num_local_experts", 128)
    moe_layers = sparse_layers(fields, fields.integer("num_hidden_layers", 24), experts)
    window = fields.optional_integer("sliding_window", 4096)
    window = window if fields.flag("use_sliding_window", False) else None
    fields.same_attention(window, len(moe_layers))
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=len(moe_layers),
        **fields.heads(32, 4, hidden=2048),
        intermediate_size=fields.integer("intermediate_size", 6144),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 768),
        **fields.routing(experts, 8),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        moe_layers=moe_layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=window,
        **fields.decoder(eps=1e-6, max_positions=32768, vocabulary=151936),
    )


def sparse_layers(fields: Fields, layers: int, experts: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts, by decoder_sparse_step and mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    moe = tuple(i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(layers))
    by = f"num_experts {experts}, decoder_sparse_step {step}, mlp_only_layers {dense}"
    return fields.some_experts(moe, by)


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    if moe:
        return params | router_params(config)
    return params | feed_forward_params(config, config.intermediate_size)


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", parse, layer_params)
