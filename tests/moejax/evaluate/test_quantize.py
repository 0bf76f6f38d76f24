"""Versions of a model's experts: made at load, and written beside the dense ones."""

import json

import numpy as np
import pytest

from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.versions import with_versions
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.evaluate.quantization import quantize
from tests.host_offload.versions.store_errors import relative_errors
from tests.moejax.checkpoints.conversions import (
    assert_same_model,
    contents,
    copied,
    flip,
    write_source,
)
from tests.moejax.checkpoints.random_checkpoint import CONFIG, UP, random_tensors, write

VERSIONS = ("int8", "int4", "int2", "lossless12")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    """All versions of it, rounded to nearest."""
    return quantize(source, tmp_path_factory.mktemp("quantized") / "model", VERSIONS)


@pytest.fixture(scope="module")
def directory(quantized):
    return quantized.conversion.directory


def arrays(loaded):
    return {version: np.asarray(array) for version, array in loaded.store.arrays.items()}


def same_stores(found, expected):
    assert list(found.store.layouts) == list(expected.store.layouts)
    for version, array in arrays(expected).items():
        np.testing.assert_array_equal(arrays(found)[version], array)


def test_versions_are_made_from_the_dense_one(source):
    dense = arrays(load_checkpoint(source))["dense"]
    loaded = with_versions(load_checkpoint(source), ("lossless12", "dense", "int4"))
    assert list(loaded.store.layouts) == ["lossless12", "dense", "int4"]
    assert loaded.quantizers == {"lossless12": "lossless", "int4": "rtn"}
    assert loaded.layout == loaded.store.layouts["dense"] and loaded.seconds["versions"] > 0
    np.testing.assert_array_equal(arrays(loaded)["dense"], dense)
    for version, array in loaded.store.arrays.items():
        layout = loaded.store.layouts[version]
        assert layout.version == version and layout.dtype == "bfloat16"
        assert array.shape == (2, 3, layout.rows, 16)
        assert array.sharding.memory_kind == "pinned_host"
    assert not relative_errors(loaded.store, "lossless12", "bfloat16").any()
    errors = relative_errors(loaded.store, "int4", "bfloat16")
    assert errors.shape == (2, 3) and ((errors > 0.03) & (errors < 0.15)).all()


@pytest.mark.parametrize(
    ("dtype", "wanted", "message"),
    [
        ("auto", ("int3",), "unknown expert version 'int3'; known: dense, lossless12"),
        ("auto", ("int4", "int4"), "name each version once, not int4, int4"),
        ("auto", (), "name each version once, not none"),
        ("float16", ("lossless12",), "lossless12 holds bfloat16 weights, not float16; run in bf"),
    ],
)
def test_versions_that_a_run_cannot_have(dtype, wanted, message, source):
    loaded = load_checkpoint(source, dtype)
    with pytest.raises(UserError, match=message):
        with_versions(loaded, wanted)
    loaded.store.delete()


