"""Products of prefill's sizes: this library's ops, and torch's of the same matrices."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.linear.api import linear
from scripts.cpu.cases import normal, pinned, timed

torch: Any = import_module("torch") if find_spec("torch") else None
"""None on Python 3.12, whose environment has none."""

SIZES = {"tokens": 512, "hidden": 2048, "width": 1024, "experts": 64}
TOP_K = 8


class Case(NamedTuple):
    name: str
    operations: float
    """Multiplications and additions of a call."""
    cpu: Callable[[], object]
    products: Callable[[Any], Callable[[], object]]
    """torch's dtype → its products."""


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
