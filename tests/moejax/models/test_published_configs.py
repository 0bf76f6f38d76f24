"""What parse_config makes of the config.json files that people download: counted parameters against
those that safetensors' index or the model's report states, and what else a file says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from moejax.checkpoints.tensors import expected_tensors
from moejax.models.config import parse_config
from moejax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Published:
    """raw: config.json, without what every Hub file repeats. billions: parameters, to two places.
    finds: fields of the ModelConfig."""

    raw: dict[str, Any]
    billions: float
    finds: dict[str, Any]


EVERY = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
ROUTED = EVERY | {"output_router_logits": False}
"""What all of these files say."""


def _deepseek(kind: str, **fields: Any) -> dict[str, Any]:
    """A config.json file of DeepSeek's own code."""
    auto = f"deepseek.Deepseek{kind[-2:].upper()}"
    return EVERY | {
        "architectures": [f"Deepseek{kind[-2:].upper()}ForCausalLM"],
        "attention_bias": False,
        "auto_map": {"AutoConfig": f"configuration_{auto}Config"},
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "model_type": kind,
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "seq_aux": True,
        "v_head_dim": 128,
        **fields,
    }


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


QWEN3_30B = ROUTED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

MIXTRAL_8X7B = ROUTED | {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}

OLMOE_1B_7B = ROUTED | {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}

QWEN_1_5_MOE = ROUTED | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

PHI_3_5_MOE = ROUTED | {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"},
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "model_type": "phimoe",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        # The published lists have other numbers, as many.
        "long_factor": [1.0 + i for i in range(64)],
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "vocab_size": 32064,
}

DEEPSEEK_V2 = _deepseek(
    "deepseek_v2",
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    hidden_size=5120,
    intermediate_size=12288,
    max_position_embeddings=163840,
    moe_intermediate_size=1536,
    n_group=8,
    n_routed_experts=160,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=128,
    num_experts_per_tok=6,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    rope_scaling=_yarn(1.0),
    routed_scaling_factor=16.0,
    scoring_func="softmax",
    topk_group=3,
    topk_method="group_limited_greedy",
    vocab_size=102400,
)

DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": _yarn(0.707),
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}

DEEPSEEK_V3 = _deepseek(
    "deepseek_v3",
    bos_token_id=0,
    eos_token_id=1,
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    max_position_embeddings=163840,
    moe_intermediate_size=2048,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    rope_scaling=_yarn(1.0),
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
)
"""Without the quantization_config of the file that is published in fp8."""


def _scale(width: int, mscale: float) -> float:
    return width**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2


LITE = {
    "norm_topk_prob": False,
    "n_group": 1,
    "shared_width": 2816,
    "attention_scale": pytest.approx(_scale(192, 0.707)),
    "kv_width": 576,
    "moe_layers": (False, *[True] * 26),
}

PUBLISHED = {
    "Qwen3-30B-A3B": Published(QWEN3_30B, 30.53, {"head_dim": 128, "norm_topk_prob": True}),
    "Mixtral-8x7B": Published(
        MIXTRAL_8X7B, 46.70, {"sliding_window": None, "rope": Rope(theta=1e6), "head_dim": 128}
    ),
    # The first files said so.
    "Mixtral-8x7B with a window": Published(
        MIXTRAL_8X7B | {"sliding_window": 4096}, 46.70, {"windows": (4096,) * 32}
    ),
    "OLMoE-1B-7B": Published(OLMOE_1B_7B, 6.92, {"clip_qkv": None, "norm_topk_prob": False}),
    "Qwen1.5-MoE-A2.7B": Published(
        QWEN_1_5_MOE, 14.32, {"windows": (None,) * 24, "attention_bias": True}
    ),
    "Phi-3.5-MoE": Published(
        PHI_3_5_MOE,
        41.87,
        {
            "architecture": "PhimoeForCausalLM",
            "lm_head_bias": True,
            "router_jitter_noise": 0.01,
            "windows": (131072,) * 32,
            "eos_token_ids": (32000,),
        },
    ),
    "DeepSeek-V2": Published(
        DEEPSEEK_V2,
        235.74,
        {
            "n_group": 8,
            "topk_group": 3,
            "group_score": "max",
            "routed_scaling_factor": 16.0,
            "attention_scale": pytest.approx(_scale(192, 1.0)),
        },
    ),
    "DeepSeek-V2-Lite": Published(DEEPSEEK_V2_LITE, 15.71, LITE),
    "DeepSeek-V3": Published(
        DEEPSEEK_V3,
        671.03,
        {
            "scoring_func": "sigmoid",
            "group_score": "top2",
            "moe_layers": (False,) * 3 + (True,) * 58,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(name):
    published = PUBLISHED[name]
    config = parse_config(published.raw)
    assert config.dtype == "bfloat16"
    assert {key: getattr(config, key) for key in published.finds} == published.finds
    shapes = [place.shape for place in expected_tensors(config, ()).values()]
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(published.billions, abs=0.006)


def test_phi_takes_its_long_factors_in_an_engine_of_more_tokens():
    rope = parse_config(PHI_3_5_MOE).rope
    assert (rope.short_factor, rope.long_factor) == ((1.0,) * 64, tuple(range(1, 65)))
    assert not rope.for_length(4096).long and rope.for_length(4097).long
