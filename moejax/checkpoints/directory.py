"""The checkpoint's directory and the JSON files in it."""

from __future__ import annotations

import json
import os
import pathlib
import re

from moejax.errors import UserError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def checkpoint_directory(path: str | os.PathLike) -> pathlib.Path:
    """The path as a pathlib.Path; UserError, saying what was expected, if it is no directory."""
    directory = pathlib.Path(path).expanduser()
    if directory.is_dir():
        return directory
    expected = "expected a local directory with config.json and model.safetensors"
    if directory.exists():
        raise UserError(f"{path}: not a directory; {expected}")
    if _HUB_ID.fullmatch(str(path)):
        raise UserError(
            f"{path}: no such directory. It looks like a Hugging Face hub id; moejax downloads "
            f"nothing: run `hf download {path} --local-dir DIR` and give DIR"
        )
    raise UserError(f"{path}: no such directory; {expected}")


def read_json(path: pathlib.Path) -> dict:
    """The JSON object in a file; UserError if it is missing, malformed or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; is {path.parent} a Hugging Face checkpoint?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
