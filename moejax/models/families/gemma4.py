"""Gemma 4 with experts (26B-A4B): five layers with a sliding window, then one that sees all with
heads of another size; norms before and after every part; a feed-forward beside the experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.models.attention.grouped_query import GroupedQueryAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    later_layer,
    wrapper_of,
)
from moejax.models.model_config import LayerKind, ModelConfig
from pallas_kernels.rms_norm import rms_norm

_LONGEST = "max_position_embeddings", 131_072
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


@dataclasses.dataclass(frozen=True)
class NormedValues(GroupedQueryAttention):
    """Grouped-query attention whose values are normalised like keys, without weights.

    - `keys_are_values`: values are the projected keys, before their norm and rotation.
    """

    keys_are_values: bool = False

    def project(self, stack, i, x, tokens, squares):
        config, qkv = stack.config, super().project(stack, i, x, tokens, squares)
        width = config.num_key_value_heads * config.head_dim
        rest, values = jnp.split(qkv, [qkv.shape[1] - width], axis=1)
        if self.keys_are_values:
            rest = qkv
        heads = values.reshape(len(values), -1, config.head_dim)
        ones = jnp.ones((1, config.head_dim), heads.dtype)
        name = stack.ops.rms_norm
        normed = rms_norm(heads, ones, 0, config.rms_norm_eps, implementation=name)
        return jnp.concatenate([rest, normed.reshape(values.shape)], axis=1)


def parse(fields: Fields) -> ModelConfig:
    """Gemma4TextConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 30)
    sliding = fields.layer_types([(i + 1) % 6 != 0 for i in range(layers)])
    sliding = (*sliding[:-1], False)  # the last layer sees all, whatever the config says
    if not fields.flag("enable_moe_block", False):
        raise fields.refuse("no layer has experts (enable_moe_block is false)")
    for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if fields.raw.get(name, default) is not None and fields.integer(name, default, least=0):
            raise fields.refuse(f"{name} {fields.raw.get(name, default)} is not implemented")
    fields.only("use_bidirectional_attention", "vision")
    heads = fields.heads(8, 4, hidden=2304, head_dim=256)
    own = {key: value for key, value in heads.items() if key != "hidden_size"}
    whole = _of_whole_layers(fields, heads["hidden_size"], own, sliding)
    hidden = heads["hidden_size"]
    ropes = {
        kind: fields.rope_of_type(kind, _ROPES[kind], fields.integer(*_LONGEST)) for kind in _ROPES
    }
    act = {"hidden_act": fields.raw.get("hidden_activation", "gelu_pytorch_tanh")}
    decoder = Fields(fields.raw | act, fields.source).decoder(
        eps=1e-6,
        max_positions=_LONGEST[1],
        vocabulary=262_144,
        eos=1,
        tied=True,
        rope=ropes["sliding_attention"],
    )
    shared = fields.flag("attention_k_eq_v", False)
    kinds = {
        True: LayerKind(attention=NormedValues(), rope=ropes["sliding_attention"], **own),
        False: LayerKind(
            attention=NormedValues(shared), rope=ropes["full_attention"], **own | whole
        ),
    }
    # transformers rounds the factor of embeddings to the checkpoint's dtype.
    factor = np.float32(hidden**0.5).astype(NUMPY_DTYPES[decoder["dtype"] or "float32"])
    experts = fields.integer("num_experts", None)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 9216),
        moe_intermediate_size=fields.integer("moe_intermediate_size", None),
        **fields.routing(experts, None, "top_k_experts"),
        norm_topk_prob=True,
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        attention=kinds[True].attention,
        attention_scale=1.0,
        layer_kinds=tuple(kinds[each] for each in sliding),
        sliding_window=fields.integer("sliding_window", 512),
        window_layers=sliding,
        embedding_multiplier=float(factor),
        logits_cap=fields.factor("final_logit_softcapping", 30.0)
        if fields.has("final_logit_softcapping")
        else None,
        routes_apart=True,
        **decoder,
    )


def _of_whole_layers(
    fields: Fields, hidden: int, own: dict[str, Any], sliding: tuple[bool, ...]
) -> dict[str, Any]:
    """num_attention_heads, num_key_value_heads and head_dim of layers that see all: transformers 5
    writes them into per_layer_config, published files have global_head_dim and
    num_global_key_value_heads.

    - `own`: the same of the other layers.
    """
    fields.only("use_double_wide_mlp", False)
    given = {"head_dim": fields.integer("global_head_dim", 512)}
    if fields.has("num_global_key_value_heads") and fields.raw.get("attention_k_eq_v"):
        given["num_key_value_heads"] = fields.integer("num_global_key_value_heads", None)
    found = fields.raw.get("per_layer_config")
    if found is not None:
        expected = [layer for layer, inside in enumerate(sliding) if not inside]
        tables = list(found.values()) if isinstance(found, dict) else []
        if (
            not isinstance(found, dict)
            or not all(isinstance(key, str) and key.isdecimal() for key in found)
            or sorted(map(int, found)) != expected  # keys are "05", "11"
            or any(table != tables[0] or not isinstance(table, dict) for table in tables)
            or not tables[0].keys() <= {"head_dim", "num_key_value_heads"}
        ):
            raise fields.refuse(
                f"per_layer_config must have the same head_dim and num_key_value_heads for each of "
                f"the full_attention layers {', '.join(map(str, expected))}, and no more"
            )
        table = Fields(tables[0], f"{fields.source}: per_layer_config")
        given = {name: table.integer(name, None) for name in tables[0]}
    heads = Fields({"hidden_size": hidden} | own | given, fields.source).heads(1, None, hidden=1)
    return {key: heads[key] for key in own}


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, experts = (config.hidden_size,), (config.num_experts,)
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    if isinstance(config.attention, NormedValues) and config.attention.keys_are_values:
        for key in params.keys() & {"qkv", "qkv_bias"}:
            params[key] = params[key][:2]
    norms = {
        "attention_out_norm": "post_attention_layernorm",
        "shared_norm": "pre_feedforward_layernorm",
        "shared_out_norm": "post_feedforward_layernorm_1",
        "post_norm": "pre_feedforward_layernorm_2",
        "experts_out_norm": "post_feedforward_layernorm_2",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    params |= {key: ((f"{name}.weight", hidden),) for key, name in norms.items()}
    params |= feed_forward_params(config, config.intermediate_size, "mlp.", "shared_")
    return params | {
        "router": (("router.proj.weight", (*experts, *hidden)),),
        "router_norm": (("router.scale", hidden),),
        "expert_scale": (("router.per_expert_scale", experts),),
        "layer_scale": (("layer_scalar", (1,)),),
    }


FAMILY = Family(
    "Gemma4ForCausalLM",
    "gemma4_text",
    parse,
    layer_params,
    experts="experts.",
    matrices=None,
    ignores=later_layer,
    reads=frozenset({"per_layer_config"}),
)
IMAGES = wrapper_of(
    FAMILY,
    "Gemma4ForConditionalGeneration",
    "gemma4",
    text_types=("gemma4_text",),
    other_models=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
    tied=True,
)
