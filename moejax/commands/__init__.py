"""The commands of ``moejax``, a module each, with the exit statuses and parser that they share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

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
    parser.set_defaults(run=run)
    return parser
