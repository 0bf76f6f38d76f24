"""Checkpoints that others quantized: their codes are paged, and mean what their libraries say."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import shutil
import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.memory.budget import format_bytes
from host_offload.policies.precision.precision_names import CHECKPOINT
from host_offload.versions.encoders import encode
from host_offload.versions.quantized import QuantizedMatrix, numbers_dtype
from host_offload.versions.quantizers import rtn
from moejax import LLM, SamplingParams
from moejax.checkpoints import shared_memory
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.own import read_expert
from moejax.checkpoints.shards import INDEX, SINGLE
from moejax.checkpoints.versions import with_versions
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.models.gguf_header import read_gguf
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from moejax.start.report.model_info import read_headers
from pallas_kernels.records import decode
from pallas_kernels.records.format import encoding_of
from tests.moejax.gguf_models import gguf_model
from tests.moejax.quantized_models import (
    COMBINATIONS,
    FORMATS,
    WRITTEN,
    dequantize_fp8,
    gpt_oss_model,
    pack_words,
    quantized_model,
)
from tests.moejax.transformers_models import assert_agrees, random_model

pytestmark = pytest.mark.torch
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 6, 7, 30], list(range(20, 90))]
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "progress": False}
FAMILIES = ("Qwen3Moe", "DeepseekV3", "Mixtral")
FP8, AWQ, GPTQ = "fp8-16x32-f32", "awq:int4-32-f16-zero", "gptq:int4-16-f16"
CASES = [(version, family) for version in FORMATS for family in FAMILIES]
CASES += [(FP8, "Qwen3Next"), (FP8, "Qwen3_5Moe"), (FP8, "NemotronH")]
CASES += [("fp4-16-e4m3divf32", "NemotronH"), ("modelopt:fp4-16-e4m3xf32", "NemotronH")]
IN_CI = [CASES[0], (FP8, "NemotronH"), *((v, "Qwen3Moe") for v in ("fp4-32-e8m0", AWQ, GPTQ))]
"""The first one in the quick suite too; what a record of each format means is tested below."""
WHOLE_GROUPS = {"DeepseekV3": {"q_lora_rank": 32, "v_head_dim": 16}}
"""Widths that groups divide, without which nobody writes them: FP8's blocks may be cut off."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("quantized")


def run(path, **options):
    with LLM(path, **{"dtype": "float32", **LIMITS, **options}) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*o.logprobs]) for o in outputs]


@functools.cache
def at_rest(path, ops, dtype="float32"):
    return run(path, ops=ops, dtype=dtype)[1]


@pytest.mark.parametrize(
    ("version", "family"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (n > 0) + [pytest.mark.nightly] * (case not in IN_CI)
        )
        for n, case in enumerate(CASES)
    ],
)
def test_tokens_and_logits_are_those_of_the_dequantized_model(version, family, directory):
    path = directory / f"{version}-{family}"
    config = {} if version == FP8 else WHOLE_GROUPS.get(family, {})
    model = quantized_model(path, version, family, **config)
    stats = assert_agrees(path, model)
    assert stats["precision"]["versions"] == [version.partition(":")[2] or version]


def differ_by_matrix(name):
    return {"gate_proj": "int8-32-bf16", "up_proj": "int4-16-bf16"}.get(
        name.split(".")[-2], "int8-channel-bf16"
    )


def differ_by_expert(name):
    return "int8-32-bf16" if "experts.2." in name else "int4-16-bf16"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("choose", "versions"),
    [
        (differ_by_matrix, ["int8-32-bf16+int4-16-bf16+int8-channel-bf16"]),
        (differ_by_expert, ["dense"]),
    ],
)
def test_formats_may_differ_by_matrix_and_by_expert(choose, versions, tmp_path):
    model = quantized_model(tmp_path / "model", choose)
    stats = assert_agrees(tmp_path / "model", model, expert_budget="50%")
    assert stats["precision"]["versions"] == versions


OPTIONS = {
    "paged": {"expert_budget": "30%"},
    "read through": {"expert_budget": "0"},
    "host": {"driver": "host", "expert_budget": "50%"},
    "stream": {"driver": "stream", "ops": "xla"},
    "prefetch": {"prefetch": "random", "expert_budget": "50%"},
    "queue": {"transfers": "queue", "prefetch": "random", "expert_budget": "50%"},
    "native stream": {"driver": "stream"},
    "placement": {"driver": "host", "placement": "greedy", "expert_budget": "30%"},
    "eviction": {"eviction": "lfu", "expert_budget": "30%"},
    "bfloat16": {"dtype": "bfloat16", "eviction": "lfru", "expert_budget": "30%"},
}
ZERO, NVFP4, MXFP4 = "int4-16-bf16-zero", "fp4-16-e4m3divf32", "fp4-32-e8m0"
MODELOPT = "modelopt:fp4-16-e4m3xf32"
GPT_OSS = "gpt-oss"
_WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8}
GGUF: dict[str, dict[str, Any]] = {
    **{f"{type_}.gguf": {"experts": type_} for type_ in ("Q4_0", "Q5_0", "Q8_0")},
    "Q4_K_M.gguf": {"experts": "Q4_K", "down": "Q6_K", **_WIDE},
    "gpt-oss.gguf": {"family": "GptOss", "experts": "MXFP4"},
}
"""Name of a file → what gguf_model makes it of."""
ONE_OF_EACH = (FP8, "int4-16-bf16", ZERO, "int8-32-bf16", AWQ, GPTQ, NVFP4, MXFP4, GPT_OSS, *GGUF)


@functools.cache
def written(directory, version, layers=2):
    path = directory / f"{layers}-{version}"
    if version in GGUF:
        gguf_model(path, num_hidden_layers=layers, **GGUF[version])
    elif version == GPT_OSS:
        gpt_oss_model(path, num_hidden_layers=layers)
    else:
        quantized_model(path, version, num_hidden_layers=layers)
    return path


