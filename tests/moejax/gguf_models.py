"""Small GGUF files, written by the gguf package as llama.cpp's converter writes them, and the same
models dequantized by that package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


ARCHITECTURES: dict[str, tuple[gguf.MODEL_ARCH, Keys]] = {
    "Qwen3Moe": (gguf.MODEL_ARCH.QWEN3MOE, _qwen3),
    "Qwen2Moe": (gguf.MODEL_ARCH.QWEN2MOE, _qwen2),
    "Olmoe": (gguf.MODEL_ARCH.OLMOE, lambda writer, config: None),
    "Mixtral": (gguf.MODEL_ARCH.LLAMA, _llama),
    "Qwen3Next": (gguf.MODEL_ARCH.QWEN3NEXT, _delta),
    "Qwen3_5MoeText": (gguf.MODEL_ARCH.QWEN35MOE, _qwen35),
}
"""Family → its architecture in GGUF."""

_MADE_AS = {"IQ4_NL": "Q4_0"}
"""Types that the package only dequantizes → one whose blocks have the same parts."""

_SUPERS = {"Q4_K": (0, 236, 2, 31), "Q5_K": (0, 488, 2, 31), "Q6_K": (208, 1370)}
"""Types that the package only dequantizes → where in a block its float16 numbers are, each with
what weights of the size 1 divide by there."""


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
    if family == "Mixtral" and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}[found[1]]
        return {name: _permute(x, config[heads])}
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
    experts: str = "Q8_0",
    others: str = "Q8_0",
    down: str | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split: int = 0,
    **config: Any,
) -> Any:
    """Writes a GGUF file, and beside it, as a directory with "-dense" in its name, the model that
    it dequantizes to. Returns transformers' model of that.

    - `experts`, `others`: the types of experts and of other matrices, where their rows are whole
      blocks. Routers and vectors are F32.
    - `down`: the type of the experts' down, if it is another one.
    - `edit`: adds to the metadata.
    - `split`: tensors of a file, if there are several.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = random_model(family, **config)
    plain = path.with_name(f"{path.stem}-dense")
    model.save_pretrained(plain)
    fields = json.loads((plain / "config.json").read_text())
    whole = load_file(plain / "model.safetensors")
    stored = {n: t.float().numpy().copy() for n, t in separate_experts(whole).items()}
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
            target = names.get_name(part, (".weight", ".bias"))
            if found:
                matrix = {"w1": "gate", "w2": "down", "w3": "up"}.get(found[2], found[2][:-5])
                target = f"blk.{found[1]}.ffn_{matrix}_exps.weight"
            assert target, part
            kind = others if found is None else (down or experts) if "down" in target else experts
            type_ = _type_of(target, values, kind)
            if type_ in _SUPERS:
                data = _random_blocks(values, type_)
            else:
                data = quantize(values, gguf.GGMLQuantizationType[_MADE_AS.get(type_, type_)])
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
    save_file(stack_experts(dense, whole), plain / "model.safetensors", {"format": "pt"})
    return (
        type(model)
        .from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )
