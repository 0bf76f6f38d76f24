"""``moejax.json``: the parts of a converted checkpoint, with a checksum of each.

Neither Orbax nor zarr notices a flipped byte. While a conversion runs, the same object under
another name is its journal, which lists the parts that are written and whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from moejax.checkpoints.orbax.layout import Leaf
from moejax.errors import UserError
from moejax.models.directory import open_regular, read_json

MANIFEST, JOURNAL = "moejax.json", "moejax.partial.json"
FORMAT, FORMAT_VERSION = "moejax-orbax", 1
CHECKSUM = "sha256, its first 64 bits"

PIECE = 1 << 20
"""Bytes read or written at once, so few that they are still in the cache when they are hashed."""

_HEX, _CRC = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{8}")
_NAME = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A parameter: numpy's name of its dtype, its shape, and a checksum for each chunk."""

    dtype: str
    shape: tuple[int, ...]
    checksums: tuple[str, ...]


@dataclasses.dataclass
class Manifest:
    """The content of ``moejax.json``. A conversion adds to its journal as it writes.

    - `provenance`: where the checkpoint came from: text for people, and under "files" the sizes and
      times of the source's files.
    - `dtype`: numpy's name of the weights' dtype.
    - `tree`: the name of the directory of Orbax's tree.
    - `params`: key, such as "runs.0.qkv", → the parameter.
    - `experts`: version → layer → a checksum for each expert.
    - `files`: relative path → checksum, for all other files.
    - `quantizers`: version → how it was made from the dense one.
    - `errors`: version → layer → ‖W − Ŵ‖/‖W‖ of each expert.
    - `dense_layers`: version → the MoE layers that it lacks, since the version cannot hold one of
      their experts without loss.
    - `crcs`: version → layer → CRC-32C of each expert, 8 hex digits, which reads during a run are
      compared with; a conversion without the native library writes none.
    """

    provenance: dict[str, Any]
    dtype: str
    tree: str
    params: dict[str, StoredLeaf] = dataclasses.field(default_factory=dict)
    experts: dict[str, dict[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    quantizers: dict[str, str] = dataclasses.field(default_factory=dict)
    errors: dict[str, dict[int, tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    dense_layers: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    crcs: dict[str, dict[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)

    def checksums(self, leaf: Leaf) -> tuple[str, ...]:
        """The checksums of a leaf's chunks; empty for a leaf that is not written."""
        kind, _, key = leaf.name.partition(".")
        if kind == "params":
            return self.params[key].checksums if key in self.params else ()
        version, layer = key.split(".")
        return self.experts.get(version, {}).get(int(layer), ())

    def crcs_of(self, leaf: Leaf) -> tuple[str, ...]:
        """The CRC-32C of each expert of a layer; empty where the conversion wrote none."""
        _, version, layer = leaf.name.split(".")
        return self.crcs.get(version, {}).get(int(layer), ())

    def put(self, leaf: Leaf, checksums: tuple[str, ...], crcs: tuple[str, ...] = ()) -> None:
        """Notes that a leaf is written.

        - `checksums`: of its chunks; empty: the leaf is not written.
        - `crcs`: CRC-32C of each expert, for a layer of experts.
        """
        kind, _, key = leaf.name.partition(".")
        if kind == "params":
            self.params[key] = StoredLeaf(leaf.dtype.name, leaf.shape, checksums)
        else:
            version, layer = key.split(".")
            self.experts[version][int(layer)] = checksums
            self.crcs.setdefault(version, {})[int(layer)] = crcs


def _own_checksum(content: dict[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def checksum(data: Any) -> str:
    """The first 64 bits of SHA-256 as 16 hex digits, which ``sha256sum FILE | cut -c1-16`` prints.
    Several threads may hash at once, since hashlib releases the GIL.

    - `data`: any contiguous buffer.
    """
    return hashlib.sha256(data).hexdigest()[:16]


def file_checksum(path: pathlib.Path) -> str:
    """The `checksum` of a file, which is never whole in memory. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def as_bytes(array: Any) -> memoryview:
    """The bytes of a contiguous numpy array of any dtype, bfloat16 included, without a copy."""
    return memoryview(array.reshape(-1).view("u1"))


def write_file(path: pathlib.Path, data: Any) -> str:
    """Writes a file and flushes it to disk, so that it survives a power cut. Returns its checksum.

    - `data`: a contiguous buffer.
    """
    digest, view = hashlib.sha256(), memoryview(data).cast("B")
    with open(path, "wb", buffering=0) as file:
        for first in range(0, len(view), PIECE):
            piece = view[first : first + PIECE]
            digest.update(piece)
            while len(piece):  # a raw write may take less than it is given
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return digest.hexdigest()[:16]


def read_file(path: pathlib.Path, into: memoryview) -> str | None:
    """Fills `into` from a file. Returns the checksum, or None if the file is too short. Raises
    OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while len(into):
            count = file.readinto(into[:PIECE])
            if not count:
                return None
            digest.update(into[:count])
            into = into[count:]
    return digest.hexdigest()[:16]


def write_manifest(path: pathlib.Path, manifest: Manifest) -> None:
    """Writes the manifest as JSON with a checksum of itself. The file is replaced in one step, so a
    reader finds the old one or the new one."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "checksum": CHECKSUM}
    content = json.loads(json.dumps({**content, **dataclasses.asdict(manifest)}))
    text = json.dumps({**content, "self": _own_checksum(content)}, indent=1) + "\n"
    new = path.with_name(path.name + ".new")
    write_file(new, text.encode())
    os.replace(new, path)


def read_manifest(path: pathlib.Path) -> Manifest:
    """Reads a manifest or journal. Raises UserError if it is damaged or has another version."""
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: format is {content.get('format')!r}, not {FORMAT!r}")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {version!r}; this moejax reads version {FORMAT_VERSION}: "
            "convert the original again with this moejax, or use the one that wrote it"
        )
    found = content.pop("self", None)
    if found != _own_checksum(content):
        raise UserError(f"{path}: damaged: its checksum does not fit; copy or convert it again")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: not a manifest that moejax wrote: {error!r}") from None


def _parse(content: dict[str, Any]) -> Manifest:
    def checksums(values: Any, digits: re.Pattern[str] = _HEX) -> tuple[str, ...]:
        if not isinstance(values, list) or not all(digits.fullmatch(v) for v in values):
            raise ValueError(f"checksums {values!r}")
        return tuple(values)

    def by_layer(name: str, parse: Callable[[Any], tuple]) -> dict[str, dict[int, tuple]]:
        return {
            version: {int(layer): parse(values) for layer, values in layers.items()}
            for version, layers in content.get(name, {}).items()
        }

    quantizers = content.get("quantizers", {})
    named = (content["params"], content["experts"], content["files"], quantizers)
    for name in (*itertools.chain(*named), *quantizers.values()):
        if not name.isprintable():
            raise ValueError(f"the name {name!a} has unprintable characters")
    for path in content["files"]:
        if pathlib.PurePath(path).is_absolute() or ".." in pathlib.PurePath(path).parts:
            raise ValueError(f"file {path!r} lies outside")
    if not _NAME.fullmatch(content["tree"]):
        raise ValueError(f"tree {content['tree']!r}")
    return Manifest(
        provenance=dict(content["provenance"]),
        dtype=str(content["dtype"]),
        tree=content["tree"],
        params={
            key: StoredLeaf(
                str(leaf["dtype"]),
                tuple(int(n) for n in leaf["shape"]),
                checksums(leaf["checksums"]),
            )
            for key, leaf in content["params"].items()
        },
        experts=by_layer("experts", checksums),
        files={path: checksums([value])[0] for path, value in content["files"].items()},
        quantizers={str(version): str(name) for version, name in quantizers.items()},
        errors=by_layer("errors", lambda values: tuple(map(float, values))),
        dense_layers={
            str(version): tuple(map(int, layers))
            for version, layers in content.get("dense_layers", {}).items()
        },
        crcs=by_layer("crcs", lambda values: checksums(values, _CRC)),
    )
