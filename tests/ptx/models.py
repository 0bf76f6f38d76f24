"""The kernels of known models at their sizes, as the interpreter runs them: each configuration
that a start checks on a GPU, against the same reference and with the same tolerance.

    JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 python -m tests.ptx.models [MODEL ...] [--cards h200,a100]
        [--decode] [--only linear] [--most MB] [--kept FILE] [--out PAGE]
    ... --compare --kept FILE       # compiles only: which of FILE are of PTX that is no more

What has passed is kept in FILE, a line each, and not done again. A configuration whose PTX, grids
and shared memory are those of one that another card has run is not run again, but kept as the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tests.ptx.memory import copy_sparse, zeros
from tests.ptx.parse import Fault
from tests.ptx.program import CompiledCall, compiled_call

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B", "DeepSeek-V2-Lite")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check, all programs of its grids. error: the largest deviation, as the check
    measures it."""

    model: str
    card: str
    check: str
    tolerance: float
    error: float | None
    fault: str | None
    instructions: int
    seconds: float
    digest: str = ""
    """Of what was launched (program.Program.digest)."""
    ran_for: str = ""
    """The card whose run this is: the same PTX."""
    date: str = ""
    versions: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def configurations(
    model: str, card: str, dtype: str = "bfloat16", wide: bool = False
) -> Iterator[Check]:
    """What a start of the model on the card would check, decode before prefill. wide: also what
    addresses more than 4 GiB."""
    ops = resolve_ops("pallas", platform="gpu", dtype=dtype)
    ops = dataclasses.replace(ops, shared_kib=shared_class(device_of(card)))
    config = parse_config(PUBLISHED[model].raw)
    for shape in kernel_shapes(config, dtype, config.slot_layout(2), None):
        yield from (check for check in checks(shape, ops) if wide or not check.wide)


def without_card(key: str) -> str:
    """The name of a check on any card: operands and reference are the same."""
    return re.sub(r" \d+ KiB", "", key)


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of a check and what the reference makes of them, for every card."""

    given: tuple
    want: list[np.ndarray]


def case_of(check: Check) -> Case:
    """Arrays of gigabytes take the memory of what is not zero in them, but one at a time while
    they are made and while the reference runs."""
    rest = jax.tree.map(_sparse, jax.jit(check.operands)())
    if check.stores is not None:
        records = [np.asarray(r) for r in jax.jit(check.stores.records)()]
        stores = [zeros(shape, np.dtype(np.uint16)) for shape in check.stores.shapes()]
        for store, record in zip(stores, records, strict=True):
            store[-1:] = record
        rest = (tuple(stores), *rest)
    reference = functools.partial(check.run, "xla")
    placed = jax.tree.map(lambda array: jax.device_put(array, may_alias=True), rest)
    if check.arena is None:
        return Case(rest, _compared(check, jax.jit(reference)(*placed)))
    make = jax.jit(check.arena)
    want = _compared(check, jax.jit(reference, donate_argnums=0)(make(), *placed))
    return Case((_sparse(make()), *rest), want)


def _sparse(array: jax.Array) -> np.ndarray:
    copy = zeros(array.shape, array.dtype)
    copy_sparse(copy.reshape(-1).view(np.uint8), np.asarray(array).reshape(-1).view(np.uint8))
    return copy


def compiled_check(check: Check, card: str) -> CompiledCall:
    arena, stores = int(check.arena is not None), int(check.stores is not None)
    return compiled_call(
        card,
        lambda *args: check.run("pallas", *args),
        argument_shapes(check),
        donated=lambda path: path[0].idx < arena,
        on_host=lambda path: arena <= path[0].idx < arena + stores,
    )


def interpret_check(
    check: Check,
    card: str,
    case: Case | None = None,
    compiled: CompiledCall | None = None,
    *,
    edit: Callable[[str], str] = lambda ptx: ptx,
    **launch: Any,
) -> tuple[float, int]:
    """(deviation from the reference, instructions issued). case, compiled: None: they are made.
    edit, launch: as of tests.ptx.program.interpret. Raises Fault."""
    case = case or case_of(check)
    compiled = compiled or compiled_check(check, card)
    got, issued = compiled.run(*case.given, launch=launch, edit=edit)
    pairs = zip(_compared(check, got), case.want, strict=True)
    return max(deviation(a, b) for a, b in pairs), sum(issued.values())


def _compared(check: Check, results: Any) -> list[np.ndarray]:
    if check.arena is not None:
        changed, *others = results
        results = (check.seen or (lambda arena: arena))(changed), others
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def outcome(
    model: str,
    card: str,
    check: Check,
    case: Case | None = None,
    compiled: CompiledCall | None = None,
) -> Outcome:
    begin, error, fault, issued = time.perf_counter(), None, None, 0
    compiled = compiled or compiled_check(check, card)
    try:
        error, issued = interpret_check(check, card, case, compiled, copies="random")
    except Fault as found:
        fault = "; ".join((str(found), *getattr(found, "__notes__", ())))
    seconds = round(time.perf_counter() - begin, 1)
    what = (model, card, check.key, check.tolerance, error, fault, issued, seconds)
    today = datetime.date.today().isoformat()
    return Outcome(*what, compiled.program.digest(), card, today, f"jax {jax.__version__}")


class Kept:
    """Outcomes by (model, card, check), and the file that has them."""

    def __init__(self, path: Path | None):
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else ()
        every = [Outcome(**json.loads(line)) for line in lines]
        self.found = {(each.model, each.card, each.check): each for each in every}

    def add(self, made: Outcome) -> None:
        self.found[made.model, made.card, made.check] = made
        if self.path is not None:
            with self.path.open("a") as kept:
                kept.write(json.dumps(dataclasses.asdict(made)) + "\n")

    def same(self, made: Outcome) -> Outcome | None:
        """What another card has run with this digest, of the same operands."""
        return next(
            (
                each
                for each in self.found.values()
                if (each.model, each.digest) == (made.model, made.digest)
                and without_card(each.check) == without_card(made.check)
                and each.ran_for == each.card
                and each.passed
            ),
            None,
        )


def run(kept: Kept, model: str, cards: Sequence[str], todo: Sequence[Mapping[str, Check]]) -> None:
    """Each configuration (by card) on each card that has none yet."""
    for of_cards in todo:
        case = None
        for card in cards:
            check = of_cards.get(card)
            known = check and kept.found.get((model, card, check.key))
            if check is None or (known and known.passed):
                continue
            compiled = compiled_check(check, card)
            made = Outcome(model, card, check.key, check.tolerance, None, None, 0, 0.0)
            made = dataclasses.replace(made, digest=compiled.program.digest())
            if (other := kept.same(made)) is not None:
                made = dataclasses.replace(other, card=card, check=check.key)
            else:
                case = case or case_of(check)
                made = outcome(model, card, check, case, compiled)
            kept.add(made)
            print(made, flush=True)


def compare(kept: Kept) -> str:
    """Which of what is kept is of other PTX than these kernels have now."""
    other, gone = [], []
    for model, card in dict.fromkeys(key[:2] for key in kept.found):
        known = {check.key: check for check in configurations(model, card, wide=True)}
        for each in kept.found.values():
            if (each.model, each.card) != (model, card):
                continue
            if each.check not in known:
                gone.append(each)
            elif compiled_check(known[each.check], card).program.digest() != each.digest:
                other.append(each)
    total = len(kept.found)
    lines = [f"{len(other)} of {total} kept entries are of other PTX than these kernels'"]
    if gone:
        lines.append(f"{len(gone)} of {total} are of no configuration of a start")
    names = (f"  {each.model}, {each.card}, {each.check}" for each in (*other, *gone))
    return "\n".join((*lines, *names))


def page(outcomes: Sequence[Outcome], starts: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """A line for each model and card, then what did not pass and what was not run. starts: what a
    start of each checks."""
    lines = [
        "| model | card | run, of a start's | the same PTX as another card's | passed | "
        "largest error / tolerance | PTX |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, card in dict.fromkeys((each.model, each.card) for each in outcomes):
        mine = [each for each in outcomes if (each.model, each.card) == (model, card)]
        shares = [o.error / o.tolerance for o in mine if o.passed and o.error]
        ptx = hashlib.sha256("".join(sorted(o.digest for o in mine)).encode()).hexdigest()[:12]
        lines.append(
            f"| {model} | {card} | {len(mine)} of {len(starts[model, card])} | "
            f"{sum(o.ran_for != card for o in mine)} | {sum(o.passed for o in mine)} | "
            f"{max(shares, default=0):.2f} | {ptx} |"
        )
    for each in outcomes:
        if not each.passed:
            why = each.fault or f"error {each.error:.2g}, tolerance {each.tolerance:.2g}"
            lines.append(f"\n{each.model}, {each.card}, {each.check}: {why}")
    done = {(each.model, each.card, each.check) for each in outcomes}
    missing: dict[tuple[str, str], list[str]] = {}
    for (model, card), keys in starts.items():
        for key in keys:
            if (model, card, key) not in done:
                missing.setdefault((model, without_card(key)), []).append(card)
    by_cards: dict[tuple[str, str], list[str]] = {}
    for (model, key), cards in missing.items():
        by_cards.setdefault((model, ", ".join(cards)), []).append(key)
    for (model, cards), keys in by_cards.items():
        lines.append(f"\nNot run, {model}, {cards}: {'; '.join(keys)}.")
    return "\n".join(lines) + "\n"


def configurations_of(model: str, cards: Sequence[str], wide: bool) -> list[dict[str, Check]]:
    """The configurations of a model, each by card."""
    found: dict[str, dict[str, Check]] = {}
    for card in cards:
        for check in configurations(model, card, wide=wide):
            found.setdefault(without_card(check.key), {})[card] = check
    return list(found.values())


def of_decode(key: str) -> bool:
    """Whether decode steps run it: in tiles of 16 rows."""
    return re.search(r" rows 64\b| prefill ", key) is None


def megabytes(check: Check) -> float:
    leaves = jax.tree.leaves(argument_shapes(check))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6


HEAD = """# Kernels of real models, run as PTX

