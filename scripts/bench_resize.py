"""Budgets that move while requests run: what a resize adds to a step, and what it is worth.

python scripts/bench_resize.py steps [--resizes 200] [--shape S --layers N]
python scripts/bench_resize.py bursts [--seeds 10]

`steps`: sequences decode while slots go from KV to experts and back, a move every few steps; the
time between the results of two steps, of steps before which slots moved and of the others, in one
run. Goal: p99 of the first ≤ 1.2 × the median of all. The p99 of the others says what the machine
itself adds. Timed on this machine, by the engine's own loop.

`bursts`: conversations with bursty arrivals through the engine, embedded model, live resize against
fixed splits, paired over arrival seeds. Steps, misses, KV moved and requests are the engine's own;
time is priced (--decode-ms, --sweep-ms, --miss-ms, --page-ms: stated, by default those of a large
model over PCIe), so throughput is predicted, not measured. For each seed the fixed split that is
best on the other seeds is the one to compare with; the best in hindsight is shown too. Tokens must
be the same with all of them. Goal: lower 95% bound of the ratio ≥ 0.98.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from replay_sessions import VirtualClock, replay
from text_table import aligned

from host_offload.budget import BudgetError
from host_offload.policies.mv_wsa import MvWsa
from host_offload.policies.peak_headroom import PeakHeadroom
from host_offload.policy import Decision, Moment, Observation, Policy, Spec
from host_offload.split import MissCosts
from moejax import LLM, SamplingParams, UserError
from moejax.budgets import cells_of
from moejax.control import start_control
from moejax.workloads import Workload, conversations, synthetic_corpus

LIVE = ("mv_wsa", "peak_headroom")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        found = list({"steps": steps, "bursts": bursts}[args.what](args))
    except (UserError, BudgetError) as error:
        print(f"bench_resize: error: {error}", file=sys.stderr)
        return 2
    for line in found:
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="what", required=True)
    one = modes.add_parser("steps")
    two = modes.add_parser("bursts")
    for mode in (one, two):
        mode.add_argument("--model", default="demo", help="(default: demo)")
        mode.add_argument("--json", action="store_true", help="JSON lines, no table")
    one.add_argument("--resizes", type=int, default=200, help="at least (default: 200)")
    one.add_argument("--every", type=int, default=4, help="steps between two (default: 4)")
    one.add_argument("--batch", type=int, default=4, help="sequences (default: 4)")
    one.add_argument("--memory", default="4MiB", help="of the arena (default: 4MiB)")
    two.add_argument("--seeds", type=int, default=10, help="of arrivals (default: 10)")
    two.add_argument("--sessions", type=int, default=10, help="of a seed (default: 10)")
    two.add_argument("--turns", type=int, default=4, help="of a session (default: 4)")
    two.add_argument("--memory", default="4MiB", help="of the arena (default: 4MiB)")
    two.add_argument("--caps", default="4,6,8,9", help="of the fixed splits (default: 4,6,8,9)")
    two.add_argument("--live", default="mv_wsa", choices=LIVE, help="(default: mv_wsa)")
    for name, ms, text in (
        ("decode", 4.0, "a decode step without misses"),
        ("sweep", 20.0, "a sweep without misses"),
        ("miss", 0.4, "an expert over the link"),
        ("page", 0.3, "a KV page over the link"),
    ):
        two.add_argument(f"--{name}-ms", type=float, default=ms, help=f"{text} (default: {ms})")
    return parser


# ---- what a resize adds to a step


@dataclasses.dataclass(frozen=True)
class ToAndFro:
    """Moves as many slots as it can between experts and KV, every so many steps."""

    every: int
    kv_pages: tuple[int, int]
    cells: tuple[tuple[int, ...], tuple[int, ...]]

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"cells", "kv_pages"})

    def init(self, spec: Spec) -> int:
        return 0

    def decide(self, state: int, observation: Observation) -> tuple[int, Decision]:
        turn, rest = divmod(state, self.every)
        if rest or not turn:
            return state + 1, Decision()
        cells = np.array(self.cells[turn % 2], np.int32)
        return state + 1, Decision(cells=cells, kv_pages=self.kv_pages[turn % 2])


def steps(args: argparse.Namespace) -> Iterator[str]:
    if min(args.resizes, args.every, args.batch) < 1:
        raise UserError("--resizes, --every and --batch must be at least 1")
    length, prompt = 256, 96
    limits: dict[str, Any] = dict(
        max_model_len=length, max_num_seqs=args.batch, max_num_batched_tokens=512
    )
    # The same place in memory is KV's and experts' by turns; the policy follows once it is known.
    probe = ToAndFro(args.every, (0, 0), ((), ()))
    with LLM(args.model, memory=args.memory, policies=[probe], progress=False, **limits) as llm:
        engine, arena = llm.engine, llm.engine.scheduler.arena
        layers, per_slot = len(cells_of(arena)), arena.layout.pages_per_slot
        least = -(-args.batch * -(-length // arena.layout.page.block_size) // per_slot)
        most = least + max((arena.slots - least) // 3, 1)
        if most >= arena.slots:
            raise UserError("the memory holds the KV of the sequences and no more; raise --memory")
        splits = [
            np.full(layers, min((arena.slots - n) // layers, arena.experts)).tolist()
            for n in (least, most)
        ]
        use(llm, ToAndFro(args.every, (least * per_slot, most * per_slot), tuple(splits)))  # type: ignore[arg-type]
        times = timed_steps(llm, args, prompt, length)
    yield from _step_report(args, llm.device.device_kind, times, engine.resizer.stats())


def timed_steps(
    llm: LLM, args: argparse.Namespace, prompt: int, length: int
) -> dict[str, list[float]]:
    """Seconds between the results of two decode steps, by whether slots moved before the later."""
    engine, resizer = llm.engine, llm.engine.resizer
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=length - prompt, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {"moved": [], "others": []}
    for round_ in itertools.count():
        prompts = rng.integers(1, llm.config.vocab_size, (args.batch, prompt)).tolist()
        kinds: dict[int, str] = {}
        moved: dict[int, bool] = {}
        before = resizer.slots_moved

        def seen(step: Any, kinds=kinds, moved=moved) -> None:
            nonlocal before
            kinds[step.number] = step.kind
            moved[step.number] = resizer.slots_moved > before
            before = resizer.slots_moved

        engine.listener = seen
        engine.events.clear()
        llm.generate(prompts, params)
        engine.listener = None
        if not round_:
            continue  # the first brings whatever compiles late
        read = {event.step: event.seconds for event in engine.events if event.what == "read"}
        for number, seconds in read.items():
            decode = kinds.get(number) == kinds.get(number - 1) == "decode"
            if decode and number - 1 in read:
                which = "moved" if moved[number] else "others"
                times[which].append(seconds - read[number - 1])
        if len(times["moved"]) >= args.resizes:
            return times
        if round_ > 5 and not times["moved"]:
            raise UserError("no slot moved; raise --memory")
    return times


def _step_report(
    args: argparse.Namespace, device: str, times: dict[str, list[float]], stats: dict[str, Any]
) -> Iterator[str]:
    every = [*times["moved"], *times["others"]]
    median = float(np.median(every))
    lines = []
    for name, values in (*times.items(), ("all", every)):
        p50, p99 = np.percentile(values, [50, 99])
        lines.append(
            {
                "steps": name,
                "count": len(values),
                "ms": p50 * 1e3,
                "ms_p99": p99 * 1e3,
                "ratio": p99 / median,
            }
        )
    if args.json:
        yield from (json.dumps({"device": device, **line, **stats}) for line in lines)
        return
    yield f"{args.model} on {device}, batch {args.batch}: {stats}"
    yield from aligned(
        [
            ("steps", "{steps}"),
            ("count", "{count}"),
            ("median ms", "{ms:.3f}"),
            ("p99 ms", "{ms_p99:.3f}"),
            ("p99 / median of all", "{ratio:.2f}"),
        ],
        lines,
    )


# ---- what it is worth


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
        prices = args.decode_ms, args.sweep_ms, args.miss_ms, args.page_ms
        self._now += float((counts - self._seen) @ np.array(prices)) / 1e3
        self._seen = counts


def bursts(args: argparse.Namespace) -> Iterator[str]:
    if args.seeds < 2:
        raise UserError("--seeds must be at least 2: the fixed split is chosen on the others")
    try:
        caps = [int(cap) for cap in args.caps.split(",")]
    except ValueError as error:
        raise UserError(f"--caps are numbers, not {args.caps!r}") from error
    costs = MissCosts(args.miss_ms / 1e3, 2 * args.page_ms / 1e3)  # out and back again
    live = MvWsa(calibrate=False, costs=costs) if args.live == "mv_wsa" else PeakHeadroom()
    limits: dict[str, Any] = dict(max_model_len=768, max_num_seqs=6, max_num_batched_tokens=512)
    rates, tokens = [], []
    with LLM(args.model, memory=args.memory, progress=False, policies=[live], **limits) as llm:
        arena = llm.engine.scheduler.arena
        layers = len(cells_of(arena))
        legal = [c for c in caps if 0 <= c <= arena.experts and c * layers < arena.slots]
        floor = -(-(limits["max_model_len"] // 16) // arena.layout.pages_per_slot)
        legal = [c for c in legal if arena.slots - c * layers >= floor]
        if not legal:
            raise UserError(f"none of --caps {args.caps} leaves KV a sequence of 768 tokens")
        for seed in range(args.seeds):
            row, said = [], []
            for cap in [*legal, None]:
                use(llm, None if cap is not None else live)
                start = legal[len(legal) // 2] if cap is None else cap
                llm.engine.set_budget([start] * layers, arena.slots - start * layers)
                rate, ids = play(llm, args, seed)
                row.append(rate)
                said.append(ids)
            if any(ids != said[0] for ids in said):
                raise UserError("tokens differ between splits, which must never be")
            rates.append(row)
            tokens.append(sum(map(len, said[0])))
        stats = llm.engine.resizer.stats()
    yield from _burst_report(args, legal, np.array(rates), tokens, stats)


def play(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[float, list[tuple[int, ...]]]:
    """(generated tokens a priced second, the tokens of every turn) of one seed's conversations."""
    workload = Workload(
        sessions=args.sessions,
        turns=args.turns,
        arrival="bursty",
        rate=8.0,
        document_tokens=160,
        think_s=1.0,
        answer_tokens=24,
        seed=seed,
    )
    found = conversations(workload, synthetic_corpus(llm.config.vocab_size, seed))
    clock = PricedClock(llm, args)
    lines = list(replay(llm, found, clock, temperature=0.0, seed=seed))
    lines.sort(key=lambda line: (line["session"], line["turn"]))
    ids = [tuple(line["output_token_ids"]) for line in lines]
    return sum(map(len, ids)) / clock.now(), ids


