"""What decides the bits of results: results on disk are bound to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moejax.checkpoints.fingerprint import file_fingerprint, fingerprint
from moejax.models.hub import model_directory
from moejax.start.options import OPTIONS

_APART = ("model", "dtype", "seed")
"""Options that a job names itself."""
_FILES = ("tokenizer", "name_map")
"""Options that are files, or the name of one that moejax has: their content counts."""


def decided_by(model: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, str]:
    """The options that change bits, as text, and "weights", a fingerprint of the checkpoint.

    - `options`: keywords of LLM that are given; what is left out has its default.

    Where the checkpoint is not on this machine, which a cluster's workers may have for themselves,
    there is no "weights". Raises UserError for files that cannot be read.
    """
    given = {
        name: str(value)
        for name, value in options.items()
        if value is not None and name not in _APART and OPTIONS[name].changes_bits
    }
    for name in _FILES:
        if name in given and os.path.exists(given[name]):
            given[name] = file_fingerprint(given[name])
    directory = model_directory(model)
    if os.path.isdir(directory):
        given["weights"] = fingerprint(directory, options.get("step"))
    return given
