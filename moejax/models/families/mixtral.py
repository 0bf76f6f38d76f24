"""Mixtral: grouped-query attention, rotary positions, experts by softmax and renormalised top-k in
every layer."""

from __future__ import annotations

from moejax.models.family import Family, Fields, Parts, attention_params, router_params
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """MixtralConfig's fields and defaults. The jitter of the router is of training only."""
    layers = fields.integer("num_hidden_layers", 32)
    width = fields.integer("intermediate_size", 14336)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 8, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_local_experts", "num_experts", 8), 2),
        norm_topk_prob=True,
        moe_layers=(True,) * layers,
        attention_bias=False,
        sliding_window=fields.window_everywhere(layers),
        **fields.decoder(eps=1e-5, max_positions=131072, vocabulary=32000, theta=1e6, eos=2),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    router = router_params(config, "block_sparse_moe.gate.weight")
    return attention_params(config, output_bias=False) | router


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    parse,
    layer_params,
    experts="block_sparse_moe.experts.",
    matrices=("w1", "w3", "w2"),
)
