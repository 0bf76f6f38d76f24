"""Checkpoints that moejax writes for compressed-tensors: other libraries read the same weights."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax.checkpoints.compressed import write_compressed
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.manifest import JOURNAL
from moejax.checkpoints.shards import find_shards
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.models.config import load_config
from tests.moejax.checkpoints.conversions import write_source


def dense(path):
    """float32[L, E, 3·I, D] of a checkpoint."""
    loaded = load_checkpoint(path, "float32")
    array, layout = np.asarray(loaded.store.arrays["dense"]), loaded.layout
    return (
        array.reshape(*array.shape[:2], -1)
        .view(np.float32)
        .reshape(*array.shape[:2], -1, layout.hidden)
    )


@pytest.mark.parametrize(("version", "most"), [("int4", 0.12), ("int8", 0.008)])
def test_experts_are_those_of_the_source_up_to_rounding(version, most, demo_dir, tmp_path):
    path = write_compressed(demo_dir, tmp_path / "model", version)
    loaded = load_checkpoint(path, versions=(CHECKPOINT,))
    assert [*loaded.store.arrays] == [f"{version}-128-bf16"]
    found, wanted = dense(path), dense(demo_dir)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 0 < error < most


def test_what_cannot_be_written_is_refused(demo_dir, tmp_path, capsys):
    command = ["quantize", str(demo_dir), str(tmp_path / "x"), "--to", "compressed-tensors"]
    assert main([*command, "--versions", "int2"]) == 2
    assert "compressed-tensors holds int8 or int4, not 'int2'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    assert main([*command, "--versions", "int4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directory"] == str(tmp_path / "x")
    assert main([*command, "--versions", "int4"]) == 2
    assert "already there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["norm", "layers.0.mlp.experts.1.up_proj"])
def test_values_that_are_not_finite_are_refused_by_name(name, demo_dir, tmp_path):
    source, tensor = tmp_path / "source", f"model.{name}.weight"
    shutil.copytree(demo_dir, source)
    (shard,) = find_shards(source)
    with shard.path.open("r+b") as file:
        file.seek(shard.begins[tensor] + 2)
        file.write(b"\x80\x7f")  # infinity
    with pytest.raises(UserError, match=f"tensor {re.escape(tensor)} has values that are NaN or"):
        write_compressed(source, tmp_path / "model", "int4")
    assert not (tmp_path / "model").exists()


def test_nothing_of_an_unfinished_call_remains(demo_dir, tmp_path):
    """Work that can go on is kept: that of a conversion to moejax's own format."""
    work = tmp_path / "model.partial"
    work.mkdir()
    (work / "model.safetensors.index.json").write_text("{")
    (work / JOURNAL).write_text("{}")
    with pytest.raises(UserError, match="an unfinished conversion to moejax's own format"):
        write_compressed(demo_dir, tmp_path / "model", "int4")
    assert {path.name for path in work.iterdir()} >= {"model.safetensors.index.json", JOURNAL}
    (work / JOURNAL).write_text("")
    path = write_compressed(demo_dir, tmp_path / "model", "int4")
    assert {each.name for each in path.iterdir()} >= {"model.safetensors", "config.json"}
    assert not (path / "model.safetensors.index.json").exists()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shard", "version", "tied"),
    [
        ("Qwen3Moe", "1GB", "int4", False),
        ("DeepseekV3", "100KB", "int4", False),
        ("Qwen3Moe", "1GB", "int8", True),
    ],
)
def test_transformers_reads_the_same_weights(family, shard, version, tied, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from tests.moejax.transformers_models import random_model

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    model = random_model(family, **sizes, tie_word_embeddings=tied)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size=shard)
    path = write_compressed(tmp_path / "dense", tmp_path / "model", version)
    experts = dense(path)
    for number, layer in enumerate(
        layer
        for layer in AutoModelForCausalLM.from_pretrained(path).model.layers
        if hasattr(layer.mlp, "experts")
    ):
        gate_up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        theirs = torch.cat([gate_up, down.transpose(1, 2)], 1).float().detach().numpy()
        assert np.array_equal(theirs, experts[number])
    wanted = dict(model.named_parameters())["model.layers.0.self_attn.o_proj.weight"]
    read = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(read.model.layers[0].self_attn.o_proj.weight, wanted.to(torch.bfloat16))
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(("version", "bits"), [("int4", 4), ("int8", 8)])
def test_file_and_config_have_what_vllm_reads(version, bits, demo_dir, tmp_path):
    """vLLM 0.33.0's CompressedTensorsConfig.from_config takes the keys `format`, `ignore` and
    `config_groups` (of each group `targets` and `weights`); the weight-only scheme of 4 and 8 bits
    needs symmetric, static weights in groups or channels and no `input_activations`. Tensors have
    the names of RoutedExperts.build_expert_params_mapping (fused_moe/routed_experts.py, line 1162),
    and dtypes and shapes of the parameters that CompressedTensorsWNA16MoEMethod.create_weights
    makes (compressed_tensors_moe_wna16.py, lines 135 to 356), of which each takes a part."""
    path = write_compressed(demo_dir, tmp_path / "model", version)
    table = json.loads((path / "config.json").read_text())["quantization_config"]
    assert table["quant_method"] == "compressed-tensors"
    assert table["format"] == "pack-quantized"
    (group,) = table["config_groups"].values()
    assert group["targets"] == ["Linear"] and group.get("input_activations") is None
    weights = group["weights"]
    assert (weights["num_bits"], weights["type"]) == (bits, "int")
    assert (weights["strategy"], weights["group_size"]) == ("group", 128)
    assert weights["symmetric"] is True and weights["dynamic"] is False
    assert weights.get("actorder") is None
    with safe_open(path / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        tensors = {name: (of.get_dtype(), of.get_shape()) for name, of in tensors.items()}
    plain = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    matrices = {n for n in plain if len(tensors[f"{n}.weight"][1]) == 2}
    # Whatever else is a Linear would be read as codes, so would a head that has no tensor.
    assert {*table["ignore"]} == matrices | {"lm_head"}
    config = load_config(path)
    hidden, width, factor = config.hidden_size, config.moe_intermediate_size, 32 // bits
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    wanted = {}
    for layer, expert in np.ndindex(config.num_hidden_layers, config.num_experts):
        for matrix, (rows, columns) in shapes.items():
            name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
            wanted[f"{name}_packed"] = ("I32", [rows, columns // factor])
            wanted[f"{name}_scale"] = ("BF16", [rows, columns // 128])
            wanted[f"{name}_shape"] = ("I64", [2])
    assert {name: found for name, found in tensors.items() if ".experts." in name} == wanted


def test_groups_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(UserError, match="have no groups of 128, 64, 32; leave --to out"):
        write_compressed(write_source(tmp_path / "small"), tmp_path / "model", "int4")
