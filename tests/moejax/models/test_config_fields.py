"""Every field that transformers reads of a family's config is honoured, refused, or without effect
on what the model computes: checked against the sources of transformers.

What reads the sources has the marker torch, as parity tests have: newer Pythons get the newest
transformers, and a new field there must not fail the suite of a release.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from moejax.checkpoints.tensors import expected_tensors
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.models.families import FAMILIES
from moejax.models.json_values import parse_json

KINDS = tuple(family.model_type for family in FAMILIES.values())

GLM, ERNIE, GRANITE = "glm4_moe", "ernie4_5_moe", "granitemoe"
LITE, DOTS, SOLAR, MINIMAX = "glm4_moe_lite", "dots1", "solar_open", "minimax_m2"
SHARED, HY3, EXAONE, HUNYUAN = "granitemoeshared", "hy_v3", "exaone_moe", "hunyuan_v1_moe"
SARVAM, BAILING, QWEN_VL, KIMI = "sarvam_moe", "bailing_moe_v2", "qwen3_vl_moe", "kimi_k25"
GPT = "gpt_oss"
SARVAM_MLA, MISTRAL4, MISTRAL3, GLM_V = "sarvam_mla", "mistral4", "mistral3", "glm4v_moe"
AFMOE, FLEX, FLINT, AXK1 = "afmoe", "flex_olmo", "flint", "axk1"
COHERE = "cohere2_moe"
V4 = "deepseek_v4"
MELLUM, WINDOWS, LAGUNA = "mellum", "granitemoe_swa", "laguna"
HYBRID, JAMBA, KIMI_LINEAR = "granitemoehybrid", "jamba", "kimi_linear"
NO_ROPE = JAMBA, KIMI_LINEAR
NEMOTRON, LONGCAT, DBRX = "nemotron_h", "longcat_flash", "dbrx"
INDEXED = "deepseek_v32", "glm_moe_dsa"
GEMMAS, LLAMAS = ("gemma4_text", "gemma4"), ("llama4_text", "llama4")
ARIAS = "aria_text", "aria"
OF_V3 = (*INDEXED, AXK1)
CORRECTED = (
    KIMI_LINEAR,
    "deepseek_v3",
    GLM,
    LITE,
    DOTS,
    SOLAR,
    SARVAM,
    KIMI,
    SARVAM_MLA,
    GLM_V,
    *OF_V3,
)
MISTRALS = MISTRAL4, MISTRAL3
NEXT, QWEN35, QWEN35_V = DELTAS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
LFM = "lfm2_moe"
GQA = (
    *("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "phimoe"),
    *(GLM, ERNIE, GRANITE, DOTS, SOLAR, MINIMAX),
    *(SHARED, HY3, EXAONE, HUNYUAN, SARVAM, BAILING, QWEN_VL, GLM_V, GPT),
    *(AFMOE, FLEX, FLINT, *DELTAS, *GEMMAS, *LLAMAS, LFM, COHERE, HYBRID, JAMBA),
    *(MELLUM, WINDOWS, NEMOTRON, LAGUNA, *ARIAS),
)
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
MLA = (KIMI_LINEAR, LONGCAT, *DEEPSEEK, LITE, KIMI, SARVAM_MLA, *MISTRALS, *OF_V3)
GRANITES = GRANITE, SHARED, HYBRID, WINDOWS

BASE: dict[str, dict[str, Any]] = {
    HYBRID: {
        "layer_types": ["mamba", "attention"] * 16,
        "position_embedding_type": "rope",  # without it rope_parameters has no effect
    },
    NEMOTRON: {"norm_topk_prob": False, "n_group": 4, "topk_group": 2},
    DBRX: {"attn_config": {"rope_theta": 1e4}},  # which transformers needs
    LFM: {
        "layer_types": ["conv", "full_attention"] * 16,
        "norm_topk_prob": False,
        "num_experts": 64,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},  # has no default
    "deepseek_v3": {"norm_topk_prob": False},
    "qwen2_moe": {"use_sliding_window": True},  # without it other fields have no effect
    "qwen3_moe": {"use_sliding_window": True},
    GLM: {"head_dim": 128, "norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    LITE: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    DOTS: {  # routing has no defaults
        "num_hidden_layers": 24,
        "max_window_layers": 20,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 2,
    },
    SOLAR: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    EXAONE: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    HUNYUAN: {"num_experts": 64, "head_dim": 128},  # transformers' own default fails
    SARVAM: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    BAILING: {  # no config class of transformers
        "num_hidden_layers": 20,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "norm_topk_prob": False,
    },
    KIMI: {"norm_topk_prob": False},
    KIMI_LINEAR: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    AXK1: {"norm_topk_prob": False},
    FLINT: {"norm_topk_prob": False},
    MELLUM: {"layer_types": ["full_attention", "sliding_attention"] * 14, "norm_topk_prob": False},
    LAGUNA: {"layer_types": ["full_attention", "sliding_attention"] * 20},
    **{kind: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2} for kind in INDEXED},
    GPT: {"num_hidden_layers": 24},
    COHERE: {
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    **{
        kind: {
            "num_hidden_layers": 24,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        }
        for kind in GEMMAS
    },
    SARVAM_MLA: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2},
    **{kind: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2} for kind in MISTRALS},
    GLM_V: {"norm_topk_prob": False, "n_group": 8, "topk_group": 2, "head_dim": 128},
}
LAYERS = {"olmoe": 16, "qwen2_moe": 24, "qwen3_moe": 24, "deepseek_v3": 61, GLM: 46, ERNIE: 28} | {
    LITE: 47,
    SOLAR: 48,
    MINIMAX: 62,
    HY3: 80,
    SARVAM: 19,
    BAILING: 20,
    QWEN_VL: 24,
    KIMI: 61,
    KIMI_LINEAR: 27,
    GPT: 24,
    GLM_V: 46,
    LONGCAT: 28,
    DBRX: 24,
    NEXT: 48,
    **dict.fromkeys((QWEN35, QWEN35_V), 40),
    DOTS: 24,
    FLINT: 49,
    MELLUM: 28,
    LAGUNA: 40,
    AXK1: 61,
    "deepseek_v32": 61,
    "glm_moe_dsa": 78,
    **dict.fromkeys(MISTRALS, 36),
    **dict.fromkeys(GEMMAS, 24),
    **dict.fromkeys(LLAMAS, 48),
    COHERE: 40,
    V4: 43,
}
"""Default number of layers; 32 elsewhere."""

NOT_IN_TRANSFORMERS = (BAILING,)
MODELLED = {
    SARVAM: GLM,
    KIMI: "deepseek_v3",
    SARVAM_MLA: "deepseek_v3",
    MISTRAL3: MISTRAL4,
    QWEN35: QWEN35_V,
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "aria_text": "aria",
}
"""Families whose text model is another directory of transformers'."""

