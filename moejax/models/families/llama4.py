"""Llama 4: layers whose queries see the tokens of their chunk, and, each fourth, one without
positions that sees all and whose queries grow with theirs; a shared expert, and a routed one whose
input its weight scales."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from host_offload.memory.layout import PREFILL_STEP
from moejax.models.attention.grouped_query import GroupedQueryAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    later_layer,
    router_params,
    wrapper_of,
)
from moejax.models.json_values import is_integer
from moejax.models.model_config import LayerKind, ModelConfig
from pallas_kernels.rms_norm import rms_norm


@dataclasses.dataclass(frozen=True)
class Llama4Attention(GroupedQueryAttention):
    """Grouped-query attention.

    - `norms`: heads of q and k are normalised, without weights.
    - `growth`, `length`: queries at position p are multiplied by
      1 + growth · ln(1 + ⌊(p + 1) / length⌋).
    """

    norms: bool = False
    growth: float = 0.0
    length: float = 1.0

    def project(self, stack, i, x, tokens, squares):
        config, qkv = stack.config, super().project(stack, i, x, tokens, squares)
        width = config.num_key_value_heads * config.head_dim
        queries = qkv.shape[1] - 2 * width
        if self.norms:
            # Before the rotation, not after it as in transformers: it leaves norms as they are.
            heads, values = jnp.split(qkv, [queries + width], axis=1)
            by_head = heads.reshape(len(heads), -1, config.head_dim)
            ones = jnp.ones((1, config.head_dim), qkv.dtype)
            name = stack.ops.rms_norm
            normed = rms_norm(by_head, ones, 0, config.rms_norm_eps, implementation=name)
            qkv = jnp.concatenate([normed.reshape(heads.shape), values], axis=1)
        if self.growth:
            steps = jnp.floor((tokens.positions.astype(jnp.float32) + 1) / self.length)
            factors = (1 + self.growth * jnp.log1p(steps))[:, None]
            q, rest = jnp.split(qkv, [queries], axis=1)
            qkv = jnp.concatenate([(q * factors).astype(q.dtype), rest], axis=1)
        return qkv


def parse(fields: Fields) -> ModelConfig:
    """Llama4TextConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 48)
    rotated = _rotated(fields, layers)
    chunk = fields.optional_integer("attention_chunk_size", 8192)
    if chunk is not None and chunk % PREFILL_STEP:
        raise fields.refuse(
            f"attention_chunk_size must be a multiple of {PREFILL_STEP}, not {chunk}"
        )
    inside = fields.layer_types(rotated if chunk else (False,) * layers, "chunked_attention")
    heads = fields.heads(40, 8, hidden=5120, head_dim=128)
    decoder = fields.decoder(
        eps=1e-5, max_positions=131_072, vocabulary=202_048, theta=500_000.0, eos=2
    )
    norms, tuned = fields.flag("use_qk_norm", True), _tuned(fields)
    growth = fields.number("attn_scale", 0.1) if tuned else 0.0
    kinds = {
        True: Llama4Attention(norms=norms),
        False: Llama4Attention(growth=growth, length=fields.factor("floor_scale", 8192.0)),
    }
    own = {key: value for key, value in heads.items() if key != "hidden_size"}
    of_kind = {
        kind: LayerKind(attention=attention, rope=decoder["rope"], **own)
        for kind, attention in kinds.items()
    }
    routing = fields.routing(fields.integer("num_local_experts", 16, least=0), 1)
    fields.only("num_experts_per_tok", 1)
    step = fields.integer("interleave_moe_layer_step", 1)
    chosen = fields.integers("moe_layers") if fields.has("moe_layers") else None
    moe = tuple((i + 1) % step == 0 if chosen is None else i in chosen for i in range(layers))
    width = fields.integer("intermediate_size", 8192)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        moe_intermediate_size=width,
        **routing,
        norm_topk_prob=False,
        scoring_func="sigmoid",
        moe_layers=fields.some_experts(moe, f"moe_layers of {layers} layers"),
        shared_width=width,
        attention_bias=fields.flag("attention_bias", False),
        attention=kinds[True],
        layer_kinds=tuple(of_kind[each] for each in rotated),
        rope_layers=rotated,
        rope_interleave=True,
        sliding_window=chunk,
        window_layers=inside if chunk else None,
        chunked_window=chunk is not None,
        routes_apart=True,
        weighted_inputs=True,
        **decoder,
    )


def _tuned(fields: Fields) -> bool:
    """attn_temperature_tuning, which the first published files have as a number."""
    value = fields.raw.get("attn_temperature_tuning")
    return bool(value) if is_integer(value) else fields.flag("attn_temperature_tuning", True)


def _rotated(fields: Fields, layers: int) -> tuple[bool, ...]:
    """For each layer, whether positions rotate q and k: no_rope_layers has 1 for those. It may be
    empty, and go on after the last layer."""
    given = fields.raw.get("no_rope_layers") or None
    first = given[:layers] if isinstance(given, list) else given
    of_layers = Fields({"no_rope_layers": first}, fields.source).of_layers
    if (found := of_layers("no_rope_layers", layers, {0: False, 1: True})) is not None:
        return found
    interval = fields.integer("no_rope_layer_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size, "feed_forward.")
    shared = "feed_forward.shared_expert."
    params |= feed_forward_params(config, config.shared_width, shared, "shared_")
    return params | router_params(config, "feed_forward.router.weight")


FAMILY = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    parse,
    layer_params,
    experts="feed_forward.experts.",
    matrices=None,
    ignores=later_layer,
    turned=True,
    reads=frozenset({"attention_chunk_size"}),
)
IMAGES = wrapper_of(
    FAMILY,
    "Llama4ForConditionalGeneration",
    "llama4",
    text_types=("llama4_text",),
    other_models=("vision_model", "multi_modal_projector"),
    turned=True,
)