@pytest.fixture(scope="module")
def fp8(directory):
    return written(directory, FP8, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "options"),
    [
        pytest.param(
            version,
            options,
            id=f"{version}-{name}",
            marks=[pytest.mark.nightly]
            * (version != FP8 and (name != "eviction" or version not in ONE_OF_EACH)),
        )
        for version in (*FORMATS, GPT_OSS, *GGUF)
        for name, options in OPTIONS.items()
        if version in ONE_OF_EACH or name in ("eviction", "bfloat16")
    ],
)
def test_no_budget_driver_or_policy_changes_a_bit(version, options, directory):
    path = written(directory, version, 4)
    dtype = {"dtype": options["dtype"]} if "dtype" in options else {}
    assert run(path, **options)[1] == at_rest(path, options.get("ops", "auto"), **dtype)


@pytest.mark.slow
def test_hot_experts_stay_as_the_checkpoint_has_them(fp8, directory, tmp_path):
    high, low = at_rest(fp8, "auto"), run(fp8, precision="int4")[1]
    for value, tokens in enumerate((high, low)):
        np.save(tmp_path / "map.npy", np.full((4, 6), value, np.int8))
        plan = f"map={tmp_path / 'map.npy'},hi=checkpoint,lo=int4"
        assert run(fp8, precision=plan)[1] == tokens
    some = "random,hi=checkpoint,lo=int4,hi_share=0.5"
    converted = convert(fp8, directory / "fp8.orbax", "float32").directory
    half = run(fp8, precision=some)
    assert half[0]["precision"]["versions"] == ["fp8-16x32-f32", "int4"]
    assert half[1] not in (high, low) and run(converted, precision=some)[1] == half[1]
    moved = run(fp8, precision="dynaexq,hi=checkpoint,lo=int4,hi_share=0.3,interval=8 tokens")
    assert moved[0]["precision"]["promotions"] > 0
    with pytest.raises(UserError, match="take a lo with fewer bits"):
        run(fp8, precision=some.replace("int4", "int8"))


@pytest.mark.slow
@pytest.mark.parametrize("source", [FP8, GPTQ, AWQ, MXFP4, MODELOPT, "Q8_0"])
def test_the_low_version_is_made_from_the_decoded_weights(source, directory):
    if source in FORMATS:
        path = written(directory, source)
    else:
        path = directory / "low.gguf"
        gguf_model(path, experts=source)
    loaded = load_checkpoint(path, "float32", versions=(CHECKPOINT,))
    (own,) = loaded.store.layouts
    assert own == source.lower().rpartition(":")[2]
    kept = np.array(loaded.store.arrays[own])
    store = with_versions(loaded, (CHECKPOINT, "int2")).store
    assert [*store.layouts] == [own, "int2"]
    np.testing.assert_array_equal(np.asarray(store.arrays[own]), kept)
    plain = path.with_name(f"{path.stem}-dense")
    dense = load_checkpoint(plain, "float32").store
    weights = np.asarray(dense.arrays["dense"]).view(np.float32)
    layout, low = store.layouts["int2"], np.asarray(store.arrays["int2"])
    for layer, rows in enumerate(weights.reshape(*low.shape[:2], -1, layout.hidden)):
        wanted = np.zeros_like(low[layer])
        encode(rows, layout, rtn, wanted)
        np.testing.assert_array_equal(low[layer], wanted)
    for each in (store, dense):
        each.delete()
    options = "dynaexq,hi=checkpoint,lo=int2,hi_share=0.3,interval=8 tokens"
    stats, found = run(path, precision=options)
    assert stats["precision"]["versions"] == [own, "int2"]
    assert stats["precision"]["promotions"] > 0
    assert all(len(tokens) == 8 for tokens, _ in found)
    for tokens, chosen in found:
        for token, one in zip(tokens, chosen, strict=True):
            assert math.isfinite(one[token].logprob)


MATRICES = ("gate", "up", "down")


def choose_by_layer(name):
    if ".layers.0." in name:
        return "int8-32-bf16" if "down_proj" in name else "int4-16-bf16"
    return None if "down_proj" in name else "int8-channel-bf16"


@pytest.fixture(scope="module")
def mixed(directory):
    path = directory / "mixed"
    quantized_model(path, choose_by_layer)
    return path


CACHED = {"driver": "host", "transfers": "queue", "ops": "xla", "store": "file,host_memory=512KiB"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        FP8,
        *(pytest.param(s, marks=pytest.mark.nightly) for s in ("mixed", *ONE_OF_EACH[1:])),
    ],
)
def test_no_store_changes_a_bit(source, request, directory, monkeypatch, tmp_path):
    one = source != "mixed"
    path = written(directory, source, 4) if one else request.getfixturevalue(source)
    converted = convert(path, tmp_path / "converted", "float32").directory
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    larger = {"store": "file,host_memory=2MiB"} if source == "Q4_K_M.gguf" else {}
    cached = CACHED | larger
    for ops, cases in {
        "xla": [(path, cached | {"expert_budget": "30%"}), (converted, cached)],
        "auto": [
            (path, {"store": "shared"}),
            (converted, {"store": "file", "expert_budget": "50%"}),
            (converted, {"store": "file", "driver": "host", "expert_budget": "0"}),
        ],
    }.items():
        for each, options in cases:
            assert run(each, **options)[1] == at_rest(path, ops), (each, options)