The configurations that a start of each model checks on each card, interpreted on a CPU by
[tests/ptx](../../tests/ptx/README.md), all programs of their grids, against the reference with its
tolerance; races and faults do not pass. {} to {}, {}; a line for each in
`tests/ptx/models.jsonl`. The last column stands for the PTX of all of them together. `python -m
tests.ptx.models --compare --kept tests/ptx/models.jsonl` says what of it is of older kernels.

"""


def _between(kept: Kept) -> tuple[str, str, str]:
    """First day, last day, versions."""
    dates = [each.date for each in kept.found.values()]
    return min(dates), max(dates), ", ".join(sorted({e.versions for e in kept.found.values()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--only", default="", help="a part of the check's name, such as 'linear'")
    parser.add_argument("--most", type=float, default=float("inf"), help="MB of arguments")
    parser.add_argument("--decode", action="store_true", help="only what decode steps run")
    parser.add_argument("--wide", action="store_true", help="also arrays beyond 4 GiB")
    parser.add_argument("--compare", action="store_true", help="compile only, against --kept")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--out", type=Path, help="the table of all that is kept")
    args = parser.parse_args()
    kept = Kept(args.kept)
    if args.compare:
        print(compare(kept))
        return
    cards = args.cards.split(",")
    for model in args.models:
        every = configurations_of(model, cards, args.wide)
        todo = [
            of_cards
            for of_cards in every
            for check in [next(iter(of_cards.values()))]
            if args.only in check.key
            and megabytes(check) <= args.most
            and (of_decode(check.key) or not args.decode)
        ]
        run(kept, model, cards, todo)
    pairs = dict.fromkeys(key[:2] for key in kept.found)
    starts = {(m, card): [c.key for c in configurations(m, card, wide=True)] for m, card in pairs}
    text = page(list(kept.found.values()), starts)
    print(text)
    if args.out:
        args.out.write_text(HEAD.format(*_between(kept)) + text)


if __name__ == "__main__":
    main()
