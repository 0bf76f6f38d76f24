"""Jamba (arXiv:2403.19887): Mamba in most layers, grouped-query attention without positions in the
others, and experts in every second layer."""

from __future__ import annotations

from moejax.models.attention.mamba import WIDE, Mamba
from moejax.models.families.granitemoehybrid import mamba_bias_params
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    router_params,
)
from moejax.models.model_config import ModelConfig, with_state
from pallas_kernels.selective_scan import ScanShape

_HEADS = 64
"""Values that are one head of the recurrence, at most: every value has its own rates."""


def parse(fields: Fields) -> ModelConfig:
    """JambaConfig's fields and defaults."""
    fields.only("hidden_act", "silu", "swish")  # of the convolution too
    layers = fields.integer("num_hidden_layers", 32)
    experts = fields.experts("num_experts", "num_local_experts", 16)
    moe = _every(fields, "expert_layer", layers, 2, 1)
    attention = _every(fields, "attn_layer", layers, 8, 4)
    if not any(attention):
        raise fields.refuse(f"attn_layer_offset leaves no attention in {layers} layers")
    moe = fields.some_experts(
        tuple(each and experts > 1 for each in moe), f"num_experts {experts} of {layers} layers"
    )
    width = fields.integer("intermediate_size", 14336)
    # No layer has positions.
    plain = {k: v for k, v in fields.raw.items() if k not in ("rope_parameters", "rope_scaling")}
    config = ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 8, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(experts, 2),
        norm_topk_prob=False,
        moe_layers=moe,
        attention_bias=False,
        sliding_window=None,
        rope_layers=(False,) * layers,
        **Fields(plain, fields.source).decoder(
            eps=1e-6, max_positions=262144, vocabulary=65536, eos=2
        ),
    )
    return with_state(config, _mamba(fields, config.hidden_size), [not a for a in attention])


def _every(fields: Fields, name: str, layers: int, period: int, offset: int) -> tuple[bool, ...]:
    """The layers from NAME_offset on, NAME_period apart."""
    period = fields.integer(f"{name}_period", period)
    offset = fields.integer(f"{name}_offset", offset, least=0)
    if offset >= period:
        raise fields.refuse(f"{name}_offset ({offset}) must be less than {name}_period ({period})")
    return tuple(i % period == offset for i in range(layers))


def _mamba(fields: Fields, hidden: int) -> Mamba:
    width = fields.integer("mamba_expand", 2) * hidden
    head_dim = next(n for n in range(min(_HEADS, width), 0, -1) if width % n == 0)
    state = fields.integer("mamba_d_state", 16)
    rank = fields.raw.get("mamba_dt_rank", "auto")
    return Mamba(
        ScanShape(width // head_dim, head_dim, 1, state, each=True),
        fields.integer("mamba_d_conv", 4, least=2),
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        rank=-(-hidden // 16) if rank == "auto" else fields.integer("mamba_dt_rank", None),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, mamba = config.hidden_size, config.attention
    params = attention_params(config, output_bias=False)
    params["post_norm"] = (("pre_ff_layernorm.weight", (hidden,)),)
    if isinstance(mamba, Mamba):
        del params["qkv"]
        params |= _mamba_params(mamba, hidden)
    if moe:
        return params | router_params(config, "feed_forward.router.weight")
    return params | feed_forward_params(config, config.intermediate_size, "feed_forward.")


def _mamba_params(mamba: Mamba, hidden: int) -> dict[str, Parts]:
    width, state, rank = mamba.mixed, mamba.shape.state, mamba.rank
    params: dict[str, Parts] = {
        "state_in": (("mamba.in_proj.weight", (2 * width, hidden)),),
        "conv": (("mamba.conv1d.weight", (width, 1, mamba.taps)),),
        "selection": (("mamba.x_proj.weight", (rank + 2 * state, width)),),
        "step_norm": (("mamba.dt_layernorm.weight", (rank,)),),
        "key_norm": (("mamba.b_layernorm.weight", (state,)),),
        "read_norm": (("mamba.c_layernorm.weight", (state,)),),
        "step": (("mamba.dt_proj.weight", (width, rank)),),
        "dt_bias": (("mamba.dt_proj.bias", (width,)),),
        "a_log": (("mamba.A_log", (width, state)),),
        "skip": (("mamba.D", (width,)),),
        "o": (("mamba.out_proj.weight", (hidden, width)),),
    }
    return params | mamba_bias_params(mamba, 2 * width, hidden)


FAMILY = Family(
    "JambaForCausalLM",
    "jamba",
    parse,
    layer_params,
    experts="feed_forward.experts.",
    wide_params=WIDE,
    renamed=(("model.final_layernorm.", "model.norm."),),
)
