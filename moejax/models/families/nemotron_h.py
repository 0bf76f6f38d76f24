"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: blocks of Mamba-2, of attention without positions,
of experts or of a feed-forward, each behind one norm. Here a layer is a block of the first two
kinds with the block of the last two that follows it, if one does."""

from __future__ import annotations

import math
from typing import Any

from moejax.errors import shown
from moejax.models.attention.grouped_query import GROUPED_QUERY
from moejax.models.attention.mamba import WIDE, Mamba2
from moejax.models.families.granitemoehybrid import mamba2_params
from moejax.models.family import Family, Fields, Parts, attention_params
from moejax.models.model_config import LayerKind, ModelConfig
from pallas_kernels.selective_scan import ScanShape

MAMBA, ATTENTION, EXPERTS, DENSE = "linear_attention", "full_attention", "moe", "mlp"
_NAMES = {"mamba": MAMBA, "attention": ATTENTION} | dict(
    zip("M*E-", (MAMBA, ATTENTION, EXPERTS, DENSE), strict=True)
)
"""Other names of blocks, in older files and in hybrid_override_pattern."""

_OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_NEXT = "next."
"""Before the names of tensors of a layer's second block."""


def parse(fields: Fields) -> ModelConfig:
    """NemotronHConfig's fields and defaults."""
    fields.only("mlp_hidden_act", "relu2")
    fields.only("mamba_hidden_act", "silu", "swish")
    fields.only("n_shared_experts", 1)
    fields.only("sliding_window", None)
    fields.only("tie_word_embeddings", False)  # which transformers ignores
    # As transformers does, of which attention has no rotation.
    rope = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    raw = {key: value for key, value in fields.raw.items() if key not in rope}
    raw |= {new: raw[old] for old, new in _OLDER.items() if raw.get(old) is not None}
    own = Fields(raw | {"hidden_act": "relu"}, fields.source)  # see ModelConfig.ungated
    layers = _layers(own)
    heads = own.heads(32, 8, hidden=4096, head_dim=128)
    decoder = own.decoder(eps=1e-5, max_positions=4096, vocabulary=131072, eos=2)
    decoder["rms_norm_eps"] = own.number("layer_norm_epsilon", 1e-5)
    count = {key: value for key, value in heads.items() if key != "hidden_size"}
    mixers: dict[str, Any] = {MAMBA: _mamba(own), ATTENTION: GROUPED_QUERY}
    kinds = {
        (block, alone): LayerKind(
            attention=mixers[block],
            rope=decoder["rope"],
            attention_only=alone,
            **count,
        )
        for block in mixers
        for alone in (False, True)
    }
    experts = own.experts("n_routed_experts", "num_local_experts", 8)
    latent = own.optional_integer("moe_latent_size") or 0
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=len(layers),
        **heads,
        intermediate_size=own.integer("intermediate_size", 21504),
        moe_intermediate_size=own.integer("moe_intermediate_size", 7688),
        shared_width=own.integer("moe_shared_expert_intermediate_size", 7688),
        **own.routing(experts, 2),
        **own.corrected_routing(normalize=True, scale=1.0),
        moe_layers=tuple(second == EXPERTS for _, second in layers),
        attention_bias=False,
        mlp_bias=own.flag("mlp_bias", False),
        sliding_window=None,
        rope_layers=(False,) * len(layers),
        layer_kinds=tuple(kinds[first, second is None] for first, second in layers),
        ungated=True,
        latent_width=latent,
        routes_apart=latent > 0,
        **decoder,
    )


