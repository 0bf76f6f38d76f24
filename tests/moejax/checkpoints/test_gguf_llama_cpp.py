"""GGUF files that llama.cpp quantized (tests/models/llama_cpp) mean what the gguf package says."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax.checkpoints.load import load_checkpoint
from pallas_kernels.records import decode
from tests.conftest import REPOSITORY
from tests.models.llama_cpp.write import MODELS
from tests.moejax.gguf_blocks import assert_bytes_come_back, leaves
from tests.moejax.transformers_models import (
    assert_agrees,
    random_model,
    save,
    separate_experts,
    stack_experts,
)

pytestmark = pytest.mark.torch
FILES = REPOSITORY / "tests" / "models" / "llama_cpp"


def formats_of(mix):
    """Format of records → the layers that are in it, or () for all."""
    return {
        "Q4_K_M": {"q4_k": (0,), "q4_k+q4_k+q6_k": (1,)},
        "Q5_K_M": {"q5_k+q5_k+q6_k": ()},
        "MXFP4_MOE": {"fp4-32-e8m0": ()},
    }.get(mix, {mix.lower(): ()})


def dequantized_model(mix):
    """transformers' model with the weights of a file."""
    import torch

    model = random_model("Qwen3Moe", seed=1, **MODELS[mix])
    tensors = {
        each.name: np.array(dequantize(each.data, each.tensor_type), np.float32)
        for each in gguf.GGUFReader(FILES / f"{mix}.gguf").tensors
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 2)
    made = {}
    for name, values in separate_experts(model.state_dict()).items():
        if match := re.fullmatch(
            r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)_proj\.weight", name
        ):
            found = tensors[f"blk.{match[1]}.ffn_{match[3]}_exps.weight"][int(match[2])]
        else:
            found = tensors[names.get_name(name, (".weight", ".bias"))]
        made[name] = torch.from_numpy(found.reshape(values.shape))
    model.load_state_dict(stack_experts(made, model.state_dict()))
    return model


@pytest.mark.parametrize("mix", MODELS)
def test_formats_are_those_of_each_layer_and_bytes_come_back(mix):
    path = FILES / f"{mix}.gguf"
    store = load_checkpoint(path, "float32", versions=(CHECKPOINT,)).store
    assert {version: store.layers.get(version, ()) for version in store.arrays} == formats_of(mix)
    assert_bytes_come_back(path, store)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MODELS)
def test_every_weight_is_that_of_the_dequantized_model(mix, tmp_path):
    found = load_checkpoint(FILES / f"{mix}.gguf", "float32", versions=(CHECKPOINT,))
    wanted = load_checkpoint(save(dequantized_model(mix), tmp_path), "float32")
    dense = np.asarray(wanted.store.arrays["dense"])
    for version, layers in formats_of(mix).items():
        records, fmt = np.asarray(found.store.arrays[version]), found.store.layouts[version]
        for place, expert in np.ndindex(records.shape[:2]):
            whole = dense[layers[place] if layers else place, expert].view(np.uint32)
            decoded = np.asarray(decode(records[place, expert], fmt)).view(np.uint32)
            assert np.array_equal(decoded.reshape(-1), whole.reshape(-1))
    assert leaves(found).keys() == leaves(wanted).keys()
    for name, leaf in leaves(wanted).items():
        assert np.array_equal(leaves(found)[name], leaf), name


@pytest.mark.slow
@pytest.mark.parametrize("mix", MODELS)
def test_tokens_and_logits_are_those_of_the_dequantized_model(mix):
    assert_agrees(FILES / f"{mix}.gguf", dequantized_model(mix), expert_budget="50%")
