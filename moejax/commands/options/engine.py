"""Options of every command that runs a model: those of moejax.start.options.Options."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moejax.start.options import Options, descriptions


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The groups of options of a command that runs a model, with --config."""
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options by name (max_num_seqs: 4), or what `moejax plan --output "
        "FILE` wrote; those that are given here go before it",
    )
    add_options(memory, "memory")
    add_options(parser.add_argument_group("precision"), "precision")
    engine = parser.add_argument_group("engine")
    add_options(engine, "checkpoint")
    add_options(engine, "engine")


def add_options(group: argparse._ActionsContainer, name: str) -> None:
    """The options of one of Description.group's groups."""
    for option, description in descriptions().items():
        if description.group != name:
            continue
        flag = "--" + option.replace("_", "-")
        # argparse formats it with %.
        help = description.help.replace("%", "%%")
        if description.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
            continue
        group.add_argument(
            flag,
            metavar=description.metavar,
            type=description.type or str,
            choices=description.choices,
            help=help,
        )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM: those that were given here, or in the file. Raises UserError for
    values that can never be."""
    given: dict[str, Any] = {}
    if args.config is not None:
        from moejax.start.options_file import read_options

        given = read_options(args.config)
    for name, description in descriptions().items():
        # What was not given keeps the file's value or the library's default.
        value = None if description.group is None else getattr(args, name, None)
        if value is not None:
            given[name] = value
    Options("", **given)
    return given


@contextmanager
def notes_unsaid() -> Iterator[None]:
    """The summary has every note; a warning would only say it twice."""
    log = logging.getLogger("moejax")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
