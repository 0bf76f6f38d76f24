"""Solar-Open: the attention of Llama with the experts of Glm4Moe in every layer."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    corrected_moe_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """SolarOpenConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 48)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    fields.only("partial_rotary_factor", 1.0)
    width = fields.integer("moe_intermediate_size", 1280)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(64, 8, hidden=4096, head_dim=128),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("n_routed_experts", "num_local_experts", 128), 8),
        moe_layers=(True,) * layers,
        shared_width=fields.shared_width(width),
        **fields.corrected_routing(normalize=True, scale=1.0),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        **fields.decoder(eps=1e-5, max_positions=131072, vocabulary=196608, theta=1e6),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    return attention_params(config, output_bias=False) | corrected_moe_params(config)


FAMILY = Family(
    "SolarOpenForCausalLM",
    "solar_open",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
)
