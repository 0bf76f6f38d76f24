"""Orbax checkpoints, ours and those of other programs, and name maps."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts
import yaml
from safetensors.numpy import load_file

from moejax.checkpoints.conversion import convert
from moejax.checkpoints.foreign.name_map import NameMap, load_name_map
from pallas_kernels.cpu.checksums import checksum
from scripts.attacks.files import DEMO, SINGLE, damage_file, load, mutated_json
from scripts.attacks.scene import Scene
from scripts.attacks.values import TEXTS, nested, pick

FORMS = ("ours", "ocdbt", "directories")
"""Our own format, and another program's with all leaves in one store or with a directory each."""


@cache
def whole(directory: Path, form: str) -> Path:
    """A checkpoint of the demo in that form, in a subdirectory; made once."""
    path = directory / form
    if form == "ours":
        convert(DEMO, path)
        return path
    tree: dict[str, Any] = {}
    for name, tensor in load_file(DEMO / SINGLE).items():
        *folders, last = name.split(".")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = tensor
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=form == "ocdbt")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, path / name)
    return path


def plain_map() -> dict[str, Any]:
    """The map of such a tree: every tensor under its own name, with slashes."""
    patterns = {}
    for name in load_file(DEMO / SINGLE):
        numbers = iter(("{layer}", "{expert}"))
        parts = [next(numbers) if part.isdigit() else part for part in name.split(".")]
        patterns["/".join(parts)] = ".".join(parts)
    return {"rules": [{"leaf": leaf, "tensor": name} for leaf, name in patterns.items()]}


def attack_trees(scene: Scene) -> None:
    """A damaged tree is refused, or read whole."""
    rng, form = scene.rng, pick(scene.rng, FORMS)
    directory = scene.directory / "model"
    shutil.copytree(whole(scene.directory.parents[1], form), directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    small = [path for path in files if path.stat().st_size < 100_000]
    path = pick(rng, small if rng.random() < 0.7 else files)
    draw = rng.random()
    if draw < 0.35 and path.read_bytes()[:1] == b"{":
        path.write_text(mutated_json(rng, json.loads(path.read_text())))
        how = f"a mutated {path.relative_to(directory)}"
    elif draw < 0.45:
        how = _folders(rng, directory, path)
    else:
        how = f"{path.relative_to(directory)}: {damage_file(rng, path)}"
    load_tree(scene, directory, form, how)


def load_tree(scene: Scene, directory: Path, form: str, how: str, outside: bool = False) -> None:
    """Loads a tree by the map of its form."""
    given: dict[str, Any] = {}
    if form != "ours":
        given["name_map"] = scene.directory / "map.json"
        given["name_map"].write_text(json.dumps(plain_map()))
    load(scene, directory, f"a tree ({form}), {how}"[:300], outside=outside, **given)


def _folders(rng: random.Random, directory: Path, path: Path) -> str:
    """Damages a folder; returns how."""
    folder = pick(rng, sorted(p for p in directory.rglob("*") if p.is_dir()) or [directory])
    how = pick(rng, ("moved", "a link to itself", "a link out", "many files", "empty"))
    if how == "moved":
        folder.rename(folder.with_name("x" * 200))
    elif how == "a link to itself":
        (folder / "again").symlink_to(folder)
    elif how == "a link out":
        shutil.rmtree(folder)
        folder.symlink_to("/etc")
    elif how == "many files":
        for i in range(5000):
            (folder / f"f{i}").touch()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    return f"the folder {folder.name[:40]}: {how}"


# ---- trees that lead out

INSIDE = "in/"
"""A folder of an OCDBT store that holds its nodes and values. "../" has as many characters."""


@cache
def _without_compression(directory: Path) -> Path:
    """The tree in one store, whose manifest can be edited; made once."""
    source = whole(directory, "ocdbt")
    path = directory / "ocdbt-plain"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("d", "ocdbt.*", "manifest.ocdbt"))
    prefixes = ("value_data", "btree_node_data", "version_tree_node_data")
    writing = {f"{name}_prefix": INSIDE for name in prefixes} | {"config": {"compression": None}}
    old, new = (
        ts.KvStore.open({"driver": "ocdbt", "base": f"file://{at}/"} | more).result()
        for at, more in ((source, {}), (path, writing))
    )
    with ts.Transaction() as at_once:
        for key in old.list().result():
            new.with_transaction(at_once).write(key, old.read(key).result().value).result()
    return path


def _lead_out_by_store(directory: Path) -> None:
    """The manifest of the store names files beside the checkpoint, which are there."""
    for path in (directory / INSIDE).iterdir():
        shutil.copy(path, directory.parent)
    manifest = directory / "manifest.ocdbt"
    data = manifest.read_bytes()[:-4].replace(INSIDE.encode(), b"../")
    assert b"../" in data, "a manifest that names no file"
    manifest.write_bytes(data + struct.pack("<I", int(checksum("crc32c", data), 16)))


def _lead_out_by_key(rng: random.Random, directory: Path) -> None:
    """A leaf's key leads to an array beside the checkpoint, which is there."""
    path = directory / "_METADATA"
    tree = json.loads(path.read_text())
    entry = pick(rng, [*tree["tree_metadata"].values()])
    keys = [part["key"] for part in entry["key_metadata"]]
    at = directory / ".".join(keys)
    if at.is_dir():
        shutil.move(at, directory.parent / at.name)
    out = ("..", str(directory.parent), f"../{directory.name}/..", "x/../..", "./..")
    entry["key_metadata"][0]["key"] = f"{pick(rng, out)}/{keys[0]}"
    path.write_text(json.dumps(tree))


