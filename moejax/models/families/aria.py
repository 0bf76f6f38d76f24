"""Aria: the attention of Llama; in every layer experts by a softmax of the chosen scores, and an
expert that every token uses. Files have all experts of a layer in one tensor, [E, in, out]."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    router_params,
    shared_expert_params,
    wrapper_of,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """AriaTextConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    fields.only("hidden_act", "silu")  # routed experts have it whatever the field says
    fields.same_attention(None, layers)
    width = fields.integer("intermediate_size", 4096)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, None, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.integer("moe_num_experts", 8, least=0), 2, "moe_topk"),
        norm_topk_prob=True,  # a softmax of the chosen scores is that
        moe_layers=(True,) * layers,
        shared_width=width * fields.integer("moe_num_shared_experts", 2),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_window=None,
        **fields.decoder(eps=1e-6, max_positions=2048, vocabulary=32000, eos=2),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    router = router_params(config, "mlp.router.weight")
    return attention_params(config, output_bias=True) | router | shared_expert_params(config)


FAMILY = Family(
    "AriaTextForCausalLM",
    "aria_text",
    parse,
    layer_params,
    matrices=None,
    stacked=("fc1.weight", "fc2.weight"),
    turned=True,
)
IMAGES = wrapper_of(
    FAMILY,
    "AriaForConditionalGeneration",
    "aria",
    text_types=("aria_text",),
    other_models=("vision_tower", "multi_modal_projector"),
    turned=True,
)
