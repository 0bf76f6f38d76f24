"""Small GGUF files, written by the gguf package as llama.cpp's converter writes them, and the same
models dequantized by that package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from tests.moejax.transformers_models import random_model, separate_experts, stack_experts

Keys = Callable[[gguf.GGUFWriter, dict[str, Any]], None]
"""Writes the keys that only this architecture has, of a config.json."""


def _qwen3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _qwen2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _llama(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def _delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _qwen2(writer, config)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    factor = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * factor))


def _qwen35(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _delta(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _routed(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What families that route as DeepSeek's have in common."""
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _dots1(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _routed(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _glm4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _dots1(writer, config)
    writer.add_rope_dimension_count(config["head_dim"] // 2)


def _deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _routed(writer, config)
    kv_rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(rotated)
    writer.add_q_lora_rank(config["q_lora_rank"]) if config["q_lora_rank"] else None
    writer.add_kv_lora_rank(kv_rank)
    writer.add_key_length(kv_rank + rotated)
    writer.add_value_length(kv_rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _ernie(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _llama(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _minimax(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["head_dim"])


ARCHITECTURES: dict[str, tuple[gguf.MODEL_ARCH, Keys]] = {
    "Qwen3Moe": (gguf.MODEL_ARCH.QWEN3MOE, _qwen3),
    "Qwen2Moe": (gguf.MODEL_ARCH.QWEN2MOE, _qwen2),
    "Olmoe": (gguf.MODEL_ARCH.OLMOE, lambda writer, config: None),
    "Mixtral": (gguf.MODEL_ARCH.LLAMA, _llama),
    "Qwen3Next": (gguf.MODEL_ARCH.QWEN3NEXT, _delta),
    "Qwen3_5MoeText": (gguf.MODEL_ARCH.QWEN35MOE, _qwen35),
    "DeepseekV2": (gguf.MODEL_ARCH.DEEPSEEK2, _deepseek),
    "DeepseekV3": (gguf.MODEL_ARCH.DEEPSEEK2, _deepseek),
    "Dots1": (gguf.MODEL_ARCH.DOTS1, _dots1),
    "Ernie4_5_Moe": (gguf.MODEL_ARCH.ERNIE4_5_MOE, _ernie),
    "Glm4Moe": (gguf.MODEL_ARCH.GLM4_MOE, _glm4),
    "GptOss": (gguf.MODEL_ARCH.GPT_OSS, _gpt_oss),
    "GraniteMoeShared": (gguf.MODEL_ARCH.GRANITE_MOE, _granite),
    "MiniMaxM2": (gguf.MODEL_ARCH.MINIMAXM2, _minimax),
}
"""Family → its architecture in GGUF."""

_MADE_AS = {"IQ4_NL": "Q4_0"}
"""Types that the package only dequantizes → one whose blocks have the same parts."""

_SUPERS = {"Q4_K": (0, 236, 2, 31), "Q5_K": (0, 488, 2, 31), "Q6_K": (208, 1370)}
"""Types that the package only dequantizes → where in a block its float16 numbers are, each with
what weights of the size 1 divide by there."""


_CONFIGS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "DeepseekV2": {"q_lora_rank": None},
    "Glm4Moe": {"n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "GptOss": {"swiglu_limit": 7.0},
    "GraniteMoeShared": {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}
"""What a family's config has that its files say, or must have because they say nothing of it."""


def _common(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[key] for key in experts if key in config))
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As LlamaModel.permute of llama.cpp's conversion/llama.py."""
    rows = weights.shape[0]
    split = weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def _tiled(weights: np.ndarray, axis: int, config: dict[str, Any], width: int) -> np.ndarray:
    """As _LinearAttentionVReorderBase of llama.cpp's conversion/qwen.py: the first value head of
    each key head, then the second of each."""
    heads = config["linear_num_key_heads"], -1, width
    whole = weights.shape
    split = weights.reshape(*whole[:axis], *heads, *whole[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(whole)


def _reordered(family: str, config: dict[str, Any], name: str, x: np.ndarray) -> dict[str, Any]:
    """The tensors that llama.cpp's converter makes of one, by their names before its renaming.

    - `x`: values, or where they are.
    """
    if family in ("Mixtral", "GraniteMoeShared") and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}[found[1]]
        return {name: _permute(x, config[heads])}
    if (split := _split(name, x, config)) is not None:
        return split
    if "linear_attn." not in name:
        return {name: x}
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width = config["linear_value_head_dim"]
    if name.endswith("in_proj_qkvz.weight"):
        each = x.reshape(config["linear_num_key_heads"], -1, x.shape[-1])
        key = config["linear_key_head_dim"]
        parts = np.split(each, [key, 2 * key, key + each.shape[1] // 2], axis=1)
        q, k, v, gate = (part.reshape(-1, x.shape[-1]) for part in parts)
        qkv = np.concatenate([q, k, v])
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): gate}
    if "conv1d" in name:
        x = x.squeeze(1)
    if family == "Qwen3_5MoeText":
        if "in_proj_qkv" in name or "conv1d" in name:
            x = np.concatenate([x[: 2 * keys], _tiled(x[2 * keys :], 0, config, width)])
        elif "out_proj" in name:
            x = _tiled(x, 1, config, width)
        elif "linear_attn.norm" not in name:
            x = _tiled(x, 0, config, width if "in_proj_z" in name else 1)
    return {name.replace(".dt_bias", ".dt_proj.bias"): x}


def _split(name: str, x: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """What the converter makes of up-projections of latent KV, and of gate and up that are one
    tensor, by the names of the file; None: of others."""
    layer = name.split(".")[2] if "layers" in name else ""
    if name.endswith("kv_b_proj.weight"):
        nope = config["qk_nope_head_dim"]
        rows = x.reshape(config["num_attention_heads"], -1, x.shape[-1])
        keys, values = rows[:, :nope].swapaxes(1, 2), rows[:, nope:]
        return {f"blk.{layer}.attn_k_b.weight": keys, f"blk.{layer}.attn_v_b.weight": values}
    if found := re.search(r"(shared_mlp|sparse_moe)\.(in|out)put_linear", name):
        end = "shexp" if found[1] == "shared_mlp" else "exps"
        if found[2] == "out":
            return {f"blk.{layer}.ffn_down_{end}.weight": x}
        gate, up = np.split(x, 2, axis=-2)
        return {f"blk.{layer}.ffn_{m}_{end}.weight": w for m, w in (("gate", gate), ("up", up))}
    if found := re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name):  # gpt-oss
        end = ".bias" if found[2] else ".weight"
        turned = x if found[2] else x.swapaxes(1, 2)
        if found[1] == "down":
            return {f"blk.{layer}.ffn_down_exps{end}": turned}
        return {
            f"blk.{layer}.ffn_{m}_exps{end}": turned[:, i::2] for i, m in enumerate(("gate", "up"))
        }
    return None


def _changed(family: str, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the converter does to values, and its reverse."""
    if name.endswith(".A_log"):
        return lambda x: -np.exp(x), lambda x: np.log(-x)
    less_one = family in ("Qwen3Next", "Qwen3_5MoeText") and "linear_attn" not in name
    if less_one and name.endswith("norm.weight"):
        return lambda x: x + 1, lambda x: x - 1
    return lambda x: x, lambda x: x


def _type_of(name: str, weights: np.ndarray, wanted: str) -> str:
    """As llama.cpp falls back where rows are no whole blocks."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]]
    plain = weights.ndim < 2 or "ffn_gate_inp" in name or weights.shape[-1] % block
    plain = plain or name.endswith(".bias")
    return "F32" if plain else wanted


def _random_blocks(weights: np.ndarray, type_: str) -> np.ndarray:
    """Blocks in which every bit is random, of weights that are about as large."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    random = np.random.default_rng(weights.view(np.uint32).reshape(-1)[:4])
    blocks = random.integers(0, 256, (len(weights), weights.shape[1] // block, nbytes), np.uint8)
    places = _SUPERS[type_]
    for place, over in zip(places[::2], places[1::2], strict=True):
        sizes = random.uniform(0.5, 1, (*blocks.shape[:2], 1)) * weights.std() / over
        blocks[..., place : place + 2] = sizes.astype("<f2").view(np.uint8)
    return blocks.reshape(len(weights), -1)


def gguf_model(
    path: Path,
    family: str = "Qwen3Moe",
    experts: str | Sequence[str] = "Q8_0",
    others: str = "Q8_0",
    down: str | Sequence[str] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split: int = 0,
    **config: Any,
) -> Any:
    """Writes a GGUF file, and beside it, as a directory with "-dense" in its name, the model that
    it dequantizes to. Returns transformers' model of that.

    - `experts`, `others`: the types of experts, of all or by layer, and of other matrices, where
      their rows are whole blocks. Routers and vectors are F32.
    - `down`: the type of the experts' down, if it is another one.
    - `edit`: adds to the metadata.
    - `split`: tensors of a file, if there are several.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = random_model(family, **_CONFIGS.get(family, {}), **config)
    plain = path.with_name(f"{path.stem}-dense")
    model.save_pretrained(plain)
    fields = json.loads((plain / "config.json").read_text())
    whole = load_file(plain / "model.safetensors")
    separate = whole if family == "GptOss" else separate_experts(whole)
    stored = {n: t.float().numpy().copy() for n, t in separate.items()}
    architecture, own_keys = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(
        path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split, small_first_shard=False
    )
    _common(writer, fields)
    own_keys(writer, fields)
    edit(writer)
    names = gguf.get_tensor_name_map(architecture, fields["num_hidden_layers"])
    stacks: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in sorted(stored, key=lambda n: [int(p) if p.isdigit() else p for p in n.split(".")]):
        found = re.fullmatch(r"model\.layers\.(\d+)\..*experts\.\d+\.(\w+)\.weight", name)
        order = np.arange(stored[name].size).reshape(stored[name].shape)
        change, restore = _changed(family, name)
        made = _reordered(family, fields, name, change(stored[name]))
        places = _reordered(family, fields, name, order)
        for part, values in made.items():
            stem = part.replace("_correction_bias", "_correction.bias")
            target = names.get_name(stem, (".weight", ".bias"))
            if stem.endswith(".sinks"):
                target = f"{target}.weight"
            if found:
                matrix = {"w1": "gate", "w2": "down", "w3": "up"}.get(found[2], found[2][:-5])
                target = f"blk.{found[1]}.ffn_{matrix}_exps.weight"
            assert target, part
            kind = (down or experts) if "down" in target else experts
            kind = kind if "_exps" in target else others
            kind = kind if isinstance(kind, str) else kind[int(target.split(".")[1])]
            type_ = _type_of(target, values, kind)
            if type_ in _SUPERS:
                data = _random_blocks(values, type_)
            else:
                data = quantize(
                    np.ascontiguousarray(values),
                    gguf.GGMLQuantizationType[_MADE_AS.get(type_, type_)],
                )
            decoded = dequantize(data, gguf.GGMLQuantizationType[type_])
            np.put(stored[name], places[part], restore(decoded))
            if found:
                stacks.setdefault((target, type_), []).append(data)
                continue
            writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType[type_])
    for (target, type_), each in stacks.items():
        writer.add_tensor(target, np.stack(each), raw_dtype=gguf.GGMLQuantizationType[type_])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dense = {name: torch.from_numpy(t) for name, t in stored.items()}
    dense = dense if family == "GptOss" else stack_experts(dense, whole)
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    return (
        type(model)
        .from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )
