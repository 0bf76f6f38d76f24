"""Ling and Ring 2.0 (BailingMoeV2) and Sarvam-30B: Glm4Moe's layers, with q, k and v as one matrix
and names of their own."""

from __future__ import annotations

import dataclasses

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    feed_forward_params,
    later_layer,
    router_params,
    shared_expert_params,
)
from moejax.models.model_config import ModelConfig


def parse_sarvam(fields: Fields) -> ModelConfig:
    """SarvamMoEConfig's fields and defaults."""
    fields.only("sliding_window", None)
    layers = fields.integer("num_hidden_layers", 19)
    fields.same_attention(None, layers)
    heads = fields.heads(64, 4, hidden=4096, head_dim=64)
    width = fields.integer("moe_intermediate_size", 1024)
    routed = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    shared, biases = (
        second if fields.alias(first, second) is not None and fields.has(second) else first
        for first, second in (
            ("n_shared_experts", "num_shared_experts"),
            ("attention_bias", "use_qkv_bias"),
        )
    )
    return ModelConfig(
        architecture=SARVAM.architecture,
        num_hidden_layers=layers,
        **heads,
        rotary_width=fields.rotary_width(heads["head_dim"], 1.0),
        qk_norm=fields.flag("use_qk_norm", True),
        intermediate_size=fields.integer("intermediate_size", 8192),
        moe_intermediate_size=width,
        **fields.routing(fields.experts("n_routed_experts", routed, 128), 6),
        moe_layers=fields.dense_first(layers, 1),
        shared_width=width * fields.integer(shared, 1, least=0),
        **fields.corrected_routing(normalize=True, scale=2.5),
        attention_bias=fields.flag(biases, False),
        sliding_window=None,
        **fields.decoder(
            eps=1e-6,
            max_positions=131072,
            vocabulary=262144,
            theta=8e6,
            eos=1,
            partial=True,
        ),
    )


def parse_v2(fields: Fields) -> ModelConfig:
    """The fields of BailingMoeV2Config, which comes with its models' own code."""
    fields.only("sliding_window", None)
    fields.only("score_function", "sigmoid")
    fields.only("moe_router_enable_expert_bias", True)
    fields.only("use_bias", False)
    fields.only("norm_head", False)
    fields.only("norm_softmax", False)
    fields.only("use_rmsnorm", True)
    fields.only("router_dtype", "fp32")
    layers = fields.integer("num_hidden_layers", None)
    fields.same_attention(None, layers)
    heads = fields.heads(16, 4, hidden=2048)
    head_dim = heads["head_dim"]
    rotated = fields.integer("rotary_dim", head_dim // 2, least=2) / head_dim
    width = fields.integer("moe_intermediate_size", None)
    shared = width * fields.integer("num_shared_experts", 1, least=0)
    fields.only("moe_shared_expert_intermediate_size", width)
    return ModelConfig(
        architecture=V2.architecture,
        num_hidden_layers=layers,
        **heads,
        rotary_width=fields.rotary_width(head_dim, rotated),
        qk_norm=fields.flag("use_qk_norm", True),
        intermediate_size=fields.integer("intermediate_size", None),
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_experts", None, least=0), None),
        moe_layers=fields.dense_first(layers, 0),
        shared_width=shared,
        **fields.corrected_routing(normalize=True, scale=2.5, groups=8, top_groups=4),
        attention_bias=fields.flag("use_qkv_bias", False),
        sliding_window=None,
        **fields.decoder(eps=1e-6, max_positions=32768, vocabulary=157184, theta=6e5, partial=True),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries = config.num_attention_heads * head_dim
    rows = queries + 2 * config.num_key_value_heads * head_dim
    params: dict[str, Parts] = {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "qkv": (("attention.query_key_value.weight", (rows, hidden)),),
        "o": (("attention.dense.weight", (hidden, queries)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
    }
    if config.attention_bias:
        params["qkv_bias"] = (("attention.query_key_value.bias", (rows,)),)
    if config.qk_norm:
        params["q_norm"] = (("attention.query_layernorm.weight", (head_dim,)),)
        params["k_norm"] = (("attention.key_layernorm.weight", (head_dim,)),)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    correction: Parts = (("mlp.gate.expert_bias", (config.num_experts,)),)
    params |= router_params(config) | shared_expert_params(config)
    return params | {"correction": correction}


SARVAM = Family(
    "SarvamMoEForCausalLM",
    "sarvam_moe",
    parse_sarvam,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
    aliases=("Glm4MoeForCausalLM",),
    renamed=(("model.word_embeddings.", "model.embed_tokens."),),
)
V2 = dataclasses.replace(
    SARVAM,
    architecture="BailingMoeV2ForCausalLM",
    model_type="bailing_moe_v2",
    parse=parse_v2,
    aliases=(),
    other_types=("bailing_moe",),
)
