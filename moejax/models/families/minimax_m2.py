"""MiniMax-M2: a norm over all of q and all of k, a part of each head rotated, experts chosen by
sigmoid scores with a correction, in every layer."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    later_layer,
    router_params,
    whole_norm_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """MiniMaxM2Config's fields and defaults, and those of the published files, which name the
    rotated part rotary_dim."""
    layers = fields.integer("num_hidden_layers", 62)
    fields.only("scoring_func", "sigmoid")
    fields.only("use_routing_bias", True)
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("attn_type_list", [1] * layers)
    fields.only("shared_intermediate_size", 0)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    heads = fields.heads(48, 8, hidden=3072, head_dim=128)
    head_dim = heads["head_dim"]
    rotated = fields.integer("rotary_dim", head_dim, least=2) / head_dim
    width = fields.integer("intermediate_size", 1536)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        rotary_width=fields.rotary_width(head_dim, rotated),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_local_experts", "num_experts", 256), 8),
        norm_topk_prob=True,
        scoring_func="sigmoid",
        moe_layers=(True,) * layers,
        attention_bias=False,
        sliding_window=None,
        **fields.decoder(
            eps=1e-6,
            max_positions=196608,
            vocabulary=200064,
            theta=5e6,
            eos=200020,
            partial=True,
        ),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    correction: Parts = (("block_sparse_moe.e_score_correction_bias", (config.num_experts,)),)
    return (
        attention_params(config, output_bias=False)
        | whole_norm_params(config)
        | router_params(config, "block_sparse_moe.gate.weight")
        | {"correction": correction}
    )


FAMILY = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    parse,
    layer_params,
    experts="block_sparse_moe.experts.",
    matrices=("w1", "w3", "w2"),
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
)