HONOURED: dict[str, tuple[tuple[str, ...], Any]] = {
    "vocab_size": (KINDS, 77),
    "hidden_size": (KINDS, 1280),
    "intermediate_size": (tuple(kind for kind in KINDS if kind not in (SOLAR, DBRX)), 96),
    "num_hidden_layers": (
        tuple(kind for kind in KINDS if kind not in (LFM, HYBRID, MELLUM, NEMOTRON, LAGUNA)),
        30,
    ),
    "num_attention_heads": (KINDS, 64),
    "num_key_value_heads": (GQA, 1),
    "head_dim": (
        (*(kind for kind in GQA if kind != "olmoe"), V4),
        48,
    ),
    "hidden_act": (
        tuple(
            kind
            for kind in KINDS
            if kind
            not in (GPT, LFM, HYBRID, NEMOTRON, DBRX, V4, *NO_ROPE, *DELTAS, *GEMMAS, *ARIAS)
        ),
        "gelu",
    ),
    "hidden_activation": (GEMMAS, "gelu"),
    "max_position_embeddings": (KINDS, 777),
    "rms_norm_eps": (tuple(kind for kind in KINDS if kind not in (NEMOTRON, DBRX)), 1e-3),
    "rope_parameters": (
        tuple(kind for kind in KINDS if kind not in (*GEMMAS, *NO_ROPE, MELLUM, NEMOTRON, LAGUNA)),
        {"rope_type": "default", "rope_theta": 123.0},
    ),
    "tie_word_embeddings": (
        tuple(kind for kind in KINDS if kind not in (KIMI_LINEAR, NEMOTRON, DBRX)),
        True,
    ),
    "eos_token_id": (KINDS, 3),
    "num_experts_per_tok": (
        tuple(kind for kind in KINDS if kind not in ("phimoe", DBRX, *GEMMAS, *LLAMAS)),
        3,
    ),
    "num_experts": (
        (
            *("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", ERNIE, MINIMAX),
            *(HY3, EXAONE, HUNYUAN, SARVAM, BAILING, QWEN_VL, SARVAM_MLA, GPT),
            *(*INDEXED, AFMOE, FLEX, FLINT, *DELTAS, *GEMMAS, LFM, COHERE, *NO_ROPE, MELLUM),
            LAGUNA,
        ),
        32,
    ),
    "num_local_experts": (
        (
            "qwen3_moe",
            "mixtral",
            "olmoe",
            "phimoe",
            *(*GRANITES, MINIMAX, "deepseek_v3", GLM, LITE, SOLAR, SARVAM, KIMI),
            *(SARVAM_MLA, GLM_V, *MISTRALS),
            *(HY3, QWEN_VL, GPT, *OF_V3, FLEX, *LLAMAS, *NO_ROPE, MELLUM, NEMOTRON, LONGCAT, V4),
        ),
        32,
    ),
    "n_routed_experts": ((*CORRECTED[1:], "deepseek_v2", *MISTRALS, NEMOTRON, LONGCAT, V4), 32),
    "moe_intermediate_size": (
        (
            "qwen3_moe",
            "qwen2_moe",
            ERNIE,
            "deepseek_v2",
            HY3,
            EXAONE,
            BAILING,
            QWEN_VL,
            AFMOE,
            FLINT,
            MELLUM,
            LAGUNA,
            *GEMMAS,
            *CORRECTED,
            *MISTRALS,
            LFM,
            *DELTAS,
            *(NEMOTRON, LONGCAT, V4),
        ),
        96,
    ),
    "norm_topk_prob": (
        (
            "qwen3_moe",
            LFM,
            "olmoe",
            "qwen2_moe",
            EXAONE,
            BAILING,
            FLEX,
            FLINT,
            MELLUM,
            COHERE,
            *CORRECTED,
            *MISTRALS,
            *(NEXT, NEMOTRON),
        ),
        True,
    ),
    "attention_bias": (
        (
            *("qwen3_moe", "olmoe", "phimoe", *GRANITES, "deepseek_v2", HY3, HUNYUAN, QWEN_VL),
            *(*CORRECTED, *MISTRALS, GPT, AFMOE, FLEX, FLINT, *DELTAS, *GEMMAS, *LLAMAS),
            *(COHERE, MELLUM, LONGCAT, LAGUNA, *ARIAS),
        ),
        "other",
    ),
    "decoder_sparse_step": (("qwen3_moe", "qwen2_moe", QWEN_VL, FLINT, NEXT), 2),
    "mlp_only_layers": (("qwen3_moe", "qwen2_moe", QWEN_VL, FLINT, NEXT), [3]),
    "sliding_window": (
        (
            "qwen3_moe",
            "mixtral",
            "qwen2_moe",
            "phimoe",
            DOTS,
            EXAONE,
            GPT,
            AFMOE,
            FLINT,
            *(MELLUM, WINDOWS, LAGUNA),
            *GEMMAS,
            COHERE,
            V4,
        ),
        33,
    ),
    "use_sliding_window": (("qwen3_moe", "qwen2_moe"), False),
    "max_window_layers": (("qwen2_moe", DOTS), 5),
    "swiglu_alpha": ((GPT,), 1.5),
    "swiglu_limit": ((GPT, V4), 5.0),
    "layer_types": (
        ("qwen2_moe", DOTS, EXAONE, GPT, AFMOE, FLINT, *GEMMAS, COHERE, MELLUM, WINDOWS, LAGUNA),
        ["full_attention"] * 23 + ["sliding_attention"],
    ),
    "full_attention_interval": (DELTAS, 2),
    "norm_eps": ((LFM,), 1e-3),
    "position_embedding_type": ((HYBRID,), None),
    "mamba_n_heads": ((HYBRID,), 64),
    "mamba_n_groups": ((HYBRID,), 2),
    "mamba_d_state": ((HYBRID, JAMBA), 32),
    "mamba_d_conv": ((HYBRID, JAMBA), 3),
    "mamba_expand": ((HYBRID, JAMBA), 4),
    "mamba_conv_bias": ((HYBRID, JAMBA), False),
    "mamba_proj_bias": ((HYBRID, JAMBA), True),
    "mamba_dt_rank": ((JAMBA,), 9),
    "attn_layer_period": ((JAMBA,), 16),
    "attn_layer_offset": ((JAMBA,), 3),
    "expert_layer_period": ((JAMBA,), 3),
    "expert_layer_offset": ((JAMBA,), 0),
    "linear_num_heads": ((KIMI_LINEAR,), 16),
    "linear_head_dim": ((KIMI_LINEAR,), 64),
    "linear_attn_config": ((KIMI_LINEAR,), {"num_heads": 16}),
    "model_max_length": ((KIMI_LINEAR,), 777),
    "num_experts_per_token": ((KIMI_LINEAR,), 3),
    "time_step_limit": ((HYBRID,), [0.1, 1]),
    "layers_block_type": ((NEMOTRON,), ["linear_attention", "full_attention", "moe"]),
    "layer_norm_epsilon": ((NEMOTRON,), 1e-3),
    "mamba_num_heads": ((NEMOTRON,), 64),
    "mamba_head_dim": ((NEMOTRON,), 32),
    "n_groups": ((NEMOTRON,), 2),
    "ssm_state_size": ((NEMOTRON,), 32),
    "conv_kernel": ((NEMOTRON,), 3),
    "use_conv_bias": ((NEMOTRON,), False),
    "time_step_min": ((NEMOTRON,), 0.1),
    "moe_latent_size": ((NEMOTRON,), 32),
    "moe_shared_expert_intermediate_size": ((NEMOTRON,), 48),
    "num_layers": ((LONGCAT,), 10),
    "ffn_hidden_size": ((LONGCAT,), 96),
    "expert_ffn_hidden_size": ((LONGCAT,), 96),
    "zero_expert_num": ((LONGCAT,), 8),
    "d_model": ((DBRX,), 1280),
    "n_heads": ((DBRX,), 32),
    "n_layers": ((DBRX,), 12),
    "max_seq_len": ((DBRX,), 777),
    "attn_config": ((DBRX,), {"clip_qkv": 8.0}),
    "ffn_config": ((DBRX,), {"moe_top_k": 2}),
    "conv_L_cache": ((LFM,), 4),
    "linear_num_key_heads": (DELTAS, 8),
    "linear_num_value_heads": (DELTAS, 64),
    "linear_key_head_dim": (DELTAS, 32),
    "linear_value_head_dim": (DELTAS, 32),
    "linear_conv_kernel_dim": ((*DELTAS, KIMI_LINEAR), 3),
    "sliding_window_pattern": ((EXAONE, COHERE), "LG"),
    "prefix_dense_sliding_window_pattern": ((COHERE,), 3),
    "prefix_dense_intermediate_size": ((COHERE,), 96),
    "shared_expert_combination_strategy": ((COHERE,), "sum"),
    "expert_selection_fn": ((COHERE,), "softmax"),
    "layer_norm_eps": ((COHERE,), 1e-3),
    "logit_scale": ((COHERE,), 0.5),
    "rope_theta": ((COHERE, V4), 123.0),
    "rope_scaling": ((COHERE,), {"type": "linear", "factor": 2.0}),
    "num_shared_experts": (
        (HY3, EXAONE, SARVAM, BAILING, SARVAM_MLA, AFMOE, COHERE, KIMI_LINEAR),
        3,
    ),
    "shared_intermediate_size": ((SHARED, HYBRID, WINDOWS), 48),
    "top_k_experts": (GEMMAS, 3),
    "final_logit_softcapping": (GEMMAS, 20.0),
    "attention_k_eq_v": (GEMMAS, True),
    "global_head_dim": (GEMMAS, 128),
    "attention_chunk_size": (LLAMAS, 128),
    "intermediate_size_mlp": (LLAMAS, 96),
    "moe_layers": (LLAMAS, [0]),
    "interleave_moe_layer_step": (LLAMAS, 2),
    "no_rope_layers": (LLAMAS, [0] * 48),
    "no_rope_layer_interval": (LLAMAS, 2),
    "attn_temperature_tuning": (LLAMAS, 0),
    "floor_scale": (LLAMAS, 100),
    "attn_scale": (LLAMAS, 0.3),
    "router_scaling_factor": ((HY3,), 2.0),
    "moe_topk": ((HUNYUAN, LONGCAT, *ARIAS), 3),
    "use_qkv_bias": ((SARVAM, BAILING), True),
    "qkv_bias": (("qwen2_moe",), False),
    "shared_expert_intermediate_size": (("qwen2_moe", FLINT, LAGUNA, *DELTAS), 48),
    "num_attention_heads_per_layer": ((LAGUNA,), [48] * 39 + [64]),
    "gating": ((LAGUNA,), "per-element"),
    "moe_routed_scaling_factor": ((LAGUNA,), 2.0),
    "clip_qkv": (("olmoe",), 5.0),
    "router_jitter_noise": (("phimoe",), 0.5),
    "lm_head_bias": (("phimoe",), True),
    "first_k_dense_replace": (
        (
            *(GLM, DOTS, *DEEPSEEK, EXAONE, SARVAM, BAILING, KIMI, SARVAM_MLA, GLM_V, *MISTRALS),
            *OF_V3,
            COHERE,
            KIMI_LINEAR,
        ),
        2,
    ),
    "mlp_layer_types": (
        (LITE, HY3, EXAONE, COHERE, *OF_V3, KIMI_LINEAR, MELLUM, LAGUNA, V4),
        "sparse",
    ),
    "layer_rope_theta": ((WINDOWS,), [0] + [1e4] * 31),
    "moe_layer_freq": ((AXK1,), 2),
    "index_topk": ((*INDEXED, V4), 99),
    "index_head_dim": ((*INDEXED, V4), 64),
    "index_n_heads": ((*INDEXED, V4), 4),
    "compress_rates": ((V4,), {"heavily_compressed_attention": 64}),
    "compress_rope_theta": ((V4,), 123.0),
    "hc_eps": ((V4,), 1e-3),
    "hc_mult": ((V4,), 2),
    "hc_sinkhorn_iters": ((V4,), 3),
    "o_groups": ((V4,), 4),
    "o_lora_rank": ((V4,), 64),
    "scoring_func": ((V4,), "sigmoid"),
    "indexer_types": (("glm_moe_dsa",), ["full"] * 77 + ["shared"]),
    "num_dense_layers": ((AFMOE, LFM), 3),
    "route_scale": ((AFMOE,), 2.0),
    "global_attn_every_n_layers": ((AFMOE,), 2),
    "mup_enabled": ((AFMOE,), True),
    "kv_lora_rank": (MLA, 32),
    "q_lora_rank": ((*MLA, V4), None),
    "qk_nope_head_dim": (MLA, 32),
    "qk_rope_head_dim": (MLA, 32),
    "v_head_dim": (MLA, 32),
    "n_shared_experts": ((*CORRECTED, "deepseek_v2", *MISTRALS), 3),
    "mlp_bias": (("deepseek_v2", HY3, NEMOTRON, *ARIAS), True),
    "routed_scaling_factor": (
        (*CORRECTED, "deepseek_v2", EXAONE, LFM, BAILING, *MISTRALS, NEMOTRON, LONGCAT, V4),
        3.5,
    ),
    "topk_method": (("deepseek_v2",), "group_limited_greedy"),
    "n_group": ((*CORRECTED, "deepseek_v2", EXAONE, BAILING, *MISTRALS, NEMOTRON), 4),
    "topk_group": ((*CORRECTED, "deepseek_v2", EXAONE, BAILING, *MISTRALS, NEMOTRON), 3),
    "rope_interleave": (("deepseek_v3", LITE, KIMI, SARVAM_MLA, *MISTRALS, AXK1), False),
    "embedding_multiplier": (GRANITES, 12.0),
    "attention_multiplier": (GRANITES, 0.015625),
    "residual_multiplier": (GRANITES, 0.22),
    "logits_scaling": (GRANITES, 6.0),
    "partial_rotary_factor": ((GLM, MINIMAX, SARVAM, BAILING, GLM_V, *DELTAS, V4), 0.125),
    "rotary_dim": ((MINIMAX, BAILING), 32),
    "use_qk_norm": ((GLM, SARVAM, BAILING, *LLAMAS), "other"),
    "use_bias": ((ERNIE, NEMOTRON), True),
    "moe_k": ((ERNIE,), 3),
    "moe_num_experts": ((ERNIE, *ARIAS), 32),
    "moe_num_shared_experts": ((ERNIE, *ARIAS), 1),
    "moe_layer_start_index": ((ERNIE,), 3),
    "moe_layer_end_index": ((ERNIE,), 9),
    "moe_layer_interval": ((ERNIE,), 2),
}
"""Field → (families in which it changes the ModelConfig, a value that is not the default)."""

