"""Small checkpoints in the formats in which others publish quantized models, written by their own
libraries where these can, and the same models dequantized by them. torch is imported inside: see
tests/conftest.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.moejax.transformers_models import random_model, separate_experts, stack_experts

Tensors = dict[str, Any]


def quantize_fp8(weight: Any, dtype: str = "float32") -> tuple[Tensors, Any]:
    """DeepSeek's blocks, here of 32 rows and 16 columns, with a short last one where they end.

    - `dtype`: of the scales.
    """
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 16, 0, -rows % 32))
    blocks = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 16, 16)
    scales = (blocks.abs().amax((1, 3)) / 448).to(getattr(torch, dtype))
    codes = (blocks / scales.float()[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn).contiguous()
    return {"weight": codes, "weight_scale_inv": scales}, dequantize_fp8(codes, scales, [32, 16])


def dequantize_fp8(codes: Any, scales: Any, block: list[int]) -> Any:
    """float32: what compressed_tensors and, where blocks are whole, transformers make of codes with
    a scale for each block [out, in]."""
    import torch
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = {"m.weight": codes, "m.weight_scale_inv": scales.float()}
    dequantizer = FP8BlockDequantizer(weight_block_size=block, dtype=torch.float32)
    found = dequantizer.process(tensors)["m.weight"].contiguous()
    if not any(length % size for length, size in zip(codes.shape, block, strict=True)):
        other = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        assert torch.equal(found, other)
    return found


def _compressed(format_: str, **weights: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """What the compressed-tensors library writes and reads."""

    def quantize(weight: Any) -> tuple[Tensors, Any]:
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        compressor = BaseCompressor.get_value_from_registry(format_)
        size = weights.get("group_size") or weight.shape[1]
        zeros: Tensors = {}
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
        if "nvfp4" in format_:
            zeros["weight_global_scale"] = (448 / scales.max()).reshape(1).float()
            scales = (scales * zeros["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        if not weights.get("symmetric", True):
            least = weight.reshape(len(weight), -1, size).amin(2)
            half = 1 << (weights["num_bits"] - 1)
            zeros["weight_zero_point"] = (-half - least / scales).round().clamp(-half, half - 1)
            zeros["weight_zero_point"] = zeros["weight_zero_point"].to(torch.int8)
        made = {"weight": weight.to(torch.bfloat16), "weight_scale": scales, **zeros}
        stored = compressor.compress(made, scheme)
        again = compressor.decompress(dict(stored), scheme)["weight"].float()
        return {name: tensor.contiguous() for name, tensor in stored.items()}, again

    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    config = {"quant_method": "compressed-tensors", "format": format_}
    return {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}, quantize


def _codes(weight: Any, bits: int, size: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Integer codes [in, out], float16 scales and zeros [groups, out], and what they mean, in the
    dtype of the scales: (codes − zeros)·scales."""
    import torch

    groups = weight.T.reshape(-1, size, len(weight))
    low, high, most = groups.amin(1), groups.amax(1), (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(1) * 2 / most).half()
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        scales = ((high - low) / most).half()
        zeros = (-low / scales).round().clamp(0, most).half()
    codes = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, most).to(torch.int64)
    dense = (codes - zeros[:, None].to(torch.int64)).half() * scales[:, None]
    return (
        codes.reshape(weight.T.shape),
        (scales, zeros.to(torch.int64)),
        dense.reshape(weight.T.shape).T.float().contiguous(),
    )


def pack_words(codes: Any, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """int32: codes along the last axis, those at `order` of each word from its lowest bits on."""
    import torch

    per = 32 // bits
    words = codes.reshape(*codes.shape[:-1], -1, per)[..., list(order[:per])]
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.uint32).view(torch.int32)


