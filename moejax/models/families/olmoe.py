"""OLMoE: a norm over all of q and all of k, values clipped where the config says so, rotary
positions, softmax-top-k experts in every layer."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    router_params,
    whole_norm_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """OlmoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 16)
    heads = fields.heads(16, None, hidden=2048)
    if heads["num_attention_heads"] * heads["head_dim"] != heads["hidden_size"]:
        raise fields.refuse(
            f"hidden_size ({heads['hidden_size']}) must be num_attention_heads × head_dim "
            f"({heads['num_attention_heads']} × {heads['head_dim']}), the width of the norm of q"
        )
    # transformers' eager attention ignores a window and its flash attention does not.
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    width = fields.integer("intermediate_size", 2048)
    clip = fields.number("clip_qkv", 0.0) if fields.has("clip_qkv") else None
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_experts", "num_local_experts", 64), 8),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        clip_qkv=clip,
        **fields.decoder(eps=1e-5, max_positions=4096, vocabulary=50304, eos=50279),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | whole_norm_params(config)
    return params | router_params(config)


FAMILY = Family("OlmoeForCausalLM", "olmoe", parse, layer_params)
