"""gpt-oss as it is published: stacked experts in MXFP4, paged in the bytes of the file."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from host_offload.versions.encoders import NUMPY_DTYPES, encode
from host_offload.versions.quantizers import rtn
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.versions import with_versions
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
    run,
    set_value,
)
from tests.moejax.quantized_models import gpt_oss_model
from tests.moejax.transformers_models import assert_agrees

pytestmark = pytest.mark.torch
VERSION = "fp4-32-e8m0"
EXPERTS = "model.layers.{}.mlp.experts."


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A checkpoint, and transformers' model of what its own function dequantizes."""
    path = tmp_path_factory.mktemp("gpt_oss") / "model"
    return path, gpt_oss_model(path)


@pytest.mark.slow
def test_tokens_and_logits_are_those_of_transformers(published):
    path, model = published
    stats = assert_agrees(path, model, expert_budget="50%")
    assert stats["precision"]["versions"] == [VERSION] and stats["ops"]["expert_ffn"] == "cpu"
    found = run(path)[1]
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


@pytest.mark.slow
def test_low_experts_are_made_from_the_decoded_ones_and_keep_their_biases(published):
    path, _ = published
    loaded = load_checkpoint(path, "float32", versions=("checkpoint",))
    fmt, high = loaded.store.layouts[VERSION], np.array(loaded.store.arrays[VERSION])
    store = with_versions(loaded, ("checkpoint", "int2")).store
    low = np.asarray(store.arrays["int2"])
    for layer, records in enumerate(high):
        wanted = np.zeros_like(low[layer])
        weights = np.stack([np.asarray(decode(record, fmt)) for record in records])
        encode(weights, store.layouts["int2"], rtn, wanted)
        np.testing.assert_array_equal(low[layer], wanted)
    store.delete()
    options = "dynaexq,hi=checkpoint,lo=int2,hi_share=0.3,interval=8 tokens"
    stats, found = run(path, precision=options)
    assert stats["precision"]["versions"] == [VERSION, "int2"]
    assert stats["precision"]["promotions"] > 0
    assert all(len(each[0]) == 8 for each in found)