def test_weights_that_a_version_cannot_hold(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors[UP][0, 0] = 1e30  # MoE layer 1, expert 2
    source = write(tmp_path / "hf", tensors)
    message = r"int4 cannot hold expert 2 of MoE layer 1: weights are too large for float16 scales"
    with pytest.raises(UserError, match=f"{message}; use another version"):
        with_versions(load_checkpoint(source), ("int4",))
    with pytest.raises(UserError, match=f"{message}; leave this version out"):
        quantize(source, tmp_path / "model", ("lossless12", "int4"))
    assert not (tmp_path / "model").exists()
    exact = with_versions(load_checkpoint(source), ("dense", "lossless12"))
    assert not relative_errors(exact.store, "lossless12", "bfloat16").any()


def test_a_run_takes_what_the_checkpoint_has(directory, source):
    assert_same_model(load_checkpoint(directory), load_checkpoint(source))
    made = with_versions(load_checkpoint(source), ("dense", *VERSIONS))
    taken = load_checkpoint(directory, versions=("dense", *VERSIONS))
    same_stores(taken, made)
    assert taken.quantizers == made.quantizers
    same_stores(with_versions(taken, ("int2", "int8")), with_versions(made, ("int2", "int8")))


def test_only_the_wanted_versions_are_read(directory, tmp_path):
    broken = copied(directory, tmp_path / "model")
    tree = broken / read_manifest(broken / MANIFEST).tree
    for path in tree.glob("experts.dense.*/c/*/0/0"):
        flip(path)
    loaded = load_checkpoint(broken, versions=("int4", "lossless12"))
    assert list(loaded.store.layouts) == ["int4", "lossless12"]
    assert loaded.layout.version == "dense"
    # Threads read the records, and any that is damaged may be the first: layer 0 alone stays so.
    for path in tree.glob("experts.dense.[!0]*/c/*/0/0"):
        flip(path)
    with pytest.raises(UserError, match=r"expert . of MoE layer 0, version dense .* damaged"):
        load_checkpoint(broken)


def test_what_the_checkpoint_lacks_is_made(source, tmp_path):
    directory = quantize(source, tmp_path / "model", ("int4",), "mse").conversion.directory
    loaded = load_checkpoint(directory, versions=("int4", "int8"))
    assert list(loaded.store.layouts) == ["dense", "int4"]
    loaded = with_versions(loaded, ("int4", "int8"))
    assert loaded.quantizers == {"int4": "mse", "int8": "rtn"}


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (("int4", "int4"), "name each version once"),
        (("",), "unknown expert version ''; known"),
        (("fp8-16x32-f32",), "fp8-16x32-f32 is a format of checkpoints.*choose dense, lossless12"),
        (("dense", "int4"), "dense is always written; name the versions to be made from it"),
    ],
)
def test_versions_that_cannot_be_written(versions, message, source, tmp_path):
    with pytest.raises(UserError, match=message):
        quantize(source, tmp_path / "model", versions)
    assert not list(tmp_path.iterdir())


def test_step_and_map_go_with_a_training_run(source, tmp_path):
    with pytest.raises(UserError, match="are for Orbax checkpoints that other programs wrote"):
        quantize(source, tmp_path / "model", ("int4",), name_map="nnx_qwen3_moe")
    asked = ["quantize", "/runs/7", str(tmp_path / "model"), "--versions", "int4", "--step", "1"]
    with pytest.raises(SystemExit):
        main([*asked, "--to", "compressed-tensors"])


def test_an_interrupted_run_asks_for_the_same_again(source, tmp_path):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "model", ("int4",), progress=interrupt)
    message = "an unfinished conversion with int4 by rtn; ask for the same, or delete it"
    with pytest.raises(UserError, match=message):
        quantize(source, tmp_path / "model", ("int4",), "mse")
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "model")


def test_the_command(source, directory, tmp_path, capsys):
    command = ["quantize", str(source), str(tmp_path / "model"), "--versions"]
    assert main([*command, ",".join(VERSIONS)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'model'}: ") and "weights and versions" in out
    assert "made by" in out and "relative error" in out
    assert contents(tmp_path / "model") == contents(directory)
    assert main([*command, "int4"]) == 2
    assert "already there" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "model"), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["weights"]["quantizers"] == {
        **dict.fromkeys(("int8", "int4", "int2"), "rtn"),
        "lossless12": "lossless",
    }
    loaded = load_checkpoint(directory, versions=VERSIONS)
    for version, layout in loaded.store.layouts.items():
        assert info["versions"][version]["record_bytes"] == layout.nbytes


@pytest.mark.slow
def test_a_converted_checkpoint_is_quantized_too(source, directory, tmp_path):
    converted = convert(source, tmp_path / "converted").directory
    again = quantize(converted, tmp_path / "model", VERSIONS).conversion.directory
    assert contents(again) == contents(directory)
    provenance = read_manifest(again / MANIFEST).provenance
    assert provenance["source"] == str(converted) and list(provenance["files"]) == [MANIFEST]
    fewer = quantize(again, tmp_path / "fewer", ("int4",)).conversion.directory
    assert list(read_manifest(fewer / MANIFEST).experts) == ["dense", "int4"]
