"""What holds for a checkpoint of every format: the same bits, freed memory, links only within the
model, and a refusal by name of what is damaged, missing or too much."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore

from host_offload.memory import bounded_reads
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import checkpoint_format, load_checkpoint
from moejax.errors import UserError
from tests.moejax.checkpoints import foreign_trees
from tests.moejax.checkpoints.random_checkpoint import (
    BF16,
    CONFIG,
    UP,
    assert_loaded,
    random_tensors,
    write,
)

MOE = {**CONFIG, "mlp_only_layers": []}
"""Of MoE layers alone, as the name map of foreign_trees is."""


@dataclasses.dataclass(frozen=True)
class Format:
    """kind: as checkpoint_format calls it. save: writes tensors. weights: a file with weights.
    names: what a message calls it. options: of load_checkpoint. link: a file that is no link to
    another place; whatever has the checksum of an expert is that expert."""

    kind: str
    save: Callable[[pathlib.Path, dict, dict], pathlib.Path]
    weights: str
    names: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    link: str = ""


def save_ours(directory, tensors, config):
    source = write(directory.with_name("source"), tensors, config, shards=2)
    return convert(source, directory).directory


def save_foreign(directory, tensors, config, **layout):
    tree = foreign_trees.hf_tree(tensors)
    foreign_trees.save(directory, tree, config, **layout)
    rules = {"rules": [*foreign_trees.HF, *foreign_trees.EXPERTS]}
    foreign_trees.write_map(directory.parent, rules)
    return directory


FORMATS = {
    "safetensors": Format("safetensors", write, "model.safetensors", "model.safetensors"),
    "shards": Format(
        "safetensors",
        lambda *args: write(*args, shards=5),
        "part-3.safetensors",
        "part-3.safetensors",
    ),
    "ours": Format(
        "moejax-orbax",
        save_ours,
        "state/experts.dense.1/c/2/0/0",
        "expert 2 of MoE layer 1",
        link="state/params.embed/zarr.json",
    ),
    "foreign, a file a leaf": Format(
        "orbax",
        lambda *args: save_foreign(*args, use_ocdbt=False),
        "model.norm.weight/0",
        "model.norm.weight",
        {"name_map": "map.json"},
    ),
    "foreign": Format(
        "orbax", save_foreign, "manifest.ocdbt", "leaf|manifest", {"name_map": "map.json"}
    ),
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint and what is in it."""

    format: Format
    directory: pathlib.Path
    tensors: dict[str, np.ndarray]

    def load(self, dtype: str = "auto", directory: pathlib.Path | None = None, **options: Any):
        given = dict(self.format.options)
        if "name_map" in given:
            given["name_map"] = self.directory.parent / given["name_map"]
        return load_checkpoint(directory or self.directory, dtype, **given | options)


@pytest.fixture(scope="module", params=FORMATS)
def saved(request, tmp_path_factory) -> Saved:
    tensors, format = random_tensors(MOE), FORMATS[request.param]
    directory = tmp_path_factory.mktemp("formats") / "model"
    return Saved(format, format.save(directory, tensors, MOE), tensors)


@pytest.mark.parametrize("dtype", ["auto", "half", "float32"])
def test_every_weight_arrives(saved, caplog, dtype):
    calls = []
    loaded = saved.load(dtype, progress=lambda *call: calls.append(call))
    assert checkpoint_format(saved.directory) == saved.format.kind
    assert loaded.dtype == {"auto": "bfloat16", "half": "float16"}.get(dtype, dtype)
    assert loaded.layout.itemsize == NUMPY_DTYPES[loaded.dtype].itemsize
    assert_loaded(loaded, saved.tensors, MOE)
    total = sum(tensor.nbytes for tensor in saved.tensors.values())
    assert calls[-1] == (total, total) and calls == sorted(calls)
    assert {"headers", "allocate", "read"} <= loaded.seconds.keys()
    assert min(loaded.seconds.values()) > 0
    assert not caplog.records


def test_an_interrupted_load_frees_the_store(saved):
    before = {id(array) for array in jax.live_arrays()}

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved.load(progress=stop)
    assert not [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()]