def _layers(fields: Fields) -> list[tuple[str, str | None]]:
    """The blocks of each layer; None: it has one."""
    given = fields.alias("layers_block_type", "layer_types")
    names = "layers_block_type", "layer_types", "hybrid_override_pattern"
    name = next((name for name in names if fields.has(name)), names[0])
    if given is None:
        given = fields.raw.get(names[2]) or [MAMBA, EXPERTS, ATTENTION, DENSE]
    known = {MAMBA, ATTENTION, EXPERTS, DENSE}
    blocks = [_NAMES.get(block, block) for block in given if isinstance(block, str)]
    if len(blocks) != len(given) or not {*blocks} <= known or len(blocks) > 8192:
        raise fields.refuse(f"{name} must be of {', '.join(sorted(known))}, not {shown(given)}")
    layers: list[tuple[str, str | None]] = []
    for number, block in enumerate(blocks):
        if block in (MAMBA, ATTENTION):
            layers.append((block, None))
        elif layers and layers[-1][1] is None:
            layers[-1] = layers[-1][0], block
        else:
            raise fields.refuse(
                f"{name}: block {number}, {block!r}, must follow one of attention or Mamba"
            )
    if ATTENTION not in blocks:
        raise fields.refuse(f"{name} must have {ATTENTION!r} once")
    fields.some_experts(tuple(second == EXPERTS for _, second in layers), name)
    return layers


def _mamba(fields: Fields) -> Mamba2:
    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise fields.refuse("mamba_num_heads must be a multiple of n_groups")
    head_dim = fields.integer("mamba_head_dim", 64)
    return Mamba2(
        ScanShape(heads, head_dim, groups, fields.integer("ssm_state_size", 128)),
        fields.integer("conv_kernel", 4, least=2),
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
        limits=(fields.number("time_step_min", 0.001), math.inf),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, mamba = config.hidden_size, config.attention
    params: dict[str, Parts] = {"input_norm": (("norm.weight", (hidden,)),)}
    if isinstance(mamba, Mamba2):
        params |= mamba2_params(mamba, hidden, "mixer.")
    else:
        found = attention_params(config, output_bias=False)
        for key in ("qkv", "o"):
            params[key] = tuple(
                (name.replace("self_attn.", "mixer."), shape) for name, shape in found[key]
            )
    if config.attention_only:
        return params
    name = f"{_NEXT}mixer."
    params["post_norm"] = ((f"{_NEXT}norm.weight", (hidden,)),)
    if not moe:
        return params | _projections(config, config.intermediate_size, name, "")
    params |= _projections(config, config.shared_width, f"{name}shared_experts.", "shared_")
    experts = config.num_experts
    params["router"] = ((f"{name}gate.weight", (experts, hidden)),)
    params["correction"] = ((f"{name}gate.e_score_correction_bias", (experts,)),)
    if latent := config.latent_width:
        sizes = {"latent_in": ("fc1", latent, hidden), "latent_out": ("fc2", hidden, latent)}
        for key, (number, rows, columns) in sizes.items():
            params[key] = ((f"{name}{number}_latent_proj.weight", (rows, columns)),)
            if config.mlp_bias:
                params[f"{key}_bias"] = ((f"{name}{number}_latent_proj.bias", (rows,)),)
    return params


def _projections(config: ModelConfig, width: int, name: str, key: str) -> dict[str, Parts]:
    """up and down. key: the beginning of the parameters' names."""
    hidden, params = config.hidden_size, dict[str, Parts]()
    for matrix, size in {"up": (width, hidden), "down": (hidden, width)}.items():
        params[f"{key}{matrix}"] = ((f"{name}{matrix}_proj.weight", size),)
        if config.mlp_bias:
            params[f"{key}{matrix}_bias"] = ((f"{name}{matrix}_proj.bias", size[:1]),)
    return params


def full_name(config: ModelConfig, layer: int, name: str) -> str:
    kinds = config.layer_kinds or ()
    block = layer + sum(not kind.attention_only for kind in kinds[:layer])
    if name.startswith(_NEXT):
        block, name = block + 1, name.removeprefix(_NEXT)
    return f"model.layers.{block}.{name}"


FAMILY = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    parse,
    layer_params,
    experts=f"{_NEXT}mixer.experts.",
    matrices=("up_proj", "down_proj"),
    stacked=("up_proj", "down_proj"),
    wide_params=WIDE | {"correction"},
    ignores=lambda config, name: name.startswith("mtp."),
    renamed=(
        ("backbone.embeddings.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.norm."),
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
    ),
    full_name=full_name,
)
