"""Agreement with transformers on random small models, one or more per branch of each family's
config, at every prompt position (scoring) and every generated position (decode logits)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moejax import LLM, SamplingParams
from moejax.models.families import FAMILIES
from tests.moejax.transformers_models import architecture_of, logprobs, random_model, save

pytestmark = pytest.mark.torch
TOLERANCE = 1e-4
OF_TYPE = {"longcat_flash": 4e-4}
"""Model types of more. A layer of LongCat-Flash has two attentions, with enlarged queries and keys,
and three feed-forwards: over its random weights XLA's ops and the native ones round to 2.4e-4."""
PROMPT_LENGTHS = (1, 63, 64, 65, 130)
"""Around one and two spans of attention, and one more prompt than there are decode rows."""

GENERATED = 12
"""Greedy tokens; those of the prompts of 63 and 64 tokens begin the next span."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 256,
}
"""Of heads of 16; the short factors are for engines of up to 256 tokens."""

LONG = {"original_max_position_embeddings": 64}
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.4}
ONLY_LONG = (65, 70, 130)
"""Prompts beyond 64 tokens: transformers takes the long factors only for those."""


def _use_long_factors(model) -> None:
    """transformers computes Phi-3.5-MoE's frequencies without the length of the sequence, so always
    from the short factors; the model's own code and vLLM take the long ones."""
    rotary = model.model.rotary_emb
    function = rotary.rope_init_fn
    rotary.rope_init_fn = lambda config: function(config, seq_len=config.max_position_embeddings)


ODD = {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 99,
    "tie_word_embeddings": True,
}

MSCALED_YARN = YARN | {"mscale": 0.9, "mscale_all_dim": 0.7}


