"""The native CPU ops at prefill's sizes beside torch's (oneDNN's) products of the same matrices.

python -m scripts.cpu matrix [--tokens 512] [--repeats 9] [--threads 2]

Rates are of multiplications and additions. Each line's op and torch's products, in bfloat16 and in
float32, alternate in one process with as many threads each; a ratio is the median of the ratios of
neighbours. float32's rate says what the machine's multipliers give. torch multiplies each expert's
rows with its three matrices and computes nothing between; the op also routes, rounds and activates.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.linear.api import linear
from scripts.cpu.cases import normal, pinned, timed
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

torch: Any = import_module("torch") if find_spec("torch") else None
"""None on Python 3.12, whose environment has none."""

SIZES = {"tokens": 512, "hidden": 2048, "width": 1024, "experts": 64}
TOP_K = 8
BAR = 0.6
"""Of torch's rate; float32's is said too, as torch has no fast bfloat16 products on many CPUs."""
PAUSE = 0.005
"""Seconds between two calls, in which the threads of the one before stop waiting for more."""

COLUMNS = [
    ("product", "{op}"),
    ("cpu GFLOP/s", "{cpu:.1f}"),
    ("torch bfloat16", "{bfloat16:.1f}"),
    ("float32", "{float32:.1f}"),
    ("cpu / torch bfloat16", "{of_bfloat16:.2f}"),
    ("/ float32", "{of_float32:.2f}"),
]


class Case(NamedTuple):
    name: str
    operations: float
    """Multiplications and additions of a call."""
    cpu: Callable[[], object]
    products: Callable[[Any], Callable[[], object]]
    """torch's dtype → its products."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--repeats", type=int, default=9, help="default: 9")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    args = parser.parse_args(arguments)
    if min(getattr(args, name) for name in (*SIZES, "repeats", "threads")) < 1:
        return refuse(__name__, "numbers are positive")
    if reason := why_not_cpu():
        return refuse(__name__, reason)
    if torch is None:
        return refuse(__name__, "there is no torch here to compare with")
    torch.set_num_threads(args.threads)
    lines = [measured(case, args.repeats) for case in cases(args)]
    if args.json:
        for line in lines:
            print(json.dumps(line | {"isa": instruction_set(), "load": os.getloadavg()[0]}))
        return 0
    print("\n".join(aligned(COLUMNS, lines)))
    print(
        f"torch {torch.__version__}, {args.threads} threads; {instruction_set()}; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    for dtype in ("bfloat16", "float32"):
        print(verdict(dtype, [line[f"of_{dtype}"] for line in lines]))
    return 0


def verdict(dtype: str, ratios: Sequence[float]) -> str:
    said = "met" if min(ratios) >= BAR else "missed"
    return f"bar, at least {BAR:.0%} of torch's {dtype} rate: {said} (least {min(ratios):.0%})"


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    calls = {"cpu": case.cpu}
    calls |= {name: case.products(getattr(torch, name)) for name in ("bfloat16", "float32")}
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            time.sleep(PAUSE)
            seconds[name].append(timed(call))
    cpu, *others = (np.array(seconds[name]) for name in calls)
    rates = {name: case.operations / np.median(seconds[name]) / 1e9 for name in calls}
    ratios = [float(np.median(other / cpu)) for other in others]
    return {"op": case.name, **rates, "of_bfloat16": ratios[0], "of_float32": ratios[1]}


def matrix_rates(threads: int) -> Callable[[], float]:
    """A function that multiplies 512 rows with a matrix of OLMoE's and returns multiplications and
    additions a second: of `linear` in bfloat16 or of torch in float32, if it is here, whichever is
    faster."""
    case = linear_case(argparse.Namespace(**SIZES), normal((512, SIZES["hidden"]), "bfloat16"))
    calls = [case.cpu]
    if torch is not None:
        torch.set_num_threads(threads)
        calls.append(case.products(torch.float32))

    def rate() -> float:
        return case.operations / min(timed(call) for call in calls)

    rate()
    return rate


def cases(args: argparse.Namespace) -> Iterator[Case]:
    x = normal((args.tokens, args.hidden), "bfloat16")
    yield linear_case(args, x)
    yield expert_case(args, x)


def linear_case(args: argparse.Namespace, x: jax.Array) -> Case:
    outputs = 3 * args.hidden
    weights = normal((1, outputs, args.hidden), "bfloat16", args.hidden**-0.5)
    op = jax.jit(lambda x, w: linear(x, w, 0, implementation="cpu"))

    def products(dtype):
        a, b = as_torch(x, dtype), as_torch(weights[0], dtype).T
        return lambda: a @ b

    operations = 2.0 * args.tokens * outputs * args.hidden
    return Case("linear", operations, lambda: jax.block_until_ready(op(x, weights)), products)


def expert_case(args: argparse.Namespace, x: jax.Array) -> Case:
    """Each token goes to TOP_K experts, drawn evenly."""
    hidden, width, experts, top_k = args.hidden, args.width, args.experts, min(TOP_K, args.experts)
    weights = np.asarray(normal((experts, 3 * width, hidden), "bfloat16", hidden**-0.5))
    store = jax.device_put(weights.view(np.uint16)[None], pinned())
    rng = np.random.default_rng(0)
    ids = np.stack([np.sort(rng.permutation(experts)[:top_k]) for _ in x]).astype(np.int32)
    active = np.unique(ids)
    listed = np.full(experts, -1, np.int32)
    listed[: len(active)] = active
    table = jnp.full((1, experts), -1, jnp.int32)
    y = jnp.zeros((ids.size, hidden), jnp.float32)
    arena = jnp.zeros((1, hidden), jnp.uint16)
    count = np.int32(len(active))
    op = jax.jit(
        lambda y, x, ids, arena, store, table, listed, count: expert_ffn(
            *(y, x, ids, arena, (store,), 0, table, table * 0, listed, count),
            activation="silu",
            row_tile=64,
            implementation="cpu",
        )
    )

    def products(dtype):
        rows = [as_torch(x[np.any(ids == e, axis=1)], dtype) for e in active]
        of_expert = [as_torch(weights[e], dtype) for e in active]
        hidden_rows = [torch.ones(len(r), width, dtype=dtype) for r in rows]

        def call():
            for r, h, w in zip(rows, hidden_rows, of_expert, strict=True):
                for rows_of, matrix in ((r, w[:width].T), (r, w[width:-width].T), (h, w[-width:])):
                    torch.mm(rows_of, matrix)

        return call

    operations = 2.0 * ids.size * 3 * width * hidden
    given = (y, x, ids, arena, store, table, listed, count)
    name = f"expert_ffn, {ids.size / len(active):.0f} rows an expert"
    return Case(name, operations, lambda: jax.block_until_ready(op(*given)), products)


def as_torch(array: Any, dtype: Any) -> Any:
    """A torch tensor of the same values."""
    return torch.from_numpy(np.array(array, np.float32)).to(dtype)
