"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SECTION: tuple[str, ...] = ()
"""A row that draws a line."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """To stdout through `print`, so that a reader who goes away ends the command as usual. The
    first column is words, the others are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        if row == SECTION:
            table.add_section()
        else:
            table.add_row(*row)
    console = Console()
    with console.capture() as capture:
        console.print(table)
    print(capture.get(), end="")
