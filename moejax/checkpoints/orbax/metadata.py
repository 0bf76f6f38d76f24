"""The files that make a directory of zarr arrays an Orbax checkpoint: Orbax itself writes them.

A conversion streams arrays that Orbax would want whole in memory (twice: it copies them), so only
the tree's description comes from Orbax, from a tree of the same keys whose leaves are one byte.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.checkpoints.orbax.layout import Leaf
from moejax.errors import UserError


def orbax_files(
    params: Any, experts: Mapping[str, Mapping[int, Leaf]]
) -> tuple[str, dict[str, bytes]]:
    """(the directory of the tree, relative path → content) of all files but the chunks.

    params: the tree of parameters' leaves. experts: version → MoE layer → leaf; a list in the tree,
    or where layers are missing, a dict by number. Raises UserError if this Orbax names their
    directories in another way.
    """
    from orbax.checkpoint import v1  # seconds, and only what writes needs it

    tree = {"params": params, "experts": {v: _numbered(each) for v, each in experts.items()}}
    byte = np.zeros(1, np.uint8)
    context = v1.Context()
    context.array.saving.use_ocdbt = False
    quiet = logging.getLogger("absl")
    level = quiet.level
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch) / "checkpoint"
        try:
            quiet.setLevel(logging.ERROR)  # Orbax warns that it finds nothing to merge
            with context:
                v1.save(str(root), jax.tree.map(lambda _: byte, tree))
        finally:
            quiet.setLevel(level)
        (name,) = [path.parent.name for path in root.glob("*/_METADATA")]
        directories = {path.name for path in (root / name).iterdir() if path.is_dir()}
        wanted = {leaf.name: leaf for leaf in jax.tree.leaves(tree)}
        if directories != set(wanted):
            version = importlib.metadata.version("orbax-checkpoint")
            raise UserError(
                f"orbax-checkpoint {version} keeps the leaves of a tree in other directories "
                f"({', '.join(sorted(directories)[:2])}) than moejax knows; install a version that "
                "moejax asks for"
            )
        files = {
            path.relative_to(root).as_posix(): path.read_bytes().replace(str(root).encode(), b"it")
            for path in sorted([*root.iterdir(), *(root / name).iterdir()])
            if path.is_file()
        }
    for leaf in wanted.values():
        files[f"{name}/{leaf.name}/zarr.json"] = json.dumps(leaf.zarr()).encode()
    return name, files


def _numbered(layers: Mapping[int, Leaf]) -> list[Leaf] | dict[str, Leaf]:
    whole = list(layers) == list(range(len(layers)))
    return list(layers.values()) if whole else {str(i): leaf for i, leaf in layers.items()}
