"""The commands of ``moejax``, a module each, with the exit statuses, parser and tables that they
share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

EXIT_USER_ERROR = 2
EXIT_BAD_LINES = 3
"""A job did all it could, but some results are errors. (1 is a crash of Python.)"""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of stdout went away, as with ``| head``."""


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    epilog: str | None = None,
    description: str | None = None,
) -> argparse.ArgumentParser:
    """A command's parser. run: takes the parsed arguments and returns the exit status. text: the
    command in a few words. description: what its own help says (default: text, as a sentence)."""
    parser = commands.add_parser(
        name,
        help=text,
        description=description or f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def say(text: str) -> None:
    """A line for people on stderr."""
    print(f"moejax: {text}", file=sys.stderr)


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


def align_rows(cells: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other: the first column to the left, the others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in cells
    )
