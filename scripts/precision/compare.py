"""Perplexity at equal expert bytes: uniform versions, fixed maps, DynaExq.

python -m scripts.precision compare run DIR [--pairs dense/int4@int8,…] [--windows 12]
python -m scripts.precision compare fixed | dynamic | shifts | draw DIR
python -m scripts.precision compare ablation DIR --name no-hysteresis | no-ema | … | hi-share

A pair HI/LO@VERSION mixes HI and LO in the bytes that VERSION takes for all experts; HI/LO@SHARE
makes that share of the experts high. `run` does everything: writes DIR/precision.jsonl, prints
tables and draws plots (draw makes them again); docs/precision.md reads them. The others do a part,
and what it needs: `fixed` everything but DynaExq, `dynamic` DynaExq, `ablation` one change of its
settings, beside DynaExq, in the first order of the domains; `shifts` how soon it follows a domain.
What DIR has is not done again, so an interrupted run goes on; DIR/arguments.json says of what.

A text's first 60% are `train`, for calibration (also gptq's), the next 20% `validation`, for what
is chosen here (each version's quantizer, DynaExq's settings), the last 20% `test`, which is
reported, in windows of 512 tokens. Every arm has as many high experts as its bytes have room for,
to the nearest one; DynaExq's spare cells are inside its bytes, and an arm more than 1% off is
refused. All arms compute with the same records: DynaExq runs on a checkpoint that has them, which
is checked. Bytes are those of records: what whole slots waste in an arena of so small experts is
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.traces.reader import TraceError
from moejax import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.places import TEXTS, TRI
from scripts.parts.plots import pyplot
from scripts.precision.arms import TUNED, WEIGHTED, Arms
from scripts.precision.engine import (
    MapEngine,
    Pair,
    calibrate,
    parse_pair,
    read_domains,
    write_versions,
)
from scripts.precision.report import draw, show
from scripts.precision.stream import check_agreement, orders_of

Line = dict[str, Any]

ABLATIONS: Mapping[str, dict[str, Any]] = {
    "no-hysteresis": {"margin": 0.0},
    "no-ema": {"alpha": 0.0},
    "long-ema": {"alpha": 0.9},
    "rank-slack": {"slack": 2},
    "global": {"scope": "global"},
    "error-weighted": WEIGHTED,
    "blocking": {"blocking": "true"},
    "one-spare": {"spares": 1},
    "hi-share": {},
}
"""Name → changes of DynaExq's settings; hi-share changes the pair instead, to SHARES."""

SHARES = (0.125, 0.25, 0.75)

SHIFTS: Mapping[str, dict[str, Any]] = {
    "2 spares, steps of 128": {"spares": 2, "prefill": 128},
    "8 spares, steps of 128": {"spares": 8, "prefill": 128},
    "2 spares, steps of 64": {"spares": 2, "prefill": 64},
    "8 spares, steps of 64": {"spares": 8, "prefill": 64},
    "blocking": {"spares": 2, "prefill": 128, "blocking": "true"},
}
"""How many transitions there can be, from few to as many as are wanted."""


SAME = "model", "text", "windows", "calibration", "prefill"
"""Arguments that all results in a directory have in common."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    path = args.directory / "precision.jsonl"
    try:
        if args.what == "draw":
            lines = _read_lines(path)
            show(lines)
            draw(lines, args.directory)
            return 0
        if not args.no_plots:
            pyplot()
        pairs = [parse_pair(text) for text in args.pairs.split(",")]
        if args.what == "ablation" and args.name is None:
            raise UserError(f"give the ablation's --name: {', '.join(ABLATIONS)}")
        if min(args.windows, args.seeds, args.orders, args.prefill, args.calibration) < 1:
            raise UserError(
                "--windows, --calibration, --seeds, --orders and --prefill are at least 1"
            )
        args.directory.mkdir(parents=True, exist_ok=True)
        _require_same(args)
        lines = _read_lines(path) if path.exists() else []
        for line in _lines(args, pairs, lines):
            lines.append(line)
            with open(path, "a") as file:
                print(json.dumps(line), file=file)
            _arguments(args.directory).write_text(json.dumps(_same(args)))
    except (UserError, TraceError) as error:
        return refuse(__name__, error)
    show(lines)
    if not args.no_plots:
        draw(lines, args.directory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    kinds = ("run", "fixed", "dynamic", "ablation", "shifts", "draw")
    parser.add_argument("what", choices=kinds)
    parser.add_argument("directory", type=Path, metavar="DIR", help="of results")
    parser.add_argument("--model", default=str(TRI), help="default: %(default)s")
    parser.add_argument(
        "--text",
        nargs="+",
        default=TEXTS,
        help="files, a domain each (default: ../shared/corpora)",
    )
    parser.add_argument(
        "--pairs",
        default="dense/int4@int8,int8/int2@int4,int4/int2@0.5",
        help="default: %(default)s; ablations take the last one",
    )
    parser.add_argument("--name", choices=ABLATIONS, help="of the ablation")
    parser.add_argument("--windows", type=int, default=12, help="of a domain (default: 12)")
    parser.add_argument(
        "--calibration", type=int, default=32, help="windows of a domain's train part (default: 32)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="random maps (default: 20)")
    parser.add_argument("--orders", type=int, default=6, help="of domains (default: all 6)")
    parser.add_argument(
        "--prefill",
        type=int,
        default=128,
        help="tokens of a step under DynaExq, from 64: steps and spares bound how many transitions "
        "an interval has (default: 128)",
    )
    parser.add_argument("--no-plots", action="store_true", help="figures only, no matplotlib")
    return parser


def _read_lines(path: Path) -> list[Line]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); run it first") from error


def _arguments(directory: Path) -> Path:
    return directory / "arguments.json"


def _same(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SAME}


def _require_same(args: argparse.Namespace) -> None:
    """Raises UserError where the directory's results are of other texts, models or sizes."""
    if not (file := _arguments(args.directory)).exists():
        return
    had, asked = json.loads(file.read_text()), _same(args)
    if other := [f"--{name} {had[name]}" for name in SAME if had[name] != asked[name]]:
        raise UserError(
            f"{args.directory} has results of {', '.join(other)}; give that, or another directory"
        )