@pytest.mark.slow
def test_formats_that_differ_by_layer_stream(directory):
    path = directory / "mixed-3"
    quantized_model(path, choose_by_layer, num_hidden_layers=3)
    for budget, ops in ((None, "auto"), ("80%", "auto"), ("80%", "xla")):
        options = {"driver": "stream", "expert_budget": budget, "ops": ops}
        assert run(path, **options)[1] == at_rest(path, ops), options
    too_small = CACHED | {"store": "file,host_memory=80KiB"}
    with pytest.raises(UserError, match=r"too small a cache .* take 351 KiB"):
        run(path, **too_small)


MIXED = ["int4-16-bf16+int4-16-bf16+int8-32-bf16", "int8-channel-bf16+int8-channel-bf16+dense"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS["paged"],
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param(OPTIONS["host"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_formats_may_differ_by_layer_and_matrix(options, mixed):
    stats, found = run(mixed, ops="xla", **options)
    assert stats["precision"]["versions"] == MIXED
    assert found == at_rest(mixed.with_name("mixed-dense"), "xla")


@pytest.mark.slow
def test_records_of_formats_that_differ_are_those_of_the_dequantized_model(mixed):
    dense = mixed.with_name("mixed-dense")
    loaded = load_checkpoint(mixed, "float32", versions=(CHECKPOINT,))
    assert [*loaded.store.layers.items()] == [(MIXED[0], (0,)), (MIXED[1], (1,))]
    whole = load_checkpoint(dense, "float32").store.arrays["dense"]
    for layer, version in enumerate(MIXED):
        fmt = loaded.store.layouts[version]
        for record, wanted in zip(loaded.store.arrays[version][0], whole[layer], strict=True):
            wanted = np.asarray(wanted).view(np.float32).reshape(-1, fmt.hidden)
            np.testing.assert_array_equal(np.asarray(decode(record, fmt)), wanted)


def experts_of(path, experts=6):
    """(layer, expert, name of a matrix without ".weight") of a checkpoint, and its tensors."""
    tensors = load_torch(path / "model.safetensors")
    for layer, expert in np.ndindex(2, experts):
        for matrix in MATRICES:
            name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj"
            yield (
                layer,
                expert,
                matrix,
                {
                    key.removeprefix(f"{name}."): tensors[key]
                    for key in tensors
                    if name + "." in key
                },
            )


def load_torch(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize(
    "version", [*FORMATS, *(pytest.param(v, marks=pytest.mark.slow) for v in COMBINATIONS)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_records_mean_what_the_library_says_and_give_the_bytes_back(version, dtype, directory):
    import torch

    path = written(directory, version)
    loaded = load_checkpoint(path, dtype, versions=(CHECKPOINT,))
    table, version = WRITTEN[version][0], version.partition(":")[2] or version
    assert [*loaded.store.arrays] == [version]
    fmt, records = loaded.store.layouts[version], np.asarray(loaded.store.arrays[version])
    dense = path.with_name(f"{path.name}-dense")
    for (layer, expert, matrix, stored), (*_, whole) in zip(
        experts_of(path), experts_of(dense), strict=True
    ):
        record, number = records[layer, expert], MATRICES.index(matrix)
        rows = slice(number * fmt.width, (number + 1) * fmt.width)
        decoded = torch.from_numpy(np.asarray(decode(record, fmt)[rows]).astype(np.float32))
        decoded = (decoded.T if matrix == "down" else decoded).contiguous()
        wanted = whole["weight"].to(getattr(torch, dtype)).float()
        assert torch.equal(decoded.view(torch.int32), wanted.contiguous().view(torch.int32))
        stored.pop("input_scale", None)  # of activations
        found = tensors_back(record, fmt, matrix, table, [*stored])
        for name, values in stored.items():
            values = values.float() if name == "weight_scale_inv" else values  # as records hold it
            values = values.reshape(values.shape or (1,)).contiguous()
            assert found[name].tobytes() == values.view(torch.uint8).numpy().tobytes(), name
    loaded.store.delete()


def library_weights(table, stored):
    """float32[out, in]: what transformers or compressed_tensors dequantize a matrix to."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter, ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    method, named = table["quant_method"], {f"m.{name}": t for name, t in stored.items()}
    if method == "fp8":
        codes, scales = stored["weight"], stored["weight_scale_inv"]
        return dequantize_fp8(codes, scales, table["weight_block_size"])
    if method == "gptq":
        return gptq_weights(table, **stored)
    format_, weights = table.get("format"), table.get("config_groups")
    weights = weights["group_0"]["weights"] if weights else None
    if method == "awq":
        format_ = "pack-quantized"
        weights = {"num_bits": 4, "symmetric": False, "strategy": "group"}
        weights["group_size"] = table["group_size"]
        named = AutoAWQConverter.from_autoawq_config(table).process(named)
    elif method == "modelopt":
        format_ = "nvfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        named = ModelOptNvfp4Converter().process(named)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(format_)
    stored = {name.removeprefix("m."): tensor for name, tensor in named.items()}
    return compressor.decompress(stored, scheme)["weight"].float()


def gptq_weights(table, qweight, qzeros, scales, g_idx):
    """As GPTQModel does it, which is not installed: BaseQuantLinear.dequantize_weight, after
    convert_gptq_v1_to_v2_format_module."""
    import torch

    bits = table["bits"]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if table.get("checkpoint_format") != "gptq_v2":
        qzeros = qzeros + (0x11111111 if bits == 4 else 0x01010101)
    zeros = (qzeros[:, :, None] >> shifts & 2**bits - 1).reshape(scales.shape)
    codes = (qweight[:, None, :] >> shifts[:, None] & 2**bits - 1).reshape(len(g_idx), -1)
    return (scales[g_idx] * (codes - zeros[g_idx])).T.float()


def matrix_of(record, fmt, matrix):
    """float32[out, in]: a matrix of an expert's record."""
    first = MATRICES.index(matrix) * fmt.width
    decoded = np.asarray(decode(np.asarray(record), fmt)[first : first + fmt.width])
    return np.ascontiguousarray(decoded.T if matrix == "down" else decoded)


def modelopt_weights(weight, weight_scale, weight_scale_2, input_scale):
    """As NVIDIA's modelopt does it, which is not installed: NVFP4QTensor.dequantize of 0.47.0
    (modelopt/torch/quantization/qtensor/nvfp4_tensor.py, lines 350 to 408). Its table has 0 for
    the code of −0."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([weight & 15, weight >> 4], -1).reshape(len(weight), -1, 16)
    scales = weight_scale.float() * weight_scale_2
    return (values[codes.long()] * scales[..., None]).reshape(len(weight), -1)


def test_modelopts_weights_with_any_number_for_the_whole_matrix(directory):
    """compressed_tensors, which divides by its inverse, agrees at powers of two alone."""
    path = written(directory, MODELOPT)
    loaded, wholes = load_checkpoint(path, "float32", versions=(CHECKPOINT,)), set()
    (records,), (fmt,) = loaded.store.arrays.values(), loaded.store.layouts.values()
    for layer, expert, matrix, stored in experts_of(path):
        found = matrix_of(records[layer, expert], fmt, matrix) + np.float32(0)
        wanted = modelopt_weights(**stored).numpy()
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
        wholes.add(float(stored["weight_scale_2"]))
    assert all(math.frexp(whole)[0] != 0.5 for whole in wholes)
    loaded.store.delete()


QUICK = (FP8, ZERO, AWQ, "gptq:int4-32-f16-zero")


@pytest.mark.parametrize(
    "version", [pytest.param(v, marks=[pytest.mark.slow] * (v not in QUICK)) for v in WRITTEN]
)
def test_weights_are_those_that_the_libraries_dequantize(version, directory, tmp_path):
    """A scale of 0 too, with which all of them make 0, or −0 of a negative code, and any zeros:
    GPTQ's, less 1, may borrow from their neighbours in a word."""
    import torch

    table, random_bytes = WRITTEN[version][0], np.random.default_rng(0)
    least = 16 if "e8m0" in version else 0  # products below 2⁻¹²⁶ are 0 to XLA

    def edit(tensors):
        for name, tensor in tensors.items():
            if UP in name and name.endswith((".weight_scale", ".scales", "_scale_inv")):
                tensor.view(torch.uint8).view(-1)[: tensor.element_size()] = least
            elif UP in name and "zero" in name and version.endswith("zero"):
                found = tensor.view(torch.uint8)
                found.copy_(torch.from_numpy(random_bytes.integers(0, 256, found.shape, np.uint8)))
            elif name.endswith("weight_scale_2"):  # which compressed_tensors divides by the inverse
                tensor.copy_(2.0 ** torch.floor(torch.log2(tensor)))

    path = changed(written(directory, version), tmp_path / "model", edit)
    loaded = load_checkpoint(path, "float32", versions=(CHECKPOINT,))
    ((_, records),) = loaded.store.arrays.items()
    (fmt,) = loaded.store.layouts.values()
    for layer, expert, matrix, stored in experts_of(path):
        found = matrix_of(records[layer, expert], fmt, matrix)
        wanted = library_weights(table, stored).contiguous().numpy()
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    loaded.store.delete()


def test_the_least_scales_of_e8m0_make_0_or_next_to_it(directory, tmp_path):
    """2⁻¹²⁷, as blocks of zeros have it, is no normal float32, and XLA may take it for 0."""
    path = changed(
        written(directory, MXFP4), tmp_path / "model", set_bits(f"{UP}.weight_scale", 0, 0)
    )
    loaded = load_checkpoint(path, "float32", versions=(CHECKPOINT,))
    fmt = loaded.store.layouts[MXFP4]
    found = np.asarray(decode(np.asarray(loaded.store.arrays[MXFP4])[1, 2], fmt))[fmt.width]
    assert (np.abs(found[:32]) <= 6 * 2.0**-127).all() and (np.abs(found[32:]) > 1e-6).any()
    loaded.store.delete()


def tensors_back(record, fmt, matrix, table, names):
    """Name → the tensor that a matrix was read from, for all its names.

    - `table`: the checkpoint's quantization_config.
    """
    method = table["quant_method"]
    codes, numbers = codes_back(record, fmt, matrix), numbers_back(record, fmt, matrix)
    scales, zeros = numbers["scales"], numbers.get("zeros")
    if method in ("awq", "gptq"):
        return words_back(codes, scales, zeros, fmt, table)
    found = {name: scales for name in names if name in ("weight_scale", "weight_scale_inv")}
    found |= {name: numbers["global"] for name in names if "global" in name or name[-2:] == "_2"}
    found["weight_shape"] = np.array(codes.shape, np.int64)
    if zeros is not None and table["format"] == "pack-quantized":
        zeros = pack_bytes(zeros.T, fmt.bits).view(np.int32).T
    elif zeros is not None:
        zeros = zeros ^ 0x80
    codes = pack_bytes(codes, fmt.bits) ^ (0x80 if table.get("format") == "int-quantized" else 0)
    return found | {"weight": codes, "weight_packed": codes, "weight_zero_point": zeros}


def pack_bytes(codes, bits):
    """uint8: codes along the last axis, two of 4 bits in one byte."""
    codes = np.ascontiguousarray(codes)
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def words_back(codes, scales, zeros, fmt, table):
    """The tensors of AWQ or GPTQ that a matrix was read from."""
    import torch

    width, bits = codes.shape[1], fmt.bits
    zeros = np.full(scales.shape, fmt.encoding.zero, np.uint8) if zeros is None else zeros
    codes, zeros = (torch.from_numpy(np.array(each.T, np.int64)) for each in (codes, zeros))
    found = {"scales": np.ascontiguousarray(scales.T)}
    if table["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = {"qweight": pack_words(codes, 4, order), "qzeros": pack_words(zeros, 4, order)}
        return found | {name: words.numpy() for name, words in packed.items()}
    found["qweight"] = pack_words(codes.T, bits).T.contiguous().numpy()
    found["qzeros"] = pack_words(zeros, bits).numpy().view(np.uint32)
    if table.get("checkpoint_format") != "gptq_v2":
        found["qzeros"] -= np.uint32(0x11111111 if bits == 4 else 0x01010101)
    return found | {"g_idx": (np.arange(width) // (width // scales.shape[1])).astype(np.int32)}


def numbers_back(record, fmt, matrix):
    """The scales of a matrix, its zeros if it has some, [out, groups], and what multiplies or
    divides all scales."""
    found = {}
    for field in fmt.encoding.fields[1:]:
        first, count = fmt.parts[f"{matrix}_{field}"]
        if field == "global":
            found[field] = record[first : first + count].reshape(-1).view(np.float32)[:1]
            continue
        shape, dtype = fmt.scale_shape(matrix), numbers_dtype(fmt.encoding.dtype_of(field))
        values = record[first : first + count].reshape(-1).view(dtype)
        values = values[: shape[0] * shape[1]].reshape(shape)
        found[field] = np.ascontiguousarray(values.T if matrix == "down" else values)
    return found


def codes_back(record, fmt, matrix):
    """uint8[out, in]: the codes of a matrix."""
    planes, down = 16 // fmt.bits, matrix == "down"
    first, count = fmt.parts[f"{matrix}_codes"]
    shape = (-(-fmt.width // planes), fmt.hidden) if down else (fmt.width, fmt.hidden // planes)
    packed = record[first : first + count].reshape(-1)[: shape[0] * shape[1]].reshape(shape)
    codes = [(packed >> (fmt.bits * j)) & ((1 << fmt.bits) - 1) for j in range(planes)]
    codes = np.concatenate(codes, 0 if down else 1)[: fmt.width].astype(np.uint8)
    return np.ascontiguousarray(codes.T if down else codes)


def changed(path, to, edit, config=None):
    """A copy of a checkpoint whose tensors `edit` changes."""
    from safetensors.torch import save_file

    shutil.copytree(path, to)
    tensors = load_torch(path / "model.safetensors")
    edit(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, to / "model.safetensors")
    if config is not None:
        fields = json.loads((to / "config.json").read_text())
        config(fields)
        (to / "config.json").write_text(json.dumps(fields))
    return to


UP = "model.layers.1.mlp.experts.2.up_proj"
SCALE, PACKED = f"{UP}.weight_scale_inv", f"{UP}.weight_packed"


def set_value(name, index, value):
    def edit(tensors):
        tensors[name].view(-1)[index] = value

    return edit


def set_bits(name, index, value):
    import torch

    return lambda tensors: set_value(name, index, value)({name: tensors[name].view(torch.uint8)})


def without_last_row(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def as_dtype(name, dtype):
    import torch

    return lambda tensors: tensors.update({name: tensors[name].to(getattr(torch, dtype))})


def many(name):
    import torch

    return lambda tensors: tensors.update({name: torch.ones(4, 2, dtype=torch.int64)})


def flat(name):
    return lambda tensors: tensors.update({name: tensors[name].reshape(-1)})


Q = "model.layers.0.self_attn.q_proj"
WHOLE, ZEROS = f"{UP}.weight_global_scale", f"{UP}.weight_zero_point"
OTHER_WHOLE, NO_NUMBERS = f"{UP}.weight_scale_2", f"matrix {UP}.weight has scales that are NaN or"
INF = float("inf")
HOSTILE = {
    "NaN code": ("fp8", set_bits, (f"{UP}.weight", 5, 0x7F), f"matrix {UP}.weight .*1 codes .*NaN"),
    "NaN code beside experts": ("fp8", set_bits, (f"{Q}.weight", 5, 0xFF), f"matrix {Q}.weight"),
    "NaN scale": ("fp8", set_value, (SCALE, 1, float("nan")), f"matrix {UP}.* scales .*NaN"),
    "infinite scale": ("fp8", set_value, (SCALE, 0, float("inf")), f"matrix {UP}.*infinite"),
    "huge scale": ("fp8", set_value, (SCALE, 0, 3e38), f"matrix {UP}.* scales up to 3e.38"),
    "short scales": ("fp8", without_last_row, (SCALE,), f"{SCALE} must have two axes"),
    "short codes": ("int4", without_last_row, (PACKED,), r"has shape \[32, 4\], but .*asks for"),
    "flat scales": ("fp8", flat, (SCALE,), f"{SCALE} must have two axes"),
    "another dtype": ("fp8", as_dtype, (SCALE, "int32"), f"{SCALE} has dtype int32; .*float32"),
    "no codes": ("fp8", lambda n: lambda t: t.pop(n), (f"{UP}.weight",), "has no .*beside it"),
    "no scales": (
        "fp8",
        lambda n: lambda t: t.pop(n),
        (SCALE,),
        f"{UP}.weight has .* {SCALE} are missing",
    ),
    "lying shape": ("int4", set_value, (f"{UP}.weight_shape", 0, 64), "weight_shape, which says"),
    "shape of many": ("int4", many, (f"{UP}.weight_shape",), r"two numbers, not \[4, 2\]"),
    "whole beside codes": ("int4", many, (f"{UP}.weight",), f"{UP}.weight is there beside"),
    "NaN in e4m3": ("nvfp4", set_bits, (f"{UP}.weight_scale", 3, 0x7F), f"{UP}.* scales .*NaN"),
    "whole of 0": ("nvfp4", set_value, (WHOLE, 0, 0.0), f"matrix {UP}.* scale of all .* 0"),
    "whole of NaN": ("nvfp4", set_value, (WHOLE, 0, float("nan")), f"matrix {UP}.* all .*nan"),
    "whole of many": ("nvfp4", many, (WHOLE,), f"{WHOLE} has dtype int64; .*float32"),
    "no whole": ("nvfp4", lambda n: lambda t: t.pop(n), (WHOLE,), f"has no {WHOLE} beside it"),
    "short zeros": ("zero", without_last_row, (ZEROS,), f"{ZEROS} has shape .*asks for"),
    "no zeros": ("zero", lambda n: lambda t: t.pop(n), (ZEROS,), f"has no {ZEROS} beside it"),
    "order": ("gptq", set_value, (f"{UP}.g_idx", 0, 1), f"matrix {UP}.*desc_act.*not supported"),
    "zeros": ("gptq", set_value, (f"{UP}.qzeros", 0, 5), f"matrix {UP}.*zero points, .*symmetric"),
    "reserved scale": ("fp4", set_value, (f"{UP}.weight_scale", 0, 255), f"{UP}.* scales .*NaN"),
    "NaN in modelopt's e4m3": ("modelopt", set_bits, (f"{UP}.weight_scale", 3, 0xFF), NO_NUMBERS),
    "whole of infinity": ("modelopt", set_value, (OTHER_WHOLE, 0, INF), f"matrix {UP}.* all .*inf"),
    "whole of 0 in modelopt": (
        "modelopt",
        set_value,
        (OTHER_WHOLE, 0, 0),
        f"matrix {UP}.* all .*0",
    ),
}
for number, source in enumerate(("int4", "int8", "int8 channel", "zero", "awq", "gptq")):
    name = f"{UP}.scales" if source in ("awq", "gptq") else f"{UP}.weight_scale"
    HOSTILE |= {
        f"{value} in {source}": (source, set_value, (name, number, float(value)), NO_NUMBERS)
        for value in ("nan", "inf", "-inf")
    }
SOURCES = {
    "fp8": FP8,
    "int4": "int4-16-bf16",
    "int8": "int8-32-bf16",
    "int8 channel": "int8-channel-bf16",
    "fp4": MXFP4,
    "nvfp4": NVFP4,
    "zero": ZERO,
    "awq": AWQ,
    "gptq": GPTQ,
    "modelopt": MODELOPT,
}


@pytest.fixture(scope="module")
def sources(directory):
    """A function from a name in SOURCES to its checkpoint."""
    return lambda name: written(directory, SOURCES[name])


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_weight_can_be_made_of_is_refused_by_its_name(case, sources, tmp_path):
    source, edit, arguments, message = HOSTILE[case]
    path = changed(sources(source), tmp_path / "model", edit(*arguments))
    with pytest.raises(UserError, match=message):
        load_checkpoint(path, versions=(CHECKPOINT,))


def test_an_order_by_activation_is_refused_before_weights_are_read(sources, tmp_path):
    def act_order(fields):
        fields["quantization_config"]["desc_act"] = True

    def turn(tensors):
        for name in tensors:
            if name.endswith(".g_idx"):
                tensors[name] = tensors[name].flip(0)

    path = changed(sources("gptq"), tmp_path / "turned", turn, act_order)
    with pytest.raises(UserError, match=r"matrix model\..* columns ordered by activation .*use a"):
        read_headers(path)
    with pytest.raises(UserError, match=r"matrix model\..* columns ordered by activation"):
        convert(path, tmp_path / "model")
    assert [*tmp_path.iterdir()] == [path]
    read_headers(changed(sources("gptq"), tmp_path / "in order", lambda tensors: None, act_order))


def in_shards(path, to, shards=5):
    """Copies a checkpoint so that tensors, those of one matrix too, lie in any of its files.
    Returns name → file."""
    from safetensors.torch import save_file

    shutil.copytree(path, to)
    tensors = load_torch(to / SINGLE)
    (to / SINGLE).unlink()
    names = sorted(tensors)
    random.Random(0).shuffle(names)
    files = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in names if files[name] == file}, to / file)
    (to / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("source", ["zero", "nvfp4", "gptq"])
def test_tensors_of_a_matrix_may_lie_in_several_files(source, sources, tmp_path):
    files = in_shards(sources(source), tmp_path / "model")
    assert len({file for name, file in files.items() if f"{UP}." in name}) > 1
    one, several = (
        load_checkpoint(path, versions=(CHECKPOINT,))
        for path in (sources(source), tmp_path / "model")
    )
    for found, wanted in zip(
        *(jax.tree.leaves((m.params, m.store.arrays)) for m in (several, one)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    for loaded in (one, several):
        loaded.store.delete()


@pytest.mark.slow
@pytest.mark.parametrize("of_gguf", [False, True])
def test_loading_takes_one_copy_and_less_than_a_shard(of_gguf, tmp_path):
    """A file of GGUF is one shard: less than its experts in one matrix of a layer."""
    config: dict[str, Any] = {"num_experts": 24, "moe_intermediate_size": 1024}
    path = tmp_path / "many.gguf"
    if of_gguf:
        gguf_model(path, **config)
        shard = max(each.nbytes for each in read_gguf(path)[0].tensors.values())
    else:
        quantized_model(tmp_path / "many", ZERO, **config)
        in_shards(tmp_path / "many", path := tmp_path / "model", shards=3)
        shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    load_checkpoint(path, versions=(CHECKPOINT,)).store.delete()  # imports, which count too
    tracemalloc.start()
    try:
        loaded = load_checkpoint(path, versions=(CHECKPOINT,))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = sum(array.nbytes for array in jax.tree.leaves((loaded.params, loaded.store.arrays)))
    assert held < peak < held + shard
    loaded.store.delete()


def test_blocks_larger_than_the_matrix_take_no_memory():
    matrix = QuantizedMatrix(
        np.full((2048, 64), 0x38, np.uint8), np.ones((1, 1)), encoding_of("fp8-65536x65536-f32")
    )
    out = np.empty((2048, 64), np.float32)
    tracemalloc.start()
    try:
        matrix.dequantize(0, out)
        assert tracemalloc.get_traced_memory()[1] < 10 * out.nbytes
    finally:
        tracemalloc.stop()
    assert (out == 1).all()


def test_scales_beyond_float16_are_refused_in_such_a_run(sources, tmp_path):
    path = changed(sources("fp8"), tmp_path / "model", set_value(SCALE, 0, 200.0))
    with pytest.raises(UserError, match=f"matrix {UP}.*float16 cannot hold.*bfloat16"):
        load_checkpoint(path, "float16", versions=(CHECKPOINT,))
    load_checkpoint(path, versions=(CHECKPOINT,)).store.delete()


def dequantized(path, chosen):
    """Puts what the library makes of chosen matrices in their place."""

    def edit(tensors):
        whole = load_torch(path.with_name(f"{path.name}-dense") / "model.safetensors")
        for name in list(tensors):
            if chosen in name and name.removesuffix("_scale_inv") != name:
                tensors.pop(name)
                name = name.removesuffix("_scale_inv")
                tensors[name] = whole[name]

    return edit


@pytest.mark.nightly
def test_a_layer_may_be_dense_and_one_with_some_dense_experts_is(sources, tmp_path):
    source, version = sources("fp8"), SOURCES["fp8"]
    wanted = at_rest(source, "xla")
    for number, part in enumerate(("layers.0.mlp.experts.", "layers.0.mlp.experts.2.")):
        path = changed(source, tmp_path / str(number), dequantized(source, part))
        stats, found = run(path, expert_budget="50%", ops="xla")
        assert stats["precision"]["versions"] == ["dense", version]
        assert found == wanted
    assert run(path, precision="dense", ops="xla")[1] == wanted


@pytest.mark.slow
def test_a_checkpoint_without_quantized_experts_runs_dense(sources, tmp_path):
    source = sources("fp8")
    path = changed(source, tmp_path / "model", dequantized(source, ".mlp.experts."))
    stats, found = run(path)
    assert stats["precision"]["versions"] == ["dense"]
    assert found == run(path, precision="dense")[1]
    with LLM(path, precision="dense", **LIMITS) as llm:
        assert "other fp8 matrices are dequantized" in " ".join(llm.plan.budget.notes)


def choose_by_expert(name):
    if ".layers.1." in name and ".experts.2." in name:
        return "int8-32-bf16"
    return "int4-16-bf16"


def test_the_plan_says_what_experts_in_formats_that_differ_by_expert_take(tmp_path):
    quantized_model(tmp_path / "model", choose_by_expert)
    tensors = load_torch(tmp_path / "model" / "model.safetensors")
    of_layer = (t for name, t in tensors.items() if ".layers.1.mlp.experts." in name)
    in_file = format_bytes(sum(t.nbytes for t in of_layer))
    for precision in (None, "dense"):
        config = Config.of(tmp_path / "model", precision=precision, **LIMITS)
        notes = " ".join(dry_run(config)[0].budget.notes)
        assert "experts of 1 of 2 MoE layers are in formats that differ by expert" in notes
        assert f"dequantized to bfloat16 and take 72 KiB, in the file {in_file};" in notes
    config = Config.of(tmp_path / "model", precision="int4", **LIMITS)
    assert "differ by expert" not in " ".join(dry_run(config)[0].budget.notes)


@pytest.mark.slow
def test_precision_dense_dequantizes_and_the_plan_says_so(sources):
    path, version = sources("fp8"), SOURCES["fp8"]
    for precision, said in (
        (None, f"as the checkpoint has them, {version}, "),
        ("dense", "are deq"),
    ):
        with LLM(path, precision=precision, **LIMITS) as llm:
            notes = " ".join(llm.plan.budget.notes)
            assert said in notes and "other fp8 matrices are dequantized to bfloat16" in notes
            assert "activations stay bfloat16" in notes
    with pytest.raises(UserError, match=r"has its codes in another order; .*moejax convert"):
        LLM(path, store="file", **LIMITS)


def input_activations(fields):
    group = fields["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = group["weights"] | {"dynamic": True, "strategy": "token"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "config", "said"),
    [
        (MODELOPT, None, True),
        (NVFP4, input_activations, True),
        ("int8-channel-bf16", input_activations, True),
        ("int8-channel-bf16", None, False),
    ],
)
def test_the_plan_says_where_authors_quantize_activations_too(
    source, config, said, directory, tmp_path
):
    path = changed(written(directory, source), tmp_path / "model", lambda tensors: None, config)
    with LLM(path, **LIMITS) as llm:
        notes = " ".join(llm.plan.budget.notes)
    assert ("activations stay bfloat16, though the authors quantize them" in notes) == said


@pytest.mark.slow
def test_a_conversion_keeps_the_codes_and_one_expert_can_be_read(mixed, tmp_path):
    path = convert(mixed, tmp_path / "model", "float32").directory
    stats, found = run(path, ops="xla")
    assert stats["precision"]["versions"] == MIXED
    assert found == at_rest(mixed, "xla")
    stored = load_checkpoint(mixed, "float32", versions=(CHECKPOINT,)).store.arrays
    for layer, version in enumerate(MIXED):
        record = read_expert(path, layer, 3, version)
        np.testing.assert_array_equal(record, np.asarray(stored[version])[0, 3])
    with pytest.raises(UserError, match=r"its experts are in int4.* alone; run with precision"):
        load_checkpoint(path)
    with pytest.raises(UserError, match=r"some matrices of .* are in float32; run in it"):
        load_checkpoint(path, "bfloat16", versions=(CHECKPOINT,))


def test_the_command_names_the_format_of_the_codes(sources, tmp_path, capsys):
    assert main(["convert", str(sources("fp8")), str(tmp_path / "model")]) == 0
    said = rf"model: [\d.]+ KiB of weights: experts in {FP8}, as in the checkpoint, all else in "
    assert re.search(said + "bfloat16\n$", capsys.readouterr().out)


SLOW = (AWQ, "gptq:int4-32-f16-zero", NVFP4, "Q4_K")


@pytest.mark.parametrize(
    "source", [GPTQ, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_conversion_keeps_zeros_global_scales_and_blocks_of_blocks(source, directory, tmp_path):
    if source in FORMATS:
        path = written(directory, source)
    else:
        wide = {"hidden_size": 256, "moe_intermediate_size": 256}
        path = tmp_path / "model.gguf"
        gguf_model(path, experts=source, down="Q6_K", **wide)
    assert_conversion_keeps_codes(path, tmp_path / "converted")


def assert_conversion_keeps_codes(path, destination):
    """Every expert, read alone, is its record in the checkpoint at `path`, bit for bit."""
    converted = convert(path, destination, "float32").directory
    stored = load_checkpoint(path, "float32", versions=(CHECKPOINT,)).store
    again = load_checkpoint(converted, "float32", versions=(CHECKPOINT,)).store
    (version,) = stored.arrays
    assert version != "dense" and again.layouts == stored.layouts
    records = np.asarray(stored.arrays[version])
    np.testing.assert_array_equal(np.asarray(again.arrays[version]), records)
    for layer, expert in np.ndindex(records.shape[:2]):
        record = read_expert(converted, layer, expert, version)
        np.testing.assert_array_equal(record, records[layer, expert])


def _fp8_in_powers(weight):
    """Codes, scales and what they mean, as in DeepSeek-V4: blocks of 32 rows and 8 columns."""
    import torch

    blocks = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 32))
    blocks = blocks.reshape(-1, 32, weight.shape[1] // 8, 8)
    scales = (2 ** torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448))).to(torch.float8_e8m0fnu)
    each = scales.float().repeat_interleave(32, 0)[: len(weight)].repeat_interleave(8, 1)
    codes = (weight / each).to(torch.float8_e4m3fn)
    return codes, scales, dequantize_fp8(codes, scales, [32, 8])


def _fp4(weight):
    """The same of its experts: two codes in a byte, a scale for each 32 of a row."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = weight.reshape(len(weight), -1, 32)
    scales = (2 ** torch.ceil(torch.log2(groups.abs().amax(2) / 6))).to(torch.float8_e8m0fnu)
    each = scales.float().repeat_interleave(32, 1)
    codes = ((weight / each)[..., None] - values).abs().argmin(-1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, scales, Fp8Dequantize(None)._dequantize_one(packed, scales, torch.float32)


@pytest.mark.parametrize(
    ("experts", "version"),
    [("fp4", MXFP4), pytest.param("fp8", "fp8-8x32-f32", marks=pytest.mark.slow)],
)
def test_deepseek_v4_in_fp8_and_fp4(experts, version, tmp_path):
    """Under the names of its files, beside a layer that predicts a further token."""
    import torch
    from safetensors.torch import save_file

    random_model("DeepseekV4").save_pretrained(tmp_path / "dense")
    dense = load_torch(tmp_path / "dense" / "model.safetensors")
    stored, config = {}, json.loads((tmp_path / "dense" / "config.json").read_text())
    published = {"model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.": ""}
    for name, tensor in list(dense.items()):
        start = next((start for start in published if name.startswith(start)), "")
        own = published.get(start, "") + name.removeprefix(start)
        stored[own] = tensor
        if re.search(r"\.w(q|kv|o|\d)", name) and ".compressor." not in name:
            quantize = _fp4 if ".experts." in name and experts == "fp4" else _fp8_in_powers
            scale = own.removesuffix("weight") + "scale"
            stored[own], stored[scale], dense[name] = quantize(tensor)
            stored |= {f"mtp.0.{key}": stored[key].clone() for key in (own, scale)}
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (path := tmp_path / "quantized").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors"
    )
    table = {"quant_method": "fp8", "weight_block_size": [32, 8], "scale_fmt": "ue8m0"}
    config |= {"quantization_config": table, "expert_dtype": experts}
    (path / "config.json").write_text(json.dumps(config))
    store = load_checkpoint(path, versions=(CHECKPOINT,)).store
    ((own, records),), (fmt,) = store.arrays.items(), store.layouts.values()
    assert own == version
    for (layer, expert), (number, matrix) in itertools.product(
        np.ndindex(records.shape[:2]), {"1": "gate", "2": "down", "3": "up"}.items()
    ):
        name = f"layers.{layer}.ffn.experts.{expert}.w{number}"
        record = np.asarray(records[layer, expert])
        codes, scales = stored[f"{name}.weight"], stored[f"{name}.scale"]
        back = pack_bytes(codes_back(record, fmt, matrix), fmt.bits)
        assert back.tobytes() == codes.view(torch.uint8).numpy().tobytes()
        scales = scales.view(torch.uint8) if experts == "fp4" else scales.float()
        assert numbers_back(record, fmt, matrix)["scales"].tobytes() == scales.numpy().tobytes()
    found, wanted = load_checkpoint(path), load_checkpoint(tmp_path / "dense")
    for one, other in zip(*(jax.tree.leaves(m.params) for m in (found, wanted)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    of_experts = [np.asarray(m.store.arrays["dense"]).view(np.float32) for m in (found, wanted)]
    np.testing.assert_array_equal(*of_experts)
