"""Loading what `moejax convert` wrote: the source's bits, one expert alone, damage by name."""

import dataclasses
import json
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax import LLM, SamplingParams
from moejax.checkpoints.convert import convert
from moejax.checkpoints.load import checkpoint_format, load_checkpoint
from moejax.checkpoints.orbax.manifest import checksum
from moejax.checkpoints.orbax.own import load_orbax, read_expert
from moejax.errors import UserError
from moejax.models.families import FAMILIES
from tests.moejax.checkpoints.conversions import assert_same_model, copied, flip, rewrite_manifest
from tests.moejax.checkpoints.random_checkpoint import CONFIG, UP, random_tensors, stacked, write
from tests.moejax.models import families

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("hf") / "model", random_tensors(CONFIG), shards=3)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("orbax") / "model", verify=True).directory


@pytest.fixture
def broken(converted, tmp_path):
    return copied(converted, tmp_path / "broken")


# ---- the same bits


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[pytest.mark.slow] * (i > 1)) for i, a in enumerate(FAMILIES)],
)
def test_every_family_loads_as_its_source_does(architecture, tmp_path):
    original = families.write_checkpoint(tmp_path / "hf", architecture)
    result = convert(original, tmp_path / "orbax").directory
    assert_same_model(load_checkpoint(result), load_checkpoint(original))


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_loads_as_its_source_does_in_every_dtype(dtype, source, converted):
    assert checkpoint_format(converted) == "moejax-orbax"
    assert_same_model(load_checkpoint(converted, dtype), load_checkpoint(source, dtype))


def test_stacked_float32_experts_without_a_dtype_in_the_config(tmp_path):
    config = {k: v for k, v in CONFIG.items() if k != "dtype"}
    tensors = stacked(random_tensors(config, np.float32), 3, 3)
    original = write(tmp_path / "hf", tensors, config)
    result = convert(original, tmp_path / "orbax").directory
    assert_same_model(load_checkpoint(result), load_checkpoint(original))


def test_conversion_to_another_dtype(tmp_path):
    config = CONFIG | {"torch_dtype": "float32", "dtype": "float32"}
    original = write(tmp_path / "hf", random_tensors(config, np.float32), config)
    result = convert(original, tmp_path / "orbax", dtype="bfloat16").directory
    wanted, found = load_checkpoint(original, "bfloat16"), load_checkpoint(result)
    assert found.config.dtype == "bfloat16"
    assert_same_model(found, dataclasses.replace(wanted, config=found.config))
    written = json.loads((result / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written


def test_parameters_with_a_dtype_of_their_own_keep_it(tmp_path):
    original = families.write_checkpoint(tmp_path / "hf", "DeepseekV3ForCausalLM")
    result = convert(original, tmp_path / "orbax").directory
    params = load_checkpoint(result).params
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    assert dtypes == {"bfloat16", "float32"}


@pytest.mark.nightly  # the same arrays: test_loads_as_its_source_does_in_every_dtype
@pytest.mark.slow
def test_the_demo_writes_the_same_text(demo_dir, tmp_path):
    result = convert(demo_dir, tmp_path / "orbax").directory
    texts = []
    for model in (demo_dir, result):
        limits = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256)
        with LLM(model, progress=False, **limits) as llm:  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
            (output,) = llm.generate("The old house", params, use_tqdm=False)
            texts.append((output.outputs[0].text, output.outputs[0].token_ids))
    assert texts[0] == texts[1] and texts[0][0]


def test_orbax_itself_loads_it(converted):
    from orbax.checkpoint import v1

    tree, loaded = v1.load(str(converted)), load_checkpoint(converted)
    assert jax.tree.structure(tree["params"]) == jax.tree.structure(loaded.params)
    for found, wanted in zip(
        jax.tree.leaves(tree["params"]), jax.tree.leaves(loaded.params), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    store = np.asarray(loaded.store.arrays["dense"])
    for found, wanted in zip(tree["experts"]["dense"], store, strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_progress_is_in_bytes(converted):
    calls = []
    loaded = load_orbax(converted, progress=lambda done, total: calls.append((done, total)))
    nbytes = loaded.store.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert calls[-1] == (nbytes, nbytes) and calls == sorted(calls)


def test_phases_are_timed(converted):
    seconds = load_checkpoint(converted).seconds
    assert seconds.keys() == {"headers", "allocate", "read"} and min(seconds.values()) > 0


def test_files_of_the_hub_cache_are_links(source, converted, tmp_path):
    """As `hf upload` and loading from the hub's cache leave them; a Hugging Face checkpoint in a
    directory of a repository too."""
    cache = tmp_path / "models--some--model"
    snapshot = pathlib.Path(shutil.copytree(converted, cache / "snapshots" / "abc"))
    shutil.copytree(source, snapshot / "original")
    (cache / "blobs").mkdir()
    for number, path in enumerate(p for p in snapshot.rglob("*") if p.is_file()):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(cache / "blobs" / str(number))
    (tmp_path / "link").symlink_to(snapshot)
    assert_same_model(load_checkpoint(tmp_path / "link"), load_checkpoint(converted))
    assert_same_model(load_checkpoint(snapshot / "original"), load_checkpoint(source))
    path = snapshot / "state/params.embed/zarr.json"
    (tmp_path / "secret").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"zarr.json: a link out of the checkpoint's directory"):
        load_checkpoint(snapshot)


# ---- one expert alone


def test_an_expert_is_read_alone(converted, broken):
    store = np.asarray(load_checkpoint(converted).store.arrays["dense"])
    kept = broken / "state/experts.dense.1/c/2/0/0"
    for path in broken.glob("state/*/c/**/*"):
        if path.is_file() and path != kept:
            path.unlink()
    np.testing.assert_array_equal(read_expert(broken, 1, 2), store[1, 2])
    with pytest.raises(UserError, match=r"expert 1 of MoE layer 1, version dense .*No such file"):
        read_expert(broken, 1, 1)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((2, 0), "no expert 0 in MoE layer 2; there are 2 MoE layers of 3 experts"),
        ((0, 3), "no expert 3 in MoE layer 0"),
        ((-1, 0), "no expert 0 in MoE layer -1"),
        ((0, 0, "int4"), "no version 'int4' of experts; there are dense"),
    ],
)
def test_an_expert_that_is_not_there(place, message, converted):
    with pytest.raises(UserError, match=message):
        read_expert(converted, *place)


