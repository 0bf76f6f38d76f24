"""Files of records: JSON lines that a killed process leaves whole."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.errors import UserError, shown
from moejax.evaluate.json_lines import LineFile, open_line_file, parsed_lines, read_line_file

DEFINITION, RECORDS, SESSIONS = "experiment.json", "records.jsonl", "sessions.jsonl"
"""Files of a directory of results: what was asked, a line for each run, a line for each start."""

QUALITY, TIMELINES = "quality.jsonl", "timelines.jsonl"
"""Files with a line for each precision and text, where a definition asks for quality, and for each
predicted cell over a link."""


LATER_KEYS: Mapping[str, Any] = {
    "link_rate": ["none"],
    "prompts": None,
    "train_prompts": 32,
    "routing": [],
    "quality_tokens": None,
    "quality_part": "test",
}
"""Keys of definitions that the first grids had not, with what they did."""

LATER_COLUMNS: Mapping[str, Any] = {"link_rate": "none", "moves_cells": False}
"""Columns of records and sessions that the first grids had not, with what held for them."""


def completed_keys(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A definition as written by any version, with the keys that came later."""
    if asked.get("conversations"):
        return dict(asked)
    later = {"routing": []} if asked.get("routing") else LATER_KEYS
    return {**later, **asked}


def completed(
    lines: Sequence[Mapping[str, Any]], experts: int | None = None
) -> list[dict[str, Any]]:
    """Records or sessions as written by any version, with the columns that came later. experts:
    a layer's, where that is known of the directory."""
    later = LATER_COLUMNS if experts is None else {**LATER_COLUMNS, "experts": experts}
    return [{**later, **line} for line in lines]


def open_records(path: Path) -> contextlib.AbstractContextManager[LineFile]:
    """The file, as open_line_file. Raises UserError for one that is something else."""
    return open_line_file(path, functools.partial(_parsed, path))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a torn last one is none. Raises UserError for a file that cannot be read
    or is something else."""
    return read_line_file(path, functools.partial(_parsed, path))


def _parsed(path: Path, data: bytes) -> list[dict[str, Any]]:
    advice = "delete the file, or choose another --output"
    return parsed_lines(path, data, "no record", advice, frozenset())


def require_same(directory: Path, asked: Mapping[str, Any]) -> None:
    """Writes what was asked into a new directory of results; of one that is there raises UserError
    unless it is of the same, saying by what they differ."""
    path, now = directory / DEFINITION, json.loads(json.dumps(asked))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            written = path.with_suffix(".new")  # a killed run may have left it
            if others := sorted(p.name for p in directory.iterdir() if p != written):
                raise UserError(
                    f"{directory} is no directory of results, it has {shown(others[0])}; choose "
                    "another --output"
                )
            written.write_text(json.dumps(now, indent=1) + "\n")
            os.replace(written, path)
            return
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read or written: {error}") from None
    if not isinstance(before, dict):
        raise UserError(f"{path} is no definition; choose another --output")
    before, now = completed_keys(before), completed_keys(now)
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing:
        said = "; ".join(
            f"{name} was {shown(before.get(name), 200)} and is {shown(now.get(name), 200)}"
            for name in differing
        )
        raise UserError(
            f"{directory} has results of another experiment: {said}. Give the same, or choose "
            "another --output"
        )