def _lines(args: argparse.Namespace, pairs: Sequence[Pair], known: list[Line]) -> Iterator[Line]:
    """What is asked for and not among `known`, to which the caller adds it."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = _arms(args, known, scratch, stack)
        for pair in pairs:
            for spares in {0, *(s["spares"] for s in (*TUNED, *SHIFTS.values()))}:
                arms.high(pair, spares)
        yield from _asked(args, pairs, arms, scratch)


def _arms(
    args: argparse.Namespace, known: list[Line], scratch: Path, stack: contextlib.ExitStack
) -> Arms:
    domains = read_domains(args.text)
    found = calibrate(args.model, domains, args.calibration, args.windows, scratch)
    engine = MapEngine(args.model, found.inputs)
    stack.callback(engine.close)
    return Arms(
        model=args.model,
        domains=domains,
        windows=args.windows,
        few=min(args.windows, 6),
        prefill=args.prefill,
        found=found,
        engine=engine,
        quantizers={x["version"]: x["quantizer"] for x in known if x.get("quantizer")},
        settings={x["pair"]: x["settings"] for x in known if x["arm"] == "DynaExq"},
        known=known,
    )


def _asked(
    args: argparse.Namespace,
    pairs: Sequence[Pair],
    arms: Arms,
    scratch: Path,
) -> Iterator[Line]:
    yield from arms.choose_quantizers()
    if args.what in ("run", "fixed"):
        for pair in pairs:
            yield from arms.fixed(pair, arms.maps(pair, args.seeds))
            yield from arms.oracles(pair)
    if args.what == "fixed":
        return
    arms.checkpoint = scratch / "versions"
    write_versions(arms.engine, args.model, arms.quantizers, arms.checkpoint)
    orders = orders_of(arms.domains, args.orders)
    for pair in pairs if args.what in ("run", "dynamic") else pairs[-1:]:
        calibrated = dict(arms.maps(pair, 0))["calibrated on all"]
        arms.say(f"{pair.name}: the checkpoint against the fixed maps")
        check_agreement(
            arms.engine,
            arms.checkpoint,
            (pair.hi, pair.lo),
            calibrated,
            arms.quantizers,
            arms.domains,
            dynamic=pair == pairs[-1],
        )
        if pair.name not in arms.settings:
            arms.tune(pair)
        if args.what in ("run", "dynamic"):
            for order in orders:
                yield from arms.dynaexq(pair, "DynaExq", {}, order)
            for order in orders[:2]:
                yield from arms.dynaexq(pair, "DynaExq error-weighted", WEIGHTED, order)
    last = pairs[-1]
    if args.what == "ablation":
        maps = arms.maps(last, 0)
        yield from arms.fixed(last, (one for one in maps if one[0] == "calibrated on all"))
        yield from arms.dynaexq(last, "DynaExq", {}, orders[0])
    names = {"run": tuple(ABLATIONS), "ablation": (args.name,)}.get(args.what, ())
    for name in names:
        if name == "hi-share":
            yield from _shares(args, last, arms)
        else:
            changes = ABLATIONS[name]
            yield from arms.dynaexq(last, f"DynaExq, {name}", changes, orders[0], study="ablation")
    if args.what in ("run", "shifts"):
        yield from _shifts(args, pairs, arms)


def _shares(args: argparse.Namespace, pair: Pair, arms: Arms) -> Iterator[Line]:
    """Other shares of high experts, each with maps of the same bytes."""
    for share in SHARES:
        other = Pair(pair.hi, pair.lo, None, share)
        arms.settings[other.name] = arms.settings[pair.name]
        study, order = "hi-share", arms.domains
        maps = arms.maps(other, min(args.seeds, 5), each=False)
        yield from arms.fixed(other, maps, study)
        yield from arms.dynaexq(other, "DynaExq", {}, order, study)
        yield from arms.dynaexq(other, "DynaExq error-weighted", WEIGHTED, order, study)


def _shifts(args: argparse.Namespace, pairs: Sequence[Pair], arms: Arms) -> Iterator[Line]:
    """The last pair (with `shifts`: each pair) in two orders, each with two shifts."""
    for pair in pairs if args.what == "shifts" else pairs[-1:]:
        if pair.name not in arms.settings:
            arms.tune(pair)
        for name, changes in SHIFTS.items():
            for order in orders_of(arms.domains, min(args.orders, 2)):
                yield from arms.dynaexq(pair, name, changes, order, study="shifts")
        for name in ("2 spares, steps of 128", "blocking"):
            changes = {k: v for k, v in SHIFTS[name].items() if k != "prefill"}
            arm = "decode, " + ("blocking" if name == "blocking" else "2 spares")
            yield from arms.decode(pair, arm, changes)
