"""What parse_config makes of the config.json files that people download: counted parameters against
those that safetensors' index or the model's report states, and what else a file says."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from moejax.checkpoints.tensors import expected_tensors
from moejax.models.config import parse_config
from moejax.models.families import FAMILIES
from moejax.models.quantization import Quantization, Scheme
from moejax.models.rope import Rope
from moejax.start.report.model_info import model_info
from pallas_kernels.expert_ffn import ClampedSwiGLU


@dataclasses.dataclass(frozen=True)
class Published:
    """raw: config.json. billions: parameters, to two places.
    finds: fields of the ModelConfig."""

    raw: dict[str, Any]
    billions: float
    finds: dict[str, Any]


LINES = [
    json.loads(line)
    for line in Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
]
FILES: dict[str, dict[str, Any]] = {line["model"]: line["config"] for line in LINES}
"""Model → its config.json. The line's `seen` says where all its fields, or its sizes alone, were
found printed in November 2026. The lists of Phi's rope have other numbers than here, as many; files
of models published in fp8 or int4 are without quantization_config, those of wrappers without
vision_config."""

BILLIONS = {
    "GLM-4.5-Air": 106.85,
    "GLM-4.5": 352.80,
    "GLM-4.5V": 106.85,
    "GLM-4.7-Flash": 29.94,
    "MiniMax-M2": 228.69,
    "Qwen3-Next-80B-A3B": 79.67,
    "Kimi-K2": 1026.41,
    "Kimi-K2.5": 1026.41,
    "Llama-4-Scout": 107.77,
    "Llama-4-Scout (text alone)": 107.77,
    "Llama-4-Maverick": 400.71,
    "ERNIE-4.5-21B-A3B": 21.83,
    "Granite-3.1-3B-A800M": 3.30,
    "dots.llm1": 142.77,
    "Hunyuan-A13B": 80.39,
    "Qwen3-VL-30B-A3B": 30.53,
    "LFM2-8B-A1B": 8.34,
    "FlexOlmo-7x7B": 33.27,
    "DeepSeek-V3.2": 671.88,
    "GLM-5": 743.91,
    "Solar-Open-100B": 102.65,
    "K-EXAONE-236B-A23B": 236.57,
    "Gemma-4-26B-A4B": 25.23,
    "Gemma-4-26B-A4B (text alone)": 25.23,
    "Qwen3.5-35B-A3B": 34.66,
    "Qwen3.5-35B-A3B (text alone)": 34.66,
    "Trinity-Mini": 26.12,
    "Nemotron-3-Nano-30B-A3B": 31.58,
    "LongCat-Flash": 560.66,
    "DBRX": 131.60,
    "Aria-25B-A4B": 24.87,
    "Hy3-295B-A21B": 295.03,
    "Mistral-Small-4-119B": 118.97,
    "Sarvam-30B": 32.15,
    "Sarvam-105B": 106.03,
    "Mellum2-12B-A2.5B": 12.15,
    "A.X-K1": 518.98,
    "Flint-40B": 39.79,
    "Kimi-Linear-48B-A3B": 49.12,
    "Jamba-1.5-Mini": 51.57,
    "North-Mini-Code": 30.48,
    "Laguna-XS-2.1": 33.44,
    "DeepSeek-V4-Flash": 284.33,
}
"""Parameters of the text models, to two places, of those without an entry in PUBLISHED."""


def _scale(width: int, mscale: float) -> float:
    return width**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2


LITE = {
    "norm_topk_prob": False,
    "n_group": 1,
    "shared_width": 2816,
    "attention_scale": pytest.approx(_scale(192, 0.707)),
    "rotary_dim": 64,
    "moe_layers": (False, *[True] * 26),
}

PUBLISHED = {
    "Qwen3-30B-A3B": Published(
        FILES["Qwen3-30B-A3B"], 30.53, {"head_dim": 128, "norm_topk_prob": True}
    ),
    "Mixtral-8x7B": Published(
        FILES["Mixtral-8x7B"],
        46.70,
        {"sliding_window": None, "rope": Rope(theta=1e6), "head_dim": 128},
    ),
    "OLMoE-1B-7B": Published(
        FILES["OLMoE-1B-7B"], 6.92, {"clip_qkv": None, "norm_topk_prob": False}
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        FILES["Qwen1.5-MoE-A2.7B"], 14.32, {"windows": (None,) * 24, "attention_bias": True}
    ),
    "Phi-3.5-MoE": Published(
        FILES["Phi-3.5-MoE"],
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
        FILES["DeepSeek-V2"],
        235.74,
        {
            "n_group": 8,
            "topk_group": 3,
            "group_score": "max",
            "routed_scaling_factor": 16.0,
            "attention_scale": pytest.approx(_scale(192, 0.707)),
        },
    ),
    "DeepSeek-V2-Lite": Published(FILES["DeepSeek-V2-Lite"], 15.71, LITE),
    **{
        f"gpt-oss-{size}b": Published(
            FILES[f"gpt-oss-{size}b"],
            billions,
            {
                "dtype": None,
                "swiglu": ClampedSwiGLU(7.0, 1.702),
                "windows": (128, None) * (layers // 2),
                "eos_token_ids": (200002,),
                "quantization": Quantization(
                    "mxfp4", (Scheme("mxfp4", "fp4-32", "e8m0"),), ("fp4-32-e8m0",)
                ),
            },
        )
        for size, layers, billions in ((20, 24, 20.91), (120, 36, 116.83))
    },
    "DeepSeek-V3": Published(
        FILES["DeepSeek-V3"],
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
    assert config.dtype == published.finds.get("dtype", "bfloat16")
    assert {key: getattr(config, key) for key in published.finds} == published.finds
    shapes = [place.shape for place in expected_tensors(config, ()).values()]
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(published.billions, abs=0.006)


@pytest.mark.parametrize("name", sorted(FILES.keys() - PUBLISHED.keys()))
def test_parameters_of_a_published_config(name):
    shapes = [place.shape for place in expected_tensors(parse_config(FILES[name]), ()).values()]
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_phi_takes_its_long_factors_in_an_engine_of_more_tokens():
    rope = parse_config(FILES["Phi-3.5-MoE"]).rope
    assert (rope.short_factor, rope.long_factor) == ((1.0,) * 64, tuple(range(1, 65)))
    assert not rope.for_length(4096).long and rope.for_length(4097).long


NOT_HERE = {
    *("GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("BailingMoeV2ForCausalLM", "Mistral4ForCausalLM", "AriaTextForCausalLM"),
}
"""Families of which FILES has no model, or, of the last two, the one with images:
test_config_fields.py counts at their config classes' own sizes."""


