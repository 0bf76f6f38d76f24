"""The command ``moejax``.

Large modules are imported only after the arguments are checked, so ``--help`` and error messages
appear at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from host_offload.memory.budget import BudgetError
from moejax.commands import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    ablate,
    brief_help,
    calibrate,
    chat,
    check_gpu,
    convert,
    doctor,
    eval,
    generate,
    info,
    plan,
    serve,
    trace,
    train_predictor,
    verify,
)
from moejax.commands.model import HelpAll
from moejax.errors import UserError
from moejax.interrupt import end_where_stuck, leave_quietly
from moejax.start.options import OPTIONS
from moejax.start.other_names import use_instead
from pallas_kernels.option_text import nearest, unknown

STUCK_S = 1.5
"""Seconds for which Ctrl-C waits for the main thread to leave native code, and for a step."""

GARBAGE = 100_000
"""New objects after which Python looks for garbage. It does so by itself at every 700, which takes
a tenth of a small start."""

COMMANDS = (
    *(generate, chat, serve, eval, ablate, info, convert, trace, calibrate, plan),
    *(train_predictor, doctor, check_gpu, verify),
)
"""The modules of the commands. Each has ``add_parser(commands)``, which adds a command whose
default `run` takes the parsed arguments and returns the exit status. `run` imports jax and other
large modules."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status.

    - `argv`: the arguments after ``moejax``; None: those of the process.
    """
    try:
        parser = _parser()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(_name_unknown(unknown, args))
        return args.run(args)
    except (UserError, BudgetError) as error:
        print(f"moejax: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("moejax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Buffered text would raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE


def run() -> NoReturn:
    """Runs the command `moejax` and ends the process with main's status. After Ctrl-C it ends at
    once, without waiting for compilations in the background."""
    end_where_stuck(STUCK_S, EXIT_INTERRUPTED, EXIT_USER_ERROR)
    # Registered before jax's own, so it runs after them. Python's last two collections would look
    # through all objects that jax and moejax made, for 0.4 s, though the process ends anyway.
    atexit.register(gc.freeze)
    # What a start makes stays as well.
    gc.set_threshold(GARBAGE)
    status = main()
    if status == EXIT_INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    leave_quietly()
    sys.exit(status)


class _Version(argparse.Action):
    """Prints the version, which is looked up only for ``--version``."""

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"moejax {version('moejax')}")
        except PackageNotFoundError:
            raise UserError("moejax runs from its source and has no version; install it") from None
        parser.exit()


def _name_unknown(unknown: Sequence[str], args: argparse.Namespace) -> str:
    """The message for unknown arguments, with the nearest options."""

    def spell(option: str) -> str:
        return "--" + option.replace("_", "-")

    known = [name for action in args.parser._actions for name in action.option_strings]
    flags = (word.partition("=")[0] for word in unknown if word.startswith("-"))
    near = "".join(use_instead(flag, spell) or nearest(flag, known) for flag in flags)
    return f"unrecognized arguments: {' '.join(unknown)}{near}"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have two lines, since argparse's usage of sixty options would hide
    them. Where there is --help-all, --help is a page."""

    def format_help(self) -> str:
        brief = any(isinstance(action, HelpAll) and not action.asked for action in self._actions)
        return brief_help(self) if brief else super().format_help()

    def error(self, message: str) -> NoReturn:
        if mistyped := re.search(r"^argument COMMAND: invalid choice: '(.*?)' ", message):
            known = [name for action in self._actions for name in action.choices or ()]
            instead = use_instead(mistyped[1])
            message = f"unknown command {mistyped[1]!r}{instead}"
            if not instead:
                message = unknown("command", mistyped[1], known)
        self.exit(
            EXIT_USER_ERROR,
            f"{self.prog}: error: {message}\n{self.prog} --help lists options and examples\n",
        )


def _epilog() -> str:
    """The end of the help: the common options, a line each."""
    lines = ["options of commands that run a model (moejax COMMAND --help-all has all of them):"]
    for name, one in OPTIONS.items():
        if one.common:
            flag = "--" + name.replace("_", "-")
            lines.append(f"  {flag:<26}{textwrap.shorten(one.help, 72, placeholder=' …')}")
    return "\n".join([*lines, "", "moejax COMMAND --help has examples of a command."])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moejax",
        description="Run Mixture-of-Experts language models that do not fit in device memory.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
