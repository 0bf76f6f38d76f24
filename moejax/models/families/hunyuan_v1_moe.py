"""HunYuan-MoE V1 (Hunyuan-A13B): norms on heads of q and k after the rotation, Mixtral's routing, a
shared expert of the routed ones' width in every layer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from moejax.errors import shown
from moejax.models.attention.grouped_query import GroupedQueryAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    router_params,
)
from moejax.models.json_values import is_number
from moejax.models.model_config import ModelConfig
from moejax.models.rope import LARGEST


class LateNormAttention(GroupedQueryAttention):
    """Grouped-query attention that normalises heads of q and k after it has rotated them. kv_write
    does both in the other order, so its heads come rotated and are turned by an angle of zero."""

    def frequencies(self, stack, i):
        return jnp.zeros_like(stack.frequencies(i))

    def project(self, stack, i, x, tokens, squares):
        config, width = stack.config, stack.config.num_key_value_heads * stack.config.head_dim
        qkv = super().project(stack, i, x, tokens, squares)
        q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * width, qkv.shape[1] - width), axis=1)
        angles = tokens.positions.astype(jnp.float32)[:, None] * stack.frequencies(i)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def turn(heads, name):
            heads = heads.reshape(len(heads), -1, config.head_dim)
            first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
            turned = [first * cos - second * sin, second * cos + first * sin]
            heads = jnp.concatenate(turned, axis=-1).astype(qkv.dtype)
            return stack.norm(heads, name, i).reshape(len(heads), -1)

        return jnp.concatenate([turn(q, "late_q_norm"), turn(k, "late_k_norm"), v], axis=1)


def parse(fields: Fields) -> ModelConfig:
    """HunYuanMoEV1Config's fields and defaults. Published files state numbers of each layer as
    lists, whose entries must be equal here."""
    layers = fields.integer("num_hidden_layers", 32)
    numbers = ("moe_topk", "num_shared_expert", "moe_intermediate_size")
    fields = dataclasses.replace(
        fields,
        raw={
            key: _of_all(fields, key, value, layers) if key in numbers else value
            for key, value in fields.raw.items()
        },
    )
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    fields.only("use_qk_norm", True)
    fields.only("use_mixed_mlp_moe", True)
    fields.only("use_cla", False)
    fields.only("num_shared_expert", 1)
    width = fields.integer("intermediate_size", 11008)
    fields.only("moe_intermediate_size", width)
    heads = fields.heads(32, None, hidden=4096)
    experts = fields.experts("num_experts", "num_local_experts", 1)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(experts, 1, older="moe_topk"),
        norm_topk_prob=True,
        moe_layers=fields.some_experts((experts > 0,) * layers, f"num_experts {experts}"),
        shared_width=width,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        attention=LateNormAttention(),
        **_static_rope(fields, heads["head_dim"]).decoder(
            eps=1e-5, max_positions=2048, vocabulary=290943, eos=2
        ),
    )


def _of_all(fields: Fields, key: str, value: object, layers: int) -> object:
    """The number that a list has for every layer."""
    if not isinstance(value, list):
        return value
    if len(value) != layers or any(each != value[0] for each in value):
        raise fields.refuse(f"{key} must be the same number for each of {layers} layers")
    return value[0]


def _static_rope(fields: Fields, head_dim: int) -> Fields:
    """The fields with the base of the rotation that `alpha` means, whatever the length."""
    raw = dict(fields.raw)
    tables = [key for key in ("rope_parameters", "rope_scaling") if isinstance(raw.get(key), dict)]
    alphas = [raw[key]["alpha"] for key in tables if raw[key].get("alpha") is not None]
    types = [raw[key].get(name, "dynamic") for key in tables for name in ("type", "rope_type")]
    for other in (each for each in types if each not in ("dynamic", "default", "linear")):
        raise fields.refuse(
            f"rope type {shown(other)} is not implemented for this model, only default, linear and "
            "dynamic"
        )
    if not alphas:
        return fields
    if not is_number(alphas[0]) or not 0 < alphas[0] <= 1e9 or {*types} != {"dynamic"}:
        raise fields.refuse("rope_parameters.alpha must be a number above 0, of rope type dynamic")
    thetas = [raw[key].get("rope_theta") for key in tables] + [raw.get("rope_theta")]
    theta = next((t for t in thetas if t is not None), 10_000.0)
    if not is_number(theta) or not 1 < theta <= LARGEST:
        raise fields.refuse(f"rope_theta must be a number above 1, not {shown(theta)}")
    if head_dim == 2:
        raise fields.refuse("rope_parameters.alpha needs a head_dim above 2")
    for key in tables:
        del raw[key]
    raw["rope_theta"] = theta * alphas[0] ** (head_dim / (head_dim - 2))
    return Fields(raw, fields.source)


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    norms: dict[str, Parts] = {
        f"late_{short}_norm": ((f"self_attn.{name}_layernorm.weight", (config.head_dim,)),)
        for short, name in (("q", "query"), ("k", "key"))
    }
    return (
        attention_params(config, output_bias=True)
        | norms
        | router_params(config, "mlp.gate.wg.weight")
        | feed_forward_params(config, config.shared_width, "mlp.shared_mlp.", "shared_")
    )


FAMILY = Family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", parse, layer_params)