def use(llm: LLM, policy: Policy | None) -> None:
    """This policy in an idle engine, as new; None: none."""
    engine = llm.engine
    engine.control = None
    if policy is not None:
        length = engine.scheduler.max_model_len
        engine.control = start_control(
            engine.runner, [policy], max_model_len=length, seed=0, routers=[]
        )
        assert engine.control is not None
        engine.control.set_budget = engine.try_budget


def _burst_report(
    args: argparse.Namespace,
    caps: Sequence[int],
    rates: np.ndarray,
    tokens: Sequence[int],
    stats: dict[str, Any],
) -> Iterator[str]:
    """rates [seeds, fixed splits + live]."""
    fixed, live = rates[:, :-1], rates[:, -1]
    seeds = len(rates)
    others = [np.delete(fixed, seed, axis=0).mean(axis=0).argmax() for seed in range(seeds)]
    chosen = fixed[np.arange(seeds), others]
    lines = []
    for name, base in (("best on other seeds", chosen), ("best in hindsight", fixed.max(axis=1))):
        ratio = np.log(live / base)
        # Student's t for the mean of the logarithms, paired by seed.
        half = _t95(seeds - 1) * ratio.std(ddof=1) / math.sqrt(seeds)
        mean, low, high = np.exp([ratio.mean(), ratio.mean() - half, ratio.mean() + half])
        lines.append({"against": name, "ratio": mean, "low": low, "high": high, "seeds": seeds})
    if args.json:
        for seed, row in enumerate(rates.tolist()):
            every = dict(zip([*map(str, caps), args.live], row, strict=True))
            yield json.dumps({"seed": seed, "tokens": tokens[seed], "tokens_per_s": every})
        yield from (json.dumps({**line, **stats}) for line in lines)
        return
    yield f"{args.model}, {args.memory}: {args.sessions} sessions of {args.turns} turns; predicted"
    means = {f"cap {cap}": fixed[:, i].mean() for i, cap in enumerate(caps)}
    shown = ", ".join(f"{n} {rate:.1f}" for n, rate in {**means, args.live: live.mean()}.items())
    yield f"tokens a priced second, mean over seeds: {shown}"
    yield f"the last seed's resizes: {stats}; every token the same under all splits"
    yield from aligned(
        [
            ("live against fixed,", "{against}"),
            ("ratio", "{ratio:.3f}"),
            ("95% from", "{low:.3f}"),
            ("to", "{high:.3f}"),
            ("seeds", "{seeds}"),
        ],
        lines,
    )


def _t95(degrees: int) -> float:
    """Two-sided 95% point of Student's t."""
    known = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14]
    return known[degrees - 1] if degrees <= len(known) else 1.96 + 2.5 / degrees


if __name__ == "__main__":
    sys.exit(main())
