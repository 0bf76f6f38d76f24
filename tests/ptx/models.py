"""The kernels of known models at their sizes, as the interpreter runs them: each configuration
that a start checks on a GPU, against the same reference and with the same tolerance.

    JAX_PLATFORMS=cpu python -m tests.ptx.models [MODEL ...] [--cards h200,a100] [--only linear]
        [--kept FILE] [--out PAGE]

What is done is kept in FILE, a line each, and not done again. Kernels of arrays beyond 4 GiB
(64-bit addresses) are left out: a checked launch keeps a few bytes for each one of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.models.config import parse_config
from moejax.start.kernels import kernel_shapes
from pallas_kernels import resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.verification import Check, checks
from pallas_kernels.verification.check import argument_shapes, deviation
from tests.aot.aot_h200 import CARDS, device_of
from tests.moejax.models.test_published_configs import PUBLISHED
from tests.ptx.parse import Fault
from tests.ptx.program import compiled_call

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B", "DeepSeek-V2-Lite")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check. error: the largest deviation, as the check measures it."""

    model: str
    card: str
    check: str
    tolerance: float
    error: float | None
    fault: str | None
    instructions: int
    seconds: float

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def configurations(model: str, card: str, dtype: str = "bfloat16") -> Iterator[Check]:
    """What a start of the model on the card would check, decode before prefill, but for what
    addresses more than 4 GiB."""
    ops = resolve_ops("pallas", platform="gpu", dtype=dtype)
    ops = dataclasses.replace(ops, shared_kib=shared_class(device_of(card)))
    config = parse_config(PUBLISHED[model].raw)
    for shape in kernel_shapes(config, dtype, config.slot_layout(2), None):
        yield from (check for check in checks(shape, ops) if not check.wide)


def interpret_check(
    check: Check,
    card: str,
    *,
    edit: Callable[[str], str] = lambda ptx: ptx,
    **launch: Any,
) -> tuple[float, int]:
    """(deviation from the reference, instructions issued). edit, launch: as of
    tests.ptx.program.interpret. Raises Fault."""
    given = jax.jit(check.operands)()
    if check.stores is not None:
        given = (check.stores.records(), *given)
    if check.arena is not None:
        given = (check.arena(), *given)
    given = jax.tree.map(np.asarray, given)
    known = jax.tree.leaves(argument_shapes(check))
    if [s.shape for s in known] != [array.shape for array in jax.tree.leaves(given)]:
        raise ValueError(f"{check.key} has a store of several layers")
    arena, stores = int(check.arena is not None), int(check.stores is not None)
    compiled = compiled_call(
        card,
        lambda *args: check.run("pallas", *args),
        given,
        donated=lambda path: path[0].idx < arena,
        on_host=lambda path: arena <= path[0].idx < arena + stores,
    )
    got, issued = compiled.run(*given, launch=launch, edit=edit)
    want = jax.jit(lambda *args: check.run("xla", *args))(*given)
    pairs = zip(_compared(check, got), _compared(check, want), strict=True)
    return max(deviation(a, b) for a, b in pairs), sum(issued.values())


def _compared(check: Check, results: Any) -> list[np.ndarray]:
    if check.arena is not None:
        changed, *others = results
        results = (check.seen or (lambda arena: arena))(jax.numpy.asarray(changed)), others
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def outcome(model: str, card: str, check: Check) -> Outcome:
    begin, error, fault, issued = time.perf_counter(), None, None, 0
    try:
        error, issued = interpret_check(check, card, copies="random")
    except Fault as found:
        fault = "; ".join((str(found), *getattr(found, "__notes__", ())))
    seconds = time.perf_counter() - begin
    return Outcome(model, card, check.key, check.tolerance, error, fault, issued, seconds)


def page(outcomes: Sequence[Outcome]) -> str:
    """A line for each model and card, then what did not pass."""
    lines = [
        "| model | card | configurations | passed | largest error / tolerance | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for model, card in dict.fromkeys((each.model, each.card) for each in outcomes):
        mine = [each for each in outcomes if (each.model, each.card) == (model, card)]
        shares = [o.error / o.tolerance for o in mine if o.passed and o.error]
        lines.append(
            f"| {model} | {card} | {len(mine)} | {sum(o.passed for o in mine)} | "
            f"{max(shares, default=0):.2f} | {sum(o.seconds for o in mine):.0f} |"
        )
    for each in outcomes:
        if not each.passed:
            why = each.fault or f"error {each.error:.2g}, tolerance {each.tolerance:.2g}"
            lines.append(f"\n{each.model}, {each.card}, {each.check}: {why}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--only", default="", help="a part of the check's name, such as 'linear'")
    parser.add_argument("--most", type=float, default=float("inf"), help="MB of arguments")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: list[Outcome] = []
    if args.kept and args.kept.exists():
        found = [Outcome(**json.loads(line)) for line in args.kept.read_text().splitlines()]
    done = {(each.model, each.card, each.check) for each in found}
    for card in args.cards.split(","):
        for model in args.models:
            for check in configurations(model, card):
                leaves = jax.tree.leaves(argument_shapes(check))
                size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
                skip = args.only not in check.key or size > args.most * 1e6
                if skip or (model, card, check.key) in done:
                    continue
                found.append(outcome(model, card, check))
                print(found[-1], flush=True)
                if args.kept:
                    with args.kept.open("a") as kept:
                        kept.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    text = page(found)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
