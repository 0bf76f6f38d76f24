"""Every policy over the same routing: misses and transfers against budget, beside MIN.

python -m scripts.policies compare curves DIR [--batches 1,8,32] [--budgets 4] [--costs FILE]
python -m scripts.policies compare coactivation DIR --shared 0,0.2,0.5,0.8
python -m scripts.policies compare draw DIR

`curves` runs all evictions and prefetches through the simulator, writes DIR/curves.jsonl, short
tables of it, DIR/curves.md (one of each policy beside LRU), and plots (draw makes both again).
`coactivation` asks WiSP's question: what does prefetch by co-activation bring at tight and loose
budgets? It writes DIR/coactivation.jsonl and a table, DIR/coactivation.md. Both print their tables.

Traces are recorded by the engine where DIR does not have them yet: prompts are windows of a text,
short and long, what is generated is sampled. A text's first 60% are `train`, its last 20% `test`;
what learns is fitted once on short prompts of the train parts of all texts together (generated
routing: on the first half of its tokens), nothing is tuned, figures are of decode steps of `test`.
docs/protocol.md has the rules.

Times need a link: `moejax calibrate` writes --costs, or --bandwidth says it. They are predicted:
`moving` is what the link needs for what moved, `stall` what of it no overlap with the step's
arithmetic can hide (host_offload.simulate.bounds.stall_bound).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.policies.eviction.names import POLICIES
from host_offload.policies.prefetch.names import FIT
from host_offload.simulate.bounds import read_references
from host_offload.traces.reader import TraceError
from moejax import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.places import TEXTS, TRI
from scripts.parts.plots import pyplot
from scripts.policies.arms import Arm, Link, Place, about, lines_of, measure
from scripts.policies.report import draw, show, write_pairs, write_tables
from scripts.policies.traces import Source, generated, recorded


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        if args.what == "draw":
            lines = read_lines(args.directory / "curves.jsonl")
            print(write_tables(lines, args.directory).read_text())
            draw(lines, args.directory)
            return 0
        if args.what == "curves" and not args.no_plots:
            pyplot()
        sizes = args.sequences, args.tokens, args.prompt_tokens, args.budgets, args.steps
        if min(*sizes, args.processes, *args.batches) < 1 or args.long_prompt_tokens < 0:
            raise UserError("sizes must be at least 1")
        link = link_of(args)
        sources = [*recorded(args), *(generated(args, shared) for shared in args.shared)]
        if not sources:
            raise UserError("there is nothing to look at; give --text or --shared")
        found = curves(args, sources, link) if args.what == "curves" else coactivation(sources)
        lines = []
        with open(args.directory / f"{args.what}.jsonl", "w") as file:
            for line in found:
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
    except (UserError, TraceError) as error:
        return refuse(__name__, error)
    show(lines)
    written = write_tables if args.what == "curves" else write_pairs
    print(written(lines, args.directory).read_text())
    if args.what == "curves" and not args.no_plots:
        draw(lines, args.directory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("what", choices=("curves", "coactivation", "draw"))
    add("directory", type=Path, metavar="DIR", help="of traces and results")
    add("--model", default=str(TRI), help="default: %(default)s")
    add(
        "--text",
        nargs="*",
        default=TEXTS,
        help="files, a domain each (default: ../shared/corpora); none: only generated routing",
    )
    add("--batches", type=_numbers(int), metavar="B,…", default=[1, 8, 32])
    add("--sequences", type=int, default=32, help="of a domain (default: 32)")
    add("--prompt-tokens", type=int, default=64, help="default: 64")
    add(
        "--long-prompt-tokens",
        type=int,
        default=896,
        help="of the long context; 0: none (default: 896)",
    )
    add("--tokens", type=int, default=32, help="generated of each (default: 32)")
    add(
        "--steps",
        type=int,
        default=256,
        help="most decode steps of a text; at batch 1 that is some of the sequences (default: 256)",
    )
    add(
        "--budgets",
        type=int,
        default=4,
        help="how many, beside the least one with a bound (default: 4)",
    )
    add(
        "--shared",
        type=_numbers(float),
        metavar="S,…",
        default=[],
        help="also qwen3-like routing with these parts of noise common to all layers",
    )
    add("--layers", type=int, default=12, help="of generated routing (default: 12)")
    add("--costs", type=Path, metavar="FILE", help="of moejax calibrate, for predicted times")
    add("--bandwidth", type=float, metavar="GB/S", help="of a link, instead of --costs")
    add("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("--no-plots", action="store_true", help="figures only, no matplotlib")
    return parser


def _numbers(number: type) -> Any:
    return lambda text: [number(part) for part in text.split(",") if part]


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); run curves first") from error


def link_of(args: argparse.Namespace) -> Link | None:
    """What --costs or --bandwidth says; None: neither. With a bandwidth alone steps compute in no
    time, so the link is the only bound."""
    if args.bandwidth is not None:
        if args.costs or not args.bandwidth > 0:
            raise UserError("--bandwidth is GB/s above 0, and without --costs, which has its own")
        return Link(1e-9 / args.bandwidth, dict.fromkeys(args.batches, 0.0))
    if args.costs is None:
        return None
    from moejax.costs.store import load_cost_model

    model = load_cost_model(args.costs)
    try:
        steps = {batch: model.bucket(batch) for batch in args.batches}
    except ValueError as error:
        raise UserError(f"{args.costs}: {error}") from error
    seconds = model.costs().step_s
    return Link(model.link_per_byte, {batch: seconds[rows] for batch, rows in steps.items()})


def curves(
    args: argparse.Namespace, sources: Sequence[Source], link: Link | None
) -> Iterator[dict[str, Any]]:
    """A line for each source, batch, budget and policy."""
    work = functools.partial(lines_of, link=link)
    every = places(args, sources)
    with _progress(len(every)) as done:
        for found in _mapped(work, every, args.processes):
            done()
            yield from found


def places(args: argparse.Namespace, sources: Sequence[Source]) -> list[Place]:
    """In the order of the table."""
    largest = {
        (s.name, s.context, b): int(read_references(t, "decode").largest.max())
        for s in sources
        for b, t in s.test.items()
    }
    found = []
    for source in sources:
        experts = source.train.header.experts
        alike = [s for s in sources if s.train.header.experts == experts]
        for batch, trace in source.test.items():
            # Panels of one model have the same budgets; from `least` on there are bounds in all.
            least = max(largest[s.name, s.context, batch] for s in alike)
            spread = np.linspace(trace.header.top_k, experts, args.budgets).round().astype(int)
            for cells in np.union1d(spread, least).tolist():
                place = source.name, source.context, batch, cells
                directories = source.train.directory, trace.directory, source.router
                found.append(Place(*place, *directories))
    return found


def _mapped(work: Callable, every: Sequence[Place], processes: int) -> Iterator[Any]:
    if processes == 1:
        yield from map(work, every)
        return
    # A product of a few rows is not worth a thread, and threads of all processes fight for cores.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Not by fork: jax has threads by now.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(every)), mp_context=context) as pool:
        yield from pool.map(work, every)


class _progress:
    """A bar over `total` budgets, on stderr where that is a terminal."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(stderr=True)
        columns = "budgets", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Callable[[], None]:
        self.bar.start()
        return lambda: self.bar.advance(self.task)

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()


def coactivation(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """LRU with and without prefetch by co-activation, at a quarter and three quarters of a layer's
    experts."""
    for source in sources:
        router = None if source.router is None else np.load(source.router)
        for batch, trace in source.test.items():
            of = read_references(trace, "decode")
            for budget, cells in (("tight", of.experts // 4), ("loose", 3 * of.experts // 4)):
                where = source.name, source.context, batch, cells
                place = Place(*where, source.train.directory, trace.directory, source.router)
                off = Arm("lru", (POLICIES["lru"](),))
                on = Arm("lru + coactivation", (*off.policies, FIT["coactivation"](source.train)))
                for arm in (off, on):
                    found = measure(trace, arm, cells, router)
                    yield {**about(place, of), "budget": budget, "policy": arm.name, **found}
