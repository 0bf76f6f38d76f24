"""What live resizing is worth under bursty arrivals: the mode `bursts` of `resize`."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Policy
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.split import MissCosts, division_of
from host_offload.traces.reader import read_trace
from moejax import LLM, UserError
from moejax.engine.control import spec_of_engine
from moejax.engine.resize import cells_of
from moejax.traces.tracer import start_trace
from scripts.budgets.steps import use
from scripts.parts.replay import VirtualClock, replay
from scripts.parts.text_table import aligned
from scripts.parts.workloads import Workload, conversations, synthetic_corpus

LIVE = ("mv_wsa", "mv_wsa-trace", "peak_headroom")
LIMITS: dict[str, Any] = dict(max_model_len=768, max_num_seqs=6, max_num_batched_tokens=512)


def add_arguments(two: argparse.ArgumentParser) -> None:
    """Adds the options of the mode, but for those that all modes have."""
    two.add_argument("--seeds", type=int, default=20, help="of arrivals (default: 20)")
    two.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    two.add_argument(
        "--trace-seed",
        type=int,
        default=100,
        help="whose conversations are the trace of mv_wsa-trace (default: 100)",
    )
    two.add_argument("--sessions", type=int, default=10, help="of a seed (default: 10)")
    two.add_argument("--turns", type=int, default=4, help="of a session (default: 4)")
    two.add_argument("--memory", default="4MiB", help="of the arena (default: 4MiB)")
    two.add_argument("--caps", default="4,5,6,7,8", help="of the fixed splits (default: 4,5,6,7,8)")
    two.add_argument(
        "--live", default="mv_wsa,mv_wsa-trace", help=f"of {', '.join(LIVE)} (default: %(default)s)"
    )
    add_prices(two)


def add_prices(mode: argparse.ArgumentParser) -> None:
    for name, ms, text in (
        ("decode", 4.0, "a decode step without misses"),
        ("prefill", 20.0, "a prefill step without misses"),
        ("miss", 0.4, "an expert over the link"),
        ("page", 0.3, "a KV page over the link"),
    ):
        mode.add_argument(f"--{name}-ms", type=float, default=ms, help=f"{text} (default: {ms})")


class Arm(NamedTuple):
    name: str
    cap: int
    """To start with."""
    policy: Policy | None
    """None: a fixed split."""


class Played(NamedTuple):
    """What one seed's conversations came to."""

    rate: float
    """Generated tokens a priced second."""
    tokens: list[tuple[int, ...]]
    """The tokens of every turn that ended."""
    unserved: int
    """Turns that were refused, failed, or got fewer tokens than they asked for."""
    why: str = ""


class PricedClock(VirtualClock):
    """Time by what the engine's steps moved, at stated prices."""

    def __init__(self, llm: LLM, args: argparse.Namespace):
        super().__init__(0.0)
        self.engine, self.args = llm.engine, args
        self._seen = self._counts()

    def _counts(self) -> np.ndarray:
        statistics, cache = self.engine.statistics, self.engine.scheduler.cache
        misses = statistics.paging["fills"] + statistics.paging["read_through"]
        pages = cache.swapped_in + cache.swapped_out
        return np.array([statistics.steps["decode"], statistics.steps["prefill"], misses, pages])

    def step(self) -> None:
        counts, args = self._counts(), self.args
        prices = args.decode_ms, args.prefill_ms, args.miss_ms, args.page_ms
        self._now += float((counts - self._seen) @ np.array(prices)) / 1e3
        self._seen = counts


