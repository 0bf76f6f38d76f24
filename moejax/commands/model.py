"""The options of commands that run a model, from flags and from a file, and the model's start."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.checkpoints.read_ahead import read_ahead
from moejax.commands import put_aside
from moejax.errors import UserError, user_errors
from moejax.models.json_values import read_yaml_mapping
from moejax.start.fields import Description, options_of
from moejax.start.options import GROUPS, OPTIONS, Config, unknown_option

if TYPE_CHECKING:
    from moejax.serve.cluster.workers import Scale
    from moejax.serve.llm import LLM


MODEL_HELP = "a Hugging Face or Orbax directory, a Hub id, or demo"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the argument MODEL."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_model_option(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    """Adds the option --model, whose default is the embedded model.

    - `positional`: whether MODEL may stand without --model too, as in `vllm serve MODEL`.
    """
    if positional:
        parser.add_argument(
            "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as --model"
        )
    help = f"{MODEL_HELP}, the embedded model (default: demo)"
    parser.add_argument("--model", default="demo", metavar="PATH", help=help)


def add_model_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds --config and, in groups, the options of commands that run a model. --help shows the
    common ones, and --help-all shows all.

    - `without`: options that this command does not have.
    """
    every = parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help="show this help with every option, and exit"
    )
    assert isinstance(every, HelpAll)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options (max_num_seqs: 4), flat or in groups (runtime: {max_num_seqs: "
        "4}), or what `moejax plan --output FILE` wrote; flags override it",
    )
    for title, kind in GROUPS.items():
        flags = {n: one for n, one in options_of(kind).items() if one.flag and n not in without}
        actions = add_described(parser.add_argument_group(title), flags)
        for action, one in zip(actions, flags.values(), strict=True):
            settings = f". {one.settings}".replace("%", "%%") if one.settings else ""
            every.helps[action] = f"{action.help}{settings}"
            if not one.common:
                put_aside([action])


class HelpAll(argparse.Action):
    """Prints all of the help, of which --help is a page."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.helps: dict[argparse.Action, str] = {}
        """Option → its text in the help."""
        self.asked = False

    def __call__(self, parser, namespace, values, option_string=None):
        for action, help in self.helps.items():
            action.help = help
        self.asked = True
        if more := parser.get_default("more"):
            parser.epilog = f"{parser.epilog}\n{more}"
        parser.print_help()
        parser.exit()


CHECKPOINT = {name: OPTIONS[name] for name in ("step", "name_map")}
"""Options of commands that only read a checkpoint."""

CLUSTER = {
    "ray": Description(
        "run on Ray's workers: HOST:PORT of a cluster's head, auto on one of its machines, or "
        "local, which needs no cluster (docs/how-to/ray.md)",
        metavar="ADDRESS",
    ),
    "workers": Description(
        "models that run at the same time (default: one per GPU, or one per machine without GPUs)",
        type=int,
    ),
    "cores_per_worker": Description(
        "CPU cores of a worker (default: the machine's, divided among its workers)", type=int
    ),
}
"""Options of commands that run on several machines."""


def wants_cluster(args: argparse.Namespace) -> bool:
    """Whether --ray is given. Without it, its options end the command with an error."""
    if args.ray is None and any(pick_arguments(args, CLUSTER).values()):
        args.parser.error("--workers and --cores-per-worker need --ray")
    return args.ray is not None


@contextmanager
def connect_cluster(args: argparse.Namespace) -> Iterator[Scale]:
    """Connects to the cluster of --ray. Yields its address, and the number and size of workers."""
    from moejax.serve.cluster.ray_cluster import connect
    from moejax.serve.cluster.workers import Scale

    scale = Scale(args.ray, args.workers, args.cores_per_worker)
    with connect(scale.address, scale.cpus):
        yield scale


def add_described(
    group: argparse._ActionsContainer, described: Mapping[str, Description]
) -> list[argparse.Action]:
    """Adds an option for each name, and returns their actions."""
    actions = []
    for name, said in described.items():
        flag = "--" + name.replace("_", "-")
        # argparse formats the text with %.
        help = said.help.replace("%", "%%")
        if said.type is bool:
            kind = argparse.BooleanOptionalAction if said.default is None else "store_true"
            action = group.add_argument(flag, action=kind, default=said.default, help=help)
        else:
            action = group.add_argument(
                flag,
                default=said.default,
                metavar=said.metavar or ("N" if said.type is int else None),
                type=said.type or str,
                choices=said.choices,
                help=help,
            )
        actions.append(action)
    return actions


def pick_arguments(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The named arguments, as a dict."""
    return {name: getattr(args, name) for name in names}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of LLM, from the command line and --config. Raises UserError for
    impossible values."""
    given: dict[str, Any] = {}
    if args.config is not None:
        given = read_options(args.config)
    for name, option in OPTIONS.items():
        # An option that is not given keeps the file's value or the library's default.
        value = getattr(args, name, None) if option.flag else None
        if value is not None:
            given[name] = value
    Config.of("", **given)
    return given


def read_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads keyword arguments of LLM from a YAML or JSON file of options, flat or in their groups.
    Raises UserError for a file that cannot be read, is no mapping, or has an unknown key or an
    impossible value."""
    found = read_yaml_mapping(path, "of options")
    options: dict[str, Any] = {}
    for key, value in found.items():
        grouped = key in GROUPS and isinstance(value, dict)
        for name, one in (value if grouped else {key: value}).items():
            known = options_of(GROUPS[key]) if grouped else OPTIONS
            if name not in known or not known[name].in_file:
                raise UserError(f"{path}: {unknown_option(str(name), known)}")
            if name in options:
                raise UserError(f"{path} has {name} twice; leave one of them out")
            options[name] = one
    with user_errors(where=f"{path}: "):
        Config.of("", **options)
    return options


def write_options(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Writes options to a file that read_options reads. Raises UserError where that fails."""
    try:
        Path(path).write_text(json.dumps(dict(options), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


@contextmanager
def start_llm(args: argparse.Namespace, options: Mapping[str, Any]) -> Iterator[LLM]:
    """Starts the model, with progress unless --quiet or --json is given. Notes are not logged,
    since the command prints every note itself."""
    if str(options.get("store", "memory")).startswith("memory"):
        read_ahead(args.model)
    from moejax import LLM

    quiet = args.quiet or args.json
    with silence_notes(), LLM(args.model, progress=not quiet, **options) as llm:
        yield llm


@contextmanager
def silence_notes() -> Iterator[None]:
    """Logs only errors inside the block."""
    log = logging.getLogger("moejax")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
