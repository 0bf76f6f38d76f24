"""Which format a checkpoint directory has."""

from __future__ import annotations

import pathlib
from typing import Literal

from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST
from moejax.checkpoints.orbax.steps import is_orbax
from moejax.checkpoints.safetensors.shards import INDEX, SINGLE, find_shards
from moejax.errors import UserError

_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint")


def checkpoint_format(
    directory: pathlib.Path,
) -> Literal["safetensors", "moejax-orbax", "orbax"]:
    """ "safetensors": a Hugging Face directory; "moejax-orbax": written by `moejax convert`;
    "orbax": any other Orbax checkpoint, or a directory of steps of them.

    Reads nothing. Raises UserError for an unfinished conversion and where nothing known is there.
    """
    if (directory / MANIFEST).exists():
        return "moejax-orbax"
    if (directory / JOURNAL).exists():
        raise UserError(
            f"{directory}: an unfinished conversion; run the same `moejax convert` again, which "
            "writes what is missing, and load what it makes"
        )
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return "safetensors"
    # A root whose only step is unfinished has these files too: the loader says so better.
    inside = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    files = (path / name for path in inside for name in _ORBAX_FILES)
    if is_orbax(directory) or any(file.exists() for file in files):
        return "orbax"
    find_shards(directory)
    raise AssertionError("find_shards refuses a directory without shards")
