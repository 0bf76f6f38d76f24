"""Checkpoints of models of text and images: the text model runs, under every published name and
order of its tensors, and the rest is left out and said."""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.models.config import parse_config, record_version
from moejax.models.families import FAMILIES
from tests.moejax.models.families import config_of, write_checkpoint

QWEN, KIMI = "Qwen3VLMoeForConditionalGeneration", "Kimi_K25ForConditionalGeneration"
WRAPPERS = [name for name, family in FAMILIES.items() if family.text_types]


def rewrite(directory, change):
    """The same checkpoint with tensors as `change` returns them."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)
    return directory


def renamed(prefix, head):
    def change(tensors):
        return {
            head if name == "lm_head.weight" else prefix + name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
        }

    return change


def turned(tensors):
    """Stacked experts as [E, D, 2F] and [E, F, D]."""
    return {
        name: np.ascontiguousarray(t.swapaxes(1, 2)) if "experts." in name else t
        for name, t in tensors.items()
    }


def assert_same(one, other):
    assert all(
        jax.tree.leaves(
            jax.tree.map(
                lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), one.params, other.params
            )
        )
    )
    first, second = (np.asarray(loaded.store.arrays["dense"]) for loaded in (one, other))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("architecture", WRAPPERS)
@pytest.mark.parametrize(
    "names",
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_prefixes_of_the_text_model(tmp_path, architecture, names):
    plain = load_checkpoint(write_checkpoint(tmp_path / "plain", architecture))
    other = rewrite(write_checkpoint(tmp_path / "other", architecture), renamed(*names))
    assert_same(load_checkpoint(other), plain)


@pytest.mark.parametrize(
    "widths", [{}, {"moe_intermediate_size": 32}, {"moe_intermediate_size": 64}]
)
def test_both_orders_of_stacked_experts(tmp_path, widths):
    """Also where 2F = D or F = D, so that one of the two tensors has the same shape in both."""
    plain = write_checkpoint(tmp_path / "plain", QWEN, stack=True, **widths)
    other = rewrite(write_checkpoint(tmp_path / "other", QWEN, stack=True, **widths), turned)
    assert_same(load_checkpoint(other), load_checkpoint(plain))
    with pytest.raises(UserError, match=r"is stored transposed; .*moejax convert"):
        load_checkpoint(other, in_files=True)


def test_another_family_has_one_order_only(tmp_path):
    other = rewrite(write_checkpoint(tmp_path / "x", "Qwen3MoeForCausalLM", stack=True), turned)
    with pytest.raises(UserError, match=r"down_proj has shape .* asks for"):
        load_checkpoint(other)


def test_what_is_left_out_is_counted_and_said(tmp_path, caplog, capsys):
    def add(tensors):
        image = np.zeros((2, 2), np.float32)
        later = "model.layers.3.mlp.gate.weight"
        return tensors | {"vision_tower.a": image, "mm_projector.b": image, later: image}

    directory = rewrite(write_checkpoint(tmp_path / "kimi", KIMI), add)
    with caplog.at_level(logging.INFO, "moejax"):
        opened = open_tensors(directory, "safetensors")
    assert opened.left_out == {"vision_tower": 1, "mm_projector": 1, "model.layers.3": 1}
    assert "left out: 1 of " in caplog.text
    assert cli.main(["info", str(directory), "--memory", "1GiB"]) == 0
    assert "1 of vision_tower" in capsys.readouterr().out


def test_two_names_of_one_tensor_are_refused(tmp_path):
    def add(tensors):
        return tensors | {"model.language_model.norm.weight": tensors["model.norm.weight"]}

    with pytest.raises(UserError, match=r"norm.weight and .*norm.weight are the same tensor"):
        load_checkpoint(rewrite(write_checkpoint(tmp_path / "x", KIMI), add))


def test_fields_of_the_wrapper_and_of_its_text(tmp_path):
    raw = config_of(KIMI)
    text, plain = raw["text_config"], parse_config(raw)
    assert parse_config(raw | {"text_config": text | {"dtype": "float16"}}).dtype == plain.dtype
    tied = raw | {"tie_word_embeddings": True, "text_config": text | {"tie_word_embeddings": False}}
    assert parse_config(tied).tie_word_embeddings
    published = raw | {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
    }
    published["text_config"] = text | {"model_type": "kimi_k2"}
    assert parse_config(published) == plain
    assert parse_config(raw | {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    int4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"weights": int4, "targets": ["Linear"]}}
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    inside = raw | {
        "text_config": text | {"quantization_config": quantized | {"config_groups": groups}}
    }
    found = parse_config(inside).quantization
    assert found is not None and found.versions == ("int4-32-bf16",)
    (tmp_path / "config.json").write_text(json.dumps(inside))
    assert record_version(tmp_path) == "checkpoint"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": 3}, "text_config must be an object, not 3"),
        (
            {"text_config": {"model_type": "llama"}},
            "text_config.model_type 'llama' .* only 'deepseek_v3' or",
        ),
        ({"text_config": {"hidden_size": 0}}, "text_config: hidden_size must be at least 1"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(UserError, match=message):
        parse_config(config_of(KIMI) | fields)
