"""Reads one tree of an Orbax checkpoint: names, shapes and dtypes of its leaves, and their values.

The tree may come from any program and mesh, from Orbax v0 or v1, with OCDBT or a directory per
leaf, in zarr 2 or 3. tensorstore reads the arrays. Nothing that the checkpoint names is imported or
unpickled.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pathlib
from typing import Any

import numpy as np
import tensorstore as ts

from host_offload.memory import bounded_reads
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.orbax.steps import TREE
from moejax.checkpoints.shards import Header
from moejax.errors import UserError, shown
from moejax.models.directory import check_size, may_lead_to, read_json

_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple", "string")
"""Orbax's value types that are no arrays."""
_MANIFEST = "manifest.ocdbt"
_DESCRIPTIONS = {"zarr.json": 1 << 20, ".zarray": 1 << 20, _MANIFEST: 16 << 20}
"""File that tensorstore reads whole → the most bytes that it may have."""
MOST_LEAVES, MOST_NAME = 200_000, 500
"""Most leaves of a tree, and most characters of a leaf's path."""
_HEADERS_CACHE = 64 << 20


@dataclasses.dataclass(frozen=True)
class Tree:
    """The metadata of a tree.

    - `leaves`: path, the keys joined by "/", → name on disk.
    - `zarr3`: the arrays are zarr 3, else zarr 2.
    - `sparse`: an old Orbax wrote the tree and may have left out chunks of zeros.
    - `custom`: the metadata that the writing program added.
    """

    directory: pathlib.Path
    leaves: dict[str, str]
    zarr3: bool
    sparse: bool
    custom: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TreeLeaf:
    """A leaf of a tree.

    header: its dtype and shape. chunk: the shape of the piece that is read and decoded at once.
    """

    path: str
    header: Header
    chunk: tuple[int, ...]


def read_tree(directory: pathlib.Path) -> Tree:
    """Reads the leaves that an item's _METADATA lists, and opens no array.

    - `directory`: the item.

    Raises UserError for metadata that is not Orbax's, for leaf names that lead out of the directory
    or cannot be printed, and for links that lead out of it.
    """
    path = directory / TREE
    raw = read_json(path)
    entries = raw.get("tree_metadata")
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{path}: tree_metadata must be an object of leaves")
    if len(entries) > MOST_LEAVES:
        raise UserError(f"{path}: {len(entries)} leaves; at most {MOST_LEAVES} are read")
    leaves: dict[str, str] = {}
    names: dict[str, str] = {}
    for entry in entries.values():
        try:
            keys = [part["key"] for part in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError):
            keys, kind = [], None
        if not (keys and all(isinstance(each, str) for each in (*keys, kind))):
            raise UserError(
                f"{path}: an entry of tree_metadata has no key_metadata or value_metadata"
            )
        if kind in _EMPTY:
            continue
        leaf, name = "/".join(keys), ".".join(keys)
        if len(name) > MOST_NAME:
            raise UserError(f"{path}: the leaf name {shown(name)} has {len(name)} characters")
        if leaf in leaves or name in names:
            raise UserError(f"{path}: two leaves are called {leaf}")
        if not name.isprintable():  # it could write over what the terminal shows
            raise UserError(f"{path}: the leaf name {leaf!a} has unprintable characters")
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise UserError(f"{path}: the leaf {leaf!r} would be outside of the checkpoint")
        leaves[leaf] = names[name] = name
    _check_files(directory)
    custom = raw.get("custom_metadata")
    return Tree(
        directory,
        leaves,
        zarr3=raw.get("use_zarr3") is True,
        sparse=raw.get("store_array_data_equal_to_fill_value") is not True,
        custom=custom if isinstance(custom, dict) else {},
    )


def _check_files(directory: pathlib.Path) -> None:
    """Raises UserError for links that lead out of the directory, for pipes and devices, on which
    tensorstore would wait, and for descriptions so large that it would run out of memory."""
    inside = directory.resolve()
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = pathlib.Path(folder, name)
            try:
                leaves = path.is_symlink() and not may_lead_to(path.resolve(), inside)
                status = path.lstat() if leaves else path.stat()
            except (OSError, RuntimeError) as error:
                if isinstance(error, OSError) and error.errno != errno.ELOOP:
                    raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
                raise UserError(f"{path}: a link in a loop ({error}); remove it") from None
            if leaves:
                raise UserError(
                    f"{path}: a link that leaves the checkpoint; copy what it points to "
                    "(cp -rL), or remove it"
                )
            if name in files:
                check_size(path, status, _DESCRIPTIONS.get(name), "the description of a tree")