def test_an_expert_without_a_checksum(broken):
    rewrite_manifest(broken, lambda manifest: manifest["experts"]["dense"].pop("1"))
    with pytest.raises(UserError, match="MoE layer 1 has not 3 checksums"):
        read_expert(broken, 1, 0)


# ---- damage


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("state/experts.dense.1/c/2/0/0", "expert 2 of MoE layer 1, version dense .*: damaged"),
        ("state/params.runs.1.qkv/c/0/0/0", "parameter runs.1.qkv .*: damaged"),
        ("state/params.embed/c/0/0", "parameter embed .*: damaged"),
        ("state/params.embed/zarr.json", "zarr.json: changed or damaged since the conversion"),
        ("state/_METADATA", "_METADATA: changed or damaged since the conversion"),
        ("generation_config.json", "generation_config.json: changed or damaged"),
        ("moejax.json", "moejax.json: damaged: its checksum does not fit"),
    ],
)
def test_a_flipped_bit_is_named(file, message, broken):
    flip(broken / file, -6 if file == "moejax.json" else -1)  # of its own, which stays JSON
    with pytest.raises(UserError, match=message):
        load_checkpoint(broken)


def test_no_flipped_bit_goes_unnoticed(broken):
    rng = np.random.default_rng(3)
    for path in sorted(p for p in broken.rglob("*") if p.is_file() and p.stat().st_size):
        at = int(rng.integers(path.stat().st_size))
        flip(path, at)
        with pytest.raises(UserError, match=re.escape(path.name)):
            load_checkpoint(broken)
        flip(path, at)
    load_checkpoint(broken)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("state/experts.dense.0", "experts.dense.0/zarr.json: no such file"),
        ("state/experts.dense.0/c", "expert 0 of MoE layer 0, version dense .*: No such file"),
        ("state/params.runs.1.down/c/1/0/0", "parameter runs.1.down .*: No such file"),
        ("state", "state/_METADATA: no such file"),
        ("config.json", "config.json: no such file"),
    ],
)
def test_what_is_missing_is_named(file, message, broken):
    path = broken / file
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match=message):
        load_checkpoint(broken)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("state/experts.dense.1/c/0/0/0", "expert 0 of MoE layer 1, .*: 40 bytes, not 768"),
        ("state/_METADATA", "_METADATA: changed or damaged"),
        ("moejax.json", "moejax.json: cannot be read as JSON"),
    ],
)
def test_a_truncated_file_is_named(file, message, broken):
    (broken / file).write_bytes((broken / file).read_bytes()[:40])
    with pytest.raises(UserError, match=message):
        load_checkpoint(broken)


