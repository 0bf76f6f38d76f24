"""Small checkpoints in the formats in which others publish quantized models, written by their own
libraries where these can, and the same models dequantized by them. torch is imported inside: see
tests/conftest.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.moejax.transformers_models import random_model

Tensors = dict[str, Any]


def _quantize_fp8(weight: Any) -> tuple[Tensors, Any]:
    """DeepSeek's blocks, here of 32 rows and 16 columns, with a short last one where they end."""
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 16, 0, -rows % 32))
    blocks = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 16, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    codes = codes.to(torch.float8_e4m3fn)
    each = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    return {"weight": codes.contiguous(), "weight_scale_inv": scales}, codes.float() * each


def _compressed(format_: str, **weights: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """What the compressed-tensors library writes and reads."""

    def quantize(weight: Any) -> tuple[Tensors, Any]:
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        compressor = BaseCompressor.get_value_from_registry(format_)
        size = weights.get("group_size") or weight.shape[1]
        if weights["strategy"] == "block":
            rows, size = weights["block_structure"]
            padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % rows))
            most = padded.reshape(-1, rows, weight.shape[1] // size, size).abs().amax((1, 3))
        else:
            most = weight.reshape(len(weight), -1, size).abs().amax(2)
        largest = {"fp8": 448, "fp4": 6, "int8": 127, "int4": 7}[
            f"{weights['type'].replace('float', 'fp')}{weights['num_bits']}"
        ]
        scales = (most / largest).to(torch.bfloat16)
        if "mxfp4" in format_:
            scales = 2 ** torch.floor(torch.log2(scales))
        made = {"weight": weight.to(torch.bfloat16), "weight_scale": scales}
        stored = compressor.compress(made, scheme)
        again = compressor.decompress(dict(stored), scheme)["weight"].float()
        return {name: tensor.contiguous() for name, tensor in stored.items()}, again

    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    config = {"quant_method": "compressed-tensors", "format": format_}
    return {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}, quantize


_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 16],
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Any], tuple[Tensors, Any]]]] = {
    "fp8-16x32-f32": (_BLOCKS, _quantize_fp8),
    "fp4-32-e8m0": _compressed(
        "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
    ),
    "int4-16-bf16": _compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=16
    ),
    "int4-channel-bf16": _compressed("pack-quantized", type="int", num_bits=4, strategy="channel"),
    "int8-32-bf16": _compressed(
        "pack-quantized", type="int", num_bits=8, strategy="group", group_size=32
    ),
    "int8-channel-bf16": _compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
    "fp8-channel-bf16": _compressed(
        "float-quantized", type="float", num_bits=8, strategy="channel"
    ),
    "fp8-16x32-bf16": _compressed(
        "float-quantized", type="float", num_bits=8, strategy="block", block_structure=[32, 16]
    ),
}
"""Record format → what config.json says, and (a matrix, float32) → its tensors, and what its
authors' library dequantizes them to."""


def quantized_model(
    directory: Path,
    version: str | Callable[[str], str | None],
    family: str = "Qwen3Moe",
    **config: Any,
) -> Any:
    """Writes a checkpoint whose linear matrices, but for router and head, are quantized; returns
    transformers' model of what they dequantize to.

    - `version`: of FORMATS; or a function from a matrix's name to its version, None for a matrix
      that is not quantized. All versions are then compressed-tensors'.
    """
    import torch
    from safetensors.torch import save_file

    choose = version if callable(version) else lambda name: version
    tables: dict[str, dict[str, Any]] = {}
    model = random_model(family, **config)
    model.save_pretrained(directory)
    from safetensors.torch import load_file

    tensors, dense = load_file(directory / "model.safetensors"), {}
    for name in sorted(tensors):
        kept = any(part in name for part in ("lm_head", "embed", "norm", ".gate.weight"))
        if kept or (not name.endswith("_proj.weight") and ".w" not in name and "_mqa" not in name):
            continue
        if (chosen := choose(name)) is None:
            continue
        tables[chosen], quantize = FORMATS[chosen]
        stored, dense[name] = quantize(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + part: t for part, t in stored.items()}
    assert dense, "nothing was quantized"
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    table, *others = tables.values()
    if others:
        groups = {
            f"group_{number}": each["config_groups"]["group_0"] | {"format": each["format"]}
            for number, each in enumerate(tables.values())
        }
        table = table | {"config_groups": groups, "format": "mixed-precision"}
    fields = json.loads(path.read_text()) | {"quantization_config": table}
    path.write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    plain = directory.with_name(f"{directory.name}-dense")
    model.save_pretrained(plain)
    whole = load_file(plain / "model.safetensors") | dense
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    return (
        type(model)
        .from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )
