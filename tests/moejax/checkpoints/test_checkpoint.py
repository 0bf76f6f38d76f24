"""Checkpoints: every bit where it belongs, in bounded memory."""

import contextlib
import importlib.resources
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.load import load_checkpoint, load_tensors
from moejax.checkpoints.safetensors.headers import Header
from moejax.checkpoints.tensors import expected_tensors
from moejax.errors import UserError
from moejax.models.config import parse_config
from tests.moejax.checkpoints.random_checkpoint import (
    BF16,
    CONFIG,
    EMBED,
    HEAD,
    assert_loaded,
    random_tensors,
    stacked,
    write,
)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "half", "float", "float32"])
def test_every_weight_arrives(tmp_path, dtype):
    tensors = random_tensors(CONFIG)
    loaded = load_checkpoint(write(tmp_path, tensors), dtype)
    assert loaded.dtype == {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(
        dtype, dtype
    )
    assert loaded.config == parse_config(CONFIG)
    assert loaded.layout.itemsize == NUMPY_DTYPES[loaded.dtype].itemsize
    assert_loaded(loaded, tensors, CONFIG)


@pytest.mark.parametrize("shards", [2, 5])
def test_layers_spread_over_shards(tmp_path, shards):
    tensors = random_tensors(CONFIG)
    assert_loaded(load_checkpoint(write(tmp_path, tensors, shards=shards)), tensors, CONFIG)


def test_experts_stacked_in_one_layer(tmp_path):
    tensors = random_tensors(CONFIG)
    directory = write(tmp_path, stacked(tensors, 3, 3), shards=2)
    assert_loaded(load_checkpoint(directory), tensors, CONFIG)


def test_attention_bias_and_tied_embeddings(tmp_path):
    config = {**CONFIG, "attention_bias": True, "tie_word_embeddings": True, "mlp_only_layers": []}
    tensors = random_tensors(config)
    loaded = load_checkpoint(write(tmp_path, tensors, config))
    assert "lm_head" not in loaded.params and len(loaded.params["runs"]) == 1
    assert_loaded(loaded, tensors, config)


def test_redundant_lm_head_is_ignored(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    directory = write(tmp_path, {**tensors, HEAD: tensors[EMBED]}, config, shards=3)
    assert_loaded(load_checkpoint(directory), tensors, config)


@pytest.mark.parametrize(
    "head", [lambda embed: embed + np.float32(1).astype(BF16), lambda embed: embed[:5]]
)
def test_lm_head_that_is_not_tied(tmp_path, head):
    """transformers 5 would use it, contrary to its config; that is the user's to decide."""
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    write(tmp_path, {**tensors, HEAD: head(tensors[EMBED])}, config)
    with pytest.raises(
        UserError,
        match=r"model.safetensors: tensor lm_head.weight differs from "
        r"model.embed_tokens.weight.*tie_word_embeddings",
    ):
        load_checkpoint(tmp_path)


def test_dtype_from_the_weights_where_the_config_has_none(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "dtype"}
    tensors = random_tensors(config, np.float16)
    loaded = load_checkpoint(write(tmp_path, tensors, config))
    assert loaded.dtype == loaded.config.dtype == "float16"
    assert_loaded(loaded, tensors, config)


def test_auto_is_what_the_config_says(tmp_path):
    tensors = random_tensors(CONFIG, np.float32)
    loaded = load_checkpoint(write(tmp_path, tensors))
    assert loaded.dtype == "bfloat16"
    assert_loaded(loaded, tensors, CONFIG)


def test_demo_bits():
    with importlib.resources.as_file(importlib.resources.files("moejax") / "demo") as directory:
        loaded = load_checkpoint(directory)
        tensors = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
    assert_loaded(loaded, tensors, config)
    assert loaded.config.eos_token_ids == (0,)
    loaded.store.delete()


def test_checkpoint_of_five_shards(shared):
    """A real one: tied, experts split between shards."""
    loaded = load_checkpoint(shared / "models" / "tri")
    tensors = {}
    for path in (shared / "models" / "tri").glob("*.safetensors"):
        tensors |= load_file(path)
    config = json.loads((shared / "models" / "tri" / "config.json").read_text())
    assert_loaded(loaded, tensors, config)


def test_progress_counts_bytes(tmp_path):
    tensors, calls = random_tensors(CONFIG), []
    write(tmp_path, tensors, shards=2)
    load_checkpoint(tmp_path, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert calls[-1] == (total, total)
    assert {t for _, t in calls} == {total}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_interrupted_load_frees_the_store(tmp_path):
    write(tmp_path, random_tensors(CONFIG))
    before = {id(array) for array in jax.live_arrays()}

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(tmp_path, progress=stop)
    assert not [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()]


def test_files_of_the_hub_cache_are_links(tmp_path):
    """The hub's cache keeps blobs outside of the snapshot's directory; that is no escape."""
    tensors, cache = random_tensors(CONFIG), tmp_path / "models--some--model"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    directory = write(cache / "snapshots" / "abc", tensors, shards=2)
    for path in list(directory.iterdir()):
        shutil.move(path, cache / "blobs" / path.name)
        path.symlink_to(pathlib.Path("..", "..", "blobs", path.name))
    assert_loaded(load_checkpoint(directory), tensors, CONFIG)


@pytest.mark.torch
def test_checkpoint_that_transformers_writes(tmp_path):
    """transformers 5 keeps experts stacked in memory and saves whichever form it likes."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).to(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    loaded = load_checkpoint(tmp_path)
    assert loaded.dtype == "float32"
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for layer in (0, 3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up, down = state.pop(prefix + "gate_up_proj"), state.pop(prefix + "down_proj")
        for e in range(3):
            state[f"{prefix}{e}.gate_proj.weight"], state[f"{prefix}{e}.up_proj.weight"] = np.split(
                gate_up[e], 2
            )
            state[f"{prefix}{e}.down_proj.weight"] = down[e]
    assert_loaded(loaded, state, CONFIG)


class InMemory:
    """A TensorFile that is no shard."""

    path = pathlib.Path("memory")

    def __init__(self, arrays):
        self.arrays = arrays
        self.tensors = {n: Header(a.dtype.name, a.shape) for n, a in arrays.items()}

    def open(self):
        return contextlib.nullcontext(self)

    def get_tensor(self, name):
        return self.arrays[name]

    def get_rows(self, name, index):
        return self.arrays[name][index]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_tensors_of_another_format(dtype):
    tensors = random_tensors(CONFIG)
    files = [
        InMemory({n: t for n, t in stacked(tensors, 3, 3).items() if n.endswith("weight") == even})
        for even in (True, False)
    ]
    loaded = load_tensors(parse_config(CONFIG), files, dtype, source="memory")
    assert_loaded(loaded, tensors, CONFIG)
    assert loaded.seconds.keys() == {"headers", "allocate", "read", "transfer"}
    files[0].tensors[HEAD] = Header("bfloat16", (1, 2))
    with pytest.raises(UserError, match=r"memory: tensor lm_head.weight has shape \[1, 2\]"):
        load_tensors(parse_config(CONFIG), files, dtype, source="memory")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_tensors_larger_than_what_is_read_at_once(tmp_path, monkeypatch, dtype):
    """Chunks of 16 rows, pieces of 5: every boundary is somewhere."""
    monkeypatch.setattr("moejax.checkpoints.placement._CHUNK", 300)
    monkeypatch.setattr("moejax.checkpoints.placement._PIECE", 5 * 16 * 2)
    config = {**CONFIG, "hidden_size": 40, "moe_intermediate_size": 7}
    tensors = random_tensors(config)
    assert_loaded(load_checkpoint(write(tmp_path, tensors, config), dtype), tensors, config)


LOAD_AND_MEASURE = """
import sys
import jax
from moejax.checkpoints.load import load_checkpoint
jax.device_put(1.0).block_until_ready()
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))
before = status("VmRSS:")
load_checkpoint(sys.argv[1])
print(status("VmHWM:") - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_resident_memory_is_bounded(tmp_path, repository):
    """1 GiB in 8 shards, each layer in all of them: weights, one shard, one layer, 256 MiB."""
    config = {
        **CONFIG,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "mlp_only_layers": [],
        "head_dim": 64,
        "num_experts": 42,
        "moe_intermediate_size": 512,
        "vocab_size": 8192,
    }
    rng, tensors = np.random.default_rng(0), {}
    for name, place in expected_tensors(parse_config(config), ()).items():
        bits = rng.integers(0, 16000, place.shape, dtype=np.uint16)
        tensors[name] = bits.view(ml_dtypes.bfloat16)
    write(tmp_path, tensors, config, shards=8)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    layer = 42 * 3 * 512 * 1024 * 2
    shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    del tensors
    assert weights > 2**30
    result = subprocess.run(
        [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path)],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(result.stdout) <= weights + shard + layer + 2**28
