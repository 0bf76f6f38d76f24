"""``moejax check-gpu`` compares kernels with their references on this GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from moejax.commands import add_command
from moejax.commands.model import add_described
from moejax.start.fields import Description

_DESCRIPTION = """\
Checks on a real GPU. Run it first on a new card, after `moejax doctor`, and after any change of jax
or driver. Exit status 1 where a check fails.

kernels  every kernel configuration that dispatch may choose for the shapes named, compared with the
         XLA reference on this device, and a whole step of each shape, in processes of their own;
         right ones are written to the table that starts read, wrong ones are listed. Saved one by
         one, the likeliest to be used first: what is killed, or ends by --minutes, goes on where
         it was
engine   a model of the size of Qwen3-30B-A3B with random weights: 200 decode steps at four expert
         budgets, which must give equal bits
"""

_PARTS = ("kernels", "engine")


def _names(text: str) -> list[str]:
    return text.split(",")


_OPTIONS = {
    "shapes": Description(
        "comma-separated model shapes for `kernels` (default: all that are known)", type=_names
    ),
    "dtypes": Description(
        "comma-separated dtypes for `kernels` (default: bfloat16,float16)",
        type=_names,
        default=["bfloat16", "float16"],
    ),
    "tables": Description("where the table goes (default: the package)", metavar="DIR", type=Path),
    "minutes": Description(
        "begin no check of `kernels` after so many; run it again for the rest", type=float
    ),
    "engine_shape": Description(
        "the model of `engine` (default: qwen3-30b-a3b)", metavar="SHAPE", default="qwen3-30b-a3b"
    ),
    "layers": Description("fewer layers for `engine`", metavar="LAYERS", type=int),
    "steps": Description("decode steps (default: 200)", metavar="STEPS", type=int, default=200),
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "check the GPU kernels on this machine's GPU"
    check = add_command(commands, "check-gpu", _run, text, description=_DESCRIPTION)
    for part in _PARTS:
        check.add_argument(f"--{part}", action="store_true", help=f"only {part} (may be combined)")
    add_described(check, _OPTIONS)


def _run(args: argparse.Namespace) -> int:
    from moejax.checkpoints.random_model import SHAPES
    from moejax.errors import UserError
    from moejax.evaluate.gpu_check import check_device
    from pallas_kernels.verification.table import SHIPPED

    for name in (*(args.shapes or ()), args.engine_shape):
        if name not in SHAPES:
            raise UserError(f"no shape is called {name!r}; known: {', '.join(SHAPES)}")
    if args.minutes is not None and not args.minutes > 0:
        raise UserError(f"--minutes must be more than 0, got {args.minutes:g}")
    failures = check_device(
        [part for part in _PARTS if getattr(args, part)] or _PARTS,
        shapes=args.shapes or list(SHAPES),
        dtypes=args.dtypes,
        tables=args.tables or SHIPPED,
        minutes=args.minutes,
        engine_shape=args.engine_shape,
        layers=args.layers,
        steps=args.steps,
    )
    return 1 if failures else 0
