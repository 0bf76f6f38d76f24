"""The commands of ``moejax``, one module each. This one has the exit statuses, parser and tables
that they share."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

EXIT_USER_ERROR = 2
EXIT_BAD_LINES = 3
"""The job is done, but some results are errors. (1 is a crash of Python.)"""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report an interruption."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: the program that reads stdout has ended, as ``| head`` does."""


def add_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    epilog: str | None = None,
    description: str | None = None,
    more: str = "",
) -> argparse.ArgumentParser:
    """Adds the parser of a command.

    - `run`: takes the parsed arguments and returns the exit status.
    - `text`: what the command does, in a few words.
    - `epilog`, `description`: the end and the begin of the command's help; by default nothing, and
      `text` as a sentence.
    - `more`: what --help-all adds to the end.
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=description or f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser, more=more)
    return parser


def put_aside(actions: Iterable[argparse.Action]) -> None:
    """Leaves options out of --help; --help-all shows them."""
    for action in actions:
        action.aside = True  # type: ignore[attr-defined]


def brief_help(parser: argparse.ArgumentParser, width: int = 80) -> str:
    """Returns the help of a command on a page: a line for each option that was not put aside."""
    shown: dict[str, list[str]] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or getattr(action, "aside", False):
                continue
            metavar = str(action.metavar or action.dest.upper()).replace("[,KEY=VALUE…]", "[,…]")
            takes = "" if action.nargs == 0 else f" {metavar}"
            if action.choices:
                takes = f" {{{','.join(map(str, action.choices))}}}"
            flag = action.option_strings[-1] + takes if action.option_strings else takes.strip()
            text = (action.help or "").replace("%%", "%").partition(" (default: ")[0]
            text = textwrap.shorten(text, width - 29, placeholder=" …")
            lines = [f"  {flag:<26} {text}"] if len(flag) < 27 else [f"  {flag}", " " * 29 + text]
            shown.setdefault(group.title or "", []).extend(lines)
    takes = "".join(f" [{a.metavar or a.dest}]" for a in parser._get_positional_actions())
    lines = [f"usage: {parser.prog} [OPTION …]{takes}    (--help-all: every option in full)", ""]
    lines += [*textwrap.wrap(parser.description or "", width), ""]
    for title, each in shown.items():
        lines += [f"{title}:", *each]
    return "\n".join([*lines, "", parser.epilog or ""]).rstrip() + "\n"


def say(text: str) -> None:
    """Writes a line for people to stderr."""
    print(f"moejax: {text}", file=sys.stderr)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table to stdout, with `print`, so that a closed pipe ends the command as usual."""
    header, *lines = align_rows([columns, *rows]).split("\n")
    print("", header, "─" * len(header), *lines, sep="\n")


def align_rows(cells: Sequence[Sequence[str]]) -> str:
    """Aligns rows of text in columns: the first one, which has words, to the left, and the others,
    which have numbers, to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in cells
    )
