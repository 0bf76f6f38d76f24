"""Random small models of transformers, to compare moejax with. torch is imported inside: see
tests/conftest.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
"""What every random model's config is where a test says nothing else."""

_NARROW = {"moe_intermediate_size": 32}
_LATENT = {
    **_NARROW,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

_INDEXER = {"index_topk": 40, "index_n_heads": 8, "index_head_dim": 16}

_DELTA = {
    "head_dim": 16,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-2,  # a state read by a key that it never saw is rounding, which norms scale
}

OF_FAMILY: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**_NARROW, "head_dim": 16, "num_experts": 6, "norm_topk_prob": True},
    "Mixtral": {"intermediate_size": 32, "num_local_experts": 6},
    "Olmoe": {"intermediate_size": 32, "num_experts": 6},
    "Qwen2Moe": {**_NARROW, "shared_expert_intermediate_size": 48, "num_experts": 6},
    "Phimoe": {"intermediate_size": 32, "num_local_experts": 6},
    "DeepseekV2": _LATENT,
    "DeepseekV3": {**_LATENT, "n_group": 4, "topk_group": 2},
    "Glm4Moe": {
        **_NARROW,
        "head_dim": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "Glm4MoeLite": {k: v for k, v in _LATENT.items() if k != "first_k_dense_replace"},
    "Dots1": {
        **_NARROW,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "GptOss": {
        "intermediate_size": 32,
        "num_local_experts": 6,
        "head_dim": 16,
        "sliding_window": 20,
        "swiglu_limit": 1.5,  # which these values reach
    },
    "SolarOpen": {**_NARROW, "head_dim": 16, "n_routed_experts": 8},
    "MiniMaxM2": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_local_experts": 6,
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "Ernie4_5_Moe": {**_NARROW, "moe_num_experts": 6, "tie_word_embeddings": False},
    "GraniteMoe": {"intermediate_size": 32, "num_local_experts": 6, "attention_multiplier": 0.25},
    "GraniteMoeShared": {
        "intermediate_size": 32,
        "num_local_experts": 6,
        "shared_intermediate_size": 48,
        "attention_multiplier": 0.25,
    },
    "GraniteMoeHybrid": {
        "intermediate_size": 32,
        "num_local_experts": 6,
        "shared_intermediate_size": 48,
        "attention_multiplier": 0.25,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "layer_types": ["mamba", "attention"],
    },
    "Jamba": {"num_experts": 6, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 0},
    "KimiLinear": {
        "pad_token_id": None,
        **{k: v for k, v in _LATENT.items() if k != "n_routed_experts"},
        "num_experts": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention"],
        "rms_norm_eps": 1e-2,  # as of _DELTA
    },
    "NemotronH": {
        **_NARROW,
        "head_dim": 16,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "layer_norm_epsilon": 1e-2,  # as of _DELTA
    },
    "HYV3": {**_NARROW, "head_dim": 16, "num_experts": 6},
    "ExaoneMoe": {**_NARROW, "num_experts": 8, "sliding_window": 20, "sliding_window_pattern": 2},
    "HunYuanMoEV1": {"intermediate_size": 32, "head_dim": 16, "num_experts": 6},
    "SarvamMoE": {**_NARROW, "head_dim": 16, "n_routed_experts": 8, "pad_token_id": None},
    "Qwen3VLMoe": {**_NARROW, "head_dim": 16, "num_experts": 6},
    "Glm4vMoe": {**_NARROW, "head_dim": 16, "n_routed_experts": 8},
    "SarvamMLA": {**_LATENT, "q_lora_rank": None},
    "Mistral4": {**_LATENT, "n_group": 4, "topk_group": 2},
    "Mistral3": {**_LATENT, "model_type": "mistral4"},
    "Kimi_K25": {**_LATENT, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
    "LongcatFlash": {
        **{
            k: v
            for k, v in _LATENT.items()
            if k not in ("n_shared_experts", "first_k_dense_replace")
        },
        "num_hidden_layers": 4,  # two layers of two
        "head_dim": 8,  # of what is rotated
        "num_experts_per_tok": 3,
        "zero_expert_num": 4,
    },
    "Dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "DeepseekV4": {
        "moe_intermediate_size": 32,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "sliding_window": 20,
        "layer_types": [
            *("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention")
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "num_hash_layers": 1,
        "swiglu_limit": 1.5,  # which these values reach
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 12,
        "index_topk": 12,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "eos_token_id": 0,
    },
    "DeepseekV32": {**_LATENT, **_INDEXER, "n_group": 4, "topk_group": 2},
    "GlmMoeDsa": {**_LATENT, **_INDEXER},
    "Afmoe": {**_NARROW, "head_dim": 16, "num_experts": 6, "sliding_window": 20},
    "Cohere2Moe": {
        "intermediate_size": 32,
        "head_dim": 16,
        "num_experts": 6,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "num_shared_experts": 2,
        "logit_scale": 0.75,
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "Llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
        "num_local_experts": 6,
        "attention_chunk_size": 64,
        "floor_scale": 20,
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "Gemma4": {
        **_NARROW,
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "eos_token_id": 0,
    },
    "Mellum": {
        **_NARROW,
        "head_dim": 16,
        "num_experts": 6,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Laguna": {
        **_NARROW,
        "head_dim": 16,
        "num_experts": 6,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6, 4],
    },
    "GraniteMoeSWA": {
        "intermediate_size": 32,
        "num_local_experts": 6,
        "shared_intermediate_size": 48,
        "attention_multiplier": 0.25,
        "sliding_window": 20,
        "num_hidden_layers": 3,
    },
    "FlexOlmo": {"intermediate_size": 32, "num_experts": 6, "pad_token_id": None},
    "AXK1": {**_LATENT, "n_group": 4, "topk_group": 2},
    "Flint": {
        **_NARROW,
        "head_dim": 16,
        "num_experts": 6,
        "shared_expert_intermediate_size": 48,
        "sliding_window": 20,
    },
    "Lfm2Moe": {
        **_NARROW,
        "num_experts": 6,
        "layer_types": ["conv", "full_attention"],
        "norm_eps": 1e-3,  # a small value's rounding is not scaled by a norm
    },
    "AriaText": {"intermediate_size": 32, "moe_num_experts": 6},
    "Qwen3Next": {**_NARROW, **_DELTA, "num_experts": 6},
    "Qwen3_5Moe": {**_NARROW, **_DELTA, "num_experts": 6},
    "Qwen3_5MoeText": {**_NARROW, **_DELTA, "num_experts": 6},
}
"""Family, as in transformers' class names → what its random models have over SMALL."""


_LESS_ONE = ("Qwen3Next", "Qwen3_5Moe", "Qwen3_5MoeText")
"""Families whose norms add one to their weights."""

_VISION: dict[str, dict[str, Any]] = {
    "Qwen3VLMoe": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 4,
    },
    "Glm4vMoe": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
    "Mistral3": {
        "model_type": "pixtral",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "image_size": 32,
    },
    "Qwen3_5Moe": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 4,
    },
    "Kimi_K25": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    },
}
"""Wrapper → its vision_config."""


