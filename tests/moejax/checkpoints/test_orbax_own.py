"""Checkpoints of `moejax convert`: written, gone on with, loaded to the source's bits, damaged."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.destination import LOCK
from moejax.checkpoints.orbax.layout import Leaf, orbax_files
from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST, checksum, read_manifest
from moejax.checkpoints.orbax.own import read_expert
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.families import FAMILIES
from pallas_kernels.cpu.checksums import checksum as crc
from tests.moejax.checkpoints.conversions import (
    assert_same_model,
    contents,
    copied,
    flip,
    refuses,
    rewrite_manifest,
    write_source,
)
from tests.moejax.checkpoints.random_checkpoint import CONFIG, random_tensors, write
from tests.moejax.models import families
from tests.pallas_kernels.contract import NATIVE

KILLED = """
import os, signal, sys, threading
from moejax.checkpoints.conversion import convert
source, destination, left, delay = *sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4])

def count(event, args):
    global left
    if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(args[0]).startswith(
        destination
    ):
        left -= 1
        if left == 0:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

sys.addaudithook(count)
convert(source, destination)
print(int(sys.argv[3]) - left, flush=True)
"""
"""Converts, and kills itself `delay` seconds after the `left`-th file operation in DST or
DST.partial; prints how many there were."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = write_source(tmp_path_factory.mktemp("hf") / "model")
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    return directory


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("orbax") / "model").directory


@pytest.fixture
def broken(undisturbed, tmp_path):
    return copied(undisturbed, tmp_path / "broken")


@pytest.fixture(scope="module")
def ended_early(source, undisturbed, tmp_path_factory):
    """A conversion that ended after all parameters and one of two MoE layers."""
    params = len(json.loads((undisturbed / MANIFEST).read_text())["params"])
    calls = itertools.count()

    def report(done, total):
        if next(calls) == params + 1:
            raise KeyboardInterrupt

    directory = tmp_path_factory.mktemp("ended") / "model"
    with pytest.raises(KeyboardInterrupt):
        convert(source, directory, progress=report)
    return directory.with_name("model.partial")


@pytest.fixture
def unfinished(ended_early, tmp_path):
    """A destination that a conversion began."""
    copied(ended_early, tmp_path / "model.partial")
    return tmp_path / "model"


# ---- the same bits


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[pytest.mark.slow] * (i > 1)) for i, a in enumerate(FAMILIES)],
)
def test_every_family_loads_as_its_source_does(architecture, tmp_path):
    original = families.write_checkpoint(tmp_path / "hf", architecture)
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


def test_orbax_itself_loads_it(undisturbed):
    from orbax.checkpoint import v1

    tree, loaded = v1.load(str(undisturbed)), load_checkpoint(undisturbed)
    assert jax.tree.structure(tree["params"]) == jax.tree.structure(loaded.params)
    for found, wanted in zip(
        jax.tree.leaves(tree["params"]), jax.tree.leaves(loaded.params), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    store = np.asarray(loaded.store.arrays["dense"])
    for found, wanted in zip(tree["experts"]["dense"], store, strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_an_expert_is_read_alone(undisturbed, broken):
    store = np.asarray(load_checkpoint(undisturbed).store.arrays["dense"])
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
        ((2, 0), "no expert 0 in MoE layer 2 of .*; there are 2 MoE layers of 3 experts"),
        ((0, 3), "no expert 3 in MoE layer 0"),
        ((-1, 0), "no expert 0 in MoE layer -1"),
        ((0, 0, "int4"), "of version 'int4'; .* in dense"),
    ],
)
def test_an_expert_that_is_not_there(place, message, undisturbed):
    with pytest.raises(UserError, match=message):
        read_expert(undisturbed, *place)


@NATIVE
def test_crcs_are_those_of_the_experts_files(undisturbed):
    experts = read_manifest(undisturbed / MANIFEST).crcs["dense"]
    assert len(experts) == sum(load_config(undisturbed).moe_layers)
    for layer, crcs in experts.items():
        files = [undisturbed / f"state/experts.dense.{layer}/c/{e}/0/0" for e in range(len(crcs))]
        assert crcs == tuple(crc("crc32c", path.read_bytes()) for path in files)


# ---- damage


def test_no_flipped_bit_goes_unnoticed(broken):
    rng = np.random.default_rng(3)
    files = sorted(p for p in broken.rglob("*") if p.is_file() and p.stat().st_size)
    kinds: dict[str, list[pathlib.Path]] = {}
    for path in files:
        kinds.setdefault("c" if "c" in path.parts else path.name, []).append(path)
    for path in (path for each in kinds.values() for path in rng.permutation(each)[:6]):
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
        (_put("files", "\033[2J", value="0" * 16), "wrote: .*unprintable"),
        (_put("errors", value={"int4": {"0": [10**400]}}), "not a manifest that moejax wrote"),
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