GROUPS = {"n_group": 8, "topk_group": 4}
WITH = {
    "topk_method": GROUPS,
    "n_group": GROUPS | {"topk_method": "group_limited_greedy"},
    "topk_group": GROUPS | {"topk_method": "group_limited_greedy"},
}
"""Fields without which, in DeepSeek-V2, the field has no effect."""

SLIDING = ["sliding_attention", *["full_attention"] * 60]
REFUSED: dict[str, dict[tuple[str, ...], tuple[Any, str]]] = {
    "num_key_value_heads": {(*MLA, V4): (2, "num_key_value_heads 2 is not implemented")},
    "mlp_hidden_act": {(NEMOTRON,): ("silu", "mlp_hidden_act 'silu' is not implemented")},
    "mamba_hidden_act": {(NEMOTRON,): ("gelu", "mamba_hidden_act 'gelu' is not implemented")},
    "n_shared_experts": {(NEMOTRON, V4): (2, "n_shared_experts 2 is not implemented")},
    "hybrid_override_pattern": {
        (NEMOTRON,): ("ME-*", "hybrid_override_pattern: block 2, 'mlp', must follow one of")
    },
    "n_groups": {(NEMOTRON,): (3, "mamba_num_heads must be a multiple of n_groups")},
    "router_bias": {(LONGCAT,): (True, "router_bias True is not implemented")},
    "qk_head_dim": {(LONGCAT,): (48, "qk_head_dim 48 is not implemented")},
    "ffn_config": {
        (DBRX,): ({"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights 2.0 is not")
    },
    "head_dim": {
        (DBRX,): (48, "head_dim 48 is not implemented"),
        ("olmoe",): (64, r"hidden_size \(2048\) must be .* \(16 × 64\)"),
    },
    "num_experts_per_tok": {
        ("phimoe",): (1, "num_experts_per_tok 1 is not implemented"),
        LLAMAS: (2, "num_experts_per_tok 2 is not implemented"),
    },
    "enable_moe_block": {GEMMAS: (False, "enable_moe_block is false")},
    "hidden_size_per_layer_input": {GEMMAS: (256, "hidden_size_per_layer_input 256 is not")},
    "use_double_wide_mlp": {GEMMAS: (True, "use_double_wide_mlp True is not implemented")},
    "use_bidirectional_attention": {GEMMAS: ("all", "use_bidirectional_attention 'all' is not")},
    "rope_parameters": {
        (*GEMMAS, MELLUM, LAGUNA): (
            {"rope_type": "default"},
            "rope_parameters must have an object",
        )
    },
    "norm_topk_prob": {
        ("deepseek_v2",): (True, "norm_topk_prob True is not implemented"),
        (QWEN35, QWEN35_V, LAGUNA, V4): (False, "norm_topk_prob False is not implemented"),
    },
    "hidden_act": {
        (*DELTAS, LFM, HYBRID, *NO_ROPE, *ARIAS, V4): (
            "gelu",
            "hidden_act 'gelu' is not implemented",
        )
    },
    "sliding_window": {
        (
            *("olmoe", GLM, ERNIE, GRANITE, SHARED, HYBRID, SOLAR, MINIMAX, *MLA),
            *(HY3, HUNYUAN, SARVAM, BAILING, GLM_V, FLEX, NEMOTRON),
        ): (
            64,
            "sliding_window 64 is not implemented",
        )
    },
    "layer_types": {
        tuple(
            k
            for k in KINDS
            if k
            not in (
                "qwen2_moe",
                DOTS,
                EXAONE,
                GPT,
                AFMOE,
                FLINT,
                *GEMMAS,
                COHERE,
                MELLUM,
                WINDOWS,
                JAMBA,
                LAGUNA,
            )
        ): (
            SLIDING,
            "layer_types must be",
        ),
    },
    "scoring_func": {
        ("deepseek_v2",): ("sigmoid", "scoring_func 'sigmoid' .*only 'softmax'"),
        (*CORRECTED, MINIMAX, EXAONE): ("softmax", "scoring_func 'softmax' .*only 'sigmoid'"),
        (V4,): ("softmax", "scoring_func 'softmax' .*only 'sqrtsoftplus' or 'sigmoid'"),
    },
    "topk_method": {
        ("deepseek_v2",): ("noaux_tc", "topk_method 'noaux_tc' .*only 'greedy'"),
        CORRECTED: ("greedy", "topk_method 'greedy' .*only 'noaux_tc'"),
    },
    "attention_bias": {(V4,): (True, "attention_bias True is not implemented")},
    "mlp_bias": {(V4,): (True, "mlp_bias True is not implemented")},
    "compress_ratios": {(V4,): ([8] * 43, "compress_ratios must be 0, 4, 128 for each of 43")},
    "moe_layer_freq": {(*DEEPSEEK, KIMI, SARVAM_MLA): (2, "moe_layer_freq 2 is not implemented")},
    "partial_rotary_factor": {
        tuple(
            kind
            for kind in KINDS
            if kind
            not in (
                *(GLM, MINIMAX, SARVAM, BAILING, GLM_V, *MISTRALS, *DELTAS, *GEMMAS, *NO_ROPE),
                *(MELLUM, NEMOTRON, LAGUNA, V4),
            )
        ): (
            0.5,
            "partial_rotary_factor 0.5 is not implemented",
        ),
        (GLM,): (0.51, r"partial_rotary_factor 0.51 of head_dim \d+ must leave an even number"),
    },
    "num_local_experts": {
        (DOTS, HUNYUAN): (32, r"experts \(64\) contradicts num_local_experts"),
        (HYBRID,): (0, r"no layer has experts \(num_local_experts 0\)"),
    },
    "num_experts": {(JAMBA,): (1, r"no layer has experts \(num_experts 1 of 32 layers\)")},
    "attn_layer_offset": {(JAMBA,): (9, r"attn_layer_offset \(9\) must be less than attn_layer_p")},
    "time_step_limit": {(HYBRID,): ([1, 0.5], "time_step_limit must be two numbers")},
    "mamba_n_groups": {(HYBRID,): (3, "mamba_n_heads must be a multiple of mamba_n_groups")},
    "mla_use_nope": {(KIMI_LINEAR,): (False, "mla_use_nope False is not implemented")},
    "linear_attn_config": {
        (KIMI_LINEAR,): (
            {"kda_layers": [1], "full_attn_layers": [3]},
            "full_attn_layers and kda_layers must be each of the layers 1 to 27 once",
        )
    },
    "score_function": {(BAILING,): ("softmax", "score_function 'softmax' is not implemented")},
    "moe_router_enable_expert_bias": {(BAILING,): (False, "moe_router_enable_expert_bias False")},
    "moe_shared_expert_intermediate_size": {(BAILING,): (64, "moe_shared_expert_inter.* 64 is")},
    "q_lora_rank": {(*OF_V3, LONGCAT): (None, "q_lora_rank must be an integer")},
    "rope_interleave": {INDEXED: (False, "rope_interleave False is not implemented")},
    "score_func": {(AFMOE,): ("softmax", "score_func 'softmax' is not implemented")},
    "route_norm": {(AFMOE,): (False, "route_norm False is not implemented")},
    "norm_head": {(BAILING,): (True, "norm_head True is not implemented")},
    "use_cla": {(HUNYUAN,): (True, "use_cla True is not implemented")},
    "num_shared_expert": {(HUNYUAN,): ([2] * 32, "num_shared_expert 2 is not implemented")},
    "use_mixed_mlp_moe": {(HUNYUAN,): (False, "use_mixed_mlp_moe False is not implemented")},
    "original_max_position_embeddings": {
        MISTRALS: (4096, "contradicting values of original_max_position_embeddings")
    },
    "use_qk_norm": {
        (GLM_V,): (True, "use_qk_norm True is not"),
        (MINIMAX, HUNYUAN): (False, "use_qk_norm False is not implemented"),
    },
    "use_routing_bias": {(MINIMAX,): (False, "use_routing_bias False is not implemented")},
    "attn_type_list": {(MINIMAX,): ([0] * 62, "attn_type_list .* is not implemented")},
    "shared_intermediate_size": {(MINIMAX,): (64, "shared_intermediate_size 64 is not impl")},
    "moe_norm_min": {(ERNIE,): (1e-3, "moe_norm_min 0.001 is not implemented")},
    "num_hidden_layers": {(LFM, HYBRID, MELLUM, LAGUNA): (30, "layer_types must be")},
    "moe_apply_router_weight_on_input": {(LAGUNA,): (True, "moe_apply_router_w.* True is not")},
    "moe_router_logit_softcapping": {(LAGUNA,): (5.0, "moe_router_logit_softc.* 5.0 is not")},
    "tie_word_embeddings": {
        (KIMI_LINEAR, NEMOTRON, DBRX): (True, "tie_word_embeddings True is not impl")
    },
    "moe_renormalize": {(KIMI_LINEAR,): (True, "moe_renormalize .* contradicts norm_topk_prob")},
    "num_expert_group": {(KIMI_LINEAR,): (4, "num_expert_group .* contradicts n_group")},
    "layers_block_type": {(HYBRID,): (["mamba"] * 32, "layer_types .* contradicts layers_block_")},
    "mamba_d_head": {(HYBRID,): (48, r"mamba_n_heads \(128\) × mamba_d_head \(48\) must be")},
    "conv_bias": {(LFM,): (True, "conv_bias True is not implemented")},
    "use_expert_bias": {(LFM,): (False, "use_expert_bias False is not implemented")},
    "is_causal": {KINDS: (False, "is_causal False is not implemented")},
    "is_encoder_decoder": {KINDS: (True, "is_encoder_decoder True is not implemented")},
    "attention_chunk_size": {
        tuple(kind for kind in KINDS if kind not in LLAMAS): (
            128,
            "attention_chunk_size 128 is not implemented",
        ),
        LLAMAS: (100, "attention_chunk_size must be a multiple of 64"),
    },
    "num_kv_shared_layers": {KINDS: (2, "num_kv_shared_layers 2 is not implemented")},
    "kv_sharing_modes": {KINDS: (["store", "reuse"], "kv_sharing_modes .* is not implemented")},
    "per_layer_config": {
        tuple(kind for kind in KINDS if kind not in GEMMAS): (
            {"0": {"head_dim": 64}},
            "per_layer_config .* not implemented",
        ),
        GEMMAS: ({"0": {"head_dim": 64}}, "per_layer_config must have"),
    },
    "quantization_config": {
        KINDS: ({"quant_method": "hqq"}, "quantized with hqq"),
        (V4,): (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp6"},
            "expert_dtype is 'fp6'",
        ),
    },
}
"""Field → families → (a value that moejax refuses, what it says): fields that transformers reads
and moejax implements with one value only, or that the model's own code reads."""

WITHOUT_EFFECT: dict[str, Any] = {
    "attention_dropout": 0.5,  # dropout, losses, jitter of inputs and initial values: training
    "initializer_range": 0.5,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "input_jitter_noise": 0.5,
    "hidden_dropout": 0.5,
    "aux_loss_alpha": 0.5,
    "seq_aux": False,
    "pad_token_id": 5,  # what surrounds the computation
    "bos_token_id": 5,
    "use_cache": False,
    "pretraining_tp": 4,  # how many parts a product is computed in
    "ep_size": 4,
    "mamba_chunk_size": 64,
    "use_mamba_kernels": False,
    "use_mambapy": True,
    "use_associative_scan": False,
    "return_dict": False,
    "num_mtp_layers": 1,  # layers that transformers leaves out
    "num_nextn_predict_layers": 2,
    "mtp_layer_types": ["full_attention"],
    "mtp_mlp_layer_types": ["dense"],
    "_attn_implementation": "eager",  # where and how transformers computes
    "_experts_implementation": "eager",
    "chunk_size_feed_forward": 4,
    "vocab_size_per_layer_input": 77,  # of a table that there is not
    "enable_moe_fp32_combine": False,  # of 16-bit runs: where the sum is rounded
    "eod_token_id": 5,
    "chunk_size": 64,
    "expand": 4,
    "mamba_ssm_cache_dtype": "float16",  # of pages, which are float32
    "moe_shared_expert_overlap": False,
    "mtp_layers_block_type": ["moe"],
    "num_logits_to_keep": 4,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,  # transformers does not read it
    "time_step_floor": 0.5,
    "time_step_max": 0.5,
    **dict.fromkeys(("attn_pdrop", "emb_pdrop", "resid_pdrop", "moe_jitter_eps"), 0.5),
    "moe_loss_weight": 0.5,
    "sep_token_id": 5,
}
NOT_ALWAYS = {
    "partial_rotary_factor": MISTRALS,  # qk_rope_head_dim says it
    "head_dim": MLA,  # transformers overwrites it by qk_rope_head_dim
    "router_jitter_noise": ("mixtral", MINIMAX, *LLAMAS, V4),  # in training only
    "intermediate_size": (SOLAR,),  # no layer is dense
    "q_head_dim": (SARVAM,),
    # transformers makes them from other fields
    **dict.fromkeys(("layer_types", "layers_block_type", "layers_num_experts"), (JAMBA,)),
    "_is_quantized": (JAMBA,),
    **dict.fromkeys(
        ("attention_bias", "mamba_proj_bias", "num_hidden_layers", "time_step_limit"), (NEMOTRON,)
    ),
    **dict.fromkeys(  # they are in attn_config and ffn_config
        ("clip_qkv", "kv_n_heads", "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k"),
        (DBRX,),
    ),
    "moe_normalize_expert_weights": (DBRX,),
    "mlp_bias": INDEXED,  # transformers does not read it
    "hidden_act": (GPT,),  # its clamped SwiGLU has a sigmoid of its own
    "original_max_position_embeddings": tuple(
        kind for kind in KINDS if kind not in MISTRALS
    ),  # of scaled ropes, see test_rope
}
"""Fields without effect in these families."""


def classified(kind: str, field: str) -> bool:
    return (
        kind in HONOURED.get(field, ((),))[0]
        or any(kind in kinds for kinds in REFUSED.get(field, {}))
        or field in WITHOUT_EFFECT
        or kind in NOT_ALWAYS.get(field, ())
    )


@functools.cache
def sources() -> Path:
    """transformers' directory, found without importing it: that would import torch."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


READ = re.compile(
    r"""(?<![\w.])(?:self\.)?(?:effective_|text_)?config\.(\w+)"""
    r"""|(?:get|has)attr\(\s*(?:self\.)?(?:effective_|text_)?config,\s*["'](\w+)["']"""
)
FIELD = re.compile(r"^    (\w+)\s*:[^=\n]+=", re.MULTILINE)
ALIAS = re.compile(r"attribute_map = \{(.*?)\}", re.DOTALL)


def reads(text: str) -> set[str]:
    return {name or got for name, got in READ.findall(text)} - {"get_text_config"}


def text_part(source: str, kind: str) -> str:
    """The classes of the text model, where a file has others beside it."""
    if kind not in (QWEN_VL, GLM_V, QWEN35, QWEN35_V, *GEMMAS, *LLAMAS, *ARIAS):
        return source
    names = ("Text", "MoeGated", "MoeAttention", "MoeDecoder", "MoeTopK", "Experts", "MoeSparse")
    parts = source.split("\nclass ")
    return "\nclass ".join(part for part in parts if any(name in part[:40] for name in names))


@pytest.mark.torch
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_IN_TRANSFORMERS])
def test_every_field_of_the_model_is_known(kind):
    """Of the modelling file and of the config class. A new name in either must be looked at."""
    models, modelled = sources() / "models", MODELLED.get(kind, kind)
    found = reads(text_part((models / modelled / f"modeling_{modelled}.py").read_text(), kind))
    kind_of_config = modelled if kind in (*WRAPPERS, QWEN35, *GEMMAS, *LLAMAS, *ARIAS) else kind
    directory = models / kind_of_config
    config = text_part((directory / f"configuration_{kind_of_config}.py").read_text(), kind)
    aliases = "".join(ALIAS.findall(config))
    found |= set(FIELD.findall(config)) | set(re.findall(r"['\"](\w+)['\"]", aliases))
    assert {"hidden_size", "vocab_size", "eos_token_id"} <= found
    assert "rope_parameters" in found or kind in (*NO_ROPE, NEMOTRON)
    assert [name for name in sorted(found) if not classified(kind, name)] == []