@dataclasses.dataclass(frozen=True)
class Case:
    """config: over transformers_models.SMALL and OF_FAMILY. engine: options of LLM beside those in
    `_run`. saved: options of transformers_models.save. correct: makes transformers' model right."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    saved: dict[str, Any] = dataclasses.field(default_factory=dict)
    family: str = "Qwen3Moe"
    prompts: tuple[int, ...] = PROMPT_LENGTHS
    correct: Callable[[Any], None] = lambda model: None


CASES = {
    "Qwen3-MoE: window of one span, biases, llama3 rope by the older keys": Case(
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
            "norm_topk_prob": False,
            "num_experts_per_tok": 5,
        },
        {"expert_budget": "50%", "eviction": "lfu"},
        {"older_keys": True, "max_shard_size": "100KB"},
    ),
    "Mixtral: window, odd widths, one KV head, linear rope, tied": Case(
        {
            **ODD,
            "head_dim": 40,
            "intermediate_size": 80,
            "sliding_window": 20,
            "rope_parameters": LINEAR,
        },
        {"expert_budget": "0%"},
        {"older_keys": True},
        family="Mixtral",
    ),
    "OLMoE: clipped, biases, normalised weights, fewer KV heads, tied": Case(
        {
            "clip_qkv": 0.8,
            "attention_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="Olmoe",
    ),
    "Qwen2-MoE: windows by default pattern, a dense layer, biases": Case(
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
        {"expert_budget": "50%"},
        family="Qwen2Moe",
    ),
    "Phi-3.5-MoE: biases, window, longrope within its length": Case(
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 20,
            "router_jitter_noise": 0.2,
            "rope_parameters": LONGROPE | MSCALES,
        },
        {"expert_budget": "50%"},
        family="Phimoe",
    ),
    "Phi-3.5-MoE: no biases, tied, longrope beyond its length by the older keys": Case(
        {"tie_word_embeddings": True, "rope_parameters": LONGROPE | MSCALES | LONG},
        {"expert_budget": "0%"},
        {"older_keys": True},
        family="Phimoe",
        prompts=ONLY_LONG,
        correct=_use_long_factors,
    ),
    "DeepSeek-V2: within groups, biases, a dense layer, yarn rope that scales scores": Case(
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": MSCALED_YARN,
        },
        {"expert_budget": "50%"},
        family="DeepseekV2",
    ),
    "DeepSeek-V3: groups, a dense layer, yarn rope that scales scores": Case(
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="DeepseekV3",
    ),
    "DeepSeek-V3: one group and whole queries (Moonlight), halves rotated": Case(
        {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.2,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-5,
        },
        {"expert_budget": "0%"},
        family="DeepseekV3",
    ),
    "DeepSeek-V3: no shared expert": Case(
        {"n_shared_experts": 0}, {"expert_budget": "50%"}, family="DeepseekV3"
    ),
    "Granite: factors everywhere, biases, fewer KV heads, llama3 rope": Case(
        {
            "attention_bias": True,
            "attention_multiplier": 0.15,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="GraniteMoe",
    ),
    "GLM-4.5: norms of heads, half of each rotated, biases, groups, a dense layer": Case(
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "50%"},
        family="Glm4Moe",
    ),
    "GLM-4.7-Flash: groups, two shared experts, a dense layer in between": Case(
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {"expert_budget": "50%"},
        family="Glm4MoeLite",
    ),
    "dots.llm1: a window in the last layer, biases, groups, normalised weights": Case(
        {
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "max_window_layers": 2,
            "attention_bias": True,
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        {"expert_budget": "50%"},
        family="Dots1",
    ),
    "gpt-oss: a window in every other layer, yarn without truncation": Case(
        {"num_hidden_layers": 3, "rope_parameters": YARN | {"truncate": False}},
        {"expert_budget": "50%"},
        {"max_shard_size": "100KB"},
        family="GptOss",
    ),
    "gpt-oss: no biases of attention, full attention, tied": Case(
        {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "swiglu_alpha": 1.2,
            "rope_parameters": YARN,
        },
        {"expert_budget": "0%"},
        {"older_keys": True},
        family="GptOss",
    ),
    "Solar-Open: biases, yarn": Case(
        {"attention_bias": True, "rope_parameters": YARN, "routed_scaling_factor": 1.5},
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="SolarOpen",
    ),
    "MiniMax-M2: half of each head rotated": Case(
        {"rotary_dim": 8, "num_experts_per_tok": 3},
        {"expert_budget": "50%"},
        family="MiniMaxM2",
    ),
    "ERNIE-4.5: pairs rotated, biases, a dense layer on each side": Case(
        {
            "num_hidden_layers": 3,
            "moe_layer_end_index": 1,
            "use_bias": True,
            "rope_parameters": YARN,
            "head_dim": 16,
        },
        {"expert_budget": "50%"},
        family="Ernie4_5_Moe",
    ),
    "Granite with a shared expert: factors, biases": Case(
        {"attention_bias": True, "residual_multiplier": 0.6, "embedding_multiplier": 2.5},
        {"expert_budget": "50%"},
        family="GraniteMoeShared",
    ),
    "Hy3: a dense layer in between, biases, two shared experts": Case(
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "num_shared_experts": 2,
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="HYV3",
    ),
    "K-EXAONE: a layer without positions between windows, groups": Case(
        {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "num_key_value_heads": 2},
        {"expert_budget": "50%"},
        family="ExaoneMoe",
    ),
    "HunYuan V1: norms after the rotation, a stretched base, biases": Case(
        {
            "attention_bias": True,
            "moe_topk": 2,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 100.0,
                "factor": 1.0,
            },
        },
        {"expert_budget": "50%"},
        family="HunYuanMoEV1",
    ),
    "Sarvam: fused q, k and v, half of each head rotated, groups, yarn": Case(
        {
            "n_group": 4,
            "topk_group": 2,
            "partial_rotary_factor": 0.5,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
        {"expert_budget": "50%"},
        family="SarvamMoE",
    ),
    "Qwen3-VL: mrope, tied": Case(
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        {"expert_budget": "50%"},
        family="Qwen3VLMoe",
    ),
    "Sarvam with latent attention: yarn": Case(
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"expert_budget": "50%"},
        family="SarvamMLA",
    ),
    "Mistral Small 4: queries by position, groups of a softmax": Case(
        {"rope_parameters": GROWING}, {"expert_budget": "50%"}, family="Mistral4"
    ),
    "Mistral Small 4 with images": Case(
        {"rope_parameters": GROWING}, {"expert_budget": "50%"}, family="Mistral3"
    ),
    "GLM-4.5V: mrope in half of each head, biases, a dense layer": Case(
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        },
        {"expert_budget": "50%"},
        family="Glm4vMoe",
    ),
    "LongCat-Flash: experts that return their input, biases, yarn that scales scores": Case(
        {"attention_bias": True, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"expert_budget": "50%"},
        family="LongcatFlash",
    ),
    "LongCat-Flash: every expert computes": Case(
        {"zero_expert_num": 0, "routed_scaling_factor": 2.0},
        {"expert_budget": "0%"},
        family="LongcatFlash",
    ),
    "DBRX: clipped, one KV head, llama3 rope": Case(
        {
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 0.8, "rope_theta": 1e4},
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "50%"},
        family="Dbrx",
    ),
    "DBRX: weights as they are": Case(
        {
            "ffn_config": {
                "ffn_hidden_size": 32,
                "moe_num_experts": 6,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
            }
        },
        {"expert_budget": "0%"},
        family="Dbrx",
    ),
    "DeepSeek-V3.2: beyond index_topk tokens, yarn that scales cosines": Case(
        {"rope_parameters": MSCALED_YARN},
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="DeepseekV32",
    ),
    "DeepSeek-V3.2: up to index_topk tokens": Case(
        {"index_topk": 256}, {"expert_budget": "50%"}, family="DeepseekV32"
    ),
    "GLM-5: beyond index_topk tokens": Case({}, {"expert_budget": "0%"}, family="GlmMoeDsa"),
    "GLM-5.2: a layer that shares the choice of another's indexer": Case(
        {
            "num_hidden_layers": 3,
            "index_topk": 256,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
        },
        {"expert_budget": "50%"},
        family="GlmMoeDsa",
    ),
    "Trinity: a dense layer, windows, scaled embeddings, biases": Case(
        {
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "attention_bias": True,
            "route_scale": 1.5,
        },
        {"expert_budget": "50%"},
        family="Afmoe",
    ),
    "FlexOlmo: biases, fewer KV heads, normalised weights": Case(
        {"attention_bias": True, "norm_topk_prob": True, "rope_parameters": YARN},
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="FlexOlmo",
    ),
    "A.X-K1: a dense layer, yarn": Case(
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"expert_budget": "50%"},
        family="AXK1",
    ),
    "Flint: a dense layer, windows": Case(
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"expert_budget": "50%"},
        family="Flint",
    ),
    "LFM2-MoE: a dense layer": Case(
        {
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
        {"expert_budget": "50%"},
        family="Lfm2Moe",
    ),
    "Granite 4: factors, no positions, limits of time steps, a long prompt": Case(
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "time_step_limit": [0.3, 2.0],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
        {"expert_budget": "50%", "max_model_len": 512},
        family="GraniteMoeHybrid",
        prompts=(*PROMPT_LENGTHS, 300),
    ),
    "Granite 4: positions, biases but of the convolution": Case(
        {
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "rope_parameters": YARN,
        },
        {"expert_budget": "0%"},
        family="GraniteMoeHybrid",
    ),
    "Jamba: Mamba in three layers, dense layers, a long prompt": Case(
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1},
        {"expert_budget": "50%", "max_model_len": 512},
        family="Jamba",
        prompts=(*PROMPT_LENGTHS, 300),
    ),
    "Jamba: experts in every layer, biases but of the convolution, a rank, 3 taps": Case(
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_dt_rank": 6,
            "mamba_d_conv": 3,
        },
        {"expert_budget": "0%"},
        family="Jamba",
    ),
    "Nemotron 3: latent experts, blocks in several orders, groups, a long prompt": Case(
        {
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention", "moe"),
                *("linear_attention", "mlp", "full_attention"),
            ],
            "moe_latent_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {"expert_budget": "50%", "max_model_len": 512},
        family="NemotronH",
        prompts=(*PROMPT_LENGTHS, 300),
    ),
    "Nemotron-H: no latent experts, biases but of the convolution": Case(
        {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.5},
        {"expert_budget": "0%"},
        family="NemotronH",
    ),
    "Kimi-Linear: a dense layer, groups, queries compressed, a long prompt": Case(
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "n_group": 4,
            "topk_group": 2,
        },
        {"expert_budget": "50%", "max_model_len": 512},
        family="KimiLinear",
        prompts=(*PROMPT_LENGTHS, 300),
    ),
    "Kimi-Linear: queries as they are, two taps": Case(
        {"q_lora_rank": None, "linear_conv_kernel_dim": 2},
        {"expert_budget": "0%"},
        family="KimiLinear",
    ),
    "Qwen3-Next: a dense layer, biases, a long prompt": Case(
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        },
        {"expert_budget": "50%", "max_model_len": 512},
        family="Qwen3Next",
        prompts=(*PROMPT_LENGTHS, 400),
    ),
    "Qwen3.5-MoE: one key head, two taps": Case(
        {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2},
        {"expert_budget": "50%"},
        family="Qwen3_5Moe",
    ),
    "Command A: a dense layer, windows, two shared experts": Case(
        {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 48,
        },
        {"expert_budget": "50%"},
        family="Cohere2Moe",
    ),
    "Command A: RMS norms, sigmoid, biases, a sum": Case(
        {
            "rms_norm_eps": 1e-5,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"expert_budget": "0%"},
        family="Cohere2Moe",
    ),
    "Llama 4: chunks, layers without positions, queries that grow": Case(
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "attn_scale": 0.3},
        {"expert_budget": "50%"},
        family="Llama4",
    ),
    "Llama 4: a dense layer, no norms, biases, one chunk": Case(
        {
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "attention_chunk_size": None,
            "rope_parameters": LLAMA3,
        },
        {"expert_budget": "0%"},
        {"older_keys": True},
        family="Llama4",
    ),
    "Gemma 4: values that are keys, wider heads in the last layer, capped logits": Case(
        {"final_logit_softcapping": 30.0}, {"expert_budget": "50%"}, family="Gemma4"
    ),
    "Gemma 4: values of their own, as many heads, biases, untied": Case(
        {
            "attention_k_eq_v": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"expert_budget": "0%"},
        family="Gemma4",
    ),
    "Mellum 2: yarn in the layers that see all, a dense layer, biases": Case(
        {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        {"expert_budget": "50%"},
        family="Mellum",
    ),
    "Laguna: yarn on half of a head, a gate for each value, biases, a scale": Case(
        {
            "attention_bias": True,
            "gating": "per-element",
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        {"expert_budget": "50%"},
        family="Laguna",
    ),
    "Laguna: gates by head, its own ropes": Case(
        {"mlp_layer_types": ["sparse", "dense", "sparse"]}, {"expert_budget": "0%"}, family="Laguna"
    ),
    "Granite with windows: sinks, a theta for each layer and none, biases": Case(
        {"attention_bias": True, "layer_rope_theta": [0, 1e4, 2e4], "residual_multiplier": 0.5},
        {"expert_budget": "0%"},
        family="GraniteMoeSWA",
    ),
    "Aria: biases, yarn, one shared expert, fewer KV heads": Case(
        {
            "attention_bias": True,
            "mlp_bias": True,
            "moe_num_shared_experts": 1,
            "moe_topk": 3,
            "num_experts_per_tok": 3,
            "rope_parameters": YARN,
        },
        {"expert_budget": "50%"},
        {"older_keys": True},
        family="AriaText",
    ),
    "DeepSeek-V4: entries of 4 and of 16 tokens, some chosen, yarn, experts by a table": Case(
        {"rope_parameters": YARN}, {"expert_budget": "50%"}, family="DeepseekV4"
    ),
    "DeepSeek-V4: three streams, sigmoid, no table, entries alone": Case(
        {
            "hc_mult": 3,
            "hc_sinkhorn_iters": 3,
            "scoring_func": "sigmoid",
            "num_hash_layers": 0,
            "num_hidden_layers": 2,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {
                "compressed_sparse_attention": 6,
                "heavily_compressed_attention": 32,
            },
        },
        {"expert_budget": "0%"},
        family="DeepseekV4",
    ),
    "Kimi-K2.5": Case({"rope_parameters": YARN}, {"expert_budget": "50%"}, family="Kimi_K25"),
}
"""Between them every branch of every family's config; the first of a family is in CI."""

