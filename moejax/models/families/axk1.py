"""A.X-K1: DeepSeek-V3 with a norm after the experts."""

from __future__ import annotations

import dataclasses

from moejax.models.families.deepseek import V3, layer_params_v3, parse_v3
from moejax.models.family import Family, Fields, Parts
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """AXK1Config's fields and defaults: DeepseekV3Config's, with mlp_layer_types."""
    step = fields.integer("moe_layer_freq", 1)
    fields.integer("q_lora_rank", 1536)
    given = dict(num_attention_heads=64, n_routed_experts=192, vocab_size=163840)
    if fields.has("num_local_experts"):
        del given["n_routed_experts"]
    given |= dict(max_position_embeddings=32768, first_k_dense_replace=1, eos_token_id=163691)
    own = Fields(given | fields.raw | {"moe_layer_freq": 1}, fields.source)
    config = parse_v3(own)
    sparse = own.sparse_layers(config.num_hidden_layers, 1)
    if not own.has("mlp_layer_types"):
        sparse = tuple(moe and i % step == 0 for i, moe in enumerate(sparse))
        own.some_experts(sparse, f"moe_layer_freq {step}")
    return dataclasses.replace(config, architecture=FAMILY.architecture, moe_layers=sparse)


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = layer_params_v3(config, moe)
    if moe:
        params["mlp_out_norm"] = (("post_mlp_layernorm.weight", (config.hidden_size,)),)
    return params


FAMILY: Family = dataclasses.replace(
    V3,
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    parse=parse,
    layer_params=layer_params,
    other_types=("AXK1",),
)