WRAPPERS = tuple(family.model_type for family in FAMILIES.values() if family.text_types)


def plain(kind: str, **fields: Any) -> dict[str, Any]:
    found = {**BASE.get(kind, {}), **fields}
    if kind not in WRAPPERS:
        return {"model_type": kind, **found}
    if kind == MISTRAL3:
        found = {"model_type": MISTRAL4, **found}
    outside = {name: found.pop(name) for name in ("tie_word_embeddings",) if name in found}
    return {"model_type": kind, "text_config": found, **outside}


OTHER_VALUES = {
    **dict.fromkeys(((kind, "tie_word_embeddings") for kind in GEMMAS), False),
    (ERNIE, "tie_word_embeddings"): False,
    (COHERE, "tie_word_embeddings"): False,
    (COHERE, "sliding_window_pattern"): 2,
    (KIMI, "tie_word_embeddings"): False,
    (GPT, "attention_bias"): False,
    (NEMOTRON, "n_group"): 2,
    (GLM, "use_qk_norm"): True,
    (NEXT, "norm_topk_prob"): False,
    (LFM, "norm_topk_prob"): True,
    (LFM, "tie_word_embeddings"): False,
    (MISTRAL3, "tie_word_embeddings"): False,
    (V4, "mlp_layer_types"): ["moe"] * 43,
    (V4, "partial_rotary_factor"): 0.25,
    (V4, "rope_parameters"): {"rope_type": "linear", "factor": 2.0},
    (MELLUM, "mlp_layer_types"): ["dense"] + ["sparse"] * 27,
    **dict.fromkeys(
        ((kind, "q_lora_rank") for kind in (SARVAM_MLA, KIMI_LINEAR, LONGCAT, V4, *OF_V3)), 64
    ),
    **dict.fromkeys(
        (
            (kind, "num_attention_heads")
            for kind in (
                *(SOLAR, HY3, COHERE, SARVAM, SARVAM_MLA, GPT, AXK1, LONGCAT, "glm_moe_dsa", V4),
            )
        ),
        32,
    ),
}
"""Instead of the value in HONOURED, where that one is the family's default."""


