"""The parsers of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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