OTHERS = {
    "BailingMoeV2ForCausalLM": "it is not in transformers; SarvamMoE has its layers",
    "AriaForConditionalGeneration": "AriaTextForCausalLM under other names: test_wrappers.py",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM under other names: test_wrappers.py",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM under other names: test_wrappers.py",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration has its layers",
}
"""Families without a case of their own, and why."""


def test_every_family_has_a_case():
    covered = {architecture_of(case.family) for case in CASES.values()}
    assert OTHERS.keys() == FAMILIES.keys() - covered
    assert WRONG.keys() == {case.family for case in CASES.values()}


FULL: dict[str, str] = {}
"""Per family the case whose run is compared with deliberately wrong models: its first."""
for _name, _case in CASES.items():
    FULL.setdefault(_case.family, _name)


@dataclasses.dataclass(frozen=True)
class Run:
    """What moejax computed for a model. decode[i]: log-probabilities [GENERATED, V] from which
    sequence i's generated tokens were chosen; scores[i]: of all its tokens but the first, by
    prefill."""

    model: Any
    prompts: list[list[int]]
    sequences: list[list[int]]
    decode: list[np.ndarray]
    scores: list[np.ndarray]


def _run(
    case: Case, directory, generated: int = GENERATED, *, splits: np.random.Generator | None = None
) -> Run:
    """Runs a case. splits: draws how many chunks of prompts each step may have."""
    # Some config classes of transformers write into what they are given.
    model = random_model(case.family, **copy.deepcopy(case.config))
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in case.prompts]
    logits: dict[str, list[np.ndarray]] = {}

    def record(step):
        if splits is not None:
            llm.engine.scheduler.prefill_chunks = int(splits.integers(1, 4))
        for row, request in step.sampled():
            logits.setdefault(request.request_id, []).append(np.asarray(step.output.logits)[row])

    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    }
    with LLM(
        save(model, directory, **case.saved),
        dtype="float32",
        progress=False,
        **options | case.engine,
    ) as llm:
        llm.engine.listener = record
        params = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
        scores = llm.score_batch(sequences)
        # The case runs the memory path that it names.
        assert (llm.stats()["experts"]["hits"] == 0) == (case.engine.get("expert_budget") == "0%")
    decode = [_log_softmax(np.stack(logits[o.request_id])) for o in outputs]
    case.correct(model)
    return Run(model, prompts, sequences, decode, scores)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _expected(run: Run, model: Any) -> list[np.ndarray]:
    """The model's log-probabilities [tokens − 1, V] along each of moejax's sequences."""
    return [logprobs(model, ids[:-1]) for ids in run.sequences]