def is_honoured(kind: str, field: str) -> bool:
    base = WITH.get(field, {}) if kind == "deepseek_v2" else {}
    value = OTHER_VALUES.get((kind, field), HONOURED[field][1])
    if value == "sparse":
        value = ["sparse"] * LAYERS.get(kind, 32)
    if field == "layer_types":
        value = ["full_attention"] * (LAYERS.get(kind, 32) - 24) + value
    if value == "other":
        value = not (kind == GLM_V or field == "use_qk_norm")
    return parse_config(plain(kind, **{**base, field: value})) != parse_config(plain(kind, **base))


@pytest.mark.parametrize("field", HONOURED)
def test_honoured_field_changes_the_computation(field):
    assert [kind for kind in HONOURED[field][0] if not is_honoured(kind, field)] == []


def refusal(kind: str, field: str, value: Any) -> str:
    value = value[: LAYERS.get(kind, 32)] if field == "layer_types" else value
    try:
        parse_config(plain(kind, **{field: value}), "some.json")
    except UserError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("field", REFUSED)
def test_refused_field_is_named(field):
    for kinds, (value, message) in REFUSED[field].items():
        said = {kind: refusal(kind, field, value) for kind in kinds}
        wanted = re.compile(f"some.json: .*{message}")
        assert {kind: text for kind, text in said.items() if not wanted.match(text)} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_other_fields_change_nothing(kind):
    values = {"head_dim": 40, "router_jitter_noise": 0.5, "hidden_act": "gelu"}
    values |= {"partial_rotary_factor": 0.5}
    fields = WITHOUT_EFFECT | {
        name: values.get(name, 4096) for name, kinds in NOT_ALWAYS.items() if kind in kinds
    }
    assert parse_config(plain(kind, **fields)) == parse_config(plain(kind))


