"""The scripts: `python -m scripts.GROUP NAME [argument...]`; `python -m scripts` lists them.

A command is a module of its group with `main(arguments) -> exit status` and a line in COMMANDS;
other modules of a group are parts of its commands.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import ParamSpec

from host_offload.memory.budget import BudgetError
from host_offload.traces.schema import TraceError
from moejax.commands.main import GARBAGE
from moejax.errors import UserError

P = ParamSpec("P")

COMMANDS = {
    "bench": (
        *("decode", "prefill", "load", "start", "peers", "formats", "drafts", "layers"),
        *("sampling", "attention", "auto", "planner", "decoders", "users", "answers"),
        *("predictors", "maps"),
    ),
    "check": (
        "batch",
        "paired",
        "fuzz",
        "attack",
        "gpu_day",
        "scale_out",
        "server",
        "flat",
        "predictions",
        "mutants",
    ),
}
"""Group → names."""


def run(group: str) -> None:
    """Runs the command of the group that the command line names; lists all where it names none."""
    name, *arguments = sys.argv[1:] or [""]
    gc.set_threshold(GARBAGE)  # as `moejax` does
    if name in COMMANDS[group]:
        sys.exit(import_module(f"scripts.{group}.{name}").main(arguments))
    print(*listed(group), sep="\n")
    sys.exit(0 if name in ("-h", "--help") else 2)


def listed(group: str) -> Iterator[str]:
    """What a group is and has. No command is imported for it."""
    folder = Path(__file__).parents[1] / group
    yield f"python -m scripts.{group} NAME [argument...]: {_summary(folder / '__init__.py')}"
    for name in COMMANDS[group]:
        yield f"  {name:12} {_summary(folder / f'{name}.py')}"


def _summary(module: Path) -> str:
    """The first paragraph of its docstring."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def new_parser(
    module: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """A parser for the command in this module, a `__name__`; the texts stay as they are."""
    return argparse.ArgumentParser(
        prog=_program(module),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def refusing(*also: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates a command's `main`: it refuses with one line, where otherwise it raises an error
    that says what the user can change (moejax's own, a trace's, a budget's, and `also`)."""

    def decorated(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def command(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except (UserError, BudgetError, TraceError, *also) as error:
                return refuse(main.__module__, error)

        return command

    return decorated


def positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UserError for an option of these that is a number below 1."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def refuse(module: str, error: object) -> int:
    """Says what is wrong on stderr, as argparse does; returns the exit status."""
    print(f"{_program(module)}: error: {error}", file=sys.stderr, flush=True)
    return 2


def _program(module: str) -> str:
    group, _, name = module.rpartition(".")
    return f"python -m {group} {name}"
