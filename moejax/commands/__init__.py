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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """To stdout through `print`, so that a reader who goes away ends the command as usual."""
    header, *lines = align_rows([columns, *rows]).split("\n")
    print("", header, "─" * len(header), *lines, sep="\n")


def align_rows(cells: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other: the first column, which is words, to the left, the others,
    which are numbers, to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in cells
    )
