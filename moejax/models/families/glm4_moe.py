"""Glm4Moe (GLM-4.5, GLM-4.5-Air and their successors): a part of each head is rotated, q and k have
norms where the config says so, routing as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), shared
experts beside the routed ones, dense first layers."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    corrected_moe_params,
    feed_forward_params,
    head_norm_params,
    later_layer,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Glm4MoeConfig's fields and defaults. Layers that predict several tokens are left out, as in
    transformers."""
    fields.only("sliding_window", None)
    layers = fields.integer("num_hidden_layers", 46)
    fields.same_attention(None, layers)
    heads = fields.heads(96, 8, hidden=4096)
    width = fields.integer("moe_intermediate_size", 1408)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        rotary_width=fields.rotary_width(heads["head_dim"], 0.5),
        qk_norm=fields.flag("use_qk_norm", False),
        intermediate_size=fields.integer("intermediate_size", 10944),
        moe_intermediate_size=width,
        **fields.routing(fields.experts("n_routed_experts", "num_local_experts", 128), 8),
        moe_layers=fields.dense_first(layers, 1),
        shared_width=fields.shared_width(width),
        **fields.corrected_routing(normalize=True, scale=1.0),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        **fields.decoder(eps=1e-5, max_positions=131072, vocabulary=151552, partial=True),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=False)
    if config.qk_norm:
        params |= head_norm_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    return params | corrected_moe_params(config)


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
)
