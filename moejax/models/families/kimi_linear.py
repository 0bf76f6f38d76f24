"""Kimi-Linear (arXiv:2510.26692): Kimi delta attention in most layers, multi-head latent attention
without positions in the others, experts as in DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from moejax.errors import shown
from moejax.models.attention.gated_delta import KimiDeltaAttention
from moejax.models.families.deepseek import V3, latent_params, parse_v3
from moejax.models.family import Fields, Parts, feed_forward_params, router_params
from moejax.models.json_values import is_integer
from moejax.models.model_config import ModelConfig, with_state

_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_experts": "num_local_experts",
}
"""Published name → transformers' other one."""

_DEFAULTS = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_local_experts": 256,
    "routed_scaling_factor": 2.446,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
}
_WITHOUT = ("layer_types", "rope_parameters", "rope_scaling", "rope_theta", "rope_interleave")


def parse(fields: Fields) -> ModelConfig:
    """KimiLinearConfig's fields and defaults, and those of the published files."""
    fields.only("hidden_act", "silu", "swish")  # of the convolution too
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("mla_use_nope", True)
    fields.only("tie_word_embeddings", False)  # which transformers ignores
    raw = {**_DEFAULTS, **{k: v for k, v in fields.raw.items() if k not in _WITHOUT}}
    for published, name in _NAMES.items():
        if (value := fields.alias(published, name)) is not None:
            raw[name] = value
    own = Fields({**raw, "rope_interleave": False}, fields.source)
    config = parse_v3(own)
    layers = config.num_hidden_layers
    config = dataclasses.replace(
        config,
        architecture=FAMILY.architecture,
        moe_layers=own.sparse_layers(layers, 1),
        rope_layers=(False,) * layers,
    )
    linear = fields.raw.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise fields.refuse(f"linear_attn_config must be an object, not {shown(linear)}")
    sizes = Fields(
        {
            "linear_num_heads": linear.get("num_heads", fields.raw.get("linear_num_heads", 32)),
            "linear_head_dim": linear.get("head_dim", fields.raw.get("linear_head_dim", 128)),
            "linear_conv_kernel_dim": linear.get(
                "short_conv_kernel_size", fields.raw.get("linear_conv_kernel_dim", 4)
            ),
        },
        fields.source,
    )
    kind = KimiDeltaAttention(
        sizes.integer("linear_num_heads", None),
        sizes.integer("linear_head_dim", None),
        sizes.integer("linear_conv_kernel_dim", None, least=2),
    )
    return with_state(config, kind, _state_layers(fields, linear, layers))


def _state_layers(fields: Fields, linear: dict, layers: int) -> tuple[bool, ...]:
    types = fields.raw.get("layer_types")
    if types is None and {"full_attn_layers", "kda_layers"} <= linear.keys():
        full, states = linear["full_attn_layers"], linear["kda_layers"]
        both = [*full, *states] if isinstance(full, list) and isinstance(states, list) else []
        if not all(map(is_integer, both)) or sorted(both) != [*range(1, layers + 1)]:
            raise fields.refuse(
                "linear_attn_config.full_attn_layers and kda_layers must be each of the layers 1 "
                f"to {layers} once, not {shown(full)} and {shown(states)}"
            )
        types = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    if types is None:
        types = [
            "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)
        ]
    return Fields({"layer_types": types}, fields.source).state_layers(layers, "linear_attention", 1)


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    kind = config.attention
    if isinstance(kind, KimiDeltaAttention):
        params = _delta_params(kind, config.hidden_size)
    else:
        params = latent_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    name = "block_sparse_moe."
    if config.shared_width:
        shared = f"{name}shared_experts."
        params |= feed_forward_params(config, config.shared_width, shared, "shared_")
    correction: Parts = ((f"{name}gate.e_score_correction_bias", (config.num_experts,)),)
    return params | router_params(config, f"{name}gate.weight") | {"correction": correction}


def _delta_params(kind: KimiDeltaAttention, hidden: int) -> dict[str, Parts]:
    name, width, values = "self_attn.", kind.width, kind.heads * kind.width
    projections = [(f"{head}_proj", values) for head in "qkv"]
    projections += [("f_a_proj", width), ("g_a_proj", width), ("b_proj", kind.heads)]
    return {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
        "state_in": tuple((f"{name}{p}.weight", (n, hidden)) for p, n in projections),
        "decay": ((f"{name}f_b_proj.weight", (values, width)),),
        "state_gate": ((f"{name}g_b_proj.weight", (values, width)),),
        "conv": tuple((f"{name}{head}_conv1d.weight", (values, 1, kind.taps)) for head in "qkv"),
        "a_log": ((f"{name}A_log", (1, 1, kind.heads, 1)),),
        "dt_bias": ((f"{name}dt_bias", (values,)),),
        "state_norm": ((f"{name}o_norm.weight", (width,)),),
        "o": ((f"{name}o_proj.weight", (hidden, values)),),
    }


FAMILY = dataclasses.replace(
    V3,
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    parse=parse,
    layer_params=layer_params,
    experts="block_sparse_moe.experts.",
    matrices=("w1", "w3", "w2"),
    wide_params=frozenset({"correction", "a_log", "dt_bias"}),
    other_types=(),
)
