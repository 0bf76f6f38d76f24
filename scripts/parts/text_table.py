"""Columns of right-aligned text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def aligned(
    columns: Sequence[tuple[str, str]], lines: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A heading and a line of text for each of `lines`.

    columns: (heading, format string of a line's fields), as in ("ms", "{step_ms:.2f}").
    """
    rows = [[heading for heading, _ in columns]]
    rows += [[shown.format(**line) for _, shown in columns] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
