"""``moejax quantize``: a checkpoint with further versions of its experts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table

if TYPE_CHECKING:
    from moejax.evaluate.quantization import Quantization

_EPILOG = """\
DST is what `moejax convert` writes, with records of each version beside the dense ones, and in
moejax.json a checksum and the relative error |W - W'| / |W| of each expert. A run that wants such a
version takes it from there instead of making it when it starts.

All is written to DST.partial, which becomes DST at the end. The same command again goes on after an
interruption of any kind; delete DST.partial to give up.

examples:
  moejax quantize /models/Qwen3-30B-A3B /models/qwen3.orbax --versions int4,int8
  moejax quantize demo demo.orbax --versions int4,int2 --quantizer mse --json
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    quantize = add_command(
        commands,
        "quantize",
        _run,
        "write a checkpoint with further versions of its experts",
        _EPILOG,
        "Write a checkpoint that has its experts in further versions, beside the dense one.",
    )
    quantize.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face model directory, what moejax convert wrote, or demo",
    )
    quantize.add_argument("destination", metavar="DST", help="the new directory")
    quantize.add_argument(
        "--versions",
        required=True,
        metavar="LIST",
        help="of int8, int4, int2 and, for bfloat16 weights, lossless12, separated by commas",
    )
    quantize.add_argument(
        "--quantizer",
        default="rtn",
        metavar="NAME",
        help="how int versions are made: rtn (round to nearest) or mse (the least squared error "
        "of the weights; some 10 times as long) (default: rtn)",
    )
    quantize.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    quantize.add_argument("--quiet", action="store_true", help="no progress and no summary")


def _run(args: argparse.Namespace) -> int:
    import jax

    from moejax.evaluate.quantization import quantize
    from moejax.models.hub import model_directory
    from moejax.progress import loading_progress

    # Orbax starts jax's backend, which on a GPU would take most of its memory for nothing.
    jax.config.update("jax_platforms", "cpu")
    versions = tuple(args.versions.split(","))
    with loading_progress(args.source, not args.quiet, "quantizing") as report:
        source = model_directory(args.source)
        done = quantize(source, args.destination, versions, args.quantizer, report)
    if args.json:
        print(json.dumps({"source": args.source, **as_json(done)}, indent=2))
    elif not args.quiet:
        _print(done)
    return 0


def as_json(done: Quantization) -> dict[str, Any]:
    """Sizes in bytes; relative errors by MoE layer, means over its experts."""
    return {
        "directory": str(done.conversion.directory),
        "dtype": done.conversion.dtype,
        "bytes": done.conversion.nbytes,
        "kept_bytes": done.conversion.kept,
        "dense_record_bytes": done.dense_bytes,
        "versions": {
            name: {
                "quantizer": version.quantizer,
                "record_bytes": version.record_bytes,
                "relative_error": version.layer_errors,
                "dense_layers": list(version.dense_layers),
            }
            for name, version in done.versions.items()
        },
    }


def _print(done: Quantization) -> None:
    conversion = done.conversion
    there = f", {format_bytes(conversion.kept)} of them from before" if conversion.kept else ""
    written = f"{format_bytes(conversion.nbytes)} of {conversion.dtype} weights and versions"
    print(f"{conversion.directory}: {written}{there}")
    print_table(
        ["version", "of dense", "made by", "relative error", "dense layers"],
        [
            [
                name,
                f"{version.record_bytes / done.dense_bytes:.1%}",
                version.quantizer,
                f"{sum(version.layer_errors) / len(version.layer_errors):.5f}",
                str(len(version.dense_layers)),
            ]
            for name, version in done.versions.items()
        ],
    )
