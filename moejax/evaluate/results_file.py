"""The file of an evaluation's results: one JSON line per run, or per step of a training run."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from moejax.errors import UserError, shown
from moejax.evaluate.json_lines import LineFile, open_line_file, parsed_lines, read_line_file


def open_lines(
    name: str, asked: Mapping[str, Any], *, resume: bool
) -> AbstractContextManager[LineFile]:
    """Opens the file, and locks it while it is open.

    - `asked`: what decides the figures, as plain data for JSON; each line has it.
    - `resume`: continue after the lines that are there.

    Raises UserError for a file that another process writes, for other content than results, for
    results of other options, naming the option, and, without `resume`, for any results.
    """

    def read(data: bytes) -> list[dict[str, Any]]:
        lines = _parse(name, data)
        if lines and not resume:
            raise UserError(f"{name} has results already; choose another --output")
        for line in lines:
            _require_same(name, line["asked"], json.loads(json.dumps(asked)))
        return lines

    return open_line_file(name, read)


def read_lines(name: str) -> list[dict[str, Any]]:
    """Returns the results in a file, without a torn last line. Raises UserError for a file that
    cannot be read or has other content."""
    lines = read_line_file(name, functools.partial(_parse, name))
    if not lines:
        raise UserError(f"{name} has no results; moejax eval --output writes them")
    return lines


def require_same_weights(name: str, line: Mapping[str, Any], now: str) -> None:
    """Raises UserError for the line of a step whose weights have changed.

    - `now`: fingerprint of the step's present weights.
    """
    if line.get("weights", now) != now:
        raise UserError(
            f"{name} has results of step {line['step']} with other weights than it has now; give "
            "the same checkpoints, or choose another --output"
        )


def _parse(name: str, data: bytes) -> list[dict[str, Any]]:
    keys, advice = frozenset({"step", "asked", "units"}), "choose another --output"
    lines = parsed_lines(name, data, "no result of moejax eval", advice, keys)
    if not lines and data and not b'{"step": '.startswith(data[:9]):
        raise UserError(f"{name} is no file of results; choose another --output")
    return lines


def _require_same(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError, naming the first option by which the results differ."""
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{name} has results of another {key}: {shown(before.get(key))}, and this run has "
                f"{shown(now.get(key))}; give the same, or choose another --output"
            )
