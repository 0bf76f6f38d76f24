"""``moejax convert``: a Hugging Face directory becomes an Orbax checkpoint."""

from __future__ import annotations

import argparse

from moejax.commands import add_command

_EPILOG = """\
DST holds one Orbax tree, {"params": …, "experts": {"dense": [a leaf for each MoE layer]}}, in which
every expert is a file of its own, the model's configuration and tokenizer, and moejax.json with the
origin and a checksum of each piece. --model DST runs it; the text is the same as SRC's.

All is written to DST.partial, which becomes DST at the end. The same command again goes on after an
interruption of any kind; delete DST.partial to give up.

examples:
  moejax convert /models/Qwen3-30B-A3B /models/qwen3.orbax
  moejax generate "The old house" --model /models/qwen3.orbax
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    convert = add_command(
        commands,
        "convert",
        _run,
        "write a Hugging Face checkpoint as an Orbax checkpoint",
        _EPILOG,
        "Write a Hugging Face checkpoint as an Orbax checkpoint whose experts can be read one by "
        "one.",
    )
    convert.add_argument("source", metavar="SRC", help="a Hugging Face model directory, or demo")
    convert.add_argument("destination", metavar="DST", help="the new directory")
    convert.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="of the weights: bfloat16, float16, float32, auto (default: auto, the checkpoint's)",
    )
    convert.add_argument("--quiet", action="store_true", help="no progress and no summary")


def _run(args: argparse.Namespace) -> int:
    import jax

    from host_offload.memory.budget import format_bytes
    from moejax.checkpoints.conversion import convert
    from moejax.models.hub import model_directory
    from moejax.progress import loading_progress

    # Orbax starts jax's backend, which on a GPU would take most of its memory for nothing.
    jax.config.update("jax_platforms", "cpu")
    with loading_progress(args.source, not args.quiet, "converting") as report:
        source = model_directory(args.source)
        done = convert(source, args.destination, args.dtype, report)
    if not args.quiet:
        there = f", {format_bytes(done.kept)} of them from before" if done.kept else ""
        print(f"{done.directory}: {format_bytes(done.nbytes)} of {done.dtype} weights{there}")
    return 0
