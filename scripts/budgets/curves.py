"""The budget's arithmetic: what its controllers cost, and how right its curves are.

python -m scripts.budgets curves controller [--batches 1,8,32] [--layers 48 --experts 128 --top-k 8]
python -m scripts.budgets curves halves [--seeds 10]

`controller`: µs a step, amortised, of the pure code (policies' `decide`) at STEP_END and at a
turn's end every --turn steps, on routing that is made beforehand; the goal is 250 µs on one core.
Time is the thread's, so that other processes do not count.
`halves`: the curve of a stationary stream's first half (its first quarter only warms up), against
what the pager misses in the second; mean relative error with its 95% interval over seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Costs, Moment, Observation, Policy, Spec
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.simulate.weighted_pager import WeightedPager
from host_offload.sizing.miss_curves import CurveCounts
from host_offload.traces.generators import routing_generator
from scripts.parts.commands import new_parser, refusing
from scripts.parts.intervals import bootstrap
from scripts.parts.text_table import aligned, show

GOAL_US = 250.0
EXPERT, PAGE, PAGE_TOKENS = 9 << 20, 16 * 96 << 10, 16
"""Bytes of Qwen3-30B-A3B: an expert, and a page of 16 tokens."""
SESSIONS, TURN_PAGES = 32, 200
"""The controller's KV stream: sessions that return in turn, with contexts of 3200 tokens."""
Table = tuple[list[tuple[str, str]], list[dict[str, Any]]]
"""Columns and lines."""


