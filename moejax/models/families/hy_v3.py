"""Hy3 of Tencent: norms on heads of q and k, experts chosen by sigmoid scores with a correction, a
shared expert beside the routed ones, a dense first layer."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    later_layer,
    router_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """HYV3Config's fields and defaults. Shared and routed experts are added in float32 or in the
    run's dtype by enable_moe_fp32_combine in transformers, and always as other families here."""
    layers = fields.integer("num_hidden_layers", 80)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    width = fields.integer("moe_intermediate_size", 1536)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(64, 8, hidden=4096, head_dim=128),
        intermediate_size=fields.integer("intermediate_size", 13312),
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_experts", "num_local_experts", 192), 8),
        norm_topk_prob=True,
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("router_scaling_factor", 2.826),
        moe_layers=fields.sparse_layers(layers, 1),
        shared_width=width * fields.integer("num_shared_experts", 1, least=0),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_window=None,
        **fields.decoder(eps=1e-5, max_positions=131072, vocabulary=120832, theta=11_158_840.0),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    params |= router_params(config, "mlp.router.gate.weight")
    params |= {"correction": (("mlp.expert_bias", (config.num_experts,)),)}
    if not config.shared_width:
        return params
    return params | feed_forward_params(config, config.shared_width, "mlp.shared_mlp.", "shared_")


FAMILY = Family(
    "HYV3ForCausalLM",
    "hy_v3",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
)
