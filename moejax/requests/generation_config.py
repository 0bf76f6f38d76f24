"""Sampling defaults that a checkpoint's authors recommend, in generation_config.json."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from moejax.errors import UserError
from moejax.models.directory import read_json
from moejax.requests.sampling_params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is read, as in vLLM but for max_new_tokens; end-of-sequence ids are load_config's."""


def sampling_defaults(directory: str | os.PathLike[str], choice: str) -> dict[str, Any]:
    """Fields of SamplingParams, of requests that state no parameters; {} without the file.

    - `directory`: of the checkpoint.
    - `choice`: the option generation_config: "auto" reads the file, "none" does not.

    Raises UserError for a malformed file and a value out of range.
    """
    path = pathlib.Path(directory).expanduser() / "generation_config.json"
    if choice == "none" or not os.path.exists(path):
        return {}
    raw = read_json(path)
    found = {name: raw[name] for name in FIELDS if raw.get(name) is not None}
    try:
        SamplingParams(**found)
    except UserError as error:
        raise UserError(f'{path}: {error}; generation_config="none" ignores it') from None
    return found


def describe_defaults(found: dict[str, Any]) -> tuple[str, ...]:
    """The defaults as notes for people; none without any."""
    if not found:
        return ()
    values = ", ".join(f"{name}={value}" for name, value in found.items())
    return (
        f"sampling defaults {values}, from the model's generation_config.json; "
        'generation_config="none" ignores them',
    )
