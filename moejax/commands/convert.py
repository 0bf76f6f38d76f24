"""``moejax convert`` and ``moejax quantize`` write checkpoints with experts as single files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table
from moejax.commands.model import CHECKPOINT, add_described, pick_arguments

if TYPE_CHECKING:
    from moejax.checkpoints.conversion import Conversion
    from moejax.evaluate.quantization import Quantization

_PARTIAL = """\
All is written to DST.partial, which becomes DST at the end. The same command again goes on after an
interruption of any kind; delete DST.partial to give up.
"""
_CONVERT_EPILOG = f"""\
DST holds one Orbax tree, {{"params": …, "experts": {{"dense": [a leaf for each MoE layer]}}}},
in which every expert is a file of its own, the model's configuration and tokenizer, and moejax.json
with the origin and a checksum of each piece. --model DST runs it; the text is the same as SRC's.

{_PARTIAL}
examples:
  moejax convert /models/Qwen3-30B-A3B /models/qwen3.orbax
  moejax generate "The old house" --model /models/qwen3.orbax
  moejax convert /runs/7 /models/7.orbax --step 1200 --name-map maxtext_qwen3_moe
"""
_QUANTIZE_EPILOG = f"""\
DST is what `moejax convert` writes, with records of each version beside the dense ones, and in
moejax.json a checksum and the relative error |W - W'| / |W| of each expert. A run that wants such a
version takes it from there instead of making it when it starts.

{_PARTIAL}
examples:
  moejax quantize /models/Qwen3-30B-A3B /models/qwen3.orbax --versions int4,int8
  moejax quantize demo demo.orbax --versions int4,int2 --quantizer mse --json
  moejax quantize demo demo-int4 --versions int4 --to compressed-tensors
  moejax quantize /runs/7 /models/7.orbax --versions int4 --name-map maxtext_qwen3_moe
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    convert = add_command(
        commands,
        "convert",
        _convert,
        "write a Hugging Face checkpoint as an Orbax checkpoint",
        _CONVERT_EPILOG,
        "Write a Hugging Face checkpoint as an Orbax checkpoint whose experts can be read one by "
        "one.",
    )
    _add_places(convert, "a Hugging Face model directory, a GGUF file, a training run, or demo")
    convert.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="of the weights: bfloat16, float16, float32, auto (default: auto, the checkpoint's)",
    )
    quantize = add_command(
        commands,
        "quantize",
        _quantize,
        "write a checkpoint with further versions of its experts",
        _QUANTIZE_EPILOG,
        "Write a checkpoint that has its experts in further versions, beside the dense one.",
    )
    _add_places(
        quantize,
        "a model directory, a GGUF file, a training run, what moejax convert wrote, or demo",
    )
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
    quantize.add_argument(
        "--to",
        choices=("moejax", "compressed-tensors"),
        default="moejax",
        help="compressed-tensors: safetensors with the one version of LIST, int4 or int8, for "
        "transformers and vLLM too (default: moejax)",
    )
    quantize.add_argument("--json", action="store_true", help="one JSON object on stdout instead")


def _add_places(parser: argparse.ArgumentParser, source: str) -> None:
    parser.add_argument("source", metavar="SRC", help=source)
    parser.add_argument("destination", metavar="DST", help="the new directory")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")
    add_described(parser, CHECKPOINT)


@contextmanager
def _reading(args: argparse.Namespace, verb: str) -> Iterator[tuple[Any, Callable[..., None]]]:
    """Yields the directory of SRC, and a function for progress in bytes: report(done, total).

    - `verb`: stands before the bar.
    """
    import jax

    from moejax.models.hub import model_directory
    from moejax.progress import byte_progress

    # Orbax starts jax's backend, which would reserve most of a GPU's memory for nothing.
    jax.config.update("jax_platforms", "cpu")
    with byte_progress(verb, not args.quiet) as report:
        yield model_directory(args.source), partial(report, args.source)


def _convert(args: argparse.Namespace) -> int:
    from moejax.checkpoints.conversion import convert

    with _reading(args, "converting") as (source, report):
        run = pick_arguments(args, CHECKPOINT)
        done = convert(source, args.destination, args.dtype, report, **run)
    if not args.quiet:
        _print_written(done, "weights")
    return 0


def _quantize(args: argparse.Namespace) -> int:
    from moejax.evaluate.quantization import quantize

    versions = tuple(args.versions.split(","))
    if args.to == "compressed-tensors":
        if any(pick_arguments(args, CHECKPOINT).values()):
            args.parser.error("--step and --name-map do not go with --to compressed-tensors")
        return _write_compressed(args)
    with _reading(args, "quantizing") as (source, report):
        run = pick_arguments(args, CHECKPOINT)
        done = quantize(source, args.destination, versions, args.quantizer, report, **run)
    if args.json:
        print(json.dumps({"source": args.source, **_as_json(done)}, indent=2))
    elif not args.quiet:
        _print_written(done.conversion, "weights and versions")
        columns = "version", "of dense", "made by", "relative error", "dense layers"
        print_table(columns, (_row(name, done) for name in done.versions))
    return 0


def _write_compressed(args: argparse.Namespace) -> int:
    from moejax.checkpoints.compressed import write_compressed

    with _reading(args, "quantizing") as (source, report):
        where = write_compressed(source, args.destination, args.versions, args.quantizer, report)
    if args.json:
        print(json.dumps({"source": args.source, "directory": str(where)}, indent=2))
    elif not args.quiet:
        print(f"{where}: experts in {args.versions}, as compressed-tensors packs them")
    return 0


def _print_written(done: Conversion, what: str) -> None:
    from moejax.checkpoints.orbax.layout import DENSE

    there = f", {format_bytes(done.kept)} of them from before" if done.kept else ""
    codes = [name for name in done.formats if name != DENSE]
    if not codes:
        print(f"{done.directory}: {format_bytes(done.nbytes)} of {done.dtype} {what}{there}")
        return
    experts = ", ".join(codes + [done.dtype for name in done.formats if name == DENSE])
    print(
        f"{done.directory}: {format_bytes(done.nbytes)} of {what}{there}: experts in {experts}, as "
        f"in the checkpoint, all else in {done.dtype}"
    )


def _row(name: str, done: Quantization) -> tuple[str, ...]:
    version = done.versions[name]
    errors = version.layer_errors
    share = f"{version.record_bytes / done.dense_bytes:.1%}"
    figures = f"{sum(errors) / len(errors):.5f}", str(len(version.dense_layers))
    return name, share, version.quantizer, *figures


def _as_json(done: Quantization) -> dict[str, Any]:
    """The result of --json: sizes in bytes, and the relative error of each MoE layer, which is the
    mean over its experts."""
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
