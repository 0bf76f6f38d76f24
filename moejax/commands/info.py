"""``moejax info`` shows a checkpoint's sizes and what fits into a device, without loading it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from host_offload.memory.budget import format_bytes
from moejax.commands import add_command, print_table
from moejax.commands.model import CHECKPOINT, add_described, pick_arguments
from moejax.sizes import parse_size
from moejax.start.fields import Description

if TYPE_CHECKING:
    from moejax.start.report.model_info import Fit, ModelInfo, Weights

SIZES = tuple(gib << 30 for gib in (8, 16, 24, 40, 80))
"""Sizes of device memory to show without a GPU and without --memory."""

_OF_A_RUN = {
    "memory": Description(
        "memory of the device, such as 16GiB (default: the GPU's; without one, several sizes)",
        metavar="SIZE",
    ),
    "batch": Description("sequences in a step (default: 1)", type=int, default=1),
    "context": Description("tokens of a sequence (default: the model's most)", type=int),
    "dtype": Description("of the run (default: the checkpoint's)", default="auto"),
}

_EPILOG = """\
examples:
  moejax info demo
      the embedded demo model
  moejax info /models/Qwen3-30B-A3B --memory 24GiB --batch 8 --context 8192
      what of it fits into 24 GiB when 8 sequences of 8192 tokens run
  moejax info Qwen/Qwen3-30B-A3B
      of the Hugging Face hub: only its config is downloaded
  moejax info DIR/config.json
      from a config alone

memory:
  --memory is what jax may use of the device: the dense part, and an arena of 85% of the rest, which
  is what generate --memory sets. moejax lets jax take what is free of a GPU, unless
  XLA_CLIENT_MEM_FRACTION says otherwise.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    info = add_command(
        commands,
        "info",
        _run,
        "show what a checkpoint needs and what fits",
        _EPILOG,
        "Show a checkpoint's sizes and what of it fits into a device. Reads the config and the\n"
        "headers of the weights only.",
    )
    info.add_argument(
        "path",
        metavar="PATH",
        help="a Hugging Face or Orbax directory, a Hub id, a config.json alone, or demo",
    )
    add_described(info, _OF_A_RUN)
    add_described(info, CHECKPOINT)
    info.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")


def _run(args: argparse.Namespace) -> int:
    memory = None if args.memory is None else parse_size(args.memory)
    # Without this jax would reserve most of the GPU's memory, and only its size is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from moejax.start.report.model_info import fit, info_json, model_info, read_headers

    config, weights = read_headers(args.path, args.step, args.name_map)
    info = model_info(config, args.dtype)
    known = _gpu_memory() if memory is None else memory
    run, memories = pick_arguments(args, ("batch", "context")), SIZES if known is None else (known,)
    fits = [fit(config, size, dtype=args.dtype, **run) for size in memories]
    if args.json:
        given = {"path": args.path, **run}
        print(json.dumps({**given, **info_json(info, weights, fits)}, indent=2))
        return 0
    kind = "config alone"
    if weights is not None:
        files = "1 file" if weights.files == 1 else f"{weights.files} files"
        kind = f"{weights.format}, {files}, {format_bytes(weights.bytes)}"
    print(f"{args.path}: {info.architecture} in {info.dtype} ({kind})")
    if weights is not None and weights.left_out:
        parts = ", ".join(f"{count} of {name}" for name, count in weights.left_out.items())
        print(f"tensors that the text model does not use: {parts}")
    if config.length_limit:
        print(f"sequences have at most {info.max_model_len} tokens: {config.length_limit}")
    print_table(("part", "parameters", "bytes", "memory"), _parts(info))
    own, longest = info.own_versions, info.max_model_len
    one = {version: info.versions[version]["record_bytes"] for version in own}
    on_cpu = model_info(config, args.dtype, weights.coded if weights else None).device_bytes
    coded = {} if on_cpu == info.device_bytes else {"the same on a CPU, matrices in codes": on_cpu}
    sizes = {
        "on the device for good": info.device_bytes,
        **coded,
        f"experts in host memory, {' and '.join(own)}": info.experts
        * sum(layers * one[version] for version, layers in own.items()),
        **{f"one expert, {version}": one[version] for version in own},
        f"slot of the arena: one expert or {info.pages_per_slot} pages": info.slot_bytes,
        f"KV page of {info.page_tokens} tokens": info.page_bytes,
        "KV of a token": info.kv_token_bytes,
        **({"state of a sequence": info.state_bytes} if info.state_bytes else {}),
        f"KV of {longest} tokens, the longest sequence": info.kv_sequence_bytes,
    }
    print_table(("memory", "bytes"), ((what, format_bytes(size)) for what, size in sizes.items()))
    columns = "expert", "bytes", "of dense", "a weight", "of all", "made by"
    print_table(columns, _versions(info, weights))
    tokens = args.context or info.max_model_len
    print(f"\nWhat fits, with {args.batch} sequences of {tokens} tokens at once:")
    print_table(("device", "arena", "experts", "KV tokens", "sequences"), map(_fit, fits))
    for one in fits:
        if one.problem is not None:
            print(f"{format_bytes(one.memory)}: {one.problem}")
    return 0


def _gpu_memory() -> int | None:
    """Free bytes of the first GPU that jax may use; None without a GPU."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu" or (statistics := device.memory_stats()) is None:
        return None
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def _parts(info: ModelInfo) -> Iterator[tuple[str, ...]]:
    from moejax.start.report.model_info import EXPERTS

    for part, count in info.parameters.items():
        tier = "host" if part == EXPERTS else "device"
        yield part, f"{count:,}", format_bytes(info.bytes[part]), tier
    yield "all", f"{info.total_parameters:,}", format_bytes(sum(info.bytes.values())), ""
    yield "for a token", f"{info.active_parameters:,}", "", ""


def _versions(info: ModelInfo, weights: Weights | None) -> Iterator[tuple[str, ...]]:
    """Yields a row of the table for each version of the experts.

    - `weights`: says which versions the checkpoint has; a run makes the others when it starts.
    """
    made_by = {}
    if weights is not None:
        made_by = {name: by.split(",")[0] for name, by in weights.quantizers.items()}
        for name, layers in weights.dense_layers.items():
            made_by[name] += f"; {len(layers)} of {info.moe_layers} layers dense"
    for version, layers in info.own_versions.items():
        some = "" if layers == info.moe_layers else f", {layers} of {info.moe_layers} layers"
        if version != "dense" or some:
            made_by[version] = f"checkpoint{some}"
    dense = info.versions["dense"]["record_bytes"]
    weight = info.parameters["experts"] / (info.moe_layers * info.experts)
    for name, version in info.versions.items():
        record, store = version["record_bytes"], version["store_bytes"]
        share = f"{record / dense:.1%}", f"{record / weight:.3g} bytes"
        yield name, format_bytes(record), *share, format_bytes(store), made_by.get(name, "–")


def _fit(size: Fit) -> tuple[str, ...]:
    if size.problem is not None:
        return format_bytes(size.memory), *("–",) * 4
    held = f"{size.resident_share:.1%}", f"{size.kv_tokens:,}", f"{size.sequences:,}"
    return format_bytes(size.memory), format_bytes(size.arena_bytes), *held