def _awq(size: int) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    def quantize(weight: Any) -> tuple[Tensors, Any]:
        codes, (scales, zeros), dense = _codes(weight, 4, size, symmetric=False)
        packed = (pack_words(each, 4, (0, 2, 4, 6, 1, 3, 5, 7)) for each in (codes, zeros))
        return dict(zip(("qweight", "qzeros", "scales"), (*packed, scales), strict=True)), dense

    table = {"bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return {"quant_method": "awq", **table}, quantize


def _gptq(bits: int, size: int, **config: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    def quantize(weight: Any) -> tuple[Tensors, Any]:
        import torch

        width = size if size > 0 else weight.shape[1]
        codes, (scales, zeros), dense = _codes(weight, bits, width, config["sym"])
        packed = pack_words(zeros, bits).view(torch.uint32).to(torch.int64)
        if config.get("checkpoint_format") != "gptq_v2":
            packed -= 0x11111111 if bits == 4 else 0x01010101
        return {
            "qweight": pack_words(codes.T, bits).T.contiguous(),
            "qzeros": (packed % (1 << 32)).to(torch.uint32).view(torch.int32),
            "scales": scales,
            "g_idx": (torch.arange(weight.shape[1]) // width).to(torch.int32),
        }, dense

    table = {"bits": bits, "group_size": size, "desc_act": False, **config}
    return {"quant_method": "gptq", **table}, quantize


def _nvfp4(weight: Any) -> tuple[Tensors, Any]:
    """As NVIDIA's modelopt: a value is a code times (scale times the matrix's)."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = weight.reshape(len(weight), -1, 16)
    whole = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(2) / (6 * whole)).to(torch.float8_e4m3fn)
    each = (scales.float() * whole)[..., None]
    codes = ((groups / each)[..., None] - values).abs().argmin(-1).to(torch.uint8)
    dense = (values[codes.long()] * each).reshape(weight.shape)
    codes = codes.reshape(weight.shape)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    return {**stored, "input_scale": torch.ones(())}, dense


_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 16],
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Any], tuple[Tensors, Any]]]] = {
    "fp8-16x32-f32": (_BLOCKS, quantize_fp8),
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
    "fp4-16-e4m3divf32": _compressed(
        "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
    ),
    "int4-16-bf16-zero": _compressed(
        "pack-quantized",
        type="int",
        num_bits=4,
        strategy="group",
        group_size=16,
        symmetric=False,
    ),
    "int8-channel-bf16-zero": _compressed(
        "int-quantized", type="int", num_bits=8, strategy="channel", symmetric=False
    ),
    "awq:int4-32-f16-zero": _awq(32),
    "gptq:int4-16-f16": _gptq(4, 16, sym=True),
    "gptq:int4-32-f16-zero": _gptq(4, 32, sym=False),
    "gptq_v2:int4-16-f16-zero": _gptq(4, 16, sym=False, checkpoint_format="gptq_v2"),
    "gptq:int8-channel-f16": _gptq(8, -1, sym=True),
    "modelopt:fp4-16-e4m3xf32": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
}
"""Record format, after who writes it where several do → what config.json says, and (a matrix,
float32) → its tensors, and what its authors' library dequantizes them to. The packers of AWQ, GPTQ
and modelopt follow the texts of AutoAWQ, GPTQModel and modelopt, whose own need a GPU; what
compressed_tensors reads in files of AWQ and modelopt, test_quantized.py compares."""

COMBINATIONS = {
    "bf16:fp8-16x32-f32": (_BLOCKS, partial(quantize_fp8, dtype="bfloat16")),
    "e8m0:fp8-16x32-f32": (_BLOCKS, partial(quantize_fp8, dtype="float8_e8m0fnu")),
    "int:int8-16-bf16": _compressed(
        "int-quantized", type="int", num_bits=8, strategy="group", group_size=16
    ),
    "int:int8-16-bf16-zero": _compressed(
        "int-quantized", type="int", num_bits=8, strategy="group", group_size=16, symmetric=False
    ),
    "pack:int8-16-bf16-zero": _compressed(
        "pack-quantized", type="int", num_bits=8, strategy="group", group_size=16, symmetric=False
    ),
    "pack:int8-channel-bf16": _compressed(
        "pack-quantized", type="int", num_bits=8, strategy="channel"
    ),
    "pack:int4-channel-bf16-zero": _compressed(
        "pack-quantized", type="int", num_bits=4, strategy="channel", symmetric=False
    ),
    "gptq:int8-16-f16": _gptq(8, 16, sym=True),
    "gptq:int8-16-f16-zero": _gptq(8, 16, sym=False),
    "gptq_v2:int8-16-f16-zero": _gptq(8, 16, sym=False, checkpoint_format="gptq_v2"),
    "gptq:int4-channel-f16": _gptq(4, -1, sym=True),
}
"""The same of other groups, bits and scales, whose parts are all among FORMATS."""
WRITTEN = FORMATS | COMBINATIONS


_KEPT = ("lm_head", "embed", "norm", ".gate.weight", "expert_gate", "conv1d", "in_proj_a.")
_KEPT += ("in_proj_b", "visual")
"""Parts of names of what is not quantized, as in published files."""


def quantized_model(
    directory: Path,
    version: str | Callable[[str], str | None],
    family: str = "Qwen3Moe",
    **config: Any,
) -> Any:
    """Writes a checkpoint whose linear matrices, but for router and head, are quantized; returns
    transformers' model of what they dequantize to.

    - `version`: of WRITTEN; or a function from a matrix's name to its version, None for a matrix
      that is not quantized. All versions are then compressed-tensors'.
    """
    import torch
    from safetensors.torch import save_file

    choose = version if callable(version) else lambda name: version
    tables: dict[str, dict[str, Any]] = {}
    model = random_model(family, **config)
    model.save_pretrained(directory)
    from safetensors.torch import load_file

    whole = load_file(directory / "model.safetensors")
    tensors, dense = separate_experts(whole), {}
    for name in sorted(tensors):
        kept = any(part in name for part in _KEPT)
        if kept or (not name.endswith("_proj.weight") and ".w" not in name and "_mqa" not in name):
            continue
        if (chosen := choose(name)) is None:
            continue
        tables[chosen], quantize = WRITTEN[chosen]
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
    whole = stack_experts(separate_experts(whole) | dense, whole)
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    return (
        type(model)
        .from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )


def gpt_oss_model(directory: Path, **config: Any) -> Any:
    """Writes gpt-oss as it is published, stacked experts of random blocks in MXFP4; returns
    transformers' model of what its own function dequantizes them to."""
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, model = np.random.default_rng(0), random_model("GptOss", **config)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for layer in range(model.config.num_hidden_layers):
        for name, shape in (("gate_up_proj", (6, 64, 2)), ("down_proj", (6, 64, 1))):
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[whole]
            blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16), np.uint8))
            scales = torch.from_numpy(rng.integers(121, 126, shape, np.uint8))
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            made = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            with torch.no_grad():
                model.get_parameter(whole).copy_(made.float())
    save_file(tensors, directory / "model.safetensors")
    kept = ["model.layers.*.self_attn", "lm_head"]
    table = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))
    return model
