"""A small random checkpoint of every family: with it a new family takes part in the contract suite
(test_families.py), by itself or, where its config needs more than COMMON says, by a line here."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.tensors import TABLES, ExpertPlace, ParamPlace, expected_tensors
from moejax.models.config import parse_config
from moejax.models.families import FAMILIES
from tests.moejax.checkpoints.random_checkpoint import write

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "eos_token_id": 0,
}

LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    n_routed_experts=8,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
)
INDEXER = dict(index_topk=40, index_n_heads=4, index_head_dim=16)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0 + i / 8 for i in range(8)],
    long_factor=[2.0 + i for i in range(8)],
    short_mscale=1.1,
    long_mscale=1.2,
    original_max_position_embeddings=128,
    rope_theta=1e4,
)

DELTA = dict(
    num_experts=8,
    head_dim=64,
    partial_rotary_factor=0.25,
    shared_expert_intermediate_size=40,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)

MAMBA2 = dict(
    mamba_n_heads=8,
    mamba_n_groups=2,
    mamba_d_state=12,
    mamba_expand=2,
    layer_types=["mamba", "attention", "mamba"],
)

NEMOTRON = dict(
    hybrid_override_pattern="MEM*E*-",
    n_routed_experts=8,
    head_dim=64,  # so that a state has one page
    moe_latent_size=32,
    moe_shared_expert_intermediate_size=40,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=12,
)

GROWING = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=8.0,
    original_max_position_embeddings=64,
    llama_4_scaling_beta=0.3,
)

LLAMA4 = dict(
    num_experts_per_tok=1,
    num_local_experts=8,
    head_dim=16,
    intermediate_size_mlp=48,
    moe_layers=[1, 2],
    attention_chunk_size=64,
    no_rope_layer_interval=2,
    floor_scale=20,
)
GEMMA4 = dict(
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    num_experts_per_tok=None,
    hidden_size_per_layer_input=0,
    sliding_window=70,
)

DEEPSEEK_V4 = dict(
    num_key_value_heads=1,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    n_routed_experts=8,
    sliding_window=70,
    layer_types=[
        *("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention")
    ],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    num_hash_layers=1,
    swiglu_limit=1.5,
    hc_mult=2,
    o_groups=2,
    o_lora_rank=12,
    index_topk=12,
    index_n_heads=8,
    index_head_dim=8,
)

SMALL: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "Qwen3MoeForCausalLM": dict(head_dim=16, num_experts=8, mlp_only_layers=[1]),
    "MixtralForCausalLM": dict(num_local_experts=8, sliding_window=100),
    "OlmoeForCausalLM": dict(num_experts=8, clip_qkv=1.5),
    "Qwen2MoeForCausalLM": dict(
        num_experts=8,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=70,
    ),
    "PhimoeForCausalLM": dict(
        num_local_experts=8, attention_bias=True, lm_head_bias=True, rope_parameters=LONGROPE
    ),
    "DeepseekV2ForCausalLM": dict(LATENT, topk_method="group_limited_greedy", q_lora_rank=None),
    "DeepseekV3ForCausalLM": dict(LATENT, q_lora_rank=24, n_shared_experts=2),
    "Glm4MoeForCausalLM": dict(
        n_routed_experts=8,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        head_dim=20,
        partial_rotary_factor=0.6,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "Glm4MoeLiteForCausalLM": dict(
        {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, q_lora_rank=24
    ),
    "Dots1ForCausalLM": dict(
        head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        sliding_window=70,
        max_window_layers=2,
    ),
    "GptOssForCausalLM": dict(num_local_experts=8, head_dim=16, sliding_window=70),
    "SolarOpenForCausalLM": dict(n_routed_experts=8, head_dim=16, attention_bias=True),
    "MiniMaxM2ForCausalLM": dict(num_local_experts=8, head_dim=16, rotary_dim=8),
    "Ernie4_5_MoeForCausalLM": dict(
        moe_num_experts=8, moe_num_shared_experts=1, moe_layer_end_index=1, use_bias=True
    ),
    "GraniteMoeForCausalLM": dict(
        num_local_experts=8,
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_scaling=1.5,
    ),
    "GraniteMoeSharedForCausalLM": dict(num_local_experts=8, shared_intermediate_size=32),
    "GraniteMoeHybridForCausalLM": dict(
        MAMBA2, num_local_experts=8, shared_intermediate_size=32, residual_multiplier=0.7
    ),
    "KimiLinearForCausalLM": dict(
        LATENT | {"kv_lora_rank": 120},  # so that a state has two pages
        num_experts=8,
        linear_num_heads=4,
        linear_head_dim=12,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "NemotronHForCausalLM": NEMOTRON,
    "JambaForCausalLM": dict(
        num_experts=8, mamba_d_state=16, attn_layer_period=3, attn_layer_offset=1, head_dim=64
    ),
    "HYV3ForCausalLM": dict(num_experts=8, head_dim=16),
    "ExaoneMoeForCausalLM": dict(
        num_experts=8,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "HunYuanMoEV1ForCausalLM": dict(num_experts=8, moe_intermediate_size=None),
    "SarvamMoEForCausalLM": dict(n_routed_experts=8, head_dim=16),
    "BailingMoeV2ForCausalLM": dict(num_experts=8, head_dim=16, n_group=4, topk_group=2),
    "Qwen3VLMoeForConditionalGeneration": dict(num_experts=8, head_dim=16),
    "Kimi_K25ForConditionalGeneration": dict(LATENT, q_lora_rank=24),
    "SarvamMLAForCausalLM": dict(LATENT),
    "Glm4vMoeForConditionalGeneration": dict(n_routed_experts=8, first_k_dense_replace=1),
    "Mistral4ForCausalLM": dict(LATENT, q_lora_rank=24, rope_parameters=GROWING),
    "DeepseekV32ForCausalLM": dict(LATENT, q_lora_rank=24, **INDEXER),
    "LongcatFlashForCausalLM": dict(
        LATENT,
        q_lora_rank=24,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=48,
        intermediate_size=None,
        moe_intermediate_size=None,
        zero_expert_num=4,
    ),
    "DbrxForCausalLM": dict(
        hidden_act=None,
        attn_config=dict(kv_n_heads=2, clip_qkv=1.5, rope_theta=1e4),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=8, moe_top_k=2),
    ),
    "GlmMoeDsaForCausalLM": dict(LATENT, q_lora_rank=24, **INDEXER),
    "AfmoeForCausalLM": dict(
        num_experts=8, head_dim=16, sliding_window=70, global_attn_every_n_layers=2
    ),
    "Cohere2MoeForCausalLM": dict(
        num_experts=8,
        head_dim=16,
        sliding_window=70,
        sliding_window_pattern=2,
        num_shared_experts=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "MellumForCausalLM": dict(
        num_experts=8,
        head_dim=16,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "LagunaForCausalLM": dict(
        num_experts=8,
        head_dim=16,
        sliding_window=70,
        shared_expert_intermediate_size=32,
        num_attention_heads_per_layer=[4, 6, 4],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "GraniteMoeSWAForCausalLM": dict(
        num_local_experts=8,
        shared_intermediate_size=32,
        sliding_window=70,
        layer_rope_theta=[0, 1e4, 2e4],
    ),
    "AXK1ForCausalLM": dict(LATENT, q_lora_rank=24),
    "FlintForCausalLM": dict(
        num_experts=8,
        head_dim=16,
        sliding_window=70,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "AriaTextForCausalLM": dict(moe_num_experts=8),
    "AriaForConditionalGeneration": dict(moe_num_experts=8),
    "Mistral3ForConditionalGeneration": dict(LATENT, q_lora_rank=24, rope_parameters=GROWING),
    "Lfm2MoeForCausalLM": dict(
        num_experts=8,
        num_dense_layers=1,
        head_dim=64,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "Qwen3NextForCausalLM": dict(DELTA, mlp_only_layers=[1]),
    "Qwen3_5MoeForCausalLM": DELTA,
    "Qwen3_5MoeForConditionalGeneration": DELTA,
}
"""architecture → config.json's fields over COMMON; not named: 8 experts and nothing else."""


