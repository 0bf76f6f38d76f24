"""Laguna: norms of each head of q and k, a softplus gate on the outputs of heads; layers may have a
sliding window, a rope and a number of heads of their own; experts by a corrected sigmoid, beside
one that every token uses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moejax.models.attention.grouped_query import GroupedQueryAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    head_norm_params,
    router_params,
)
from moejax.models.json_values import is_integer
from moejax.models.model_config import LayerKind, ModelConfig
from moejax.models.rope import parse_rope

_ROPES = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}


@dataclasses.dataclass(frozen=True)
class SoftplusGatedAttention(GroupedQueryAttention):
    """Grouped-query attention whose heads' outputs are multiplied by the softplus of a product of
    the normalised input, `attention_gate`.

    - `by_head`: there is one gate for each head, not for each of its values.
    """

    by_head: bool = True

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        given = arena, tokens, page, squares, counters
        attended, arena, counters = super().attend(stack, i, x, *given)
        gate = stack.norm_linear(x, "input_norm", "attention_gate", i, tokens, squares)
        gate = jax.nn.softplus(gate.astype(jnp.float32)).astype(attended.dtype)
        gate = jnp.repeat(gate, page.head_dim, axis=1) if self.by_head else gate
        return attended * gate, arena, counters


def parse(fields: Fields) -> ModelConfig:
    """LagunaConfig's fields and defaults."""
    fields.only("gating", True, "per-head", "per-element")
    fields.only("moe_apply_router_weight_on_input", False)
    fields.only("moe_router_logit_softcapping", 0, 0.0)
    fields.only("norm_topk_prob", True)
    layers = fields.integer("num_hidden_layers", 40)
    sliding = fields.layer_types((False,) * layers)
    heads = fields.heads(48, 8, hidden=2048, head_dim=128)
    kinds = _layer_kinds(fields, sliding, heads)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 8192),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 512),
        **fields.routing(fields.integer("num_experts", 256, least=0), 8),
        norm_topk_prob=True,
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("moe_routed_scaling_factor", 1.0),
        moe_layers=fields.sparse_layers(layers, 1),
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=fields.integer("sliding_window", 512) if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        layer_kinds=kinds,
        **fields.decoder(eps=1e-6, max_positions=131_072, vocabulary=100_352, rope=kinds[0].rope),
    )


def _layer_kinds(fields: Fields, sliding: tuple[bool, ...], heads: dict) -> tuple[LayerKind, ...]:
    attention = SoftplusGatedAttention(by_head=fields.raw.get("gating") != "per-element")
    longest = fields.integer("max_position_embeddings", 131_072)
    every, kv = heads["num_attention_heads"], heads["num_key_value_heads"]
    counts = fields.raw.get("num_attention_heads_per_layer") or [every] * len(sliding)
    right = isinstance(counts, list) and len(counts) == len(sliding)
    if not right or not all(is_integer(n) and n >= 1 and n % kv == 0 for n in counts):
        raise fields.refuse(
            f"num_attention_heads_per_layer must be a multiple of num_key_value_heads ({kv}) for "
            f"each of {len(sliding)} layers, not {counts!r}"
        )
    of_type = {}
    for name, default in _ROPES.items():
        if (name == "sliding_attention") in sliding:
            table = fields.rope_table(name, default)
            of_type[name == "sliding_attention"] = {
                "rope": parse_rope(table.raw, longest, table.source, partial=True),
                "rotary_width": table.rotary_width(heads["head_dim"], 1.0),
            }
    own = {"attention": attention, "num_key_value_heads": kv, "head_dim": heads["head_dim"]}
    return tuple(
        LayerKind(num_attention_heads=count, **own, **of_type[inside])
        for count, inside in zip(counts, sliding, strict=True)
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True) | head_norm_params(config)
    kind, gates = config.attention, config.num_attention_heads
    assert isinstance(kind, SoftplusGatedAttention)
    gates *= 1 if kind.by_head else config.head_dim
    params["attention_gate"] = (("self_attn.g_proj.weight", (gates, config.hidden_size)),)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    params["correction"] = (("mlp.experts.e_score_correction_bias", (config.num_experts,)),)
    shared = feed_forward_params(config, config.shared_width, "mlp.shared_expert.", "shared_")
    return params | router_params(config) | shared


FAMILY = Family("LagunaForCausalLM", "laguna", parse, layer_params)