def test_other_families_have_a_published_config():
    assert FAMILIES.keys() - {parse_config(raw).architecture for raw in FILES.values()} == NOT_HERE
    assert all(line["seen"] for line in LINES)


OF_MODEL = {
    "SarvamMoEForCausalLM": "Glm4MoeForCausalLM",
    "SarvamMLAForCausalLM": "DeepseekV3ForCausalLM",
}
"""Families of which transformers has a config class alone → the model of the same layers."""


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_info_counts_the_parameters_that_transformers_counts(name):
    """On the meta device, corrections of the router included, other models of a wrapper not."""
    import torch
    import transformers

    raw = copy.deepcopy(FILES[name])
    ours = parse_config(raw)
    family = FAMILIES[ours.architecture]
    for table in (raw, raw.get("text_config", {})):
        if table.get("model_type") == "kimi_k2":  # which transformers has as DeepSeek-V3
            table["model_type"] = "deepseek_v3"
    if name == "Llama-4-Scout (text alone)":  # transformers refuses 4
        raw["attn_temperature_tuning"] = True
    if name == "DBRX":  # transformers refuses 1
        raw["ffn_config"]["moe_normalize_expert_weights"] = 1.0
    config = transformers.AutoConfig.for_model(**raw)
    of_model = OF_MODEL.get(family.architecture, family.architecture)
    with torch.device("meta"):
        model = getattr(transformers, of_model)._from_config(config)
    saved = "correction_bias", "expert_bias", "layer_scalar", "tid2eid"
    parts = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith(saved))]
    theirs = sum(part.numel() for key, part in parts if not key.startswith(family.others or "-"))
    if name == "LongCat-Flash":  # it has gates of experts that compute nothing
        theirs -= 28 * 256 * 2 * 2048 * 6144
    assert model_info(ours).total_parameters == theirs


def test_names_of_deepseek_v4_as_published():
    places = expected_tensors(parse_config(FILES["DeepSeek-V4-Flash"]), ())
    names = ("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.2.attn.wkv.weight")
    own = FAMILIES["DeepseekV4ForCausalLM"].own_name
    assert {own(name) for name in names} <= places.keys()