def attack_outside(scene: Scene) -> None:
    """A tree with a part outside of its directory is refused."""
    directory = scene.directory / "model"
    shared = scene.directory.parents[1]
    way = pick(scene.rng, ("store", "key", "key of a store"))
    form = "directories" if way == "key" else "ocdbt"
    shutil.copytree(
        _without_compression(shared) if way == "store" else whole(shared, form), directory
    )
    if way == "store":
        _lead_out_by_store(directory)
    else:
        _lead_out_by_key(scene.rng, directory)
    load_tree(scene, directory, form, f"that leads out by a {way}", outside=True)


# ---- name maps


def _bomb(levels: int, width: int) -> str:
    """A list of lists by aliases: width ** levels items."""
    lines = ["a0: &a0 [" + ", ".join(["in"] * width) + "]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * width) + "]")
    return "\n".join(lines)


def _long_map(rng: random.Random) -> str:
    """A map whose one rule has a field that costs a lot to read."""
    rule: dict[str, Any] = {"leaf": "model/norm/weight", "tensor": "model.norm.weight"}
    many = " ".join(f"a{i}" for i in range(100_000))
    hostile: dict[str, tuple[Any, ...]] = {
        "leaf": ("**/" * 5000 + "x", "{a}" * 3000, "(a+)+" * 1000, "*" * 10**6, "{a}{b}" * 40),
        "tensor": (["x"] * 10**6, "x" * 10**7, "{a*9}" * 1000, "{a+b+c}", "{layer*10000000000}"),
        "axes": (f"{many} -> {many}", "(" * 10**5, "a -> " + "a " * 10**5, "-> ->", nested(500)),
        "values": ({"a": ["x"] * 10**6}, {"a": "x" * 10**6}, {"": []}),
        "sizes": ({"a": 10**30}, {"a": -1}, {"a": 2**62}, {"a": "vocab_size"}),
        "scale": (1e308, 10**400, "sqrt(" + "x" * 10**6 + ")", "1/sqrt(x)", float("nan")),
        "crop": ("yes", 1),
        "optional": (None, []),
    }
    name = pick(rng, sorted(hostile))
    rule[name] = pick(rng, hostile[name])
    rules = [rule] * pick(rng, (1, 1, 50))
    return json.dumps(plain_map() | {"rules": [*plain_map()["rules"], *rules]})


def map_text(rng: random.Random) -> tuple[str, str]:
    """(text, file name) of a hostile map."""
    draw = rng.random()
    if draw < 0.35:
        return mutated_json(rng, plain_map()), "map.json"
    if draw < 0.6:
        return _long_map(rng), pick(rng, ("map.json", "map.yaml"))
    field = pick(rng, ("rules", "root", "ignore", "item", "config", "other"))
    rule_field = pick(rng, ("leaf", "tensor", "axes", "values", "sizes", "scale"))
    levels = pick(rng, (8, 9, 30))
    bomb = _bomb(levels, 10)
    choices = (
        f"{bomb}\n{field}: *a{levels - 1}\nrules: []\n",
        f"{bomb}\nrules:\n- leaf: x\n  tensor: y\n  {rule_field}: *a{levels - 1}\n",
        f"rules:\n- leaf: x\n  tensor: y\n  {rule_field}: &a [*a]\n",
        f"rules:\n- leaf: x\n  tensor: y\n  {rule_field}: &a\n    b: *a\n",
        f"{bomb}\n".replace("a0:", "? *a0\n:", 1),
        "!!python/object/apply:os.system ['touch /tmp/attack-ran']",
        "rules: " + "[" * 10_000,
        "rules: " + "{a: " * 5000,
        "rules:\n" + "- " * 5000 + "x",
        "rules: " + "9" * 10_000,
        "rules: 2001-99-99",
        "rules: !!binary " + "A" * 10**6,
        "rules: !!int '0x" + "f" * 10**5 + "'",
        "rules: 1:2:3:" + ":".join(["59"] * 3000),
        "<<: [*a]\nrules: []",
        "x" * 5_000_000,
        "- \n" * 300_000,
        "# " + "x" * 10**7,
        "\t- a: b",
        "%YAML 9.9\n---\nrules: []",
        *(text for text in TEXTS if text != "\ud800"),
        yaml.safe_dump(plain_map()),
    )
    return pick(rng, choices), "map.yaml"


def attack_maps(scene: Scene) -> None:
    """A map is refused, in a short message, or read."""
    rng = scene.rng
    text, name = map_text(rng)
    path = scene.directory / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    how = f"a map {text[:60]!r}"
    if rng.random() < 0.15:
        how = f"a map: {damage_file(rng, path)}"
    found = scene.call(f"load_name_map of {how}", lambda: load_name_map(path))
    if isinstance(found, NameMap) or rng.random() < 0.2:
        directory = scene.directory / "model"
        os.symlink(whole(scene.directory.parents[1], "ocdbt"), directory)
        load(scene, directory, how, name_map=path)
