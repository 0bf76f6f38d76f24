"""Groups of scripts: `python -m scripts.GROUP NAME [argument...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module


def run(group: str, names: Sequence[str]) -> None:
    """Runs the script that the command line names, as a program; lists all where it names none."""
    program = f"python -m scripts.{group}"
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: {program} NAME [argument...]\n")
        for name in names:
            first = (import_module(f"scripts.{group}.{name}").__doc__ or "").partition("\n")[0]
            print(f"  {name:12} {first}")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"{program} {name}"
    sys.exit(import_module(f"scripts.{group}.{name}").main())
