"""Options in a file: `--config FILE.yaml`, and what `moejax plan --output FILE` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moejax.errors import UserError
from moejax.start.options import Options, descriptions


def read_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Keyword arguments of Options from a YAML or JSON file. Raises UserError for a file that
    cannot be read, is no mapping, has an unknown key, or a value that can never be."""
    try:
        options = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path} must be a mapping of options, not {type(options).__name__}")
    known = [name for name, option in descriptions().items() if option.in_file]
    if unknown := sorted(map(str, options.keys() - set(known))):
        raise UserError(f"{path} has the unknown option {unknown[0]!r}; known: {', '.join(known)}")
    try:
        Options("", **options)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return options


def write_options(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(dict(options), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
