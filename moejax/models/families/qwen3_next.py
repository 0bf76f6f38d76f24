"""Qwen3-Next and Qwen3.5-MoE: gated delta nets in most layers, gated attention in the others, and
experts as in Qwen2-MoE."""

from __future__ import annotations

import dataclasses

from moejax.models.attention.gated_delta import GatedDeltaNet
from moejax.models.attention.grouped_query import HeadGatedAttention
from moejax.models.families.qwen2_moe import gated_moe_params
from moejax.models.families.qwen3_moe import sparse_layers
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    wrapper_of,
)
from moejax.models.model_config import ModelConfig, with_state

_WIDE = frozenset({"a_log", "dt_bias"})


def _parse(
    fields: Fields,
    *,
    layers: int,
    vocabulary: int,
    experts: int,
    top_k: int,
    by_key_head: bool,
) -> ModelConfig:
    """Fields of both config classes; the arguments are the defaults in which they differ."""
    fields.only("hidden_act", "silu", "swish")  # of the convolution too
    number = fields.integer("num_hidden_layers", layers)
    experts = fields.experts("num_experts", "num_local_experts", experts)
    heads = fields.heads(16, 2, hidden=2048, head_dim=256)
    delta = {
        name: fields.integer(f"linear_{name}", default)
        for name, default in (
            ("num_key_heads", 16),
            ("num_value_heads", 32),
            ("key_head_dim", 128),
            ("value_head_dim", 128),
            ("conv_kernel_dim", 4),
        )
    }
    if delta["num_value_heads"] % delta["num_key_heads"]:
        raise fields.refuse("linear_num_value_heads must be a multiple of linear_num_key_heads")
    config = ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=number,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 5632),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 512),
        **fields.routing(experts, top_k),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        moe_layers=sparse_layers(fields, number, experts),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
        rotary_width=fields.rotary_width(heads["head_dim"], 0.25),
        attention=HeadGatedAttention(),
        unit_offset_norms=True,
        **fields.decoder(eps=1e-6, max_positions=32768, vocabulary=vocabulary, partial=True),
    )
    linear = {f"linear_{name}": value for name, value in delta.items()}
    net = GatedDeltaNet(**linear, by_key_head=by_key_head)
    return with_state(config, net, fields.state_layers(number, "linear_attention", 4))


def parse(fields: Fields) -> ModelConfig:
    """Qwen3NextConfig's fields and defaults."""
    sizes = {"layers": 48, "vocabulary": 151936, "experts": 512, "top_k": 10}
    return _parse(fields, **sizes, by_key_head=True)


def parse_qwen3_5(fields: Fields) -> ModelConfig:
    """Qwen3_5MoeTextConfig's fields and defaults: no dense layers, weights always normalised."""
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    fields.only("norm_topk_prob", True)
    sizes = {"layers": 40, "vocabulary": 248320, "experts": 256, "top_k": 8}
    config = _parse(fields, **sizes, by_key_head=False)
    return dataclasses.replace(config, architecture=QWEN3_5.architecture)


def _feed_forward(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    if moe:
        return gated_moe_params(config)
    return feed_forward_params(config, config.intermediate_size)


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    if isinstance(config.attention, GatedDeltaNet):
        return _delta_params(config, config.attention) | _feed_forward(config, moe)
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    for name in ("qkv", "qkv_bias"):  # each head of q_proj has a gate too
        if name in params:
            (q, (rows, *columns)), *rest = params[name]
            params[name] = ((q, (2 * rows, *columns)), *rest)
    return params | _feed_forward(config, moe)


def _delta_params(config: ModelConfig, delta: GatedDeltaNet) -> dict[str, Parts]:
    hidden = config.hidden_size
    columns, values, heads = delta.shape.columns, delta.values, delta.linear_num_value_heads
    if delta.by_key_head:
        projections = (("qkvz", columns + values), ("ba", 2 * heads))
    else:
        projections = (("qkv", columns), ("z", values), ("b", heads), ("a", heads))
    name = "linear_attn."
    return {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
        "state_in": tuple((f"{name}in_proj_{p}.weight", (n, hidden)) for p, n in projections),
        "conv": ((f"{name}conv1d.weight", (columns, 1, delta.linear_conv_kernel_dim)),),
        "a_log": ((f"{name}A_log", (heads,)),),
        "dt_bias": ((f"{name}dt_bias", (heads,)),),
        "state_norm": ((f"{name}norm.weight", (delta.linear_value_head_dim,)),),
        "o": ((f"{name}out_proj.weight", (hidden, values)),),
    }


def _is_draft(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to the layer that predicts several tokens, which transformers leaves
    out."""
    return name.startswith("mtp.")


FAMILY = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    parse,
    layer_params,
    wide_params=_WIDE,
    ignores=_is_draft,
)
QWEN3_5 = dataclasses.replace(
    FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    parse=parse_qwen3_5,
)
QWEN3_5_VISION = wrapper_of(
    QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    text_types=("qwen3_5_moe_text",),
    other_models=("visual",),
)
