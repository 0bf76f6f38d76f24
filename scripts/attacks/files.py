"""Damage to files, and the config and the weights of a checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.models.hub import model_directory
from scripts.attacks.scene import Scene
from scripts.attacks.values import pick, raw_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DEMO = Path(model_directory("demo"))

# ---- any file


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(pick(rng, (1, 1, 3, 50))):
        # The beginning decides most.
        at = rng.randrange(min(len(data), pick(rng, (16, 4096, len(data))))) if data else 0
        data[at : at + 1] = bytes([data[at] ^ (1 << rng.randrange(8))]) if data else b""
    path.write_bytes(data)


def _cut(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def _longer(rng: random.Random, path: Path) -> None:
    os.truncate(path, path.stat().st_size + pick(rng, (1, 10**6, 200 * 2**30)))


def _sparse(rng: random.Random, path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, pick(rng, (0, 10**6, 99 * 2**20, 200 * 2**30)))


def _pipe(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(rng: random.Random, path: Path) -> None:
    path.unlink()
    target = pick(rng, ("/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", path.name))
    path.symlink_to(target)


def _folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _gone(rng: random.Random, path: Path) -> None:
    path.unlink()


def _filled(rng: random.Random, path: Path) -> None:
    contents = (b"", b"\0" * 10**6, b" " * 10**7, b"{}", b"[]", b"null", b"\xff" * 1000, b"x" * 9)
    path.write_bytes(pick(rng, (*contents, b"[" * 10**6, b'{"a":' * 10**5, b"\x80\x02]")))


DAMAGE: dict[str, Callable[[random.Random, Path], None]] = {
    "bits flipped": _flip,
    "cut": _cut,
    "made longer": _longer,
    "sparse": _sparse,
    "a pipe": _pipe,
    "a link": _link,
    "a folder": _folder,
    "gone": _gone,
    "other content": _filled,
}


def damage_file(rng: random.Random, path: Path) -> str:
    """Damages a file in place; returns how."""
    how = pick(rng, (*DAMAGE, "bits flipped", "bits flipped", "cut"))
    DAMAGE[how](rng, path)
    return how


def mutated_json(rng: random.Random, table: Any) -> str:
    """The JSON text with one to three of its values, at any depth, exchanged for hostile ones."""
    marks = {}
    for i in range(pick(rng, (1, 1, 2, 3))):
        holders = list(_holders(table))
        holder, key = pick(rng, holders)
        if isinstance(holder, dict) and rng.random() < 0.1:
            del holder[key]
            continue
        marks[f'"\\u0001{i}"'] = raw_json(rng, type(holder[key]))
        holder[key] = f"\x01{i}"
    text = json.dumps(table)
    for mark, raw in marks.items():
        text = text.replace(mark, raw.encode("utf-8", "replace").decode())
    return text


def _holders(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything in a JSON value; of long ones the beginning."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:100]
    elif isinstance(value, list):
        items = list(enumerate(value))[:20]
    else:
        return found
    for key, item in items:
        found.append((value, key))
        found += _holders(item)
    return found


# ---- config.json


def plain_model(directory: Path) -> Path:
    """The demo's config and weights."""
    directory.mkdir()
    for name in ("config.json", SINGLE):
        shutil.copyfile(DEMO / name, directory / name)
    sampling = {"eos_token_id": 0, "do_sample": True, "temperature": 0.7, "top_k": 50}
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    return directory


def load(scene: Scene, directory: Path, how: str, *, outside: bool = False, **given: Any) -> None:
    """The checkpoint is refused, or read whole. outside: a part of it lies where a checkpoint may
    not lead, so it must be refused."""
    load_it = partial(load_checkpoint, directory, **given)
    loaded = scene.call(f"load_checkpoint with {how}", load_it)
    if isinstance(loaded, LoadedModel):
        loaded.store.delete()
        if outside:
            scene.fault("outside", f"{how}: moejax reads what lies outside of the checkpoint")
    scene.counts["read outside"] += outside and isinstance(loaded, LoadedModel)
    scene.counts["refused outside"] += outside and not isinstance(loaded, LoadedModel)


