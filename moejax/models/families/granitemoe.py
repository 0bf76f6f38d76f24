"""GraniteMoe (Granite 3.0 and 3.1, PowerMoE): Mixtral's layers with factors on embeddings, scores,
what a layer adds and logits (muP, arXiv:2203.03466); experts stacked in the files too. One of its
kinds has an expert that every token uses."""

from __future__ import annotations

import dataclasses

from moejax.models.family import Family, Fields, Parts, attention_params, router_params
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """GraniteMoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    width = fields.integer("intermediate_size", 11008)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, None, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_local_experts", 8, least=0), 2),
        norm_topk_prob=True,  # transformers' softmax over the chosen logits is that
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        attention_scale=fields.factor("attention_multiplier", 1.0),
        embedding_multiplier=fields.factor("embedding_multiplier", 1.0),
        residual_multiplier=fields.factor("residual_multiplier", 1.0),
        logits_scaling=fields.factor("logits_scaling", 1.0),
        **fields.decoder(eps=1e-6, max_positions=2048, vocabulary=32000, eos=2),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    router = router_params(config, "block_sparse_moe.router.layer.weight")
    return attention_params(config, output_bias=True) | router


def parse_shared(fields: Fields) -> ModelConfig:
    """GraniteMoeSharedConfig's fields: GraniteMoeConfig's, and shared_intermediate_size."""
    width = fields.integer("shared_intermediate_size", 0, least=0)
    config = parse(fields)
    return dataclasses.replace(config, architecture=SHARED.architecture, shared_width=width)


def shared_layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = layer_params(config, moe)
    if width := config.shared_width:
        into, out = (2 * width, config.hidden_size), (config.hidden_size, width)
        params["shared_gate_up"] = (("shared_mlp.input_linear.weight", into),)
        params["shared_down"] = (("shared_mlp.output_linear.weight", out),)
    return params


FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    parse,
    layer_params,
    experts="block_sparse_moe.",
    matrices=None,
    stacked=("input_linear.weight", "output_linear.weight"),
)
SHARED = dataclasses.replace(
    FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    parse=parse_shared,
    layer_params=shared_layer_params,
)
