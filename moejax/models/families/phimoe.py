"""Phi-3.5-MoE: LayerNorm, biases, longrope, and two experts chosen by sparsemixer (SparseMixer-v2,
arXiv:2409.12136) in every layer."""

from __future__ import annotations

from moejax.models.family import Family, Fields, Parts, attention_params, router_params
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """PhimoeConfig's fields and defaults. The jitter of the input is of training only."""
    layers = fields.integer("num_hidden_layers", 32)
    width = fields.integer("intermediate_size", 6400)
    experts = fields.experts("num_local_experts", "num_experts", 16)
    fields.only("num_experts_per_tok", 2)
    decoder = fields.decoder(
        eps=1e-5, max_positions=131072, vocabulary=32064, theta=1e6, eos=2, mscales=True
    )
    rope = decoder["rope"]
    if rope.type != "default" and None in (rope.short_mscale, rope.long_mscale):
        raise fields.refuse(
            f"rope type {rope.type!r} of this model needs short_mscale and long_mscale, and only "
            "longrope has them"
        )
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 8, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(experts, 2),
        norm_topk_prob=False,
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=fields.window_everywhere(layers),
        lm_head_bias=fields.flag("lm_head_bias", False),
        scoring_func="sparsemixer",
        router_jitter_noise=fields.number("router_jitter_noise", 0.01),
        **decoder,
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True)
    params |= router_params(config, "block_sparse_moe.gate.weight")
    hidden = (config.hidden_size,)
    params["input_norm_bias"] = (("input_layernorm.bias", hidden),)
    params["post_norm_bias"] = (("post_attention_layernorm.bias", hidden),)
    return params


FAMILY = Family(
    "PhimoeForCausalLM",
    "phimoe",
    parse,
    layer_params,
    experts="block_sparse_moe.experts.",
    matrices=("w1", "w3", "w2"),
    final_norm_bias=True,
    aliases=("PhiMoEForCausalLM",),
)
