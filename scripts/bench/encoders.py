"""How fast experts are encoded and decoded on one core, in MB of dense weights a second.

python -m scripts.bench encoders [--hidden 2048 --width 768] [--experts 8] [--quantizers rtn,mse]

The weights are normally distributed. Seconds are of the processor, not of the clock, so that other
programs disturb little; each figure is the best of --repeats. The floor is what a plain copy of the
weights takes, which each encoder has to read. lossless12 must give the weights back, or nothing is
printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES, decode, encode
from host_offload.versions.quantizers import QUANTIZERS
from moejax import UserError
from pallas_kernels.records import VERSIONS, RecordFormat
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

COLUMNS = [
    ("version", "{version}"),
    ("by", "{quantizer}"),
    ("bytes, of dense", "{share:.1%}"),
    ("relative error", "{error:.5f}"),
    ("encode MB/s", "{encode:.0f}"),
    ("decode MB/s", "{decode:.0f}"),
]


@refusing(ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    sizes = (("hidden", 2048), ("width", 768), ("experts", 8), ("repeats", 5))
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--quantizers", default="rtn", help="separated by commas (default: rtn)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    names = args.quantizers.split(",")
    positive(args, *(name for name, _ in sizes))
    if not set(names) <= QUANTIZERS.keys():
        raise UserError(f"quantizers are {', '.join(QUANTIZERS)}")
    load = os.getloadavg()[0]
    lines = [line | {"load_average": load} for line in measure(args, names)]
    floor = f"floor, a copy: {lines[0]['copy']:.0f} MB/s; load {load:.1f}"
    show(args.json, lines, [*aligned(COLUMNS, lines), floor])
    return 0


def measure(args: argparse.Namespace, quantizers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line for each version and quantizer. Raises ValueError as RecordFormat does."""
    shape = (args.experts, 3 * args.width, args.hidden)
    normal = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.03)
    if args.dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(NUMPY_DTYPES)}, not {args.dtype}")
    weights = normal.astype(NUMPY_DTYPES[args.dtype])
    exact = weights.astype(np.float32)
    copy = np.empty_like(weights)
    copied = rate(lambda: np.copyto(copy, weights), weights.nbytes, args.repeats)
    for version in VERSIONS:
        if version == "lossless12" and args.dtype != "bfloat16":
            continue
        fmt = RecordFormat(version, args.hidden, args.width, args.dtype)
        records = np.empty((args.experts, fmt.rows, fmt.hidden), np.uint16)
        for name in quantizers if fmt.lossy else quantizers[:1]:
            rule = QUANTIZERS[name]

            def encoded(fmt=fmt, rule=rule, records=records):
                return encode(weights, fmt, rule, records, workers=1)

            def decoded(fmt=fmt, records=records):
                return decode(records, fmt)

            encoding = rate(encoded, weights.nbytes, args.repeats)
            difference = decoded().astype(np.float32) - exact
            if not fmt.lossy and difference.any():
                raise ValueError(f"{version} does not give the weights back")
            yield {
                "version": version,
                "quantizer": name if fmt.lossy else "–",
                "share": fmt.nbytes / weights[0].nbytes,
                "error": float(np.linalg.norm(difference) / np.linalg.norm(exact)),
                "encode": encoding,
                "decode": rate(decoded, weights.nbytes, args.repeats),
                "copy": copied,
            }


def rate(run: Callable[[], Any], nbytes: int, repeats: int) -> float:
    """MB/s of this thread's processor time, the best of so many runs after a first one."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)
    return nbytes / 1e6 / max(min(seconds), 1e-9)