def architecture_of(family: str) -> str:
    """architectures' entry in config.json."""
    return f"{family}For{'ConditionalGeneration' if family in _VISION else 'CausalLM'}"


def _classes(family: str) -> tuple[Any, Any]:
    """transformers' classes of config and model."""
    import transformers

    if family == "SarvamMoE":  # a config class alone
        return transformers.SarvamMoEConfig, transformers.Glm4MoeForCausalLM
    if family == "SarvamMLA":
        return transformers.SarvamMLAConfig, transformers.DeepseekV3ForCausalLM
    if family == "Qwen3_5MoeText":
        return transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM
    if family in ("Gemma4", "Llama4"):  # their Config is that of images and text
        text = getattr(transformers, f"{family}TextConfig")
        return text, getattr(transformers, f"{family}ForCausalLM")
    return getattr(transformers, f"{family}Config"), getattr(transformers, architecture_of(family))


def random_model(family: str = "Qwen3Moe", seed: int = 0, **config: Any):
    """A float32 model of transformers, of a family in OF_FAMILY, whose every parameter is random,
    biases and norms included.

    config: the fields over SMALL and OF_FAMILY. Weights are scaled so that each layer's part of the
    residual stream and the logits have a standard deviation of about 1 to 3: at transformers' own
    0.02 most errors would hide below the tolerance.
    """
    import torch

    # With more, torch's threads spin against XLA's: seconds for products of microseconds.
    torch.set_num_threads(1)
    of_family, of_model = _classes(family)
    fields = {**SMALL, **OF_FAMILY[family], **config}
    if family in _VISION:
        tied = fields.pop("tie_word_embeddings", False)
        vision = dict(_VISION[family])
        wrapped = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
        fields = wrapped | {"projection_hidden_size": 16} if family == "Kimi_K25" else wrapped
    model = of_model._from_config(
        of_family(**fields),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    corrections = [
        b
        for b in model.named_buffers()
        if b[0].endswith(("correction_bias", "expert_bias", "layer_scalar"))
    ]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight") and parameter.dim() == 1:
                less_one = family in _LESS_ONE and "linear_attn" not in name
                parameter.copy_(0.3 * noise if less_one else 1 + 0.3 * noise)
            elif name.endswith("layer_scalar"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("correction_bias"):
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:  # matrices and stacks of them, [..., out, in]; the embedding may be the head too
                parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # a token's experts are different ones
                scores = torch.rand(len(table), model.config.n_routed_experts, generator=generator)
                table.copy_(scores.argsort(dim=1)[:, : table.shape[1]])
    return model.eval()


def save(model: Any, directory: Path, *, older_keys: bool = False, **options: Any) -> Path:
    """Writes the checkpoint with save_pretrained. older_keys: config.json under the names that
    transformers 4 wrote. options: save_pretrained's, such as max_shard_size."""
    model.save_pretrained(directory, **options)
    if model.config.model_type == "kimi_k25":  # save_pretrained writes names that no one reads
        _save_as_published(model, directory)
    if model.config.model_type == "kimi_linear":  # save_pretrained names dense layers as sparse
        _rename_dense_layers(directory / "model.safetensors")
    if older_keys:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        # "type" is the oldest name of the key; newer files say "rope_type".
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = None if rope["type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        if model.config.model_type == "qwen3_moe":
            config["num_experts"] = config.pop("num_local_experts")
        path.write_text(json.dumps(config))
    return directory


_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


def separate_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors, each expert's matrices by themselves."""
    separate = {}
    for name, tensor in tensors.items():
        if (found := _STACKED.fullmatch(name)) is None:
            separate[name] = tensor
            continue
        matrices = ("gate", "up") if found[2] == "gate_up" else ("down",)
        for expert, each in enumerate(tensor):
            for matrix, part in zip(matrices, each.chunk(len(matrices)), strict=True):
                separate[f"{found[1]}.{expert}.{matrix}_proj.weight"] = part.contiguous()
    return separate


def stack_experts(tensors: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The reverse of separate_experts, for a checkpoint with these names."""
    import torch

    stacked = {}
    for name in names:
        if (found := _STACKED.fullmatch(name)) is None:
            stacked[name] = tensors[name]
            continue
        matrices = ("gate", "up") if found[2] == "gate_up" else ("down",)
        parts = [
            torch.stack([tensors[e] for e in each])
            for m in matrices
            if (each := _of_experts(tensors, f"{found[1]}.", f".{m}_proj.weight"))
        ]
        stacked[name] = torch.cat(parts, dim=1)
    return stacked


def _of_experts(tensors: dict[str, Any], prefix: str, suffix: str) -> list[str]:
    names = (f"{prefix}{expert}{suffix}" for expert in itertools.count())
    return list(itertools.takewhile(tensors.__contains__, names))


def _save_as_published(model: Any, directory: Path) -> None:
    from safetensors.torch import save_file

    published = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.": "",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix = next(p for p in published if name.startswith(p))
        tensors[published[prefix] + name.removeprefix(prefix)] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")


def _rename_dense_layers(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    of_dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    save_file({of_dense.sub("mlp.", name): t for name, t in load_file(path).items()}, path)


@contextlib.contextmanager
def _in_float64(model: Any) -> Iterator[None]:
    """transformers' model in float64 where it keeps a state: in float32 its two forms of the gated
    delta rule differ from each other by more than moejax does from either of them. LongCat's scores
    have factors: its model in float32 is 2e-4 off from that in float64."""
    import torch

    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" not in kinds and model.config.model_type != "longcat_flash":
        yield
        return
    float32, to_float = torch.float32, torch.Tensor.float
    model.double()
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = float32, to_float  # type: ignore
        model.float()


def logprobs(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """log p(next token) after every token of the sequence, float64[n, V], without a cache."""
    import torch

    with torch.no_grad(), _in_float64(model):
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()


def assert_agrees(path: Path, model: Any, **options: Any) -> dict[str, Any]:
    """A run's greedy tokens are those of transformers' model, and the log-probabilities that each
    was chosen from, of the whole vocabulary, differ by less than 1e-4. Returns the run's stats."""
    vocabulary = model.config.get_text_config().vocab_size
    prompts, logits = [[5, 6, 7, 30], [token % vocabulary for token in range(20, 90)]], {}

    def record(step: Any) -> None:
        for row, request in step.sampled():
            logits.setdefault(request.request_id, []).append(np.asarray(step.output.logits)[row])

    limits = {"max_model_len": 128, "max_num_seqs": 4, "progress": False, "dtype": "float32"}
    with LLM(path, **limits | options) as llm:
        llm.engine.listener = record
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        outputs, stats = llm.generate(prompts, params), llm.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        wanted = logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == wanted.argmax(-1).tolist()
        found = np.stack(logits[output.request_id]).astype(np.float64)
        found -= np.log(np.exp(found).sum(-1, keepdims=True))
        assert np.abs(found - wanted).max() < 1e-4
    return stats