def test_infinity_by_either_spelling():
    limits = [0.1, {"__float__": "Infinity"}], [0.1, math.inf]
    written = (json.dumps(plain(HYBRID, time_step_limit=each)) for each in limits)
    newer, older = (parse_config(parse_json(text)) for text in written)
    assert newer == older != parse_config(plain(HYBRID))


IN_TRANSFORMERS = [f for f in FAMILIES.values() if f.model_type not in NOT_IN_TRANSFORMERS]


def _config_class(family) -> str:
    # Of these, Config is that of images and text.
    of_text = family.model_type in (QWEN35, GEMMAS[0], LLAMAS[0])
    config = "TextConfig" if of_text else "Config"
    return re.sub("For(CausalLM|ConditionalGeneration)$", config, family.architecture)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", IN_TRANSFORMERS, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family):
    """What an empty config.json means, and what transformers writes for it."""
    import transformers

    given = {k: v for k, v in plain(family.model_type).items() if k != "model_type"}
    theirs = getattr(transformers, _config_class(family))(**given)
    ours = parse_config(plain(family.model_type))
    for whole in (True, False):
        written = json.loads(theirs.to_json_string(use_diff=not whole))
        assert parse_config(written) == ours


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", IN_TRANSFORMERS, ids=lambda family: family.model_type)
def test_a_model_has_as_many_parameters_as_in_transformers(family):
    """At its config class's own size, corrections of the router included."""
    import torch
    import transformers

    kind = family.model_type
    configured = {SARVAM: "Glm4MoeForCausalLM", SARVAM_MLA: "DeepseekV3ForCausalLM"}
    name = configured.get(kind, family.architecture)
    given = {k: v for k, v in plain(kind).items() if k != "model_type"}
    with torch.device("meta"):
        config = getattr(transformers, _config_class(family))(**given)
        model = getattr(transformers, name)._from_config(config)
    for vision in (
        "visual",
        "vision_tower",
        "mm_projector",
        "multi_modal_projector",
        *("audio_tower", "embed_vision", "embed_audio", "vision_model"),
    ):  # of wrappers the text model runs
        inner = getattr(model, "model", model)
        if hasattr(inner, vision):
            delattr(inner, vision)
    saved = "correction_bias", "expert_bias", "layer_scalar", "tid2eid"
    corrections = [b for name, b in model.named_buffers() if name.endswith(saved)]
    theirs = sum(p.numel() for p in [*model.parameters(), *corrections])
    if kind == LONGCAT:  # it has gates of experts that compute nothing
        theirs -= 28 * 256 * 2 * 2048 * 6144
    places = expected_tensors(parse_config(plain(kind)), ()).values()
    assert sum(math.prod(place.shape) for place in places) == theirs