def _errors(run: Run, expected: list[np.ndarray]) -> tuple[float, float]:
    """The largest difference from the expected log-probabilities: (at generated tokens, over the
    whole vocabulary; of each sequence's own tokens, by scoring)."""
    decode, score = [], []
    for i, (prompt, ids) in enumerate(zip(run.prompts, run.sequences, strict=True)):
        decode.append(np.abs(run.decode[i] - expected[i][len(prompt) - 1 :]).max())
        chosen = expected[i][np.arange(len(ids) - 1), ids[1:]]
        score.append(np.abs(run.scores[i] - chosen).max())
    return max(decode), max(score)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Run]:
    return functools.cache(lambda name: _run(CASES[name], tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(request, runs) -> Run:
    """The run of a case, by its name; each case runs once."""
    return runs(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name not in FULL.values()))
        for name in CASES
    ],
    indirect=True,
)
def test_agrees_with_transformers(run):
    spread = np.concatenate(run.decode).std(axis=-1)
    assert 1 < spread.mean() < 3, "the random weights are too small, or too large, to tell"
    expected = _expected(run, run.model)
    decode, score = _errors(run, expected)
    assert max(decode, score) < OF_TYPE.get(run.model.config.model_type, TOLERANCE)
    for probable, prompt, ids in zip(expected, run.prompts, run.sequences, strict=True):
        _check_greedy(probable[len(prompt) - 1 :], ids[len(prompt) :])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family",
    ["GraniteMoeHybrid", "Jamba", "KimiLinear", "NemotronH", "Qwen3Next", "Lfm2Moe", "DeepseekV4"],
)
def test_long_sequences(family, tmp_path):
    """Prompts that steps divide at random places, and 200 generated tokens."""
    case = CASES[FULL[family]]
    # Of few heads of an indexer all may be 0, and torch orders equal scores as it likes.
    heads = {"index_n_heads": 24} if family == "DeepseekV4" else {}
    case = dataclasses.replace(
        case,
        config=case.config | heads | {"max_position_embeddings": 8192},
        engine=case.engine | {"max_model_len": 5376, "max_num_batched_tokens": 192},
        prompts=(1, 63, 64, 65, 1000, 5000),
    )
    run = _run(case, tmp_path, 200, splits=np.random.default_rng(0))
    assert max(_errors(run, _expected(run, run.model))) < TOLERANCE


