"""FlexOlmo: OLMoE with norms after attention and experts in place of before."""

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
    """FlexOlmoConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    width = fields.integer("intermediate_size", 11008)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, None, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_experts", "num_local_experts", 7), 5),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        **fields.decoder(
            eps=1e-6, max_positions=4096, vocabulary=100352, theta=500_000.0, eos=100257
        ),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | whole_norm_params(config)
    del params["input_norm"]
    params["attention_out_norm"] = params.pop("post_norm")
    params["mlp_out_norm"] = (("post_feedforward_layernorm.weight", (config.hidden_size,)),)
    return params | router_params(config)


FAMILY = Family("FlexOlmoForCausalLM", "flex_olmo", parse, layer_params)
