"""What placing missed experts on two processors takes, by rule and predictor, simulated (PreScope).

python -m scripts.policies placement TRACE [TRACE...] [--predictor FILE] [--forest FILE]
    [--model MODEL] [--resident 0.25[,0.5]] [--costs 1,0,16,1,8] [--loads 4,16,64] [--steps 43]
    [--json]

Decode steps of the last fifth of a trace's requests are played on an accelerator, a CPU beside the
weights and a link (`simulate_placement`); the hot table is of the first three fifths. All arms have
the same residents to begin with, but the one without a hot table, which has as many drawn at random
(mean of 10 draws). --costs: microseconds of a row on the CPU, of starting an expert there, of a
load, of an expert on the accelerator, of attention. The default is no machine: a load is worth 16
rows on the CPU. --predictor: of `moejax train-predictor`; --model: the trace's model, whose gates
are reused; --forest: of `moejax train-predictor --predictor forest`, for ExpertFlow, with --model;
without them arms that need them are left out. No clock is read, so figures are of the
simulator.

One trace, share and load: a line an arm. Columns: mean of a step; time of a token over the first
arm's (Klotski's steps are of two batches); prefetches that were begun a layer; median and largest
difference of both processors in a layer; share of the time that the link was busy. Several of any:
a grid, a row an arm and a column a cell, the time of a token over the first arm's.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.placement.correlation import successors
from host_offload.policies.placement.presched import PlacementCosts, hot_table
from host_offload.policies.prefetch.expertflow.evaluation import predicted_rows
from host_offload.policies.prefetch.expertflow.policy import ExpertFlow
from host_offload.policies.prefetch.expertflow.policy import read as forests_of
from host_offload.policies.prefetch.fitted import check_fitted
from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.policy import Learned, read
from host_offload.policies.prefetch.llapor.training import samples, split
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.simulate.placement import right_predictions
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.schema import KINDS
from moejax.commands.train_predictor import routers_of
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned
from scripts.policies.placed_arms import FOREST, REACH, Work, all_played

COLUMNS = [
    ("arm", "{arm}"),
    ("predicted by", "{predictor}"),
    ("step µs", "{step_us:.1f}"),
    ("of first", "{ratio:.3f}"),
    ("ahead", "{ahead:.2f}"),
    ("gap µs", "{gap_us:.1f}"),
    ("largest", "{largest_us:.1f}"),
    ("link", "{link:.0%}"),
]


class Cell(NamedTuple):
    """One of the grid."""

    trace: str
    resident: float
    load: float
    """µs"""

    @property
    def title(self) -> str:
        return f"{Path(self.trace).name} {self.resident:.0%} {self.load:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        costs = [float(each) for each in args.costs.split(",")]
        loads = [float(each) for each in args.loads.split(",")] if args.loads else costs[2:3]
        if len(costs) != 5 or min(costs) < 0 or min(loads) <= 0:
            raise UserError(f"--costs are five, and a load takes time, not {args.costs}")
        shares = [float(each) for each in args.resident.split(",")]
        if not all(0 <= share <= 1 for share in shares):
            raise UserError(f"--resident lies in 0…1, not {args.resident}")
        grid = [Cell(*each) for each in itertools.product(args.trace, shares, loads)]
        found = {}
        for name in args.trace:
            routed = _routed(args, read_trace(name))
            for cell in (cell for cell in grid if cell.trace == name):
                work = _work(routed, cell.resident)
                given = PlacementCosts(*(1e-6 * s for s in (*costs[:2], cell.load, *costs[3:])))
                found[cell] = lines = list(all_played(work, given))
                for line in lines:
                    line["ratio"] = lines[0]["tokens_s"] / line["tokens_s"]
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        for cell, lines in found.items():
            for line in lines:
                print(json.dumps({**cell._asdict(), **line}))
    elif len(grid) > 1:
        print(*_grid(found), sep="\n")
    else:
        rows = work.tokens[:, 0].sum() / len(work.tokens)
        print(
            f"{len(work.tokens)} steps of {rows:.1f} uses a layer; {work.resident.sum()} resident"
        )
        print(*aligned(COLUMNS, lines), sep="\n")
    return 0


def _grid(found: dict[Cell, list[dict[str, Any]]]) -> Iterator[str]:
    """A row an arm, a column a cell: time of a token over the first arm's."""
    columns = [("arm", "{arm}"), ("predicted by", "{predictor}")]
    columns += [(cell.title, f"{{ratios[{i}]:.2f}}") for i, cell in enumerate(found)]
    first = next(iter(found.values()))
    rows = [
        {**line, "ratios": [lines[i]["ratio"] for lines in found.values()]}
        for i, line in enumerate(first)
    ]
    yield from aligned(columns, rows)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("trace", metavar="TRACE", nargs="+", help="with gate inputs, to predict")
    parser.add_argument("--predictor", metavar="FILE", help="of moejax train-predictor, stride 1")
    parser.add_argument("--forest", metavar="FILE", help="of moejax train-predictor … forest")
    parser.add_argument("--model", metavar="MODEL", help="the traces', to reuse its gates")
    parser.add_argument("--resident", default="0.25", help="of all experts (%(default)s)")
    parser.add_argument("--costs", default="1,0,16,1,8", help="in µs (%(default)s)")
    parser.add_argument("--loads", metavar="µs", help="of a load, instead of the one in --costs")
    parser.add_argument("--steps", type=int, help="at most so many of a trace, evenly spread")
    parser.add_argument("--json", action="store_true", help="a JSON line for each arm")
    return parser


