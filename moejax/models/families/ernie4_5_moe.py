"""Ernie4_5_Moe (ERNIE-4.5-21B-A3B, -300B-A47B): pairs of neighbours are rotated, experts are chosen
by softmax with a learned correction that is not part of the weights, shared experts beside the
routed ones, dense layers around those with experts.

The router, and cosine and sine, have the run's dtype as in every family; transformers keeps both in
float32 in bfloat16 runs too.
"""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    router_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Ernie4_5_MoeConfig's fields and defaults."""
    fields.only("sliding_window", None)
    fields.only("moe_norm_min", 1e-12)
    layers = fields.integer("num_hidden_layers", 28)
    fields.same_attention(None, layers)
    biases = fields.flag("use_bias", False)
    width = fields.integer("moe_intermediate_size", 1536)
    experts = fields.experts("moe_num_experts", "num_experts", 64)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(20, 4, hidden=2560),
        rope_interleave=True,
        intermediate_size=fields.integer("intermediate_size", 12288),
        moe_intermediate_size=width,
        **fields.routing(experts, 6, older="moe_k"),
        norm_topk_prob=True,
        moe_layers=_moe_layers(fields, layers),
        shared_width=width * fields.integer("moe_num_shared_experts", 2, least=0),
        attention_bias=biases,
        mlp_bias=biases,
        lm_head_bias=biases,
        sliding_window=None,
        **fields.decoder(
            eps=1e-5, max_positions=131072, vocabulary=103424, theta=5e5, eos=2, tied=True
        ),
    )


def _moe_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts."""
    start = fields.integer("moe_layer_start_index", 1, least=0)
    end = fields.integer("moe_layer_end_index", -1, least=-1)
    interval = fields.integer("moe_layer_interval", 1)
    last = layers - 1 if end == -1 else end
    moe = tuple((i + 1) % interval == 0 and start <= i <= last for i in range(layers))
    by = f"moe_layer_start_index {start}, moe_layer_end_index {end}, moe_layer_interval {interval}"
    return fields.some_experts(moe, f"{by}, {layers} layers")


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    name = "mlp.moe_statics.e_score_correction_bias"
    params |= router_params(config) | {"correction": ((name, (1, config.num_experts)),)}
    if not config.shared_width:
        return params
    return params | feed_forward_params(
        config, config.shared_width, "mlp.shared_experts.", "shared_"
    )


def _of_later_tokens(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to the blocks that predict several tokens. transformers leaves these
    out."""
    return name.startswith("model.mtp_")


FAMILY = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=_of_later_tokens,
)