def test_the_tree_that_orbax_would_read_is_not_trusted(broken):
    # A checksum that fits is not enough: the array must be the one that config.json asks for.
    path = broken / "state/params.embed/zarr.json"
    path.write_text(path.read_text().replace("bfloat16", "float16"))
    rewrite_manifest(
        broken,
        lambda m: m["files"].update({"state/params.embed/zarr.json": checksum(path.read_bytes())}),
    )
    with pytest.raises(UserError, match=r"zarr.json: not the array that config.json asks for"):
        load_checkpoint(broken)


def _put(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def _drop(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_put("format_version", value=2), "format_version 2; this moejax reads version 1"),
        (_put("format", value="other"), "format is 'other'"),
        (_put("dtype", value="int8"), "dtype 'int8' is unknown"),
        (_put("tree", value="../elsewhere"), "not a manifest that moejax wrote"),
        (_put("files", "../../etc/passwd", value="0" * 16), "not a manifest that moejax wrote"),
        (_put("files", "/etc/passwd", value="0" * 16), "not a manifest that moejax wrote"),
        (_put("files", "\033[2J", value="0" * 16), "wrote: .*unprintable"),
        (_put("files", "config.json", value=7), "not a manifest that moejax wrote"),
        (_put("nonfinite", value=[]), "not a manifest that moejax wrote"),
        (_put("experts", value=[]), "not a manifest that moejax wrote"),
        (_drop("params"), "not a manifest that moejax wrote"),
        (_drop("params", "embed"), "parameter embed is missing"),
        (_put("params", "extra", value={"dtype": "bfloat16", "shape": [], "checksums": []}),
         "parameter extra is unknown to this architecture"),
        (_put("params", "embed", "shape", value=[16, 24]), r"embed is bfloat16\[16, 24\], but"),
        (_put("params", "embed", "checksums", value=[]), "0 checksums for params.embed"),
        (_drop("experts", "dense", "1"), "0 checksums for experts.dense.1"),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused(change, message, broken):
    rewrite_manifest(broken, change)
    with pytest.raises(UserError, match=message):
        load_checkpoint(broken)


@pytest.mark.parametrize("name", [UP, NORM])
def test_values_that_the_wanted_dtype_cannot_hold(name, tmp_path):
    config = CONFIG | {"dtype": "float32"}
    tensors = random_tensors(config, np.float32)
    tensors[name].flat[3] = 1e30
    original = write(tmp_path / "hf", tensors, config)
    with pytest.raises(UserError, match=f"{re.escape(name)} has values that float16 cannot hold"):
        convert(original, tmp_path / "orbax", dtype="float16")
    result = convert(original, tmp_path / "whole").directory
    with pytest.raises(UserError, match=r"state.* has values that float16 cannot hold"):
        load_checkpoint(result, "float16")


def test_a_pipe_instead_of_a_file(broken):
    (broken / "generation_config.json").unlink()
    os.mkfifo(broken / "generation_config.json")
    with pytest.raises(UserError, match=r"generation_config.json: a pipe"):
        load_checkpoint(broken)


def test_an_unknown_dtype(converted):
    with pytest.raises(UserError, match="dtype 'int3' is unknown; choose auto"):
        load_checkpoint(converted, "int3")


def test_a_store_that_does_not_fit(converted):
    def refuse(*args):
        raise MemoryError("no room")

    with pytest.raises(UserError, match="no room"):
        load_checkpoint(converted, new_builder=refuse)


# ---- formats


def test_formats(source, converted, tmp_path):
    assert checkpoint_format(source) == "safetensors"
    (tmp_path / "a/3/default").mkdir(parents=True)
    (tmp_path / "a/3/_CHECKPOINT_METADATA").write_text("{}")
    assert checkpoint_format(tmp_path / "a") == "orbax"
    assert checkpoint_format(tmp_path / "a/3") == "orbax"
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        checkpoint_format(tmp_path)


def test_numpy_dtypes_are_zarr_names():
    # zarr v3 and numpy agree on these names; the manifest and zarr.json rely on it.
    assert all(name == dtype.name for name, dtype in NUMPY_DTYPES.items())