class Routed(NamedTuple):
    """Steps of a trace, and what they were predicted to be."""

    work: Work
    frequency: np.ndarray
    """int[L, E] of the profile."""


def _work(routed: Routed, share: float) -> Work:
    capacity = round(share * routed.frequency.size)
    return routed.work._replace(resident=hot_table(routed.frequency, capacity))


class Predictors(NamedTuple):
    """Who predicts, of those that were given."""

    networks: Learned | None
    forests: ExpertFlow | None
    router: np.ndarray | None
    """float32[L, D, E]"""


def _predictors(args: argparse.Namespace, trace: Trace) -> Predictors:
    """Those of the arguments. Raises UserError or ValueError for files of another model, and for a
    trace without what they predict from."""
    header = trace.header
    networks = forests = router = None
    if args.predictor is not None:
        networks = read(args.predictor)
        check_fitted([networks], header.config_digest)
        if networks.fitted.setting("stride") != 1:
            raise UserError(f"{args.predictor}: its stride is not 1; train it with --stride 1")
    if args.forest is not None:
        if args.model is None:
            raise UserError("forests set right what the model's gates say: name it with --model")
        forests = forests_of(args.forest)
        check_fitted([forests], header.config_digest)
    if args.model is not None:
        router = routers_of(args.model, header.config_digest)
    found = Predictors(networks, forests, router)
    if any(each is not None for each in found):
        lacks = [] if header.gate_input else ["gate inputs"]
        lacks += ["weights"] if "token.weights" in header.absent else []
        if lacks:
            raise UserError(
                f"{trace.directory} has no {' and no '.join(lacks)} to predict from; record one "
                "with --trace-arrays gate_input, or leave out --predictor, --forest and --model"
            )
    return found


def _said(
    predictors: Predictors, trace: Trace, rows: np.ndarray
) -> Iterator[tuple[str, int, int, np.ndarray]]:
    """(predictor, layer, layers ahead, float32[N, E]): what each says of rows int[N] of a trace."""
    networks, forests, router = predictors
    if all(each is None for each in predictors):
        return  # a trace need not have what to predict from
    header, ids = trace.header, trace.array("token.ids")[rows]
    for layer in range(header.layers - 1):
        some = samples(trace, layer, 1).of(rows)
        if networks is not None:
            own = of_layer(networks.fitted.arrays, layer)
            yield "learned", layer, 1, scores(own, some.gate_input, some.ids, some.weights)
        last = header.layers - 1 - layer
        if router is not None:
            for d in range(1, min(REACH, last) + 1):
                yield "gate", layer, d, gate_scores(some.gate_input, router[layer + d])
        if forests is not None and router is not None:
            for d in range(1, min(forests.fitted.setting("reach"), last) + 1):
                yield FOREST, layer, d, predicted_rows(forests, some, ids, layer, d, router)


def _routed(args: argparse.Namespace, trace: Trace) -> Routed:
    """Decode steps of the trace's last fifth of requests."""
    header = trace.header
    learned, _, last = split(trace, (0.6, 0.2))
    if "token.phase" not in header.absent:
        last = last & (trace.array("token.phase") == KINDS.index("decode"))
    rows = np.flatnonzero(last)
    if not len(rows):
        raise UserError(f"{trace.directory} has no decode steps in the last fifth of its requests")
    ids = trace.array("token.ids")
    steps = np.repeat(np.arange(trace.steps), trace.array("step.tokens"))[rows]
    places = np.unique(steps)
    if args.steps is not None and args.steps < len(places):
        places = places[np.linspace(0, len(places) - 1, args.steps).astype(int)]
        keep = np.isin(steps, places)
        rows, steps = rows[keep], steps[keep]
    tokens = np.stack([routed_counts(ids[rows][steps == p], header.experts) for p in places])
    predicted = {"right": right_predictions(tokens, REACH)}
    given = _predictors(args, trace)
    reach = {"learned": 1, "gate": REACH}
    if given.forests is not None:
        reach[FOREST] = given.forests.fitted.setting("reach")
    for name, layer, d, of_rows in _said(given, trace, rows):
        shape = (*tokens.shape[:2], reach[name], header.experts)
        best = np.argsort(-of_rows, axis=1, kind="stable")[:, None, : header.top_k]
        counts = [routed_counts(best[steps == place], header.experts)[0] for place in places]
        predicted.setdefault(name, np.zeros(shape, tokens.dtype))[:, layer, d - 1] = counts
    after = successors(ids[learned], header.experts, header.top_k)
    nobody = np.zeros(tokens.shape[1:], bool)
    work = Work(tokens, nobody, predicted, after, header.top_k)
    return Routed(work, routed_counts(ids[learned], header.experts))
