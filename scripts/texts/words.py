"""Words and templates of the texts, read from the folder `templates`."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import yaml

FOLDER = pathlib.Path(__file__).with_name("templates")


@functools.cache
def read(name: str) -> Any:
    """The content of templates/NAME.yaml."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((FOLDER / f"{name}.yaml").read_text(), loader)


WORDS: dict[str, list[str]] = read("words")
