"""What a prediction of LLaPor takes for the rows of a step, layer by layer (PreScope, Table 3).

python -m scripts.policies calls [FILE] [--like 2048,64] [--rows 1,4,16,64] [--repeats 200] [--json]
python -m scripts.policies calls FILE --shifted TRACE [--learn 256,10,2e-4] [--json]

FILE: of `moejax train-predictor`. --like: instead networks with random weights of a model with that
hidden size and so many experts, at the paper's 256 and 512 components and our width of 512, an
input, a middle and an output layer. numpy on this CPU; the median of so many calls, each for rows
with other random inputs. It reads the clock: run it on a quiet machine.

--shifted: instead, without a clock, what learning on is worth on a TRACE with gate inputs, of other
text than FILE was learned from: plain top-k recall of FILE's networks, and of those that learned
from every step before (`--prefetch learned_online`, rounds as soon as their rows are there), by
quarters of the steps, mean over layers. --learn: rows, iterations and rate of a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.online import Tuning
from host_offload.policies.prefetch.llapor.policy import read
from host_offload.policies.prefetch.llapor.training import EDGE, MIDDLE, Training
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned
from scripts.policies.placed.shifted import recalls

TOP_K = 6

SHIFTED = [
    ("part", "{part}"),
    ("steps", "{steps}"),
    ("rows", "{rows}"),
    ("as learned", "{frozen:.1%}"),
    ("learning on", "{learning:.1%}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        if args.shifted is not None:
            return _shifted(args)
        if (args.file is None) == (args.like is None):
            raise UserError("give a FILE, or --like HIDDEN,EXPERTS")
        rows = [int(each) for each in args.rows.split(",")]
        if min(rows) < 1 or args.repeats < 1:
            raise UserError("rows and --repeats are 1 or more")
        if args.file is not None:
            arrays = read(args.file).fitted.arrays
        else:
            hidden, experts = (int(each) for each in args.like.split(","))
            arrays = drawn(hidden, experts)
    except (UserError, TraceError, ValueError) as error:
        return refuse(__name__, error)
    layers = sorted({int(name.split(".")[0]) for name in arrays})
    lines = []
    for layer in layers:
        own = of_layer(arrays, layer)
        lines.append(
            {
                "layer": layer + 1,
                "kib": sum(array.nbytes for array in own.values()) / 1024,
                "us": [seconds(own, count, args.repeats) * 1e6 for count in rows],
            }
        )
    if args.json:
        for line in lines:
            print(json.dumps({**line, "rows": rows}))
        return 0
    columns = [("layer", "{layer}"), ("KiB", "{kib:.0f}")]
    columns += [(f"µs at {count}", f"{{us[{i}]:.0f}}") for i, count in enumerate(rows)]
    print(*aligned(columns, lines), sep="\n")
    return 0


def _shifted(args: argparse.Namespace) -> int:
    """Prints what learning on is worth."""
    if args.file is None:
        raise UserError("--shifted needs a FILE of networks that were learned from other text")
    rows, iterations, rate = args.learn.split(",")
    tuning = Tuning(int(rows), int(iterations), float(rate))
    lines = [*recalls(read(args.file), read_trace(args.shifted), tuning)]
    if args.json:
        print(*map(json.dumps, lines), sep="\n")
    else:
        print(*aligned(SHIFTED, lines), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("file", metavar="FILE", nargs="?", help="of moejax train-predictor")
    parser.add_argument("--like", metavar="HIDDEN,EXPERTS", help="sizes of a model, instead")
    parser.add_argument("--rows", default="1,4,16,64", help="of a step (%(default)s)")
    parser.add_argument("--repeats", type=int, default=200, help="calls (%(default)s)")
    parser.add_argument("--shifted", metavar="TRACE", help="of other text, with gate inputs")
    parser.add_argument("--learn", default="256,10,2e-4", metavar="ROWS,ITERATIONS,RATE")
    parser.add_argument("--json", action="store_true", help="a JSON line for each layer")
    return parser


def drawn(hidden: int, experts: int) -> dict[str, np.ndarray]:
    """Arrays of an input, a middle and an output layer, with random weights."""
    random, width, found = np.random.default_rng(0), Training().width, {}
    for layer, group in enumerate((EDGE, MIDDLE, EDGE)):
        q = min(group.components, hidden)
        sizes = {"input": (q + experts, width), "output": (width, experts)}
        if group.deep:
            sizes |= {"inner1": (width, width), "inner2": (width, width), "gate": (q, width)}
        own = {"mean": (hidden,), "basis": (hidden, q), **sizes}
        own |= {f"{name}_bias": (columns,) for name, (_, columns) in sizes.items()}
        for name, shape in own.items():
            found[f"{layer}.{name}"] = random.standard_normal(shape, np.float32) / 32
    return found


def seconds(own: Mapping[str, Any], rows: int, repeats: int) -> float:
    """The median of calls for so many rows, after one that is not counted."""
    random = np.random.default_rng(0)
    hidden, experts = len(own["mean"]), own["output_bias"].size
    k = min(TOP_K, experts)
    ids = np.stack([random.permutation(experts)[:k] for _ in range(rows)])
    weights = np.full((rows, k), 1 / k, np.float32)
    taken = []
    for _ in range(repeats + 1):
        inputs = random.standard_normal((rows, hidden), np.float32)
        begun = time.perf_counter()
        scores(own, inputs, ids, weights)
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))