def _check_greedy(expected: np.ndarray, tokens: list[int]) -> None:
    """Each token is what transformers chooses greedily after the same tokens. A tie, where its two
    best tokens are within the tolerance, allows either."""
    second, best = np.partition(expected, -2, axis=-1)[:, -2:].T
    chosen = expected[np.arange(len(tokens)), tokens]
    clear = best - second > TOLERANCE
    assert (chosen == best)[clear].all()
    assert (chosen >= second).all()
    assert clear.mean() > 0.9, "too many ties to tell"


def _swapped_norms(model):
    attention = model.model.layers[0].self_attn
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def _swapped_norms_of_layer(model):
    layer = model.model.layers[0]
    names = "post_attention_layernorm", "post_feedforward_layernorm"
    first, second = (getattr(layer, name) for name in names)
    setattr(layer, names[0], second)
    setattr(layer, names[1], first)


def _ungated_shared_expert(model):
    model.model.layers[-1].mlp.shared_expert_gate.weight.data *= 1000


def _more_jitter(model):
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise *= 1.5


def _one_pair_at_rest(model):
    model.model.rotary_emb.inv_freq[1] = 0


def _text_pair_at_rest(model):
    model.model.language_model.rotary_emb.inv_freq[1] = 0


def _other(path, change):
    """Changes an attribute of the model or of a part of it."""

    def changed(model):
        *parts, name = path.split(".")
        owner = functools.reduce(getattr, parts, model)
        setattr(owner, name, change(getattr(owner, name)))

    return changed


