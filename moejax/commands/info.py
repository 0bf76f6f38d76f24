"""``moejax info``: what a checkpoint needs and what fits, without loading it."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from host_offload.memory.budget import format_bytes
from moejax.commands.options.engine import add_options
from moejax.commands.parsers import add_command
from moejax.commands.tables import new_table, print_table
from moejax.sizes import parse_rate, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from moejax.start.report.info import Fit, ModelInfo, Weights

SIZES = tuple(gib << 30 for gib in (8, 16, 24, 40, 80))
"""Memories that are shown where there is no GPU to ask."""

LINK = "25GB/s"
"""About what PCIe 4.0 with 16 lanes gives."""

_EPILOG = """\
examples:
  moejax info demo
      the embedded demo model
  moejax info /models/Qwen3-30B-A3B --memory 24GiB --batch 8 --context 8192
      what of it fits into 24 GiB when 8 sequences of 8192 tokens run
  moejax info DIR/config.json
      from the config alone, before the weights are downloaded

memory:
  --memory is what jax may use of the device: the dense part, and an arena of 85% of the rest, which
  is what generate --memory sets. jax takes 75% of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says
  otherwise.

cost:
  The bytes that a decode step moves are expected ones if routing were uniform: B tokens then need
  E·(1 − (1 − k/E)^B) of a layer's E experts, of which the share that is not resident is missing.
  Real routing repeats itself and misses less.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    info = add_command(
        commands,
        "info",
        _run,
        "show what a checkpoint needs and what fits",
        _EPILOG,
        "Show a checkpoint's sizes, what of it fits into a device and what a step then moves.\n"
        "Reads the config and the headers of the weights only.",
    )
    info.add_argument(
        "path",
        metavar="PATH",
        help="a Hugging Face or Orbax directory, a config.json alone, or demo",
    )
    info.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of the device, such as 16GiB (default: the GPU's; without one, several sizes)",
    )
    info.add_argument(
        "--link",
        default=LINK,
        metavar="RATE",
        help=f"bytes per second from host to device (default: {LINK})",
    )
    info.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences in a step (default: 1)"
    )
    info.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence (default: the model's most)"
    )
    info.add_argument(
        "--dtype", default="auto", metavar="DTYPE", help="of the run (default: the checkpoint's)"
    )
    add_options(info, "checkpoint")
    info.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")


def _run(args: argparse.Namespace) -> int:
    memory = None if args.memory is None else parse_size(args.memory)
    link = parse_rate(args.link)
    # jax would else take most of a GPU that is only asked for its size.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from moejax.start.report.info import fit, info_json, model_info, read_headers

    config, weights = read_headers(args.path, args.step, args.name_map)
    info = model_info(config, args.dtype)
    sizes = SIZES if memory is None else (memory,)
    if memory is None and (gpu := _gpu_memory()):
        sizes = (gpu,)
    batch, context = args.batch, args.context
    fits = [
        fit(config, size, dtype=args.dtype, batch=batch, context=context, link=link)
        for size in sizes
    ]
    if args.json:
        asked = {"path": args.path, "link": link, "batch": args.batch, "context": args.context}
        print(json.dumps({**asked, **info_json(info, weights, fits)}, indent=2))
        return 0
    kind = "config alone"
    if weights is not None:
        files = "1 file" if weights.files == 1 else f"{weights.files} files"
        kind = f"{weights.format}, {files}, {format_bytes(weights.bytes)}"
    print(f"{args.path}: {info.architecture} in {info.dtype} ({kind})")
    print_table(_parts(info))
    print_table(_layout(info))
    print_table(_versions(info, weights))
    tokens = args.context or info.max_model_len
    print(
        f"\nWhat fits, and what a decode step of {args.batch} then moves at {args.link} if routing "
        f"is\nuniform; sequences of {tokens} tokens:"
    )
    print_table(_fits(fits))
    for size in fits:
        if size.problem is not None:
            print(f"{format_bytes(size.memory)}: {size.problem}")
    return 0


def _gpu_memory() -> int | None:
    """Bytes that jax may use of the first GPU and that nobody uses yet; None without a GPU."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu" or (statistics := device.memory_stats()) is None:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def _parts(info: ModelInfo) -> Table:
    from moejax.start.report.info import EXPERTS

    table = new_table("part", "parameters", "bytes", "memory")
    for part, count in info.parameters.items():
        tier = "host" if part == EXPERTS else "device"
        table.add_row(part, f"{count:,}", format_bytes(info.bytes[part]), tier)
    table.add_section()
    total = sum(info.bytes.values())
    table.add_row("all", f"{info.total_parameters:,}", format_bytes(total), "")
    table.add_row("for a token", f"{info.active_parameters:,}", "", "")
    return table


def _layout(info: ModelInfo) -> Table:
    table = new_table("memory", "bytes")
    table.add_row("on the device for good", format_bytes(info.device_bytes))
    dense = info.versions["dense"]
    table.add_row("experts in host memory, dense", format_bytes(dense.store_bytes))
    table.add_row("one expert, dense", format_bytes(dense.record_bytes))
    holds = f"one expert or {info.pages_per_slot} pages"
    table.add_row(f"slot of the arena: {holds}", format_bytes(info.slot_bytes))
    table.add_row(f"KV page of {info.page_tokens} tokens", format_bytes(info.page_bytes))
    table.add_row("KV of a token", format_bytes(info.kv_token_bytes))
    longest = f"KV of {info.max_model_len} tokens, the longest sequence"
    table.add_row(longest, format_bytes(info.kv_sequence_bytes))
    return table


def _versions(info: ModelInfo, weights: Weights | None) -> Table:
    """weights: with the versions in the checkpoint; the others are made when a run starts."""
    made_by = {}
    if weights is not None:
        made_by = {name: by.split(",")[0] for name, by in weights.quantizers.items()}
        for name, layers in weights.dense_layers.items():
            made_by[name] += f"; {len(layers)} of {info.moe_layers} layers dense"
    table = new_table("expert", "bytes", "of dense", "of all", "made by")
    dense = info.versions["dense"].record_bytes
    for name, version in info.versions.items():
        share = f"{version.record_bytes / dense:.1%}"
        sizes = format_bytes(version.record_bytes), share, format_bytes(version.store_bytes)
        table.add_row(name, *sizes, made_by.get(name, "–"))
    return table


def _fits(fits: list[Fit]) -> Table:
    table = new_table("device", "arena", "experts", "KV tokens", "sequences", "moved", "at least")
    for size in fits:
        cells = ("–",) * 6
        if size.problem is None:
            cells = (
                format_bytes(size.arena_bytes),
                f"{size.resident_share:.1%}",
                f"{size.kv_tokens:,}",
                f"{size.sequences:,}",
                format_bytes(round(size.step_bytes)),
                f"{size.step_floor_s * 1e3:.3g} ms",
            )
        table.add_row(format_bytes(size.memory), *cells)
    return table