def test_checksums_that_are_missing(broken):
    def others(manifest):
        manifest["experts"]["dense"].pop("1")
        manifest["experts"]["lossless12"] = {}
        manifest["dense_layers"] = {"lossless12": [-1, 0, 10**9]}

    rewrite_manifest(broken, others)
    refuses("no checksum for experts.dense.1", read_expert, broken, 1, 0)
    message = "0 checksums for experts.(dense|lossless12).1"
    refuses(message, load_checkpoint, broken, versions=("lossless12",))


def test_files_that_are_none_or_without_end(broken):
    pipe = broken / "state/experts.dense.1/c/2/0/0"
    pipe.unlink()
    os.mkfifo(pipe)
    refuses("a pipe", read_expert, broken, 1, 2)
    for file in ("moejax.json", "state/_METADATA", "config.json"):
        kept = (broken / file).read_bytes()
        os.truncate(broken / file, 200 << 30)
        refuses(f"{200 << 30} bytes are too many", load_checkpoint, broken)
        (broken / file).write_bytes(kept)


def test_weights_beyond_the_memory(undisturbed, monkeypatch):
    monkeypatch.setattr("moejax.checkpoints.loaded_model.host_available_bytes", lambda: 1000)
    refuses("asks for .* of which 1000 B are free", load_checkpoint, undisturbed)


# ---- what a conversion refuses


def test_a_destination_that_is_there(source, tmp_path):
    (tmp_path / "mine").write_text("")
    for there in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="already there; delete it or choose another"):
            convert(source, there)
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty").directory == tmp_path / "empty"
    assert not (tmp_path / "empty" / LOCK).exists()


