"""FluxMoE's decompression on a timeline: Huffman's code and lossless12, beside computing or not.

python -m scripts.bench decoders [--model DIR]

The shape is Mixtral-8x7B's on two GPUs, as in the paper's Exp#2: 32 layers of 8 experts, of which
--host stay in host memory. Rates are stated, and nothing is timed. The bytes of packed experts are
measured on the model's own weights, whose Huffman code is made for this.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.simulate.streaming import HUFFMAN_RATE, huffman_share, play_stream
from host_offload.sizing.tiers import StorageModel, uniform_placement
from moejax import UserError
from moejax.checkpoints.load import load_checkpoint
from moejax.models.hub import model_directory
from moejax.sizes import parse_rate
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

LAYERS, EXPERTS, RECORD = 32, 8, 3 * 4096 * 14336
"""A half of each expert of 16 bits on each of two GPUs."""

COLUMNS = (
    ("codec", "{codec}"),
    ("bytes", "{kappa:.1%}"),
    ("packed", "{packed} of {experts}"),
    ("GiB on the GPU", "{gib:.2f}"),
    ("decode ms a layer", "{decode_ms:.2f}"),
    ("link ms a layer", "{link_ms:.2f}"),
    ("beside: ms a pass", "{beside_ms:.1f}"),
    ("in series", "{series_ms:.1f}"),
    ("loading hidden", "{hidden:.0%}"),
)


def shares(model: str) -> dict[str, float]:
    """Returns κ of each codec for a model's experts. Raises UserError for other weights than
    bfloat16."""
    loaded = load_checkpoint(model_directory(model))
    dense = loaded.store.versions["dense"]
    if loaded.dtype != "bfloat16":
        raise UserError(f"{model} is {loaded.dtype}; exponents of bfloat16 are packed")
    packed = dataclasses.replace(dense.layout, version="lossless12").nbytes / dense.layout.nbytes
    return {"huffman": huffman_share(np.asarray(dense.array)), "lossless12": packed}


def row_of(
    codec: str, model: StorageModel, host: int, layer_s: float, slows: float
) -> dict[str, Any]:
    packed = model.experts - host
    placement = uniform_placement(model, 0, packed)
    beside = play_stream(model, placement, layer_s, slows=slows).seconds
    series = play_stream(model, placement, layer_s, beside=False).seconds
    compute = layer_s * model.layers
    load = model.load_seconds(placement)
    return {
        "codec": codec,
        "kappa": model.kappa,
        "packed": packed,
        "experts": model.experts,
        "gib": model.experts_bytes(placement) / 2**30,
        "decode_ms": 1e3 * packed * model.record_bytes / model.packed_rate,
        "link_ms": 1e3 * host * model.record_bytes / model.host_rate,
        "beside_ms": 1e3 * beside,
        "series_ms": 1e3 * series,
        "hidden": (compute + load - beside) / min(compute, load),
    }


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default="demo", help="whose weights are packed (default: %(default)s)")
    add("--link-rate", default="25GB/s", help="rate of the link (default: %(default)s)")
    add("--decoder-rate", help="dense bytes a second of both decoders (default: 200GB/s)")
    add("--host", type=int, default=1, help="experts of a layer at the host (default: %(default)s)")
    add("--layer-ms", type=float, default=5.0, help="of computing (default: %(default)s)")
    add("--slows", type=float, default=0.1, help="share of computing that decoding beside it takes")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    _check(args)
    rate = HUFFMAN_RATE if args.decoder_rate is None else parse_rate(args.decoder_rate)
    given = StorageModel(
        LAYERS, EXPERTS, RECORD, host_rate=parse_rate(args.link_rate), packed_rate=rate
    )
    rows = [
        row_of(
            codec,
            dataclasses.replace(given, kappa=kappa),
            args.host,
            args.layer_ms / 1e3,
            args.slows / rate,
        )
        for codec, kappa in shares(args.model).items()
    ]
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0


def _check(args: argparse.Namespace) -> None:
    positive(args, "host")
    if args.host > EXPERTS:
        raise UserError(f"--host: a layer has {EXPERTS} experts, not {args.host}")
    if not (args.layer_ms > 0 and 0 <= args.slows < 1):
        raise UserError("--layer-ms must be above 0, and --slows from 0 to below 1")