WRONG = {
    "Qwen3Moe": _swapped_norms,
    "Mixtral": _other("config.sliding_window", lambda window: window + 1),
    "Olmoe": _other("config.clip_qkv", lambda clip: 1.1 * clip),
    "Qwen2Moe": _ungated_shared_expert,
    "Phimoe": _more_jitter,
    "DeepseekV2": _other("model.layers.1.mlp.gate.topk_method", lambda method: "greedy"),
    "DeepseekV3": _other("model.layers.1.mlp.gate.topk_group", lambda groups: groups + 1),
    "GraniteMoe": _other("config.logits_scaling", lambda scaling: 1.01 * scaling),
    "Glm4Moe": _one_pair_at_rest,
    "Glm4MoeLite": _one_pair_at_rest,
    "Dots1": _swapped_norms,
    "SolarOpen": _one_pair_at_rest,
    "GptOss": _other("model.layers.1.mlp.experts.limit", lambda limit: 1.5 * limit),
    "MiniMaxM2": _one_pair_at_rest,
    "Ernie4_5_Moe": _other("model.layers.1.mlp.gate.top_k", lambda count: count - 1),
    "GraniteMoeShared": _other("config.logits_scaling", lambda scaling: 1.01 * scaling),
    "GraniteMoeHybrid": _other("config.logits_scaling", lambda scaling: 1.01 * scaling),
    "Jamba": _other("model.layers.1.feed_forward.router.top_k", lambda count: count - 1),
    "NemotronH": _other("model.layers.1.mixer.gate.topk_group", lambda groups: groups + 1),
    "KimiLinear": _other("model.layers.1.mlp.gate.topk_group", lambda groups: groups + 1),
    "HYV3": _other("model.layers.0.mlp.gate.router_scaling_factor", lambda scale: 1.1 * scale),
    "ExaoneMoe": _other("model.layers.1.self_attn.is_sliding", lambda sliding: True),
    "HunYuanMoEV1": _one_pair_at_rest,
    "SarvamMoE": _one_pair_at_rest,
    "Qwen3VLMoe": _text_pair_at_rest,
    "Kimi_K25": _text_pair_at_rest,
    "SarvamMLA": _one_pair_at_rest,
    "Glm4vMoe": _text_pair_at_rest,
    "Mistral4": _one_pair_at_rest,
    "Mistral3": _text_pair_at_rest,
    "LongcatFlash": _other(
        "model.layers.1.mlp.experts.num_routed_experts", lambda count: count - 1
    ),
    "Dbrx": _other("transformer.blocks.1.ffn.top_k", lambda count: count - 1),
    "DeepseekV32": _one_pair_at_rest,
    "GlmMoeDsa": _one_pair_at_rest,
    "Afmoe": _other("model.layers.0.self_attn.is_local_attention", lambda local: False),
    "FlexOlmo": _swapped_norms_of_layer,
    "AXK1": _one_pair_at_rest,
    "AriaText": _other("model.layers.1.mlp.router.top_k", lambda count: count - 1),
    "Qwen3Next": _ungated_shared_expert,
    "Lfm2Moe": _other("model.layers.1.feed_forward.gate.routed_scaling_factor", lambda s: 1.1 * s),
    "Qwen3_5Moe": _text_pair_at_rest,
    "Flint": _other("model.layers.0.self_attn.sliding_window", lambda window: None),
    "Cohere2Moe": _one_pair_at_rest,
    "Llama4": _other("model.layers.1.self_attn.floor_scale", lambda scale: 2 * scale),
    "Gemma4": _other("config.final_logit_softcapping", lambda cap: 0.9 * cap),
    "Mellum": _other("config.sliding_window", lambda window: window + 1),
    "Laguna": _other("model.layers.1.mlp.routed_scaling_factor", lambda scale: 1.1 * scale),
    "DeepseekV4": _other("model.layers.0.mlp.gate.routed_scaling_factor", lambda s: 1.1 * s),
    "GraniteMoeSWA": _other("config.logits_scaling", lambda scaling: 1.01 * scaling),
}
"""Family → what makes transformers' model another one, beyond its parameters."""


