"""What placing missed experts on two processors takes, by rule and predictor, simulated (PreScope).

python -m scripts.policies placement TRACE [--predictor FILE] [--model MODEL] [--resident 0.25]
    [--costs 1,0,16,1,8] [--json]

The steps of the last fifth of a trace's requests are played on an accelerator, a CPU beside the
weights and a link (`simulate_placement`); the hot table is of the first three fifths. All arms have
the same residents, but the one without a hot table, which has as many drawn at random (mean of 10
draws). --costs: microseconds of a row on the CPU, of starting an expert there, of a load, of an
expert on the accelerator, of attention. The default is no machine: a load is worth 16 rows on the
CPU. --predictor: of `moejax train-predictor`; --model: the trace's model, whose gates are reused;
without them arms that need them are left out. No clock is read, so figures are of the simulator.

Columns: mean of a step, what it is of the first arm's; prefetches that were begun a layer; median
and largest difference of both processors in a layer; share of the time that the link was busy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.placement.presched import PlacementCosts, hot_table
from host_offload.policies.placement.rivals import SCHEDULERS
from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.policy import read
from host_offload.policies.prefetch.llapor.training import samples, split
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.simulate.placement import Setting, right_predictions, simulate_placement
from host_offload.traces.reader import Trace, read_trace
from moejax.commands.train_predictor import routers_of
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

GROUP = 8
"""Buffers of a prefetch group."""

DRAWS = 10

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


class Work(NamedTuple):
    """What is played."""

    tokens: np.ndarray
    """int[T, L, E]"""
    resident: np.ndarray
    """bool[L, E]: the hot table."""
    predicted: dict[str, np.ndarray]
    """Predictor → int[T, L, 1, E]"""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        seconds = [float(each) * 1e-6 for each in args.costs.split(",")]
        if len(seconds) != 5 or min(seconds) < 0 or seconds[2] == 0:
            raise UserError(f"--costs are five, and a load takes time, not {args.costs}")
        if not 0 <= args.resident <= 1:
            raise UserError(f"--resident lies in 0…1, not {args.resident}")
        work = _work(args, read_trace(args.trace))
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    lines = list(played(work, PlacementCosts(*seconds)))
    for line in lines:
        line["ratio"] = line["step_us"] / lines[0]["step_us"]
    if args.json:
        for line in lines:
            print(json.dumps(line))
        return 0
    rows = work.tokens[:, 0].sum() / len(work.tokens)
    print(f"{len(work.tokens)} steps of {rows:.1f} uses a layer; {work.resident.sum()} resident")
    print(*aligned(COLUMNS, lines), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("trace", metavar="TRACE", help="with gate inputs, for predictions")
    parser.add_argument("--predictor", metavar="FILE", help="of moejax train-predictor, stride 1")
    parser.add_argument("--model", metavar="MODEL", help="the trace's, to reuse its gates")
    parser.add_argument("--resident", type=float, default=0.25, help="of all experts (%(default)s)")
    parser.add_argument("--costs", default="1,0,16,1,8", help="in µs (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON line for each arm")
    return parser


def _work(args: argparse.Namespace, trace: Trace) -> Work:
    """The trace's last fifth of requests, by steps."""
    header = trace.header
    learned, _, rows = split(trace, (0.6, 0.2))
    ids = trace.array("token.ids")
    frequency = routed_counts(ids[learned], header.experts)
    steps = np.repeat(np.arange(trace.steps), trace.array("step.tokens"))[rows]
    places = np.unique(steps)
    tokens = np.stack([routed_counts(ids[rows][steps == p], header.experts) for p in places])
    predicted = {"right": right_predictions(tokens, 1)}
    if args.predictor is not None:
        policy = read(args.predictor)
        if (
            policy.fitted.config_digest != header.config_digest
            or policy.fitted.setting("stride") != 1
        ):
            raise UserError(f"{args.predictor} is of another model, or its stride is not 1")
        predicted["learned"] = np.zeros_like(predicted["right"])
    router = None if args.model is None else routers_of(args.model, header.config_digest)
    if router is not None:
        predicted["gate"] = np.zeros_like(predicted["right"])
    if (router is not None or args.predictor is not None) and not header.gate_input:
        raise UserError(f"{args.trace} has no gate inputs to predict from")
    for layer in range(header.layers - 1) if len(predicted) > 1 else ():
        some = samples(trace, layer, 1).of(rows)
        found = {}
        if args.predictor is not None:
            own = of_layer(policy.fitted.arrays, layer)
            found["learned"] = scores(own, some.gate_input, some.ids, some.weights)
        if router is not None:
            found["gate"] = gate_scores(some.gate_input, router[layer + 1])
        for name, of_rows in found.items():
            best = np.argsort(-of_rows, axis=1, kind="stable")[:, None, : header.top_k]
            for i, place in enumerate(places):
                counts = routed_counts(best[steps == place], header.experts)
                predicted[name][i, layer, 0] = counts[0]
    capacity = round(args.resident * header.layers * header.experts)
    return Work(tokens, hot_table(frequency, capacity), predicted)


def played(work: Work, costs: PlacementCosts) -> Iterator[dict[str, Any]]:
    """A line for each arm."""
    none = {"fiddler", "fiddler-code", "llama.cpp", "no-prediction"}
    for predictor in [p for p in ("learned", "gate", "right") if p in work.predicted]:
        for arm in SCHEDULERS:
            if arm not in none:
                yield _line(arm, predictor, work, [work.resident], _setting(arm, costs))
    for arm in sorted(none):
        yield _line(arm, "", work, [work.resident], _setting(arm, costs))
    best = next(p for p in ("learned", "gate", "right") if p in work.predicted)
    setting, random = _setting("prescope", costs), np.random.default_rng(0)
    drawn = [
        random.permutation(work.resident.ravel()).reshape(work.resident.shape) for _ in range(DRAWS)
    ]
    yield _line("prescope, no hot table", best, work, drawn, setting)
    blocking = dataclasses.replace(setting, asynchronous=False)
    yield _line("prescope, no asynchronous loads", best, work, [work.resident], blocking)


def _setting(arm: str, costs: PlacementCosts) -> Setting:
    return Setting(SCHEDULERS[arm], costs, GROUP)


def _line(
    arm: str, predictor: str, work: Work, residents: list[np.ndarray], setting: Setting
) -> dict[str, Any]:
    predicted = work.predicted[predictor or "right"]
    steps = [s for r in residents for s in simulate_placement(work.tokens, predicted, r, setting)]
    layers = [times for step in steps for times in step]
    gaps = np.array([abs(times.cpu_s - times.accelerator_s) for times in layers])
    seconds = sum(times.seconds for times in layers)
    return {
        "arm": arm,
        "predictor": predictor,
        "step_us": seconds / len(steps) * 1e6,
        "ahead": float(np.mean([times.begun for times in layers])),
        "gap_us": float(np.median(gaps)) * 1e6,
        "largest_us": float(gaps.max()) * 1e6,
        "link": sum(times.link_s for times in layers) / seconds,
    }
