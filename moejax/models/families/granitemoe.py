"""GraniteMoe (Granite 3.0 and 3.1, PowerMoE): Mixtral's layers with factors on embeddings, scores,
what a layer adds and logits (muP, arXiv:2203.03466); experts stacked in the files too."""

from __future__ import annotations

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


FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    parse,
    layer_params,
    experts="block_sparse_moe.",
    matrices=None,
    stacked=("input_linear.weight", "output_linear.weight"),
)
