"""GGUF files: their codes are paged, and mean what the gguf package says."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from host_offload.memory.budget import format_bytes
from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax import LLM, SamplingParams
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.fingerprint import fingerprint
from moejax.checkpoints.gguf_tensors import GgufFile, Source, unpacked
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.shards import Header
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.evaluate.quantization import quantize
from moejax.models.gguf_config import FORMATS
from moejax.models.gguf_header import GgufTensor, read_gguf
from moejax.start.decide.facts import facts_of
from moejax.start.report.dry_run import facts_without_weights
from moejax.start.report.model_info import model_info, read_headers
from pallas_kernels.cpu.gguf import put_blocks
from pallas_kernels.cpu.library import library
from pallas_kernels.linear import CodedWeights
from pallas_kernels.records import RecordFormat, decode
from tests.moejax.gguf_blocks import assert_bytes_come_back, leaves
from tests.moejax.gguf_models import ARCHITECTURES, gguf_model
from tests.moejax.transformers_models import assert_agrees
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.torch
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 6, 7, 30], list(range(20, 90))]
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "progress": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def run(path, dtype="float32", **options):
    with LLM(path, dtype=dtype, **LIMITS, **options) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*(o.logprobs or ())]) for o in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_weight_is_that_of_the_dequantized_checkpoint(family, directory):
    path = directory / f"{family}.gguf"
    gguf_model(path, family)
    found, wanted = (
        load_checkpoint(each, "float32") for each in (path, directory / f"{family}-dense")
    )
    first, second = (np.asarray(each.store.arrays["dense"]) for each in (found, wanted))
    assert np.array_equal(first, second)
    unsaid = ("quantization", "dtype", "eos_token_ids", "rms_norm_eps")
    assert abs(found.config.rms_norm_eps - wanted.config.rms_norm_eps) < 1e-9
    same = {name: getattr(wanted.config, name) for name in unsaid}
    assert dataclasses.replace(found.config, **same) == wanted.config
    assert leaves(found).keys() == leaves(wanted).keys()
    for name, leaf in leaves(wanted).items():
        assert np.array_equal(leaves(found)[name], leaf), name


WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4}


@pytest.mark.parametrize(
    ("type_", "split"),
    [
        *(("Q4_0", 4), ("MXFP4", 0), ("Q4_K", 0)),
        *(
            pytest.param(name, 0, marks=pytest.mark.slow)
            for name in FORMATS
            if name not in ("Q4_0", "MXFP4", "Q4_K")
        ),
    ],
)
def test_records_mean_what_the_package_says(type_, split, tmp_path):
    gguf_model(
        tmp_path / "model.gguf",
        experts=type_,
        split=split,
        **(WIDE if type_.endswith("K") else {}),
    )
    path = min(tmp_path.glob("*.gguf"))
    assert path.name.endswith(f"-of-{len([*tmp_path.glob('*.gguf')]):05}.gguf") == (split > 0)
    found = load_checkpoint(path, "float32", versions=(CHECKPOINT,)).store
    wanted = load_checkpoint(tmp_path / "model-dense", "float32").store
    assert [*found.arrays] == [FORMATS[type_]]
    records, dense = (np.asarray(*each.arrays.values()) for each in (found, wanted))
    for at in np.ndindex(records.shape[:2]):
        decoded, whole = (
            np.asarray(decode(jnp.asarray(each[at]), *store.layouts.values())).view(np.uint32)
            for each, store in ((records, found), (dense, wanted))
        )
        assert np.array_equal(decoded, whole), at
    assert_bytes_come_back(path, found)


@NATIVE
@pytest.mark.parametrize("matrix", ["up", "down"])
@pytest.mark.parametrize("type_", FORMATS)
def test_the_library_puts_blocks_where_numpy_does(type_, matrix):
    rows, width = 80, 512  # a transposed tile is not full
    down = matrix == "down"
    fmt = RecordFormat(FORMATS[type_], *((rows, width) if down else (width, rows)), "bfloat16")
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_]]
    raw = np.random.default_rng(0).integers(256, size=(rows, width // weights * nbytes))
    raw = raw.astype(np.uint8)
    wanted, found = ({}, {})
    for parts in wanted, found:
        for field in fmt.encodings[matrix].fields:
            count = fmt.parts[f"{matrix}_{field}"][1]
            parts[field] = np.full((1, count, fmt.hidden), 0xABCD, np.uint16)
    unpacked(raw, GgufTensor(type_, (rows, width), 0, raw.nbytes)).put(matrix, wanted)
    put_blocks(type_, raw, width, down, found)
    for field, part in wanted.items():
        assert np.array_equal(found[field], part), field
    with pytest.raises(ValueError, match=f"{type_}: part scales is too small"):
        put_blocks(type_, raw, width, down, found | {"scales": found["scales"][:, :0]})


WIDE_OF: dict[str, dict[str, Any]] = {
    "Mixtral": {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 4},
    "DeepseekV3": {"hidden_size": 256, "moe_intermediate_size": 256},
}
"""Beside Qwen3Moe, whose files of each type llama.cpp wrote: test_gguf_llama_cpp.py."""
FAMILIES = ("Qwen3Moe", "Mixtral", "Qwen3Next", "Qwen3_5MoeText", "DeepseekV3")
NOT_NIGHTLY = [(name, "Q8_0") for name in ("Qwen3Moe", "Mixtral", "Qwen3_5MoeText")]
NOT_NIGHTLY += [("DeepseekV3", "Q6_K")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "type_"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case not in NOT_NIGHTLY))
        for case in (
            *((family, "Q8_0") for family in FAMILIES),
            *((family, type_) for family in WIDE_OF for type_ in FORMATS if type_ != "Q8_0"),
        )
    ],
)
def test_tokens_and_logits_are_those_of_the_dequantized_model(family, type_, directory):
    path = directory / f"{family}-{type_}-run.gguf"
    model = gguf_model(path, family, type_, **WIDE_OF[family] if type_.endswith("K") else {})
    assert assert_agrees(path, model)["precision"]["versions"] == [FORMATS[type_]]


@pytest.mark.slow
def test_verify_compares_a_run_with_what_the_file_means(directory, capsys):
    path = directory / "Mixtral-verified.gguf"
    gguf_model(path, "Mixtral")
    small = ["--max-model-len", "128", "--max-num-seqs", "1", "--dtype", "float32"]
    assert main(["verify", str(path), "--json", "-q", *small]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["good"] for check in checks if "layers" in check["name"]] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "ops"),
    [
        pytest.param("50%", "xla", marks=pytest.mark.nightly),
        ("100%", "cpu"),
        ("50%", "cpu"),
    ],
)
def test_k_quants_of_a_mix_run_in_the_bits_of_the_dequantized_model(budget, ops, directory):
    path = directory / "Q4_K_M.gguf"
    if not path.exists():
        gguf_model(path, experts="Q4_K", down="Q6_K", **WIDE)
    stats, found = run(path, expert_budget=budget, ops=ops)
    assert stats["precision"]["versions"] == ["q4_k+q4_k+q6_k"]
    assert found == run(directory / "Q4_K_M-dense", ops=ops)[1]


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "down", "family"),
    [
        ("Q4_K", "Q6_K", "Qwen3Moe"),
        ("F32", "F32", "Qwen3Moe"),
        ("MXFP4", "MXFP4", "GptOss"),  # with biases
        *(
            pytest.param(name, name, "Qwen3Moe", marks=pytest.mark.nightly)
            for name in ("Q8_0", "MXFP4")
        ),
    ],
)
def test_experts_stay_in_the_file_with_the_same_bits(experts, down, family, directory):
    path = directory / f"{family}-{experts}-in-file.gguf"
    gguf_model(path, family, experts, down=down, **({} if family == "GptOss" else WIDE))
    wanted = run(path, expert_budget="50%")[1]
    stats, found = run(path, expert_budget="50%", store="file")
    assert found == wanted and stats["store"]["file_bytes"] > 0


def bias_of(path, rng):
    """Finite values of every size for the biases of a file, some half between two bfloat16's."""
    for name, tensor in read_gguf(path)[0].tensors.items():
        if name.endswith("_exps.bias"):
            values = rng.integers(0, 1 << 32, tensor.nbytes // 4, np.uint32) & 0xBFFFFFFF
            values[::3] = values[::3] & 0xFFFF0000 | 0x8000
            with path.open("r+b") as file:
                file.seek(tensor.begin)
                file.write(values.tobytes())


@NATIVE
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_library_makes_records_with_biases_as_numpy_does(dtype, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, "GptOss", "MXFP4")
    bias_of(path, np.random.default_rng(0))
    opened = open_tensors(path, "gguf")
    held = opened.hold(dtype, (CHECKPOINT,))
    (source,) = opened.record_files(dtype, (CHECKPOINT,), held, False, True).values()
    located, data, put = source.locate(lambda name: 0), path.read_bytes(), library()
    for at in np.ndindex(source.shape):
        wanted, found = np.full((2, source.format.rows, source.format.hidden), 0xABCD, np.uint16)
        source.read(*at, wanted)
        for matrix, place in zip(source.blocks, located[at]["place"].tolist(), strict=True):
            raw = np.frombuffer(data[place : place + matrix["bytes"]], np.uint8)
            each = np.array(matrix)
            pointers = (ctypes.c_void_p(a.ctypes.data) for a in (each, raw, found))
            assert not put.moejax_put_blocks(*pointers)
        assert np.array_equal(found, wanted)


@NATIVE
@pytest.mark.slow
def test_damaged_biases_are_found_when_an_expert_is_read_from_the_file(directory):
    path = directory / "biases.gguf"
    gguf_model(path, "GptOss", "MXFP4")
    tensor = read_gguf(path)[0].tensors["blk.1.ffn_down_exps.bias"]
    with path.open("r+b") as file:
        file.seek(tensor.begin)
        file.write(np.full(tensor.nbytes // 4, np.nan, "<f4").tobytes())
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(Exception, match=r"gguf is damaged: a bias has values that are NaN"):
            run(path, dtype, expert_budget="50%", store="file")


def test_biases_beside_experts_that_are_not_quantized_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, "GptOss", "F32")
    with pytest.raises(UserError, match=r"gate_proj.bias is a bias, .*moejax convert"):
        run(path, store="file")


def test_damaged_scales_are_found_when_an_expert_is_read_from_the_file(directory):
    path = directory / "damaged.gguf"
    gguf_model(path, experts="Q5_K", **WIDE)
    begin = read_gguf(path)[0].tensors["blk.1.ffn_up_exps.weight"].begin
    with path.open("r+b") as file:
        for expert in range(4):
            file.seek(begin + expert * 176 * 256 + 2)
            file.write(np.float16("nan").tobytes())
    with pytest.raises(Exception, match=r"damaged\.gguf is damaged: .*scales that are NaN"):
        run(path, expert_budget="50%", store="file")
    with pytest.raises(UserError, match="may have scales that float16 cannot hold"):
        run(path, "float16", expert_budget="50%", store="file")


@pytest.mark.slow
def test_matrices_of_products_stay_in_codes_with_the_bits_of_their_weights(directory, capsys):
    path = directory / "coded.gguf"
    gguf_model(path, experts="Q4_K", others="Q6_K", **WIDE)
    for dtype in "bfloat16", "float32":
        found = run(path, dtype)
        assert found[1] == run(directory / "coded-dense", dtype)[1]
    wide = load_checkpoint(path, dtype="float32", coded=True)
    assert isinstance(wide.params["lm_head"], CodedWeights)
    whole, same = (load_checkpoint(path, coded=coded) for coded in (True, False))
    loaded, plain, (config, weights), sizes = whole.params, same.params, read_headers(path), []
    for model, coded in ((whole, weights.coded), (same, {})):  # which a dry run has from headers
        without = facts_without_weights(config, "auto", whole.store.versions, coded=coded)
        facts = facts_of(model)
        assert (without.param_bytes, without.read_bytes) == (facts.param_bytes, facts.read_bytes)
        assert model_info(config, "auto", coded).device_bytes == facts.param_bytes
        sizes.append(format_bytes(facts.param_bytes))
    assert main(["info", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = "on the device for good {1} the same on a CPU, matrices in codes {0} "
    assert text.format(*sizes) in said
    pairs = [(loaded["lm_head"], plain["lm_head"][None])]
    pairs += [(run["qkv"], plain["runs"][i]["qkv"]) for i, run in enumerate(loaded["runs"])]
    for coded, whole in pairs:
        assert isinstance(coded, CodedWeights) and coded.elements.nbytes < 0.5 * whole.nbytes
        decoded, stored = (np.asarray(each).view(np.uint16) for each in (coded.decode(), whole))
        assert np.array_equal(decoded, stored)


@pytest.mark.parametrize("offset", [0, 2])
def test_k_quants_whose_scales_or_minimums_are_not_finite_are_refused(offset, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, experts="Q5_K", **WIDE)
    whole, begin = fingerprint(path), read_gguf(path)[0].tensors["blk.1.ffn_up_exps.weight"].begin
    with path.open("r+b") as file:
        file.seek(begin + 176 * 256 + offset)
        file.write(np.float16("inf").tobytes())
    assert fingerprint(path) != whole
    with pytest.raises(UserError, match=r"blk.1.ffn_up_exps.weight, expert 1 has scales .*infin"):
        load_checkpoint(path, versions=(CHECKPOINT,))


NAN, INFINITY, LESS = (np.float16(each).tobytes() for each in ("nan", "inf", "-inf"))
PLACES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (0,),
}
"""Type → where in its blocks the float16 numbers are, or MXFP4's byte."""


@pytest.mark.parametrize(("type_", "place"), [(t, p) for t in FORMATS for p in PLACES[t]])
def test_scales_that_are_not_finite_are_refused_however_they_are_read(type_, place, tmp_path):
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_]]
    blocks = np.random.default_rng(0).integers(256, size=(2, 8, 512 // weights, nbytes), dtype="u1")
    for each in PLACES[type_]:
        if type_ == "MXFP4":
            blocks[..., each] %= 200
        else:
            blocks[..., each : each + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    name, path = "blk.0.ffn_up_exps.weight", tmp_path / "model.gguf"
    fmt, dtype = RecordFormat(FORMATS[type_], 512, 8, "float32"), np.dtype(np.float32)

    def reads(index, native):
        writer = GGUFWriter(path, "qwen3moe")
        data = blocks.reshape(2, 8, -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (header,) = read_gguf(path)
        source = Source(((header, name),), index)
        file = GgufFile(header, {"x": Header("float32", (8, 512))}, {"x": source})
        parts = {
            field: np.zeros((1, fmt.parts[f"up_{field}"][1], fmt.hidden), np.uint16)
            for field in fmt.encodings["up"].fields
        }
        with file.open() as reader:
            reader = dataclasses.replace(reader, native=native and reader.native)
            yield lambda: reader.matrix("x", dtype)
            yield lambda: reader.put("x", dtype, "up", parts)
            yield lambda: reader.rows("x")(0, np.empty((8, 512), np.float32))

    good = blocks.copy()
    for bad in (b"\xff",) if type_ == "MXFP4" else (NAN, INFINITY, LESS):
        blocks[:] = good
        blocks[1, 3, -1, place : place + len(bad)] = np.frombuffer(bad, np.uint8)
        for native in True, False:
            for read in reads(0, native):
                read()
            for read in reads(1, native):
                with pytest.raises(
                    UserError, match=rf"model\.gguf: tensor {name}.* has scales that are NaN or inf"
                ):
                    read()


@pytest.mark.parametrize(
    ("tensor", "family"),
    [("output", "Qwen3Moe"), ("blk.1.attn_output", "Qwen3Moe"), ("blk.0.attn_k", "Mixtral")],
)
def test_other_matrices_that_are_not_finite_are_refused_by_name(tensor, family, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, family)
    with path.open("r+b") as file:
        file.seek(read_gguf(path)[0].tensors[f"{tensor}.weight"].begin + 34)
        file.write(NAN)
    for dtype in "float32", "bfloat16", "float16":
        for coded in False, True:
            with pytest.raises(
                UserError, match=rf"tensor {tensor}\.weight has scales that are NaN"
            ):
                load_checkpoint(path, dtype, coded=coded)


def reshaped(path, name, shape):
    """Writes another shape of a tensor into the header of a file."""
    data, place = path.read_bytes(), text(name.encode())
    begin = data.index(place) + len(place)
    (axes,) = struct.unpack_from("<I", data, begin)
    assert axes == len(shape)
    sizes = struct.pack(f"<{axes}Q", *shape[::-1])
    path.write_bytes(data[: begin + 4] + sizes + data[begin + 4 + len(sizes) :])


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("blk.1.ffn_up_exps.weight", (6, 64, 32), (6, 32, 64)),
        ("blk.1.ffn_up_exps.weight", (3, 64, 64), (6, 32, 64)),
        ("blk.0.attn_q.weight", (32, 128), (64, 64)),
        ("blk.0.attn_norm.weight", (32,), (64,)),
    ],
)
def test_a_shape_other_than_the_metadatas_is_refused_by_name(name, shape, wanted, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path)
    reshaped(path, name, shape)
    message = re.escape(
        f"{name} has shape {[*shape]}, but the file's metadata asks for {[*wanted]}"
    )
    with pytest.raises(UserError, match=message):
        load_checkpoint(path)


def test_metadata_of_another_width_is_refused_by_tensor(tmp_path):
    def edit(writer):
        writer.kv_data[0].pop("qwen3moe.expert_feed_forward_length")
        writer.add_expert_feed_forward_length(64)

    gguf_model(tmp_path / "model.gguf", edit=edit)
    with pytest.raises(UserError, match=r"ffn_\w+_exps\.weight has shape .*metadata asks for .*64"):
        load_checkpoint(tmp_path / "model.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(shape=(32,), kind=0, offset=0, name=b"a") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


KEY = text(b"k")
HUGE = 1 << 60
HOSTILE = {
    "another file": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "empty": (b"", "more than there are"),
    "version 9": (header(version=9), "GGUF version 9 is not supported"),
    "big-endian": (header(version=3 << 24), "big-endian numbers is not supported"),
    "tensors without end": (header(tensors=HUGE), f"{HUGE} tensors; at most"),
    "keys without end": (header(keys=HUGE), f"{HUGE} keys; at most"),
    "long key": (header(keys=1, rest=struct.pack("<Q", HUGE)), f"a key of {HUGE} bytes"),
    "long text": (
        header(keys=1, rest=KEY + struct.pack("<IQ", 8, HUGE)),
        f"k of {HUGE} bytes; at most",
    ),
    "array without end": (
        header(keys=1, rest=KEY + struct.pack("<IIQ", 9, 8, HUGE)),
        f"k has {HUGE} values; at most",
    ),
    "nested arrays": (header(keys=1, rest=KEY + struct.pack("<IIQ", 9, 9, 3)), "array of type 9"),
    "unknown type": (header(keys=1, rest=KEY + struct.pack("<I", 77)), "k has type 77"),
    "a key twice": (header(keys=2, rest=(KEY + struct.pack("<IB", 0, 1)) * 2), "there twice"),
    "no axes": (header(tensors=1, rest=tensor(())), "tensor a has 0 axes"),
    "many axes": (header(tensors=1, rest=tensor((1,) * 9)), "tensor a has 9 axes"),
    "enormous shape": (header(tensors=1, rest=tensor((HUGE, HUGE))), "tensor a .*ends at byte"),
    "half a block": (header(tensors=1, rest=tensor((33,), 8)), "rows of 33 weights, and Q8_0"),
    "type 99": (header(tensors=1, rest=tensor(kind=99)), "tensor a is of type 99"),
    "beyond the file": (header(tensors=1, rest=tensor(offset=1 << 40)), "tensor a .*ends at byte"),
    "truncated": (header(tensors=1, rest=tensor((8,)) + bytes(20)), "tensor a .*ends at byte"),
    "one place for two": (
        header(tensors=2, rest=tensor() + tensor(name=b"b") + bytes(400)),
        "begins at 0, which is no place of its own",
    ),
    "not aligned": (header(tensors=1, rest=tensor(offset=1) + bytes(400)), "tensor a begins at 1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_before_memory_is_taken(case, tmp_path):
    data, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_uint32("qwen3moe.new_key", 3), "qwen3moe.new_key is 3, which is not supp"),
        (lambda w: w.add_uint32("qwen3moe.expert_gating_func", 2), "expert_gating_func is 2"),
        (lambda w: w.add_uint32("qwen3moe.rope.dimension_count", 6), "rope.dimension_count is 6"),
        (lambda w: w.add_float32("qwen3moe.expert_weights_scale", 2), "expert_weights_scale is 2"),
        (
            lambda w: w.add_float32("qwen3moe.rope.scaling.attn_factor", 1.5),
            "rope.scaling.attn_factor is 1.5",
        ),
        (lambda w: w.add_array("tokenizer.ggml.eos_token_id", [1, 2]), "eos_token_id must be"),
        (lambda w: w.kv_data[0].pop("qwen3moe.expert_used_count"), "expert_used_count is missing"),
        (lambda w: w.add_tensor(f"blk.{'9' * 5000}.x", np.ones(4, np.float32)), "blk.999.*is not"),
        (
            lambda w: w.add_string("qwen3moe.rope.scaling.type", "longrope"),
            "rope.scaling.type is 'longrope'",
        ),
        (lambda w: w.add_tensor("blk.0.what.weight", np.ones(4, np.float32)), "blk.0.what.weight"),
        (
            lambda w: w.kv_data[0]["general.architecture"].__setattr__("value", "no-such"),
            "general.architecture 'no-such' is not supported; supported: qwen3moe",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(edit, message, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, edit=edit)
    with pytest.raises(UserError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_missing_is_named_with_its_number(lost, tmp_path):
    gguf_model(tmp_path / "model.gguf", split=4)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[lost].rename(parts[lost].with_name("renamed.gguf"))
    said = f"{parts[lost].name}: no such file; it is part {lost + 1} of {len(parts)} of this model"
    with pytest.raises(UserError, match=said):
        load_checkpoint(parts[1 - lost])
    with pytest.raises(
        UserError, match=rf"one of {len(parts)} files, whose names must end in -000"
    ):
        load_checkpoint(tmp_path / "renamed.gguf")


NOT_FINITE = {"F32": b"\0\0\x80\x7f", "F16": INFINITY, "BF16": b"\xc1\xff"}
"""Type → infinity, or NaN of BF16."""


@pytest.mark.parametrize(
    ("tensor", "family", "type_"),
    [
        ("output.weight", "Qwen3Moe", "F16"),
        ("blk.1.attn_output.weight", "Qwen3Moe", "BF16"),
        ("blk.1.ffn_norm.weight", "Qwen3Moe", "F32"),
        ("blk.0.attn_k.weight", "Mixtral", "F16"),  # in another order
        ("blk.1.ffn_up_exps.weight", "Qwen3Moe", "F32"),
        ("blk.1.ffn_down_exps.weight", "Qwen3Moe", "BF16"),
    ],
)
def test_plain_tensors_that_are_not_finite_are_refused_by_name(tensor, family, type_, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, family, experts=type_, others=type_)
    found, expert = read_gguf(path)[0].tensors[tensor], ""
    at, bad = found.begin, NOT_FINITE[type_]
    if "exps" in tensor:
        expert, at = ", expert 1", at + found.nbytes // found.shape[0]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bad)
    for read in (
        lambda: load_checkpoint(path, "float32"),
        lambda: load_checkpoint(path, coded=True),
        lambda: convert(path, tmp_path / "converted"),
        lambda: quantize(path, tmp_path / "quantized", ("int8",)),
    ):
        with pytest.raises(
            UserError, match=rf"model\.gguf: tensor {tensor}{expert} has values that are NaN or inf"
        ):
            read()
    assert not (tmp_path / "converted").exists() and not (tmp_path / "quantized").exists()
