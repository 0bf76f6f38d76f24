"""What decides the bits of results: results on disk are bound to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moejax.checkpoints.fingerprint import file_fingerprint, fingerprint
from moejax.checkpoints.orbax.steps import Step
from moejax.models.hub import model_directory
from moejax.start.options import OPTIONS

DEFAULTS = 2
"""Raised with every change of a default that decides bits, and of what an option computes: results
of another number are not gone on with. A test knows the defaults of each number."""

_APART = ("model", "dtype", "seed")
"""Options that a job names itself."""
_FILES = ("tokenizer", "name_map")
"""Options that are files, or the name of one that moejax has: their content counts."""


def decided_by(model: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, str]:
    """The options that change bits, as text, "defaults", the number of those that are not given,
    and "weights", a fingerprint of the checkpoint.

    - `options`: keywords of LLM that are given.

    Where the checkpoint is not on this machine, which a cluster's workers may have for themselves,
    there is no "weights". Raises UserError for files that cannot be read.
    """
    given = {
        name: value
        for name, value in options.items()
        if name not in _APART and OPTIONS[name].changes_bits
    }
    found = {"defaults": str(DEFAULTS), **by_content(given)}
    if (weights := weights_of(model, options.get("step"))) is not None:
        found["weights"] = weights
    return found


def by_content(options: Mapping[str, Any]) -> dict[str, str]:
    """Options that are given, as text; those that are files by what is in them. Raises UserError
    for files that cannot be read."""
    given = {name: str(value) for name, value in options.items() if value is not None}
    return given | files_of(options)


def files_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the options that are files. Raises UserError for files that cannot be
    read."""
    named = {name: options[name] for name in _FILES if options.get(name) is not None}
    return {n: file_fingerprint(path) for n, path in named.items() if os.path.exists(path)}


def weights_of(model: str | os.PathLike[str], step: Step = None) -> str | None:
    """A fingerprint of a checkpoint; None where it is not on this machine. Raises UserError for
    files that cannot be read."""
    directory = model_directory(model)
    return fingerprint(directory, step) if os.path.isdir(directory) else None