@refusing(ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    columns, lines = {"controller": controller, "halves": halves}[args.what](args)
    show(args.json, lines, aligned(columns, lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    modes = parser.add_subparsers(dest="what", required=True)

    def mode(name: str, layers: int) -> argparse.ArgumentParser:
        parser = modes.add_parser(name)
        for size, value in (("layers", layers), ("experts", 128), ("top-k", 8)):
            parser.add_argument(f"--{size}", type=int, default=value, help=f"default: {value}")
        parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
        return parser

    cost = mode("controller", 48)
    numbers: Any = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    cost.add_argument("--batches", type=numbers, default=[1, 8, 32], metavar="B,…")
    cost.add_argument("--steps", type=int, default=1024, help="default: 1024")
    cost.add_argument("--turn", type=int, default=64, help="steps between two turns' ends")
    split = mode("halves", 16)
    split.add_argument("--seeds", type=int, default=10, help="default: 10")
    split.add_argument("--steps", type=int, default=4000, help="default: 4000")
    split.add_argument("--batch", type=int, default=1, help="default: 1")
    return parser


# ---- controller


def controller(args: argparse.Namespace) -> Table:
    lines = []
    for batch in args.batches:
        ids = [step.ids for step in _generator(args).steps(batch, args.steps)]
        for name, policy in policies().items():
            lines.append({"policy": name, "batch": batch, **timed(policy, ids, args)})
    columns = [
        ("policy", "{policy}"),
        ("batch", "{batch}"),
        ("step µs", "{step_us:.0f}"),
        ("turn's end µs", "{turn_us:.0f}"),
        ("amortised µs/step", "{amortised_us:.0f}"),
        ("steps", "{steps}"),
        ("≤ 250", "{within}"),
    ]
    return columns, lines


def policies() -> dict[str, Policy]:
    return {
        "mv_wsa": MvWsa(),
        "mv_wsa, marginal": MvWsa(allocation="marginal"),
        "mv_wsa, optimal": MvWsa(allocation="optimal"),
        "peak_headroom": PeakHeadroom(),
        "layer_cells, marginal": LayerCells(interval="64 steps"),
        "joint": JointBudget(),
    }


def timed(policy: Policy, ids: Sequence[np.ndarray], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over steps and over turns of one core; amortised: all of the time by the steps."""
    told = spec(args)
    state, rng = policy.init(told), np.random.default_rng(0)
    missed = rng.random((args.layers, args.experts)) < 0.03
    cells = np.full(args.layers, args.experts // 2, np.int32)
    seconds: dict[Moment, list[float]] = {Moment.STEP_END: [], Moment.TURN_END: []}
    for number, rows in enumerate(ids):
        turn = number // args.turn
        held = np.stack([np.full(TURN_PAGES, turn % SESSIONS), np.arange(TURN_PAGES)], axis=1)
        ends = (number + 1) % args.turn == 0
        for moment in (Moment.STEP_END, *((Moment.TURN_END, Moment.INTERVAL) if ends else ())):
            if moment not in policy.moments:
                continue
            seen = Observation(
                moment=moment,
                step=number,
                age=1,
                interval=turn,
                turn=turn,
                layer=-1,
                seconds=0.02 * number + 1e-3 * rng.random(),
                ids=rows,
                phase=np.ones(len(rows), np.uint8),
                missed=missed,
                bucket=len(rows),
                compiled=False,
                cells=cells,
                kv_pages=6400,
                kv_used=int(rng.integers(2000, 6000)),
                kv_swapped=100,
                kv_refs=held,
                running=len(rows),
                waiting=2,
                waiting_tokens=4000,
                costs=told.costs,
            )
            began = time.thread_time()
            state, _ = policy.decide(state, seen)
            key = Moment.STEP_END if moment == Moment.STEP_END else Moment.TURN_END
            seconds[key].append(time.thread_time() - began)
    total = sum(map(sum, seconds.values()))
    amortised = total / len(ids) * 1e6
    return {
        "step_us": float(np.median(seconds[Moment.STEP_END])) * 1e6,
        "turn_us": float(np.median(seconds[Moment.TURN_END])) * 1e6,
        "amortised_us": amortised,
        "steps": len(ids),
        "turns": len(ids) // args.turn,
        "within": bool(amortised <= GOAL_US),
    }


def spec(args: argparse.Namespace) -> Spec:
    costs = Costs(
        fill=np.array([0.0, 1 / 48e9]),
        stage=np.zeros(2),
        gpu_expert=np.zeros((1, 2)),
        cpu_expert=np.zeros(2),
        step_s={rows: 0.004 + 5e-4 * rows for rows in (16, 32, 48, 64)},
        attention_s=0.0,
        prefill_s_per_token=1e-4,
        kv_swap_s_per_byte=1 / 48e9,
    )
    return Spec(
        layers=args.layers,
        experts=args.experts,
        top_k=args.top_k,
        hidden=2048,
        page_bytes=PAGE,
        page_tokens=PAGE_TOKENS,
        budget_bytes=4200 * EXPERT,
        slot_bytes=EXPERT,
        kv_floor_bytes=256 * PAGE,
        staging_bytes=16 * EXPERT,
        seed=0,
        driver="device",
        version_bytes={"dense": np.full(args.layers, EXPERT)},
        min_cells=np.zeros(args.layers, np.int32),
        cell_bound=args.experts,
        stage_entries=8,
        costs=costs,
    )


# ---- halves


def halves(args: argparse.Namespace) -> Table:
    """Errors of each number of cells, and of all of them together."""
    cells = [args.experts * i // 16 for i in (2, 4, 6, 8, 10, 12)]
    errors = np.array([half_errors(args, cells, seed) for seed in range(args.seeds)])
    lines = [
        {"cells": c, **interval(errors[:, i]), "seeds": args.seeds} for i, c in enumerate(cells)
    ]
    lines.append({"cells": "all", **interval(errors.mean(axis=1)), "seeds": args.seeds})
    columns = [
        ("cells", "{cells}"),
        ("mean |error|", "{error:.2%}"),
        ("95% from", "{low:.2%}"),
        ("to", "{high:.2%}"),
        ("signed", "{signed:+.2%}"),
        ("seeds", "{seeds}"),
    ]
    return columns, lines


def half_errors(args: argparse.Namespace, cells: Sequence[int], seed: int) -> np.ndarray:
    """float64[len(cells)]: (predicted − measured) / measured misses of the second half."""
    half = args.steps // 2
    counts = CurveCounts(args.layers, args.experts)
    sets = list(step_sets(args, seed))
    for step, active in enumerate(sets[:half]):
        counts.add(active, counted=step >= half // 2)
    curve = counts.curves().misses.sum(axis=0) / (half - half // 2)
    found = []
    for c in cells:
        pager = WeightedPager(np.full(args.layers, c), args.experts, (1, 0, 0), args.steps)
        missed = [np.count_nonzero(pager.reference(active).missing) for active in sets]
        measured = np.mean(missed[half:])
        found.append((curve[c] - measured) / measured)
    return np.array(found)


def interval(errors: np.ndarray) -> dict[str, float]:
    """Mean of |errors| with its bootstrap interval over seeds."""
    size = np.abs(errors)
    low, high = bootstrap(size, np.mean)
    return {
        "error": float(size.mean()),
        "low": low,
        "high": high,
        "signed": float(errors.mean()),
    }


def _generator(args: argparse.Namespace) -> Any:
    return routing_generator("qwen3-like", args.layers, args.experts, args.top_k)


def step_sets(args: argparse.Namespace, seed: int) -> Iterator[np.ndarray]:
    layer = np.arange(args.layers)[:, None]
    for step in _generator(args).steps(args.batch, args.steps, seed):
        active = np.zeros((args.layers, args.experts), bool)
        active[layer, step.ids] = True
        yield active
