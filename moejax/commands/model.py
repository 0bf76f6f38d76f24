"""The model that a command runs: its options, also from a file, and its start."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError, user_errors
from moejax.models.json_values import MOST_YAML, parse_yaml
from moejax.start.options import WITHOUT_A_GPU, Description, Options, descriptions

if TYPE_CHECKING:
    from moejax.serve.llm import LLM


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, of a command that runs one."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face or Orbax directory, or demo")


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
    add_options(parser.add_argument_group(WITHOUT_A_GPU), WITHOUT_A_GPU)


CLUSTER = {
    "ray": Description(
        "run on Ray's workers: HOST:PORT of a cluster's head, auto on one of its machines, or "
        "local, which needs no cluster (docs/scale_out.md)",
        metavar="ADDRESS",
    ),
    "workers": Description(
        "models to run at once (default: one a GPU; one a machine where there is none)", type=int
    ),
    "cores_per_worker": Description(
        "CPU cores of each (default: its machine's, divided among its workers)", type=int
    ),
}
"""Options of commands that run on several machines."""


def add_options(group: argparse._ActionsContainer, name: str) -> None:
    """The options of one of Description.group's groups."""
    of_group = {key: said for key, said in descriptions().items() if said.group == name}
    add_described(group, of_group)


def add_described(group: argparse._ActionsContainer, described: Mapping[str, Description]) -> None:
    """An option for each name."""
    for name, said in described.items():
        flag = "--" + name.replace("_", "-")
        # argparse formats it with %.
        help = said.help.replace("%", "%%")
        if said.type is bool:
            action = argparse.BooleanOptionalAction if said.default is None else "store_true"
            group.add_argument(flag, action=action, default=said.default, help=help)
            continue
        group.add_argument(
            flag,
            default=said.default,
            metavar=said.metavar or ("N" if said.type is int else None),
            type=said.type or str,
            choices=said.choices,
            help=help,
        )


def asked(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Arguments by name."""
    return {name: getattr(args, name) for name in names}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM: those that were given here, or in the file. Raises UserError for
    values that can never be."""
    given: dict[str, Any] = {}
    if args.config is not None:
        given = read_options(args.config)
    for name, description in descriptions().items():
        # What was not given keeps the file's value or the library's default.
        value = None if description.group is None else getattr(args, name, None)
        if value is not None:
            given[name] = value
    Options("", **given)
    return given


def read_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Keyword arguments of Options from a YAML or JSON file. Raises UserError for a file that
    cannot be read, is no mapping, has an unknown key, or a value that can never be."""
    try:
        with open(path, "rb") as file:  # which may be a pipe
            options = parse_yaml(file.read(MOST_YAML + 1).decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path} must be a mapping of options, not {type(options).__name__}")
    known = [name for name, option in descriptions().items() if option.in_file]
    if unknown := sorted(map(str, options.keys() - set(known))):
        raise UserError(f"{path} has the unknown option {unknown[0]!r}; known: {', '.join(known)}")
    with user_errors(where=f"{path}: "):
        Options("", **options)
    return options


def write_options(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(dict(options), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


@contextmanager
def started(args: argparse.Namespace, options: Mapping[str, Any]) -> Iterator[LLM]:
    """The model with its progress as --quiet and --json say. Notes are not logged: what a command
    prints has every note, and a warning would only say it twice."""
    from moejax import LLM

    quiet = args.quiet or args.json
    with notes_unlogged(), LLM(args.model, progress=not quiet, **options) as llm:
        yield llm


@contextmanager
def notes_unlogged() -> Iterator[None]:
    """A block in which the log has errors alone."""
    log = logging.getLogger("moejax")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
