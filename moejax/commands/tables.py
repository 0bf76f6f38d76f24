"""Tables that commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(*columns: str) -> Table:
    """A table whose first column is words and whose others are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def print_table(table: Table) -> None:
    """To stdout through `print`, so that a reader who goes away ends the command as usual."""
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(table)
    print(capture.get(), end="")
