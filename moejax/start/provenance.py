"""What decides the bits of results. Results on disk are bound to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moejax.checkpoints.fingerprint import file_fingerprint, fingerprint
from moejax.checkpoints.orbax.steps import Step
from moejax.models.hub import model_directory
from moejax.start.options import OPTIONS

DEFAULTS = 4
"""Version of the defaults. Increase it with every change of a default that decides bits, and of
what an option computes: a job does not continue results of another number. A test knows the
defaults of each number."""

_APART = ("model", "dtype", "seed")
"""Options that a job names itself."""
_FILES = ("tokenizer", "name_map")
"""Options that are files, or names of files that moejax has. Their content counts."""
_TRACES = {"cache_aware_routing": "buddies=", "placement": "recorded="}
"""Options that name a trace, with what stands before it."""


def decided_by(model: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns, as text, the options that change bits; "defaults", the number of the defaults of the
    other options; and "weights", a fingerprint of the checkpoint.

    - `options`: keywords of LLM that are given.

    "weights" is missing if the checkpoint is not on this machine; the workers of a cluster may have
    it. Raises UserError for files that cannot be read.
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
    """Returns the given options as text, with the fingerprint of the content for options that are
    files. Raises UserError for files that cannot be read."""
    given = {name: str(value) for name, value in options.items() if value is not None}
    return given | files_of(options)


def files_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fingerprints of the options that are files, or that name one. Raises UserError
    for files that cannot be read."""
    named = {name: options[name] for name in _FILES if options.get(name) is not None}
    found = {n: file_fingerprint(path) for n, path in named.items() if os.path.exists(path)}
    for name, prefix in _TRACES.items():
        given = options.get(name)
        if isinstance(given, str) and given.startswith(prefix):
            path, *settings = given.removeprefix(prefix).split(",")
            if os.path.exists(path := path.strip()):
                found[name] = ",".join([prefix + file_fingerprint(path), *settings])
    return found


def weights_of(model: str | os.PathLike[str], step: Step = None) -> str | None:
    """Returns a fingerprint of a checkpoint, or None if it is not on this machine. Raises UserError
    for files that cannot be read."""
    directory = model_directory(model)
    return fingerprint(directory, step) if os.path.exists(directory) else None
