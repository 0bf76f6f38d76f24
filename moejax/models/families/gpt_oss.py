"""GptOss (gpt-oss-20b and gpt-oss-120b, arXiv:2508.10925): attention with biases and a sink for
each head, a sliding window in every other layer, yarn positions; experts with biases and a clamped
SwiGLU, chosen by a router with biases."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    router_params,
    sink_params,
)
from moejax.models.model_config import ModelConfig
from pallas_kernels.expert_ffn import ClampedSwiGLU

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(fields: Fields) -> ModelConfig:
    """GptOssConfig's fields and defaults. hidden_act has no effect, as in transformers: the clamped
    SwiGLU has its own activation."""
    given = {**fields.raw, "hidden_act": "silu"}
    if not (fields.has("rope_parameters") or fields.has("rope_scaling")):
        given["rope_parameters"] = _ROPE
    fields = Fields(given, fields.source)
    layers = fields.integer("num_hidden_layers", 36)
    width = fields.integer("intermediate_size", 2880)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(64, 8, hidden=2880, head_dim=64),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.experts("num_local_experts", "num_experts", 128), 4),
        norm_topk_prob=True,  # a softmax over the chosen scores is one over all, renormalised
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", True),
        sliding_window=fields.optional_integer("sliding_window", 128),
        window_layers=fields.layer_types([i % 2 == 0 for i in range(layers)]),
        swiglu=ClampedSwiGLU(
            fields.factor("swiglu_limit", 7.0), fields.factor("swiglu_alpha", 1.702)
        ),
        expert_bias=True,
        **fields.decoder(eps=1e-5, max_positions=131072, vocabulary=201088, theta=150_000.0),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    bias: Parts = (("mlp.router.bias", (config.num_experts,)),)
    router = router_params(config, "mlp.router.weight") | {"router_bias": bias}
    return attention_params(config, output_bias=True) | sink_params(config) | router


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    parse,
    layer_params,
    matrices=None,
    interleaved=True,
)
