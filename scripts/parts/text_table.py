"""Tables: columns of right-aligned text."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def aligned(
    columns: Sequence[tuple[str, str]], lines: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A heading and a line of text for each of `lines`.

    columns: (heading, format string of a line's fields), as in ("ms", "{step_ms:.2f}"); a field
    that is None is a dash.
    """
    dashes = _Dashes()
    rows = [[heading for heading, _ in columns]]
    rows += [[dashes.vformat(shown, (), line) for _, shown in columns] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def running(
    columns: Sequence[tuple[str, str]], lines: Iterable[Mapping[str, Any]], width: int = 8
) -> Iterator[str]:
    """As aligned, each line as soon as there is one: columns of `width` or as wide as headings."""
    dashes = _Dashes()
    widths = [max(width, len(heading)) for heading, _ in columns]
    rows = ([dashes.vformat(shown, (), line) for _, shown in columns] for line in lines)
    for row in itertools.chain([[heading for heading, _ in columns]], rows):
        yield "  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True))


def show(as_json: bool, lines: Iterable[Mapping[str, Any]], text: Iterable[str]) -> None:
    """Prints a command's lines, as an object of JSON each, or the text that people read of them."""
    print(*(map(json.dumps, lines) if as_json else text), sep="\n")


class _Dashes(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return "–" if value is None else super().format_field(value, format_spec)
