"""Command A with experts: attention and experts beside each other after one norm; layers with a
sliding window rotate q and k, the others do not."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    feed_forward_params,
    later_layer,
    router_params,
    shared_expert_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """Cohere2MoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 40)
    dense = fields.integer("first_k_dense_replace", 0, least=0)
    first = fields.integer("prefix_dense_sliding_window_pattern", 1)
    every = fields.integer("sliding_window_pattern", 4)
    counts = [(i + 1, first) for i in range(min(dense, layers))]
    counts += [(i + 1, every) for i in range(layers - len(counts))]
    window = fields.optional_integer("sliding_window", 4096)
    sliding = fields.layer_types([i % pattern != 0 for i, pattern in counts])
    if window is None:
        sliding = (False,) * layers
    moe = fields.sparse_layers(layers, 0)
    width = fields.integer("intermediate_size", 22528)
    shared = fields.integer("num_shared_experts", 0, least=0)
    fields.only("shared_expert_combination_strategy", "average", "sum")
    averages = fields.raw.get("shared_expert_combination_strategy", "average") == "average"
    fields.only("expert_selection_fn", "softmax", "sigmoid")
    scoring = fields.raw.get("expert_selection_fn", "softmax")
    normed = fields.has("rms_norm_eps")
    eps = fields.number("rms_norm_eps" if normed else "layer_norm_eps", 1e-5)
    given = {**fields.raw, "rms_norm_eps": eps}
    rotated = tuple(
        inside or (not sparse and first == 1) for inside, sparse in zip(sliding, moe, strict=True)
    )
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(64, None, hidden=8192, head_dim=128),
        intermediate_size=fields.optional_integer("prefix_dense_intermediate_size") or width,
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_experts", 8, least=0), 2),
        norm_topk_prob=scoring == "softmax" or fields.flag("norm_topk_prob", True),
        scoring_func=scoring,
        moe_layers=moe,
        shared_width=shared * width,
        mlp_multiplier=0.5 if shared and averages else 1.0,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=window,
        window_layers=sliding,
        rope_layers=None if all(rotated) else rotated,
        rope_interleave=True,
        logits_scaling=1 / fields.factor("logit_scale", 0.0625),
        mean_norms=not normed,
        parallel=True,
        **Fields(given, fields.source).decoder(
            eps=1e-5, max_positions=8192, vocabulary=256_000, eos=255_001, tied=True
        ),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=True)
    del params["post_norm"]
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    return params | router_params(config) | shared_expert_params(config)


FAMILY = Family("Cohere2MoeForCausalLM", "cohere2_moe", parse, layer_params, ignores=later_layer)
