"""AFMoE (Trinity): norms before and after attention and experts, a gate on the outputs of heads,
norms on heads of q and k; layers with a sliding window rotate q and k, the others do not."""

from __future__ import annotations

from moejax.models.attention.grouped_query import GatedAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    later_layer,
    router_params,
    shared_expert_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """AfmoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    every = fields.integer("global_attn_every_n_layers", 4)
    sliding = fields.layer_types([(i + 1) % every != 0 for i in range(layers)])
    window = fields.integer("sliding_window", 1024) if any(sliding) else None
    heads = fields.heads(16, None, hidden=2048, head_dim=128)
    width = fields.integer("moe_intermediate_size", 1408)
    dense = fields.integer("num_dense_layers", 1, least=0)
    moe = tuple(i >= dense for i in range(layers))
    fields.only("score_func", "sigmoid")
    fields.only("route_norm", True)
    fields.only("n_group", 1)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 6144),
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_experts", 64, least=0), 6),
        moe_layers=fields.some_experts(moe, f"num_dense_layers {dense} of {layers} layers"),
        shared_width=width * fields.integer("num_shared_experts", 2),
        norm_topk_prob=True,
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("route_scale", 1.0),
        attention_bias=fields.flag("attention_bias", False),
        attention=GatedAttention(),
        sliding_window=window,
        window_layers=sliding if window else None,
        rope_layers=None if all(sliding) else sliding,
        embedding_multiplier=heads["hidden_size"] ** 0.5
        if fields.flag("mup_enabled", False)
        else 1.0,
        **fields.decoder(eps=1e-5, max_positions=16384, vocabulary=200192),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden = (config.hidden_size,)
    heads = config.num_attention_heads * config.head_dim
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    params |= {
        "attention_gate": (("self_attn.gate_proj.weight", (heads, *hidden)),),
        "attention_out_norm": (("post_attention_layernorm.weight", hidden),),
        "post_norm": (("pre_mlp_layernorm.weight", hidden),),
        "mlp_out_norm": (("post_mlp_layernorm.weight", hidden),),
    }
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    params["correction"] = (("mlp.expert_bias", (config.num_experts,)),)
    params |= router_params(config, "mlp.router.gate.weight")
    return params | shared_expert_params(config)


FAMILY = Family(
    "AfmoeForCausalLM",
    "afmoe",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
)
