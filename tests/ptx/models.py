"""The kernels of known models at their sizes, as the interpreter runs them: each configuration
that a start checks on a GPU, against the same reference and with the same tolerance.

    JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 python -m tests.ptx.models [MODEL ...] [--cards h200,a100]
        [--decode] [--wide] [--versions int4,int8] [--only linear] [--most MB] [--programs N]
        [--kept FILE] [--out PAGE]
    ... --compare --kept FILE       # which of FILE are of PTX that is no more

What has passed is kept in FILE, a line each, and not done again as long as its PTX is what the
kernels have, but for names of registers and the order of independent arithmetic: where what XLA
compiles is the same, nothing is compiled. A configuration whose PTX, grids and shared memory are
those of one that another card has run is not run again, but kept as the same.
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
from jax._src.lib.mlir import ir

from moejax.models.config import parse_config
from moejax.start.kernels import kernel_shapes
from pallas_kernels import resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from pallas_kernels.verification import Check, checks
from pallas_kernels.verification.check import argument_shapes, deviation
from tests.aot.aot_h200 import CARDS, device_of
from tests.moejax.models.test_published_configs import PUBLISHED
from tests.ptx.memory import copy_sparse, zeros
from tests.ptx.parse import Fault
from tests.ptx.program import (
    CompiledCall,
    compiled_call,
    kernels_digest,
    lowered_call,
    lowered_digest,
)

VERSIONS = f"jax {jax.__version__}"

QUANTIZED = ("int4", "int8")
"""Versions of experts that entries may be of."""

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
    programs: str = ""
    """"n of m" of kernels that ran in part, together; "": all ran whole."""
    source: str = ""
    """Of what XLA compiled (program.lowered_digest): where it is the same, the PTX is."""
    dataflow: str = ""
    """Of what the PTX computes (program.Program.dataflow); "": not known."""
    ran: str = ""
    """The digest of the PTX that ran, if it was another of the same dataflow."""
    kernels: str = ""
    """Of the Pallas kernels alone (program.kernels_digest); "": not known."""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def configurations(
    model: str,
    card: str,
    dtype: str = "bfloat16",
    wide: bool = False,
    versions: Sequence[str] = (),
) -> Iterator[Check]:
    """What a start of the model on the card would check, each once. wide: also what addresses more
    than 4 GiB. versions: also what starts check whose experts are all int4, and so on."""
    ops = resolve_ops("pallas", platform="gpu", dtype=dtype)
    ops = dataclasses.replace(ops, shared_kib=shared_class(device_of(card)))
    config = parse_config(PUBLISHED[model].raw)
    known = set()
    for version in (None, *versions):
        formats = None
        if version is not None:
            size = config.hidden_size, config.moe_intermediate_size, dtype
            record = RecordFormat(version, *size)
            formats = (VersionFormats(record, record),)
        for shape in kernel_shapes(config, dtype, config.slot_layout(2), formats):
            for check in checks(shape, ops):
                if (wide or not check.wide) and check.key not in known:
                    known.add(check.key)
                    yield check


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
    return compiled_call(card, **_call(check))


def lowered(check: Check, card: str) -> ir.Module:
    """What Outcome.source and kernels are of: a tenth of the time that compiling takes."""
    return lowered_call(card, **_call(check))


def _call(check: Check) -> dict[str, Any]:
    arena, stores = int(check.arena is not None), int(check.stores is not None)
    return {
        "function": lambda *args: check.run("pallas", *args),
        "given": argument_shapes(check),
        "donated": lambda path: path[0].idx < arena,
        "on_host": lambda path: arena <= path[0].idx < arena + stores,
    }


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


def interpret_part(
    check: Check, case: Case, compiled: CompiledCall, most: int, **launch: Any
) -> tuple[float, int, str]:
    """As interpret_check, of slices of grids of more than `most` programs (CompiledCall.execute):
    what they have made is compared. And how many programs that was, "" if all. Raises Fault, also
    where an operation needs what was left out."""
    got, execution = compiled.execute(*case.given, launch=launch, most=most)
    if not execution.ran:
        pairs = zip(_compared(check, got), case.want, strict=True)
        return max(deviation(a, b) for a, b in pairs), sum(execution.issued.values()), ""
    if check.arena is not None:
        raise Fault("what is changed in place is not compared in part: run all programs")
    error = 0.0
    for a, b, made in zip(_compared(check, got), case.want, execution.made(), strict=True):
        if not made.any():
            raise Fault("the programs that ran made nothing of a result")
        error = max(error, deviation(a[made], b[made]))
    ran, total = (sum(each) for each in zip(*execution.ran.values(), strict=True))
    return error, sum(execution.issued.values()), f"{ran} of {total}"


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
    module: ir.Module | None = None,
    most: int | None = None,
) -> Outcome:
    """module: as of lowered; None: it is made. most: as interpret_part's; None: all programs."""
    begin, error, fault, issued, programs = time.perf_counter(), None, None, 0, ""
    compiled = compiled or compiled_check(check, card)
    try:
        if most is None:
            error, issued = interpret_check(check, card, case, compiled, copies="random")
        else:
            case = case or case_of(check)
            error, issued, programs = interpret_part(check, case, compiled, most, copies="random")
    except Fault as found:
        fault = "; ".join((str(found), *getattr(found, "__notes__", ())))
    seconds = round(time.perf_counter() - begin, 1)
    what = (model, card, check.key, check.tolerance, error, fault, issued, seconds)
    today = datetime.date.today().isoformat()
    digest, dataflow = compiled.program.digest(), compiled.program.dataflow()
    module = module or lowered(check, card)
    own = {"source": lowered_digest(module), "dataflow": dataflow}
    own["kernels"] = kernels_digest(module)
    return Outcome(*what, digest, card, today, VERSIONS, programs, **own)


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

    def rewrite(self) -> None:
        """The file without what was added again later."""
        if self.path is not None:
            lines = (json.dumps(dataclasses.asdict(each)) for each in self.found.values())
            self.path.write_text("".join(line + "\n" for line in lines))

    def same(self, made: Outcome, whole: bool = True) -> Outcome | None:
        """What another card has run with this digest, of the same operands. whole: all programs."""
        return next(
            (
                each
                for each in self.found.values()
                if (each.model, each.digest) == (made.model, made.digest)
                and without_card(each.check) == without_card(made.check)
                and each.ran_for == each.card
                and each.passed
                and not (whole and each.programs)
            ),
            None,
        )


def run(
    kept: Kept,
    model: str,
    cards: Sequence[str],
    todo: Sequence[Mapping[str, Check]],
    most: int | None = None,
) -> None:
    """Each configuration (by card) on each card where it has not passed with today's PTX. most: as
    outcome's; what has run in part runs again if it is None."""
    for of_cards in todo:
        case = None
        for card in cards:
            check = of_cards.get(card)
            if check is None:
                continue
            known = kept.found.get((model, card, check.key))
            if known and (not known.passed or (known.programs and most is None)):
                known = None
            module = lowered(check, card)
            source = lowered_digest(module)
            if known and (known.source, known.versions) == (source, VERSIONS):
                continue
            compiled = compiled_check(check, card)
            digest = compiled.program.digest()
            dataflow = compiled.program.dataflow()
            if known and (known.digest == digest or known.dataflow == dataflow):
                ran = known.ran or ("" if known.digest == digest else known.digest)
                now = {"digest": digest, "source": source, "dataflow": dataflow, "ran": ran}
                kept.add(dataclasses.replace(known, versions=VERSIONS, **now))
                continue
            made = Outcome(model, card, check.key, check.tolerance, None, None, 0, 0.0, digest)
            if (other := kept.same(made, most is None)) is not None:
                own = {"card": card, "check": check.key, "source": source, "dataflow": dataflow}
                made = dataclasses.replace(other, **own)
            else:
                case = case or case_of(check)
                made = outcome(model, card, check, case, compiled, module, most)
            kept.add(made)
            print(made, flush=True)


def compare(kept: Kept) -> str:
    """Which of what is kept is of other PTX than these kernels have now, and how much of it is of
    kernels that are the same in a check that has changed."""
    other, gone, same = [], [], 0
    for model, card in dict.fromkeys(key[:2] for key in kept.found):
        every = configurations(model, card, wide=True, versions=QUANTIZED)
        known = {check.key: check for check in every}
        for each in kept.found.values():
            if (each.model, each.card) != (model, card):
                continue
            if each.check not in known:
                gone.append(each)
                continue
            today = lowered(known[each.check], card)
            if (each.source, each.versions) == (lowered_digest(today), VERSIONS):
                continue
            if (each.kernels, each.versions) == (kernels_digest(today), VERSIONS):
                same += 1
            elif not _of_today(each, known[each.check]):
                other.append(each)
    total = len(kept.found)
    lines = [f"{len(other)} of {total} kept entries are of other PTX than these kernels'"]
    if same:
        lines.append(f"{same} of {total} are of these kernels, but of a check that has changed")
    if gone:
        lines.append(f"{len(gone)} of {total} are of no configuration of a start")
    names = (f"  {each.model}, {each.card}, {each.check}" for each in (*other, *gone))
    return "\n".join((*lines, *names))


def _of_today(each: Outcome, check: Check) -> bool:
    """Whether its PTX is what the check's kernels have now."""
    program = compiled_check(check, each.card).program
    return program.digest() == each.digest or program.dataflow() == each.dataflow


def page(outcomes: Sequence[Outcome], starts: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """A line for each model and card, then what did not pass, what ran in part, what is of other
    versions of the experts, and what was not run. starts: what a start of each checks."""
    lines = [
        "| model | card | decode | prefill | the same PTX as another card's | passed | "
        "largest error / tolerance | PTX |",
        "|---|---|---|---|---|---|---|---|",
    ]
    dense = [each for each in outcomes if each.check in starts[each.model, each.card]]
    for model, card in starts:
        mine = [each for each in dense if (each.model, each.card) == (model, card)]
        shares = [o.error / o.tolerance for o in mine if o.passed and o.error]
        ptx = hashlib.sha256("".join(sorted(o.digest for o in mine)).encode()).hexdigest()[:12]
        counts = []
        for decode in (True, False):
            of_start = [key for key in starts[model, card] if of_decode(key) == decode]
            counts.append(f"{sum(of_decode(o.check) == decode for o in mine)} of {len(of_start)}")
        lines.append(
            f"| {model} | {card} | {counts[0]} | {counts[1]} | "
            f"{sum(o.ran_for != card for o in mine)} | {sum(o.passed for o in mine)} | "
            f"{max(shares, default=0):.2f} | {ptx} |"
        )
    for each in outcomes:
        if not each.passed:
            why = each.fault or f"error {each.error:.2g}, tolerance {each.tolerance:.2g}"
            lines.append(f"\n{each.model}, {each.card}, {each.check}: {why}")
    done = {(each.model, each.card, each.check): each for each in outcomes}
    lines += _listed(
        "In part", {key: each.programs + " programs" for key, each in done.items() if each.programs}
    )
    lines += _listed(
        "Ran as PTX of the same dataflow", {key: "" for key, each in done.items() if each.ran}
    )
    others = (key for key, each in done.items() if each not in dense and each.passed)
    lines += _listed("Experts of other versions, passed", dict.fromkeys(others, ""))
    every = ((model, card, key) for (model, card), keys in starts.items() for key in keys)
    lines += _listed("Not run", {key: "" for key in every if key not in done})
    return "\n".join(lines) + "\n"


def _listed(what: str, of: Mapping[tuple[str, str, str], str]) -> list[str]:
    """Checks of (model, card, key), cards together that have the same ones; the values are what is
    to be said of each."""
    by_key: dict[tuple[str, str], list[str]] = {}
    for (model, card, key), said in of.items():
        name = f"{without_card(key)}, {said}" if said else without_card(key)
        by_key.setdefault((model, name), []).append(card)
    by_cards: dict[tuple[str, str], list[str]] = {}
    for (model, name), cards in by_key.items():
        by_cards.setdefault((model, ", ".join(sorted(cards, key=CARDS.index))), []).append(name)
    return [
        f"\n{what}, {model}, {cards}: {'; '.join(names)}."
        for (model, cards), names in by_cards.items()
    ]


def configurations_of(
    model: str, cards: Sequence[str], wide: bool, versions: Sequence[str] = ()
) -> list[dict[str, Check]]:
    """The configurations of a model, each by card."""
    found: dict[str, dict[str, Check]] = {}
    for card in cards:
        for check in configurations(model, card, wide=wide, versions=versions):
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
[tests/ptx](../../tests/ptx/README.md), all programs of their grids unless
it is said, against the reference with its tolerance; races and faults do not pass. Decode: what
steps in tiles of 16 rows run, with arrays below and above 4 GiB. PTX of the same dataflow differs
in names of registers and in the order of independent arithmetic alone. {} to {}, {}; a line for
each in `tests/ptx/models.jsonl`. The last column stands for the PTX of all of them together.
`python -m tests.ptx.models --compare --kept tests/ptx/models.jsonl` says what of it is of older
kernels, and how many entries are of the same kernels with other operands than the checks have now.

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
    parser.add_argument(
        "--versions",
        default=(),
        type=lambda text: text.split(","),
        help=f"also of starts with such experts, of {', '.join(QUANTIZED)}",
    )
    parser.add_argument("--wide", action="store_true", help="also arrays beyond 4 GiB")
    parser.add_argument(
        "--programs",
        type=int,
        metavar="N",
        help="of kernels with more programs, only slices of their grids; the entry says so",
    )
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
        every = configurations_of(model, cards, args.wide, args.versions)
        todo = [
            of_cards
            for of_cards in every
            for check in [next(iter(of_cards.values()))]
            if args.only in check.key
            and megabytes(check) <= args.most
            and (of_decode(check.key) or not args.decode)
        ]
        run(kept, model, cards, todo, args.programs)
    kept.rewrite()
    pairs = dict.fromkeys(key[:2] for key in kept.found)
    starts = {(m, card): [c.key for c in configurations(m, card, wide=True)] for m, card in pairs}
    text = page(list(kept.found.values()), starts)
    print(text)
    if args.out:
        args.out.write_text(HEAD.format(*_between(kept)) + text)


if __name__ == "__main__":
    main()
