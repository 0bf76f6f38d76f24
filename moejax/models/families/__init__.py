"""All model families. A new family is one file and a line here."""

from __future__ import annotations

import pkgutil

from moejax.models.family import Family

_PLACES = (
    "qwen3_moe:FAMILY",
    "mixtral:FAMILY",
    "olmoe:FAMILY",
    "qwen2_moe:FAMILY",
    "lfm2_moe:FAMILY",
    "qwen3_next:FAMILY",
    "qwen3_next:QWEN3_5",
    "qwen3_next:QWEN3_5_VISION",
    "phimoe:FAMILY",
    "deepseek:V2",
    "deepseek:V3",
    "granitemoe:FAMILY",
    "glm4_moe:FAMILY",
    "glm4_moe_lite:FAMILY",
    "dots1:FAMILY",
    "solar_open:FAMILY",
    "minimax_m2:FAMILY",
    "ernie4_5_moe:FAMILY",
    "gpt_oss:FAMILY",
    "granitemoe:SHARED",
    "granitemoehybrid:FAMILY",
    "jamba:FAMILY",
    "nemotron_h:FAMILY",
    "kimi_linear:FAMILY",
    "longcat_flash:FAMILY",
    "dbrx:FAMILY",
    "aria:FAMILY",
    "aria:IMAGES",
    "hy_v3:FAMILY",
    "laguna:FAMILY",
    "exaone_moe:FAMILY",
    "hunyuan_v1_moe:FAMILY",
    "bailing_moe:SARVAM",
    "bailing_moe:V2",
    "wrappers:QWEN3_VL",
    "wrappers:KIMI_K25",
    "wrappers:GLM_4V",
    "deepseek:V32",
    "deepseek:GLM_DSA",
    "afmoe:FAMILY",
    "flex_olmo:FAMILY",
    "axk1:FAMILY",
    "flint:FAMILY",
    "cohere2_moe:FAMILY",
    "llama4:FAMILY",
    "llama4:IMAGES",
    "gemma4:FAMILY",
    "gemma4:IMAGES",
    "deepseek:SARVAM_MLA",
    "deepseek_v4:FAMILY",
    "mistral4:FAMILY",
    "mistral4:MISTRAL3",
    "mellum:FAMILY",
    "granitemoe:WINDOWS",
)

_families: list[Family] = [pkgutil.resolve_name(f"{__name__}.{place}") for place in _PLACES]

FAMILIES: dict[str, Family] = {family.architecture: family for family in _families}
"""architectures' entry in config.json → the family."""