def test_a_destination_that_cannot_be_replaced(source, tmp_path, monkeypatch):
    def mounted(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(pathlib.Path, "rmdir", mounted)
    with pytest.raises(UserError, match=r"as mount points cannot .*busy\); give .*disk/model$"):
        convert(source, tmp_path / "disk")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be read or written: Not a directory"):
        convert(source, tmp_path / "file/model")


def test_a_filesystem_without_locks(source, tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    convert(source, tmp_path / "model")
    assert "model.partial: this filesystem has no locks (No locks available)" in caplog.text


def test_a_source_that_is_converted_already(undisturbed, tmp_path):
    with pytest.raises(UserError, match="its format is moejax-orbax; convert reads safetensors"):
        convert(undisturbed, tmp_path / "again")
    assert not any(tmp_path.iterdir())


def test_a_directory_of_somebody_else(source, tmp_path):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial/thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"model.partial: .* holds 'thesis.tex' and no unfinished"):
        convert(source, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model.partial").iterdir()] == ["thesis.tex"]


def test_a_wrong_source_writes_nothing(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "hf")
    (broken / "part-1.safetensors").unlink()
    with pytest.raises(UserError, match="shard missing"):
        convert(broken, tmp_path / "model")
    with pytest.raises(UserError, match="dtype 'int8' is unknown"):
        convert(source, tmp_path / "model", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_orbax_that_lays_trees_out_in_another_way():
    with pytest.raises(
        UserError, match=r"orbax-checkpoint \S+ keeps the leaves of a tree in other"
    ):
        orbax_files({"embed": Leaf("embed", np.dtype(np.uint8), (1,), False)}, {})


def test_two_conversions_at_once(source, unfinished):
    with open(unfinished.with_name("model.partial") / LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another conversion is writing it"):
            convert(source, unfinished)


def test_too_little_space_is_said_first(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"GiB are still to be written, but the disk has 0.0 GiB"):
        convert(source, tmp_path / "model")


# ---- going on


def test_an_unfinished_conversion_is_not_loadable(unfinished):
    with pytest.raises(UserError, match=r"no such directory, but .*model.partial: if that is an"):
        load_checkpoint(unfinished)
    with pytest.raises(UserError, match="an unfinished conversion; run the same `moejax convert`"):
        load_checkpoint(f"{unfinished}.partial")


def test_finished_units_are_not_written_again(source, unfinished, undisturbed):
    partial = unfinished.with_name("model.partial")
    times = {p.relative_to(partial): p.stat().st_mtime_ns for p in partial.glob("state/*/c/**/0")}
    assert len(times) > 20
    calls = []
    result = convert(source, unfinished, progress=lambda *call: calls.append(call))
    assert 0 < result.kept < result.nbytes and calls[0] == (result.kept, result.nbytes)
    assert all((unfinished / p).stat().st_mtime_ns == time for p, time in times.items())
    assert contents(unfinished) == contents(undisturbed)
    assert not partial.exists() and not (unfinished / JOURNAL).exists()


@pytest.mark.parametrize("file", ["state/experts.dense.0/c/1/0/0", "tokenizer.json"])
def test_what_was_damaged_since_is_written_again(file, source, unfinished, undisturbed, caplog):
    flip(unfinished.with_name("model.partial") / file)
    convert(source, unfinished)
    assert "is damaged; it is written again" in caplog.text
    assert contents(unfinished) == contents(undisturbed)


def test_a_damaged_journal(source, unfinished):
    flip(unfinished.with_name("model.partial") / JOURNAL, at=200)
    with pytest.raises(UserError, match=r"partial.json: .*; or delete .*model.partial to begin"):
        convert(source, unfinished)


def test_a_source_that_changed_since(source, unfinished, tmp_path):
    part = source / "part-0.safetensors"
    times = part.stat().st_atime_ns, part.stat().st_mtime_ns
    os.utime(part, ns=(1, 1))
    with pytest.raises(UserError, match="whose files have changed or are others; delete it"):
        convert(source, unfinished)
    os.utime(part, ns=times)
    # Another model's files may have these names, sizes and times.
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(UserError, match="whose files have changed or are others; delete it"):
        convert(other, unfinished)
    with pytest.raises(UserError, match=r"an unfinished conversion of .* to bfloat16"):
        convert(source, unfinished, dtype="float32")


def test_a_source_that_changes_meanwhile(source, tmp_path):
    changing = shutil.copytree(source, tmp_path / "hf")

    def write_to(done, total):
        flip(changing / "part-1.safetensors")

    with pytest.raises(UserError, match=r"part-1.safetensors: was written to while moejax read it"):
        convert(changing, tmp_path / "model", progress=write_to)
    assert not (tmp_path / "model").exists()
    with pytest.raises(UserError, match="whose files have changed or are others; delete it"):
        convert(changing, tmp_path / "model")


def test_killed_before_the_last_step(source, undisturbed, tmp_path):
    partial = tmp_path / "model.partial"
    shutil.copytree(undisturbed, partial)
    assert_same_model(load_checkpoint(partial), load_checkpoint(undisturbed))  # it is whole
    result = convert(source, tmp_path / "model")
    assert result.kept == result.nbytes
    assert contents(tmp_path / "model") == contents(undisturbed)


def test_a_full_disk(source, undisturbed, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
        with pytest.raises(UserError, match=r"the disk is full, .* run the same command again"):
            convert(source, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    convert(source, tmp_path / "model")
    assert contents(tmp_path / "model") == contents(undisturbed)


@pytest.mark.slow
def test_killed(source, undisturbed, tmp_path):
    """At two of some 300 file operations; each is resumed and compared."""
    later = random.Random(5).randrange(60, 260)
    expected, whole = load_checkpoint(undisturbed), contents(undisturbed)
    for point, delay in ((3, 0.0), (later, 0.001)):
        target = tmp_path / f"model{point}"
        command = [sys.executable, "-c", KILLED, source, target, str(point), str(delay)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode in (-9, 0), ended.stderr
        for left in (target, target.with_name(target.name + ".partial")):
            if (left / MANIFEST).exists():
                assert_same_model(load_checkpoint(left), expected)
            elif left.exists() and any(left.iterdir()):
                assert left != target
                with pytest.raises(UserError, match=r"unfinished conversion|neither"):
                    load_checkpoint(left)
        if not target.exists():
            convert(source, target)
        assert contents(target) == whole, (point, delay)


MEMORY = """
import sys
from orbax.checkpoint import v1
import jax
from moejax.checkpoints.conversion import convert
jax.devices()

def most():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

before = most()
convert(*sys.argv[1:3])
print(most() - before)
"""


@pytest.mark.slow
def test_memory_is_a_layer_and_not_the_checkpoint(tmp_path):
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16, head_dim=16)
    config = CONFIG | sizes | {"num_hidden_layers": 24, "mlp_only_layers": []}
    source = write(tmp_path / "hf", random_tensors(config), config, shards=4)
    layer, whole = 16 * 3 * 256 * 256 * 2, sum(p.stat().st_size for p in source.glob("*.saf*"))
    command = [sys.executable, "-c", MEMORY, source, tmp_path / "orbax"]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert whole > 23 * layer and used < 4 * layer + whole / 8


def test_the_command(source, undisturbed, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path / 'model'}: 19.31 KiB of bfloat16 weights\n"
    assert contents(tmp_path / "model") == contents(undisturbed)
    assert main(["convert", str(source), str(tmp_path / "model")]) == 2
    assert "already there" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "wide"), "--dtype=float32", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "wide" / MANIFEST).read_text())["dtype"] == "float32"