@pytest.mark.nightly
@pytest.mark.parametrize("family", WRONG)
def test_a_planted_difference_is_found(runs, family):
    run = runs(FULL[family])
    wrong = copy.deepcopy(run.model)
    WRONG[family](wrong)
    assert min(_errors(run, _expected(run, wrong))) > 1e-3


OF_IMAGES = {"visual", "vision_tower", "multi_modal_projector", "mm_projector"}
"""Parts of a wrapper's model that text does not read."""


@pytest.mark.nightly
@pytest.mark.parametrize("run", FULL.values(), indirect=True)
def test_every_parameter_is_noticed(run):
    wrong = copy.deepcopy(run.model)
    names = [name for name, _ in wrong.named_parameters()]
    names += [name for name, _ in wrong.named_buffers() if name.endswith("correction_bias")]
    for name in names:
        if not OF_IMAGES.isdisjoint(name.split(".")):
            continue
        # Of now: buffers are other tensors after a change of dtype.
        parameter = wrong.state_dict(keep_vars=True)[name]
        right = parameter.data
        # Another unit's, or another expert's; of the only one another input's; a number's double.
        axis = next((axis for axis, size in enumerate(right.shape) if size > 1), None)
        parameter.data = 2 * right if axis is None else right.roll(1, dims=axis)
        errors = _errors(run, _expected(run, wrong))
        assert min(errors) > 1e-3, name
        parameter.data = right
