"""Glm4MoeLite (GLM-4.7-Flash): the latent attention of DeepSeek-V3 with the experts of Glm4Moe."""

from __future__ import annotations

import dataclasses

from moejax.models.families.deepseek import latent_attention, latent_scale, layer_params_v3
from moejax.models.family import Family, Fields, later_layer
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Glm4MoeLiteConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 47)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    fields.only("first_k_dense_replace", 1)  # the config class has mlp_layer_types
    width = fields.integer("moe_intermediate_size", 1536)
    config = ModelConfig(
        architecture=FAMILY.architecture,
        hidden_size=fields.integer("hidden_size", 2048),
        num_hidden_layers=layers,
        moe_layers=fields.sparse_layers(layers, 1),
        intermediate_size=fields.integer("intermediate_size", 10240),
        moe_intermediate_size=width,
        **fields.routing(fields.experts("n_routed_experts", "num_local_experts", 64), 4),
        shared_width=fields.shared_width(width),
        **fields.corrected_routing(normalize=True, scale=1.8),
        sliding_window=None,
        **latent_attention(
            fields,
            heads=20,
            interleave=fields.flag("rope_interleave", True),
            q_lora=768,
            nope=192,
            v=256,
        ),
        **fields.decoder(eps=1e-5, max_positions=202752, vocabulary=154880, eos=1),
    )
    return dataclasses.replace(config, attention_scale=latent_scale(fields, config))


FAMILY = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    parse,
    layer_params_v3,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
)
