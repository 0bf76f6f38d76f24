"""dots.llm1: the attention of Qwen3 with the experts of DeepSeek-V3."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    corrected_moe_params,
    feed_forward_params,
    head_norm_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Dots1Config's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 62)
    window = fields.optional_integer("sliding_window", 4096)
    until = fields.integer("max_window_layers", 62, least=0)
    sliding = fields.layer_types([window is not None and i >= until for i in range(layers)])
    if any(sliding) and window is None:
        raise fields.refuse("layers with sliding_attention need a sliding_window")
    width = fields.integer("moe_intermediate_size", 1408)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 32, hidden=4608),
        intermediate_size=fields.integer("intermediate_size", 10944),
        moe_intermediate_size=width,
        **fields.routing(fields.experts("n_routed_experts", "num_local_experts", 0), None),
        moe_layers=fields.dense_first(layers, 0),
        shared_width=fields.shared_width(width, None),
        # Published files name the method here.
        **fields.corrected_routing(normalize=False, scale=1.0, scoring=("sigmoid", "noaux_tc")),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=window if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        **fields.decoder(eps=1e-6, max_positions=2048, vocabulary=152064),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    return params | corrected_moe_params(config)


FAMILY = Family(
    "Dots1ForCausalLM", "dots1", parse, layer_params, wide_params=frozenset({"correction"})
)