def config_of(architecture: str, **fields: Any) -> dict[str, Any]:
    """config.json of the family's small model."""
    small = SMALL.get(architecture, {"num_experts": 8})
    found = {"architectures": [architecture], **COMMON, **small, **fields}
    if not FAMILIES[architecture].text_types:
        return found
    own = {key: found.pop(key) for key in ("architectures", "dtype")}
    return own | {"text_config": found, "tie_word_embeddings": False}


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint with that config.json, scaled so that every part of a layer matters:
    matrices by their width, norms about 1, biases and corrections about 0."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, place in expected_tensors(parse_config(config), ()).items():
        values = rng.standard_normal(place.shape)
        if isinstance(place, ParamPlace) and place.key in TABLES:  # different experts for a token
            values = (
                values[:, : place.shape[1]].argsort(axis=1) + np.arange(place.shape[0])[:, None]
            )
            tensors[name] = (values % config["n_routed_experts"]).astype(NUMPY_DTYPES["float32"])
            continue
        if "norm" in name and name.endswith("weight") and len(place.shape) == 1:
            values = 1 + 0.3 * values
        elif len(place.shape) == 1:
            values *= 0.3
        else:
            values *= 1.5 / place.shape[-1] ** 0.5
        dtype = getattr(place, "dtype", None) or config["dtype"]
        tensors[name] = values.astype(NUMPY_DTYPES[dtype])
    return tensors


class _AllBut:
    """Holds every name but these: expected_tensors then says what a checkpoint of stacked experts
    holds."""

    def __init__(self, names: Container[str]):
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name not in self._names


def stacked(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint with the experts of every layer stacked, under the family's names."""
    parsed, left, found = parse_config(config), dict(tensors), {}
    single: dict[tuple[int, str], list[np.ndarray]] = {}
    for name, place in expected_tensors(parsed, tensors).items():
        if isinstance(place, ExpertPlace):
            single.setdefault((place.layer, place.matrix), []).append(left.pop(name))
    for name, place in expected_tensors(parsed, _AllBut(tensors)).items():
        if isinstance(place, ExpertPlace):
            parts = {"gate_up": ("gate", "up")}.get(place.matrix, (place.matrix,))
            stacks = [np.stack(single[place.layer, part]) for part in parts]
            found[name] = np.concatenate(stacks, axis=1)
    return left | found


def write_checkpoint(
    directory: Path, architecture: str, stack: bool = False, shards: int = 1, **fields: Any
) -> Path:
    """The family's small model as a Hugging Face checkpoint without a tokenizer. stack: experts are
    stacked, whatever the family's published checkpoints are."""
    config = config_of(architecture, **fields)
    tensors = weights_of(config)
    return write(directory, stacked(config, tensors) if stack else tensors, config, shards)