def leaf_headers(tree: Tree, paths: list[str]) -> dict[str, TreeLeaf]:
    """Reads dtype, shape and chunk shape of leaves, but no values.

    Raises UserError for arrays that are missing or damaged, and for dtypes that weights cannot
    have.
    """
    context = _context(_HEADERS_CACHE)
    opening = [(path, _open(tree, path, context)) for path in paths]
    leaves = {}
    for path, future in opening:
        store = _result(tree, path, future)
        shape, dtype = tuple(store.shape), store.dtype.name
        if dtype not in NUMPY_DTYPES:
            raise UserError(
                f"{tree.directory}: leaf {path} has dtype {dtype}, which is not one of weights "
                f"({', '.join(NUMPY_DTYPES)}); if it is no weight, ignore it in the name "
                "map"
            )
        chunk = tuple(store.chunk_layout.read_chunk.shape or shape)
        if any(c > max(n, 1) for c, n in zip(chunk, shape, strict=True)):
            raise UserError(
                f"{tree.directory}: leaf {path} of shape {list(shape)} has chunks {list(chunk)}, "
                "larger than itself; the checkpoint is damaged"
            )
        leaves[path] = TreeLeaf(path, Header(dtype, shape), chunk)
        _check_chunks(tree, leaves[path])
    return leaves


def _check_chunks(tree: Tree, leaf: TreeLeaf) -> None:
    """Raises UserError for a chunk's file that is larger than the array. tensorstore would read the
    file whole, and the process would end if it did not fit in memory."""
    # A compressed chunk may be a little larger than its values, and the metadata beside it may be
    # larger than a small array.
    most = 2 * math.prod(leaf.header.shape) * NUMPY_DTYPES[leaf.header.dtype].itemsize + (1 << 20)
    for path in (tree.directory / tree.leaves[leaf.path]).rglob("*"):
        if path.is_file():
            check_size(path, path.stat(), most, f"an array of shape {list(leaf.header.shape)}")


class LeafReader:
    """Reads parts of a tree's leaves. Several threads may read at once.

    cache_bytes: bytes of decoded chunks to keep, so that the next slice of a chunk is only copied.
    """

    def __init__(self, tree: Tree, cache_bytes: int):
        self._tree, self._context = tree, _context(cache_bytes)
        self._stores: dict[str, Any] = {}

    def read(self, leaf: TreeLeaf, index: tuple[int | slice, ...]) -> np.ndarray:
        """Reads leaf[index] as a new array. Raises UserError for damage and for a missing chunk,
        which would otherwise read as zeros."""
        future = self._stores.get(leaf.path)
        if future is None:
            future = self._stores[leaf.path] = _open(self._tree, leaf.path, self._context)
        store = _result(self._tree, leaf.path, future)
        if tuple(store.shape) != leaf.header.shape or store.dtype.name != leaf.header.dtype:
            raise UserError(f"{self._tree.directory}: leaf {leaf.path} changed while being read")
        part = store[index]
        read = part.read()
        return np.asarray(
            _result(self._tree, leaf.path, read, part.size * store.dtype.numpy_dtype.itemsize)
        )


def touched_bytes(leaf: TreeLeaf, index: tuple[int | slice, ...]) -> int:
    """Bytes of the chunks that reading leaf[index] decodes.

    - `index`: an integer or a slice over the whole axis, for each axis.
    """
    cells = [
        chunk if isinstance(at, int) else -(-size // max(chunk, 1)) * chunk
        for size, chunk, at in zip(leaf.header.shape, leaf.chunk, index, strict=True)
    ]
    return math.prod(cells) * (4 if leaf.header.dtype == "float32" else 2)


def _context(cache_bytes: int) -> Any:
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})


def _open(tree: Tree, path: str, context: Any) -> Any:
    directory, name = str(tree.directory.resolve()), tree.leaves[path]
    if (tree.directory / _MANIFEST).is_file():
        files = {"driver": "file", "path": f"{directory}/"}
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{directory}/{name}/"}
    spec = {
        "driver": "zarr3" if tree.zarr3 else "zarr",
        "kvstore": store,
        "fill_missing_data_reads": False,
        "recheck_cached_metadata": "open",
        "recheck_cached_data": "open",
    }
    try:
        return ts.open(spec, open=True, read=True, context=context)
    except (ValueError, TypeError, OverflowError) as error:
        raise _damage_error(tree, path, error) from None


def _result(tree: Tree, path: str, future: Any, nbytes: int = 0) -> Any:
    """What a future gives. A result of so many bytes may take as long as other reads of them."""
    try:
        return future.result(bounded_reads.READ_S * (1 + nbytes // bounded_reads.PIECE))
    except TimeoutError:
        raise UserError(
            f"{tree.directory}: leaf {path}: no answer within {bounded_reads.READ_S:g} s"
        ) from None
    except (ValueError, TypeError, OverflowError, OSError, MemoryError) as error:
        raise _damage_error(tree, path, error) from None


def _damage_error(tree: Tree, path: str, error: Exception) -> UserError:
    text = str(error).split(" [tensorstore_spec", 1)[0]
    old = (
        ". It was written by an old Orbax, which left out chunks of zeros, so that they cannot be "
        "told from lost ones; restore it with Orbax and save it again"
    )
    return UserError(
        f"{tree.directory}: leaf {path} is missing or damaged, in part or whole ({text}); copy the "
        f"checkpoint again, or use another step{old if tree.sparse else ''}"
    )