def test_a_store_beyond_the_machine_and_an_unknown_dtype_are_refused(saved):
    def refuse(*_):
        raise MemoryError("cannot allocate 99.0 GiB of pinned host memory")

    with pytest.raises(UserError, match=r"cannot allocate 99\.0 GiB"):
        saved.load(new_builder=refuse)
    with pytest.raises(UserError, match="dtype 'int4' is unknown; choose auto, half"):
        saved.load("int4")
    if saved.format.kind == "orbax":
        with pytest.raises(UserError, match="and this is neither"):
            saved.load(in_files=True)


def test_files_of_the_hub_cache_are_links_and_others_are_refused(saved, tmp_path):
    """The hub's cache keeps blobs outside of the snapshot's directory; that is no escape."""
    cache = tmp_path / "models--some--model"
    snapshot = pathlib.Path(shutil.copytree(saved.directory, cache / "snapshots" / "abc"))
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    for number, path in enumerate(p for p in snapshot.rglob("*") if p.is_file()):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(os.path.relpath(cache / "blobs" / str(number), path.parent))
    assert_loaded(saved.load(directory=snapshot), saved.tensors, MOE)
    path = snapshot / (saved.format.link or saved.format.weights)
    (cache / "refs" / "secret").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(cache / "refs" / "secret")
    with pytest.raises(UserError, match=r"a link (out of|that leaves) the checkpoint"):
        saved.load(directory=snapshot)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [cut, pathlib.Path.unlink, pipe])
def test_what_is_cut_or_missing_is_named(saved, tmp_path, damage):
    directory = pathlib.Path(shutil.copytree(saved.directory, tmp_path / "model"))
    damage(directory / saved.format.weights)
    with pytest.raises(UserError, match=saved.format.names) as caught:
        saved.load(directory=directory)
    assert str(directory) in str(caught.value) and "\n" not in str(caught.value)


def test_a_disk_without_an_answer_is_named(saved, monkeypatch):
    """Whichever call to it hangs first."""
    never, opened = threading.Event(), os.open
    path = saved.directory / saved.format.weights
    read = os.preadv if saved.format.kind == "safetensors" else None

    def open_or_hang(at, *args, **kwargs):
        hangs = os.fspath(at) == str(path) and read is None
        return never.wait() if hangs else opened(at, *args, **kwargs)

    monkeypatch.setattr(bounded_reads, "READ_S", 0.3)
    monkeypatch.setattr(os, "open", open_or_hang)
    if read is not None:
        monkeypatch.setattr(os, "preadv", lambda *_: never.wait())
    if saved.format.kind == "orbax":  # tensorstore opens files itself
        _promise, future = tensorstore.Promise.new()
        monkeypatch.setattr(tensorstore, "open", lambda *_, **__: future)
    began = time.monotonic()
    try:
        with pytest.raises(UserError, match=r"no answer within 0\.3 s") as caught:
            saved.load()
    finally:
        never.set()
    assert str(saved.directory) in str(caught.value) and time.monotonic() - began < 5


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_a_dtype_cannot_hold_and_that_are_not_finite(name, tmp_path):
    tensors, format = random_tensors(MOE), FORMATS[name]
    tensors[UP][2, 3] = 1e6
    saved = Saved(format, format.save(tmp_path / "large" / "model", tensors, MOE), tensors)
    with pytest.raises(UserError, match="has values that float16 cannot hold"):
        saved.load("half")
    assert_loaded(saved.load("float32"), tensors, MOE)
    tensors[UP][2, 3] = 1
    for place, value in ((UP, -np.inf), ("model.norm.weight", np.nan)):
        bad = tensors | {place: tensors[place].copy()}
        bad[place].flat[-1] = value
        message = rf"tensor {re.escape(place)} has values that are NaN or infinite"

        def save_and_load(dtype, place=place, bad=bad):
            directory = format.save(tmp_path / f"{dtype} {place}" / "model", bad, MOE)
            Saved(format, directory, bad).load(dtype)

        for dtype in "auto", "half":
            with pytest.raises(UserError, match=message):  # of ours by the conversion
                save_and_load(dtype)


def test_values_beyond_bfloat16_are_refused_by_name(tmp_path):
    tensors = random_tensors(CONFIG, np.float32)
    tensors[UP][0, 0] = np.finfo(np.float32).max
    source = write(tmp_path / "hf", tensors)
    for attempt in (load_checkpoint, lambda path: convert(path, tmp_path / "model")):
        with pytest.raises(UserError, match=f"{re.escape(UP)} has values that bfloat16 cannot"):
            attempt(source)
    assert tensors[UP].dtype != BF16
