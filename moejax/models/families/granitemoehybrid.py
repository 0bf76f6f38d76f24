"""GraniteMoeHybrid (Granite 4): GraniteMoeShared with Mamba-2 in most layers and, mostly, without
positions in the others."""

from __future__ import annotations

import dataclasses
import math

from moejax.models.attention.mamba import WIDE, Mamba2, StateSpace
from moejax.models.families.granitemoe import SHARED, parse_shared, shared_layer_params
from moejax.models.family import Fields, Parts
from moejax.models.model_config import ModelConfig, with_state
from pallas_kernels.selective_scan import ScanShape

_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def parse(fields: Fields) -> ModelConfig:
    """GraniteMoeHybridConfig's fields and defaults."""
    fields.only("hidden_act", "silu", "swish")  # of the convolution too
    raw = dict(fields.raw)
    types = fields.alias("layer_types", "layers_block_type")
    layers = fields.integer("num_hidden_layers", 32)
    if isinstance(types, list):
        raw["layer_types"] = [_NAMES.get(t, t) if isinstance(t, str) else t for t in types]
    # Without layer_types every layer keeps a state, which state_layers refuses.
    states = Fields(raw, fields.source).state_layers(layers, "linear_attention", layers + 1)
    experts = fields.integer("num_local_experts", 8, least=0)
    fields.some_experts((experts > 0,) * layers, f"num_local_experts {experts}")

    rotates = fields.raw.get("position_embedding_type") == "rope"
    if not rotates:  # as in transformers, whatever the other names
        raw = {key: value for key, value in raw.items() if key not in _ROPE}
    raw.pop("layer_types", None)
    raw.setdefault("shared_intermediate_size", 1024)
    config = parse_shared(Fields(raw, fields.source))
    config = dataclasses.replace(
        config,
        architecture=FAMILY.architecture,
        rope_layers=None if rotates else (False,) * layers,
    )
    return with_state(config, _mamba(fields, config.hidden_size), states)


def _mamba(fields: Fields, hidden: int) -> Mamba2:
    heads = fields.integer("mamba_n_heads", 128)
    groups = fields.integer("mamba_n_groups", 1)
    width = fields.integer("mamba_expand", 2) * hidden
    given = fields.raw.get("mamba_d_head", "auto")
    head_dim = width // heads if given == "auto" else fields.integer("mamba_d_head", None)
    if heads * head_dim != width:
        raise fields.refuse(
            f"mamba_n_heads ({heads}) × mamba_d_head ({head_dim}) must be mamba_expand × "
            f"hidden_size ({width})"
        )
    if heads % groups:
        raise fields.refuse("mamba_n_heads must be a multiple of mamba_n_groups")
    return Mamba2(
        ScanShape(heads, head_dim, groups, fields.integer("mamba_d_state", 256)),
        fields.integer("mamba_d_conv", 4, least=2),
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        limits=fields.limits("time_step_limit", (0.0, math.inf)),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = shared_layer_params(config, moe)
    mamba = config.attention
    if not isinstance(mamba, Mamba2):
        return params
    for name in ("qkv", "qkv_bias", "o", "o_bias"):
        params.pop(name, None)
    return params | mamba2_params(mamba, config.hidden_size)


def mamba2_params(mamba: Mamba2, hidden: int, name: str = "mamba.") -> dict[str, Parts]:
    """A layer of Mamba-2 without its norm. name: the beginning of its tensors' names."""
    shape = mamba.shape
    rows = shape.values + shape.columns + shape.steps
    params: dict[str, Parts] = {
        "state_in": ((f"{name}in_proj.weight", (rows, hidden)),),
        "conv": ((f"{name}conv1d.weight", (mamba.mixed, 1, mamba.taps)),),
        "a_log": ((f"{name}A_log", (shape.steps,)),),
        "dt_bias": ((f"{name}dt_bias", (shape.steps,)),),
        "skip": ((f"{name}D", (shape.steps,)),),
        "state_norm": ((f"{name}norm.weight", (shape.values,)),),
        "o": ((f"{name}out_proj.weight", (hidden, shape.values)),),
    }
    return params | mamba_bias_params(mamba, rows, hidden, name)


def mamba_bias_params(
    mamba: StateSpace, rows: int, hidden: int, name: str = "mamba."
) -> dict[str, Parts]:
    """Biases of a layer with state. rows: of its first projection."""
    params: dict[str, Parts] = {}
    if mamba.conv_bias:
        params["conv_bias"] = ((f"{name}conv1d.bias", (mamba.mixed,)),)
    if mamba.bias:
        params["state_in_bias"] = ((f"{name}in_proj.bias", (rows,)),)
        params["o_bias"] = ((f"{name}out_proj.bias", (hidden,)),)
    return params


FAMILY = dataclasses.replace(
    SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    parse=parse,
    layer_params=layer_params,
    wide_params=WIDE,
)
