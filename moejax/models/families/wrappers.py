"""Models of text and images of which the text model runs: tensors of the others are left out, and
images are refused."""

from __future__ import annotations

import dataclasses

from moejax.models.families import deepseek, glm4_moe, qwen3_moe
from moejax.models.family import Family, Fields, wrapper_of
from moejax.models.model_config import ModelConfig


def _qwen3_vl_text(fields: Fields) -> ModelConfig:
    """Qwen3VLMoeTextConfig's fields and defaults: Qwen3-MoE's, with weights that are always
    normalised and no window."""
    given = {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16}
    given |= {"intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts_per_tok": 4}
    given |= {"max_position_embeddings": 128000}
    raw = given | {key: value for key, value in fields.raw.items() if value is not None}
    if not {"num_experts", "num_local_experts"} & raw.keys():
        raw["num_experts"] = 60
    tables = [raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if not any(isinstance(t, dict) and "rope_theta" in t for t in tables):
        raw.setdefault("rope_theta", 500_000.0)
    raw |= {"norm_topk_prob": True, "use_sliding_window": False}
    return qwen3_moe.parse(Fields(raw, fields.source))


def _glm_4v_text(fields: Fields) -> ModelConfig:
    """Glm4vMoeTextConfig's fields and defaults: Glm4Moe's, with biases and without norms of q and
    k."""
    fields.only("use_qk_norm", False)
    given = {"attention_bias": True, "max_position_embeddings": 65536, "vocab_size": 151424}
    raw = given | {key: value for key, value in fields.raw.items() if value is not None}
    return glm4_moe.parse(Fields(raw, fields.source))


_QWEN3_VL_TEXT = Family(
    "Qwen3VLMoeTextModel", "qwen3_vl_moe_text", _qwen3_vl_text, qwen3_moe.layer_params
)

QWEN3_VL = wrapper_of(
    _QWEN3_VL_TEXT,
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    text_types=("qwen3_vl_moe_text",),
    other_models=("visual",),
    turned=True,
)
GLM_4V = wrapper_of(
    dataclasses.replace(glm4_moe.FAMILY, parse=_glm_4v_text),
    "Glm4vMoeForConditionalGeneration",
    "glm4v_moe",
    text_types=("glm4v_moe_text",),
    other_models=("visual",),
)
KIMI_K25 = wrapper_of(
    deepseek.V3,
    "Kimi_K25ForConditionalGeneration",
    "kimi_k25",
    aliases=("KimiK25ForConditionalGeneration",),
    text_types=("deepseek_v3", "kimi_k2"),
    other_models=("vision_tower", "mm_projector"),
    tied=True,
)