def bursts(args: argparse.Namespace) -> Iterator[str]:
    if args.seeds < 2:
        raise UserError("--seeds must be at least 2: the fixed split is chosen on the others")
    try:
        caps = [int(cap) for cap in args.caps.split(",")]
    except ValueError as error:
        raise UserError(f"--caps are numbers, not {args.caps!r}") from error
    names = args.live.split(",")
    if unknown := [name for name in names if name not in LIVE]:
        raise UserError(f"--live are of {', '.join(LIVE)}, not {unknown[0]!r}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if "mv_wsa-trace" in names and args.trace_seed in seeds:
        raise UserError("--trace-seed must be none of the seeds that are reported")
    # The first policy is there from the start, so that costs are asked for once.
    first = MvWsa(calibrate=False, costs=costs_of(args))
    with (
        tempfile.TemporaryDirectory(prefix="moejax-bursts-") as scratch,
        LLM(args.model, memory=args.memory, progress=False, policies=[first], **LIMITS) as llm,
    ):
        arms = _arms(llm, args, caps, names, Path(scratch))
        played = [[run(llm, args, arm, workload_of(args, seed)) for arm in arms] for seed in seeds]
        stats = llm.engine.resizer.stats()
    for seed, row in zip(seeds, played, strict=True):
        check(arms, row, seed)
    yield from _burst_report(args, arms, played, stats)


def costs_of(args: argparse.Namespace) -> MissCosts:
    return MissCosts(args.miss_ms / 1e3, 2 * args.page_ms / 1e3)  # out and back again


def _arms(
    llm: LLM, args: argparse.Namespace, caps: Sequence[int], names: Sequence[str], scratch: Path
) -> list[Arm]:
    """The fixed splits, then the live ones."""
    arena = llm.engine.scheduler.arena
    layers = len(cells_of(arena))
    floor = -(-(LIMITS["max_model_len"] // 16) // arena.layout.pages_per_slot)
    legal = [c for c in caps if 0 <= c <= arena.experts and arena.slots - c * layers >= floor]
    if not legal:
        raise UserError(f"none of --caps {args.caps} leaves KV a sequence of 768 tokens")
    arms = [Arm(f"cap {cap}", cap, None) for cap in legal]
    middle = legal[len(legal) // 2]
    for name in names:
        if name == "peak_headroom":
            arms.append(Arm(name, middle, PeakHeadroom()))
        elif name == "mv_wsa":
            arms.append(Arm(name, middle, MvWsa(calibrate=False, costs=costs_of(args))))
        else:
            # As LLM(budget="mv_wsa=TRACE", resize="mv_wsa") begins.
            directory = str(scratch / "trace")
            _record(llm, args, middle, directory)
            spec = spec_of_engine(llm.engine.runner, max_model_len=LIMITS["max_model_len"], seed=0)
            turns = turns_of(read_trace(directory))
            cap = configure(turns, division_of(spec), costs_of(args)).cap
            live = MvWsa(calibrate=False, costs=costs_of(args), trace=directory)
            arms.append(Arm(name, cap, live))
    return arms


def _record(llm: LLM, args: argparse.Namespace, cap: int, directory: str) -> None:
    """A trace of another seed's conversations under a fixed split."""
    set_split(llm, Arm("", cap, None))
    engine, length = llm.engine, llm.engine.scheduler.max_model_len
    spec = spec_of_engine(engine.runner, max_model_len=length, seed=0)
    tracer = start_trace(directory, engine.runner, spec, settings={})
    engine.tracer = tracer
    try:
        play(llm, args, workload_of(args, args.trace_seed))
    finally:
        tracer.close()
        engine.tracer = None


def set_split(llm: LLM, arm: Arm) -> None:
    """The arm's split and policy in an idle engine; no expert is resident and no KV held."""
    arena = llm.engine.scheduler.arena
    layers = len(cells_of(arena))
    use(llm.engine, None)
    llm.engine.set_budget([0] * layers, arena.slots)
    llm.engine.set_budget([arm.cap] * layers, arena.slots - arm.cap * layers)
    use(llm.engine, arm.policy)


def run(llm: LLM, args: argparse.Namespace, arm: Arm, workload: Workload) -> Played:
    set_split(llm, arm)
    return play(llm, args, workload)


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    return Workload(
        sessions=args.sessions,
        turns=args.turns,
        arrival="bursty",
        rate=8.0,
        document_tokens=160,
        think_s=1.0,
        answer_tokens=24,
        seed=seed,
    )


def play(llm: LLM, args: argparse.Namespace, workload: Workload) -> Played:
    """A workload's turns. A refusal ends them, and all that were left are unserved."""
    seed = workload.seed
    found = conversations(workload, synthetic_corpus(llm.config.vocab_size, seed))
    clock, lines, why = PricedClock(llm, args), [], ""
    try:
        for line in replay(llm, found, clock, temperature=0.0, seed=seed):
            lines.append(line)
    except UserError as error:
        why = str(error)
        for session in llm.engine.scheduler.sessions.all:
            llm.end_session(session.session_id)
    lines.sort(key=lambda line: (line["session"], line["turn"]))
    ids = [tuple(line["output_token_ids"]) for line in lines]
    wanted = {(turn.session, turn.index): turn.max_tokens for each in found for turn in each.turns}
    served = sum(line["output_tokens"] == wanted[line["session"], line["turn"]] for line in lines)
    return Played(sum(map(len, ids)) / clock.now(), ids, len(wanted) - served, why)


def check(arms: Sequence[Arm], played: Sequence[Played], seed: int) -> None:
    """Raises UserError where resizing leaves a turn unserved that a fixed split serves, or where
    tokens differ."""
    fewest = min(p.unserved for arm, p in zip(arms, played, strict=True) if arm.policy is None)
    for arm, found in zip(arms, played, strict=True):
        if arm.policy is not None and found.unserved > fewest:
            raise UserError(
                f"seed {seed}: {arm.name} leaves {found.unserved} turns unserved, a fixed split "
                f"{fewest}: {found.why or 'answers were cut short'}"
            )
    whole = [found.tokens for found in played if not found.unserved]
    if any(tokens != whole[0] for tokens in whole):
        raise UserError(f"seed {seed}: tokens differ between splits, which must never be")


def _burst_report(
    args: argparse.Namespace,
    arms: Sequence[Arm],
    played: Sequence[Sequence[Played]],
    stats: dict[str, Any],
) -> Iterator[str]:
    """played: of each seed, of each arm."""
    rates = np.array([[found.rate for found in row] for row in played])
    unserved = np.array([[found.unserved for found in row] for row in played])
    is_fixed = np.array([arm.policy is None for arm in arms])
    fixed, seeds = rates[:, is_fixed], len(rates)
    others = [np.delete(fixed, seed, axis=0).mean(axis=0).argmax() for seed in range(seeds)]
    chosen = fixed[np.arange(seeds), others]
    lines = []
    for column in np.flatnonzero(~is_fixed).tolist():
        for name, base in (
            ("best on other seeds", chosen),
            ("best in hindsight", fixed.max(axis=1)),
        ):
            lines.append(
                {
                    "live": arms[column].name,
                    "against": name,
                    **paired_ratio(rates[:, column], base),
                    "seeds": seeds,
                    "unserved": int(unserved[:, column].sum()),
                }
            )
    names = [arm.name for arm in arms]
    if args.json:
        for i, row in enumerate(rates.tolist()):
            every = dict(zip(names, row, strict=True))
            lost = dict(zip(names, unserved[i].tolist(), strict=True))
            seed = args.first_seed + i
            yield json.dumps({"seed": seed, "tokens_per_s": every, "unserved": lost})
        yield from (json.dumps({**line, **stats}) for line in lines)
        return
    turns = args.sessions * args.turns
    yield f"{args.model}, {args.memory}: {args.sessions} sessions of {args.turns} turns; predicted"
    means = zip(names, rates.mean(axis=0), strict=True)
    shown = ", ".join(f"{name} {rate:.1f}" for name, rate in means)
    yield f"tokens a priced second, mean over seeds: {shown}"
    lost = ", ".join(f"{n} {k}" for n, k in zip(names, unserved.sum(axis=0), strict=True))
    yield f"turns refused, failed or cut short, of {turns * seeds}: {lost}"
    starts = ", ".join(f"{arm.name} cap {arm.cap}" for arm in arms if arm.policy is not None)
    yield f"live starts at: {starts}; every token the same under all splits"
    yield from aligned(
        [
            ("live", "{live}"),
            ("against fixed,", "{against}"),
            ("ratio", "{ratio:.3f}"),
            ("95% from", "{low:.3f}"),
            ("to", "{high:.3f}"),
            ("worst seed", "{worst:.3f}"),
            ("seeds", "{seeds}"),
        ],
        lines,
    )


def paired_ratio(rates: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """rates / base, seed by seed: the geometric mean, its 95% interval (Student's t for the mean of
    the logarithms) and the worst seed."""
    ratio = np.log(rates / base)
    half = _t95(len(ratio) - 1) * ratio.std(ddof=1) / math.sqrt(len(ratio))
    mean, low, high = np.exp([ratio.mean(), ratio.mean() - half, ratio.mean() + half]).tolist()
    return {"ratio": mean, "low": low, "high": high, "worst": math.exp(ratio.min())}


def _t95(degrees: int) -> float:
    """Two-sided 95% point of Student's t."""
    known = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14]
    return known[degrees - 1] if degrees <= len(known) else 1.96 + 2.5 / degrees
