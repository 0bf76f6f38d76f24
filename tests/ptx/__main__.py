"""Runs kernels at the size of a real model as PTX for a card: what a start checks on a GPU, with
the same operands, reference and tolerance.

    JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 python -m tests.ptx OLMoE-1B-7B a100 --only "linear 64"

A line for each check: the largest deviation, what is allowed, instructions, seconds; or the fault.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.verification import Check
from pallas_kernels.verification.check import deviation
from tests.aot.aot_h200 import CARDS
from tests.aot.cards import MODELS, check_call, start_checks
from tests.ptx.memory import copy_sparse, zeros
from tests.ptx.parse import Fault
from tests.ptx.program import compiled_call


def sparse(array: jax.Array) -> np.ndarray:
    """A copy that takes memory for what is not zero."""
    copy = zeros(array.shape, array.dtype)
    copy_sparse(copy.reshape(-1).view(np.uint8), np.asarray(array).reshape(-1).view(np.uint8))
    return copy


def operands(check: Check) -> tuple:
    """Arguments of the check's `run`, arena and stores first."""
    rest = jax.tree.map(sparse, jax.jit(check.operands)())
    if check.stores is not None:
        stores = [zeros(shape, np.dtype(np.uint16)) for shape in check.stores.shapes()]
        for store, records in zip(stores, jax.jit(check.stores.records)(), strict=True):
            store[-1:] = records
        rest = (tuple(stores), *rest)
    return rest if check.arena is None else (sparse(jax.jit(check.arena)()), *rest)


def compared(check: Check, results: Any) -> list[np.ndarray]:
    if check.arena is not None:
        changed, *others = results
        results = (check.seen or (lambda arena: arena))(changed), others
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def interpret_check(check: Check, card: str, **options: Any) -> tuple[float, int]:
    """(deviation from the reference, instructions issued). options: as CompiledCall.run's. Raises
    Fault."""
    given, call = operands(check), check_call(check)
    want = compared(check, jax.jit(functools.partial(check.run, "xla"))(*given))
    compiled = compiled_call(
        card,
        call["fn"],
        call["args"],
        donated=lambda path: path[0].idx in call["donate_argnums"],
        on_host=lambda path: path[0].idx in call["host_argnums"],
    )
    got, issued = compiled.run(*given, **{"launch": {}, **options})
    pairs = zip(compared(check, got), want, strict=True)
    return max(deviation(a, b) for a, b in pairs), sum(issued.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--only", default="", help="part of the checks' names")
    args = parser.parse_args()
    for check in start_checks(args.card, args.model):
        if args.only in check.key:
            began = time.perf_counter()
            try:
                error, issued = interpret_check(check, args.card)
                said = f"deviates by {error:.2g} of {check.tolerance:.2g}, {issued} instructions"
            except Fault as fault:
                said = f"FAULT: {fault}"
            print(f"{check.key}: {said}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
