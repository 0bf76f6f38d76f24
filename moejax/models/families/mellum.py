"""Mellum 2: Qwen3-MoE with a sliding window in some layers, which have a rope of their own."""

from __future__ import annotations

from moejax.models.attention.grouped_query import GROUPED_QUERY
from moejax.models.families.qwen3_moe import layer_params
from moejax.models.family import Family, Fields
from moejax.models.model_config import LayerKind, ModelConfig

_THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}


def parse(fields: Fields) -> ModelConfig:
    """MellumConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 28)
    sliding = fields.layer_types((False,) * layers)
    heads = fields.heads(32, 4, hidden=2304, head_dim=128)
    longest = fields.integer("max_position_embeddings", 131_072)
    ropes = {
        kind: fields.rope_of_type(kind, {"rope_type": "default", "rope_theta": theta}, longest)
        for kind, theta in _THETAS.items()
        if (kind == "sliding_attention") in sliding
    }
    own = {key: value for key, value in heads.items() if key != "hidden_size"}
    kinds = {
        kind == "sliding_attention": LayerKind(attention=GROUPED_QUERY, rope=rope, **own)
        for kind, rope in ropes.items()
    }
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 7168),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 896),
        **fields.routing(fields.experts("num_experts", "num_local_experts", 64), 8),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        moe_layers=fields.sparse_layers(layers, 0),
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=fields.integer("sliding_window", 1024) if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        layer_kinds=tuple(kinds[inside] for inside in sliding),
        **fields.decoder(
            eps=1e-6, max_positions=131_072, vocabulary=98_304, rope=kinds[sliding[0]].rope
        ),
    )


FAMILY = Family(
    "MellumForCausalLM",
    "mellum",
    parse,
    layer_params,
    ignores=lambda config, name: name.startswith("mtp."),
)
