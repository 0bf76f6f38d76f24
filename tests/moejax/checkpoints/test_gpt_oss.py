"""gpt-oss as it is published: stacked experts in MXFP4, paged in the bytes of the file."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax import LLM, SamplingParams
from moejax.checkpoints.load import load_checkpoint
from moejax.commands.main import main
from moejax.errors import UserError
from pallas_kernels.records import decode
from pallas_kernels.records.reference import split_weights
from tests.moejax.checkpoints.test_quantized import (
    assert_conversion_keeps_codes,
    codes_back,
    load_torch,
    numbers_back,
    pack_bytes,
    set_value,
)
from tests.moejax.transformers_models import logprobs, random_model

pytestmark = pytest.mark.torch
VERSION = "fp4-32-e8m0"
PROMPTS = [[5, 6, 7, 30], list(range(20, 90))]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
EXPERTS = "model.layers.{}.mlp.experts."
TABLE = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def blocks_of(rng, *shape):
    """Random codes and scales of matrices [..., out, in]."""
    *rows, width = shape
    blocks = rng.integers(0, 256, (*rows, width // 32, 16), np.uint8)
    return blocks, rng.integers(121, 126, (*rows, width // 32), np.uint8)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint, and transformers' model of what its own function dequantizes."""
    import torch
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path, rng = tmp_path_factory.mktemp("gpt_oss") / "model", np.random.default_rng(0)
    model = random_model("GptOss")
    model.save_pretrained(path)
    tensors = load_torch(path / "model.safetensors")
    for layer in range(2):
        for name, shape in (("gate_up_proj", (6, 64, 64)), ("down_proj", (6, 64, 32))):
            whole = EXPERTS.format(layer) + name
            del tensors[whole]
            blocks, scales = map(torch.from_numpy, blocks_of(rng, *shape))
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            made = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            with torch.no_grad():
                model.get_parameter(whole).copy_(made.float())
    save_file(tensors, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": TABLE}
    (path / "config.json").write_text(json.dumps(fields))
    return path, model


def run(path, **options):
    limits = {"max_model_len": 128, "max_num_seqs": 4, "progress": False, "dtype": "float32"}
    with LLM(path, **limits, **options) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*o.logprobs]) for o in outputs]


@pytest.mark.slow
def test_tokens_and_logits_are_those_of_transformers(published):
    path, model = published
    stats, found = run(path, expert_budget="50%")
    assert stats["precision"]["versions"] == [VERSION] and stats["ops"]["expert_ffn"] == "cpu"
    for prompt, (tokens, chosen) in zip(PROMPTS, found, strict=True):
        wanted = logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        for each, token, row in zip(chosen, tokens, wanted, strict=True):
            assert token == row.argmax() and abs(each[token].logprob - row[token]) < 1e-4
    for options in ({"expert_budget": "0"}, {"driver": "host"}):
        assert run(path, **options)[1] == found, options


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_records_mean_what_transformers_says_and_give_the_bytes_back(published, dtype):
    path, model = published
    loaded = load_checkpoint(path, dtype, versions=("checkpoint",))
    fmt, records = loaded.store.layouts[VERSION], np.asarray(loaded.store.arrays[VERSION])
    tensors = load_torch(path / "model.safetensors")
    for layer, expert in np.ndindex(2, 6):
        record, prefix = records[layer, expert], EXPERTS.format(layer)
        matrices, biases = split_weights(np.asarray(decode(record, fmt)).astype(np.float32), fmt)
        own = dict(model.named_parameters())
        gate_up, down = (
            own[f"{prefix}{name}_proj"][expert].detach().numpy() for name in ("gate_up", "down")
        )
        wanted = [gate_up[:, ::2].T, gate_up[:, 1::2].T, down]
        for found, values in zip(matrices, wanted, strict=True):
            np.testing.assert_array_equal(found.view(np.int32), values.copy().view(np.int32))
        both = own[f"{prefix}gate_up_proj_bias"][expert].detach().numpy()
        of_down = own[f"{prefix}down_proj_bias"][expert].detach().numpy()
        for found, values in zip(biases, [both[::2], both[1::2], of_down], strict=True):
            rounded = values.astype(NUMPY_DTYPES[dtype]).astype(np.float32)
            np.testing.assert_array_equal(found, rounded)
        for matrix, rows in (("gate", np.s_[::2]), ("up", np.s_[1::2]), ("down", np.s_[:])):
            name = prefix + ("down_proj" if matrix == "down" else "gate_up_proj")
            kept = [tensors[f"{name}_{part}"][expert][rows] for part in ("blocks", "scales")]
            codes = pack_bytes(codes_back(record, fmt, matrix), 4)
            for found, values in zip(
                (codes, numbers_back(record, fmt, matrix)["scales"]), kept, strict=True
            ):
                assert found.tobytes() == values.numpy().tobytes()
    loaded.store.delete()


GATE_UP = EXPERTS.format(1) + "gate_up_proj"


def shaped(name, shape):
    import torch

    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.uint8)})


HOSTILE = {
    "reserved scale": (
        lambda: set_value(f"{GATE_UP}_scales", 200, 255),
        f"expert 1 of matrix {GATE_UP}_blocks has scales that are NaN",
    ),
    "short blocks": (lambda: shaped(f"{GATE_UP}_blocks", (6, 63, 2, 16)), "has shape"),
    "no blocks": (lambda: shaped(f"{GATE_UP}_blocks", (6, 64, 2, 15)), "blocks of 16 bytes"),
    "lying scales": (lambda: shaped(f"{GATE_UP}_scales", (6, 64, 3)), r"_scales has shape .*asks"),
    "scales alone": (lambda: lambda t: t.pop(f"{GATE_UP}_blocks"), "has no .*_blocks beside"),
    "whole beside blocks": (lambda: shaped(GATE_UP, (6, 64, 64)), f"{GATE_UP} is there beside"),
    "no bias": (lambda: lambda t: t.pop(f"{GATE_UP}_bias"), f"{GATE_UP}_bias is missing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_expert_can_be_made_of_is_refused_by_its_name(published, case, tmp_path):
    from safetensors.torch import save_file

    edit, message = HOSTILE[case]
    path = shutil.copytree(published[0], tmp_path / "model")
    tensors = load_torch(path / "model.safetensors")
    edit()(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_checkpoint(path, versions=("checkpoint",))


@pytest.mark.slow
def test_a_conversion_keeps_the_codes(published, tmp_path):
    assert_conversion_keeps_codes(published[0], tmp_path / "model")
    assert run(tmp_path / "model")[1] == run(published[0])[1]


@pytest.mark.nightly
def test_verify_computes_the_biases_clamps_sinks_and_windows_of_the_files(published, capsys):
    small = ["--max-model-len", "128", "--max-num-seqs", "1", "--dtype", "float32"]
    assert main(["verify", str(published[0]), "--json", "-q", *small]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["good"] for check in checks if "layers" in check["name"]] == [True]