def attack_configs(scene: Scene) -> None:
    rng, directory = scene.rng, plain_model(scene.directory / "model")
    path = directory / pick(rng, ("config.json", "config.json", "generation_config.json"))
    if rng.random() < 0.75:
        path.write_text(mutated_json(rng, json.loads(path.read_text())))
        how = f"a mutated {path.name}"
    else:
        how = f"{path.name}: {damage_file(rng, path)}"
    load(scene, directory, how)


# ---- safetensors


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The table and the bytes after it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(text: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + body


def _mutated_header(rng: random.Random, path: Path) -> None:
    table, body = _header(path.read_bytes())
    text = mutated_json(rng, table).encode()
    path.write_bytes(_with_header(text, body))


def _enormous_header(rng: random.Random, path: Path) -> None:
    """As many empty tensors as a header holds, at most 95 MB of them."""
    count = pick(rng, (100_000, 1_600_000))
    with open(path, "wb") as file:  # bit by bit: the memory that counts is of who reads it
        file.write(b"\0" * 8)
        for first in range(0, count, 1000):
            names = range(first, first + 1000)
            empty = '"t%07d":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
            file.write((b"," if first else b"{") + ",".join(empty % i for i in names).encode())
        file.write(b"}")
        length = file.tell() - 8
        file.seek(0)
        file.write(struct.pack("<Q", length))


def _long_header(rng: random.Random, path: Path) -> None:
    """A header whose length is a lie."""
    length = pick(rng, (0, 1, 2**31, 2**63, 2**64 - 1, 99 * 2**20))
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    if rng.random() < 0.5:
        os.truncate(path, 200 * 2**30)


def _enormous_tensor(rng: random.Random, path: Path) -> None:
    """A tensor that says that it has 200 GiB, in a sparse file that agrees."""
    table, body = _header(path.read_bytes())
    name = pick(rng, sorted(n for n in table if n != "__metadata__"))
    if rng.random() < 0.5:
        name = "another"
    size = pick(rng, (2**31, 200 * 2**30, 2**62))
    table[name] = {
        "dtype": "BF16",
        "shape": [size // 2],
        "data_offsets": [len(body), len(body) + size],
    }
    path.write_bytes(_with_header(json.dumps(table).encode(), body))
    if size < 2**60:
        os.truncate(path, path.stat().st_size + size)


def _damaged(rng: random.Random, path: Path) -> None:
    damage_file(rng, path)


WEIGHTS = (_mutated_header, _enormous_header, _long_header, _enormous_tensor, _damaged, _damaged)


def _sharded(rng: random.Random, directory: Path) -> str:
    """Two shards and an index, one of the three attacked; returns how."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    owner = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(owner.values()):
        save_file({n: t for n, t in tensors.items() if owner[n] == file}, directory / file)
    index = directory / INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": owner}))
    draw = rng.random()
    if draw < 0.3:
        index.write_text(mutated_json(rng, json.loads(index.read_text())))
        return "a mutated index"
    if draw < 0.5:
        names = ("../x.safetensors", "/etc/passwd", "part-0.safetensors\0", "a/" * 3000, "nothing")
        owner |= {f"t{i}": pick(rng, names) + "x" * i for i in range(pick(rng, (1, 100)))}
        if rng.random() < 0.3:
            owner = {f"t{i}": f"s{i}.safetensors" for i in range(300_000)}
        index.write_text(json.dumps({"weight_map": owner}))
        return "an index of other files"
    path = pick(rng, (index, directory / "part-0.safetensors", directory / "part-1.safetensors"))
    return f"{path.name}: {damage_file(rng, path)}"


def attack_weights(scene: Scene) -> None:
    rng, directory = scene.rng, plain_model(scene.directory / "model")
    if rng.random() < 0.3:
        how = _sharded(rng, directory)
    else:
        way = pick(rng, WEIGHTS)
        way(rng, directory / SINGLE)
        how = way.__name__.strip("_").replace("_", " ")
    load(scene, directory, how)
