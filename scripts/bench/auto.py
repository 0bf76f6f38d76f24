"""`--policy auto` beside each of its arms: seconds of the same work, by link, memory and load.

python -m scripts.bench auto [--model DIR] [--cells CELL,…] [--ablations] [--simulated]
python -m scripts.bench auto --driver host [--prefetch NAME] [--model DIR] …

Each cell runs the same requests on one engine under each arm alone and under auto, by turns, from a
cold cache and with everything compiled; tokens must be equal. Orders are drawn, each followed by
its reverse. Arms that took the same steps and moved the same bytes are one arm, whose time in a
round is their mean: they differ by noise alone.

The regret of a round is auto's time over that of the best arm in the same round, less 1. The best
arm is the one whose median over the other rounds is the least, since the least of several noisy
times is below all their means. It leans low: where two arms are close, the other rounds may choose
the slower one. Figures are medians over rounds; `regret in` and `lru in` hold them with 90%. Those
of fewer than 5 rounds are the whole range, which holds them less often and decides nothing. Short
loads have more rounds, and so, up to --most, have cells whose interval does not say whether the
regret is 5%. The mean regret of all cells is known better than that of one.

`own` is the share of auto's time that its Python takes between steps, and `at best` the time of the
best arm of each phase over that of the best arm, less 1, by rounds too. `tau` compares the mean of
auto's prices with the arms' measured times (Kendall).

Loads: `chat` is one conversation, `batch` 32 requests at once, `long` two prompts that fill most of
the context, `shift` all three and a chat again. A cell is shown as soon as it was measured.
`--ablations` runs auto also without correction, without hysteresis (as if changes cost nothing) and
without horizon (as if each choice held for 512 steps). `--counted` takes the steps and bytes of one
round instead of its time; they are the same in every run. `--simulated` predicts instead, for 48
layers of 128 experts on stated hardware, with generated routing. `--keep FILE` keeps the times of
cells there and measures only those that it lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Observation, Policy
from host_offload.control.step_record import Glance
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.simulate import auto as choices
from host_offload.simulate.auto import SPLIT, Auto, Watched, choose_arm, is_ahead
from host_offload.simulate.prediction import predict
from host_offload.traces.reader import Trace, read_trace
from moejax import LLM, SamplingParams, UserError
from moejax.costs.hardware import stated_costs
from moejax.engine.loop import Engine
from moejax.traces.generated_traces import write_generated_trace
from scripts.parts.bench_engine import compilations, log_to
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import running

LOADS = ("chat", "batch", "long", "shift")
ABLATIONS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "no correction": ("correct", lambda *known: ((1.0, 1.0), known[4])),
    "no hysteresis": ("choose_arm", lambda prices, horizon: choose_arm(prices, horizon=10**9)),
    "no horizon": ("choose_arm", lambda prices, horizon: choose_arm(prices, horizon=512)),
}
"""Name → the function of host_offload.simulate.auto that another one replaces."""
STEP_S, PREFILL_S = 4e-3, 40e-3
"""Of a step of `tri` on two quiet cores, about, for --counted."""
NEAR, BEHIND = 0.05, 0.1
"""Shares that the regret and the time over LRU's should not exceed."""
MISSED, FEWEST = 0.1, 5
"""Probability that an interval does not hold the median, and rounds from which on it can be so."""
Phase = tuple[int, int, int]
"""Requests, tokens of each prompt, tokens of each answer."""
Seconds = Mapping[str, Sequence[Any]]
"""Way → round → of each phase, or of all."""


def phases_of(load: str, longest: int, tokens: int) -> list[Phase]:
    """Returns the phases of a load, one after the other.

    - `longest`: most tokens of a sequence.
    - `tokens`: decode steps of the load.
    """
    chat, part = (1, 24, tokens), tokens // 2
    batch, long = (32, 24, part), (2, longest - part - 1, part)
    return {
        "chat": [(1, 24, 2 * tokens)],
        "batch": [batch],
        "long": [long],
        "shift": [chat, batch, long, chat],
    }[load]


def prompts_of(phase: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Returns prompts of random tokens, no two alike."""
    rng = np.random.default_rng((phase, count, length))
    return rng.integers(1, vocabulary, (count, length)).tolist()


def run_load(
    llm: LLM, phases: Sequence[Phase], counted: bool = False
) -> tuple[list[float], list[Any]]:
    """Returns (seconds of each phase, tokens) of a load.

    - `counted`: by counted_s, whatever the clock says.
    """
    vocabulary, answers, seconds = llm.engine.runner.config.vocab_size, [], []
    for number, (count, length, tokens) in enumerate(phases):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = prompts_of(number, count, length, vocabulary)
        began, before = time.perf_counter(), counted_s(llm) if counted else 0.0
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter() - began
        seconds.append(counted_s(llm) - before if counted else ended)
        answers.append([output.outputs[0].token_ids for output in outputs])
    return seconds, answers


def counted_s(llm: LLM) -> float:
    """Returns the seconds that the engine's steps and bytes so far take by --counted: STEP_S and
    PREFILL_S a step, and bytes at the link's rate."""
    statistics, queue = llm.engine.statistics, llm.engine.runner.steps.queue
    assert queue is not None
    steps = STEP_S * statistics.steps["decode"] + PREFILL_S * statistics.steps["prefill"]
    return sum(statistics.moved.values()) / queue.rate + steps


@dataclasses.dataclass(frozen=True)
class Counted(Auto):
    """Auto by another clock, so that a busy machine changes no choice."""

    clock: Callable[[], float] = time.perf_counter

    def rests(self, state: Watched, glance: Glance) -> Watched | None:
        return super().rests(state, glance._replace(seconds=self.clock()))

    def decide(self, state: Watched, seen: Observation) -> tuple[Watched, Decision]:
        shown = object.__new__(Observation)
        shown.__dict__.update(vars(seen), seconds=self.clock())
        return super().decide(state, shown)


def auto_of(llm: LLM) -> Auto:
    """Returns the policy of an LLM. Raises UserError where its memory leaves nothing to choose."""
    for policy in llm.plan.settings.policies:
        if isinstance(policy, Auto):
            return policy
    raise UserError(f"{llm.plan.budget.notes[-1]}; lower --memories")


def fresh(policy: Auto) -> Auto:
    """Returns the policy without what earlier runs learned."""
    order = sorted(
        policy.arms,
        key=lambda arm: (is_ahead(arm), SPLIT not in arm, not arm.startswith("lru"), arm),
    )
    return dataclasses.replace(policy, arms=tuple(order), ratios=(1.0, 1.0), pool_s=0.0)


def begin(llm: LLM, policy: Policy) -> None:
    """Gives an idle engine the split of its start, a cold cache and this policy."""
    plan = llm.plan
    llm.engine.control = None  # or its split would stay the policy's
    llm.engine.set_budget(list(plan.cells), plan.budget.kv_slots)
    llm.engine.begin_anew(plan.spec, [policy], list(plan.cells))


def ways_of(policy: Auto, ablations: bool) -> dict[str, Policy]:
    """Returns a cell's policies by name: each arm alone, auto, and auto with parts left out."""
    ways: dict[str, Policy] = {
        arm: POLICIES[arm]() if arm in POLICIES else dataclasses.replace(policy, arms=(arm,))
        for arm in policy.arms
    }
    ways["auto"] = policy
    if ablations:
        ways |= dict.fromkeys(ABLATIONS, policy)
    return ways


@contextmanager
def ablated(way: str) -> Iterator[None]:
    """Leaves a part of auto out in a block, where the way is an ablation."""
    name, other = ABLATIONS.get(way, ("correct", choices.correct))
    kept = getattr(choices, name)
    setattr(choices, name, other)
    try:
        yield
    finally:
        setattr(choices, name, kept)


@contextmanager
def timed(engine: Engine, methods: Sequence[str]) -> Iterator[list[float]]:
    """Yields a list of the seconds of each call of these methods in the block."""
    spent: list[float] = []

    def timed_call(method: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent.append(time.perf_counter() - began)

    for name in methods:
        setattr(engine, name, functools.partial(timed_call, getattr(engine, name)))
    try:
        yield spent
    finally:
        for name in methods:
            delattr(engine, name)


@dataclasses.dataclass
class Runs:
    """What the rounds of a cell gave."""

    seconds: dict[str, list[Any]]
    own: list[float] = dataclasses.field(default_factory=list)
    """Share that auto's Python took of each round."""
    said: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What auto said of the last round."""
    work: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Of each way: steps and bytes of the last round."""
    tokens: list[Any] | None = None

    def run(self, llm: LLM, name: str, policy: Policy, phases: Sequence[Phase], args) -> None:
        """Runs a way once, and again if it compiled something. Raises UserError if tokens
        differ."""
        own = ("_tell", "_before_step") if name == "auto" else ()
        compiled = -1
        while compiled != len(compilations()):
            begin(llm, policy)
            compiled, before = len(compilations()), work_of(llm)
            with ablated(name), timed(llm.engine, own) as spent:
                seconds, tokens = run_load(llm, phases, args.counted)
        self.seconds[name].append(seconds)
        # What moves between layers is not counted.
        apart = SPLIT in name, is_ahead(name) and name
        self.work[name] = (*apart, *np.subtract(work_of(llm), before).tolist())
        self.tokens = tokens if self.tokens is None else self.tokens
        if tokens != self.tokens:
            raise UserError(f"{name} changed a token")
        if name == "auto":
            control = llm.engine.control
            assert control is not None
            self.said = control.controller.stats()["said"]["auto"]
            self.own.append(sum(spent) / sum(seconds))

    def same(self) -> dict[str, str]:
        """Returns, for each arm, the first one that does the same work."""
        arms = sorted(arms_of(self.seconds), key=lambda arm: (not arm.startswith("lru"), arm))
        first = {self.work[arm]: arm for arm in reversed(arms)}
        return {arm: first[self.work[arm]] for arm in arms}


def work_of(llm: LLM) -> tuple[int, ...]:
    """Returns the steps of an engine so far, and the bytes that they moved."""
    statistics = llm.engine.statistics
    return *statistics.steps.values(), sum(statistics.moved.values())


def enough(seconds: Seconds, args: argparse.Namespace) -> bool:
    """Whether a cell needs no more rounds. Counts are the same in each."""
    totals = phases_by_round(seconds).values()
    spent = min(float(times.sum()) for times in totals)
    if args.counted or len(seconds["auto"]) < args.rounds or spent < args.least:
        return args.counted
    return spent >= args.most or not _may_be_either(figures(seconds))


def _may_be_either(cell: Mapping[str, Any]) -> bool:
    """Whether a cell's interval does not say on which side of NEAR its regret is."""
    low, high = cell["regret_in"]
    return cell["rounds"] < FEWEST or low <= NEAR < high


def measure(
    llm: LLM, load: str, args: argparse.Namespace, before: Seconds | None = None
) -> dict[str, Any]:
    """Runs one cell. Returns its times and what auto said. Raises UserError if tokens differ.

    - `before`: times of earlier rounds.
    """
    policy = fresh(auto_of(llm))
    if args.counted:
        settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        policy = Counted(**settings, clock=functools.partial(counted_s, llm))
    phases = phases_of(load, llm.engine.scheduler.max_model_len, args.tokens)
    ways = ways_of(policy, args.ablations)
    runs = Runs({name: list(before[name]) if before else [] for name in ways})
    for turn in itertools.count(len(runs.seconds["auto"])):
        for name in order(sorted(ways), turn):
            runs.run(llm, name, ways[name], phases, args)
        seconds = joined(runs.seconds, same := runs.same())
        if enough(seconds, args):
            break
    return {
        "seconds": runs.seconds,
        "same": same,
        "own": None if args.counted else float(np.median(runs.own)),
        "switch_mb": runs.said["switched_experts"] * llm.engine.runner.link_bytes[0] / 1e6,
        **said_of(seconds, runs.said),
    }


def order(names: Sequence[str], turn: int) -> list[str]:
    """Returns the names as drawn for each two turns, in the second one backwards, so that a machine
    that gets slower favours none."""
    drawn = np.random.default_rng(turn // 2).permutation(len(names))
    return [names[int(i)] for i in drawn[:: -1 if turn % 2 else 1]]


# ---- figures


def phases_by_round(seconds: Seconds) -> dict[str, np.ndarray]:
    """Returns way → float64[rounds, phases], one phase where a round has the time of all."""
    whole = any(np.size(of_round) == 1 for rounds in seconds.values() for of_round in rounds)
    join = np.sum if whole else np.asarray
    return {
        name: np.array([join(of_round) for of_round in rounds]).reshape(len(rounds), -1)
        for name, rounds in seconds.items()
    }


def joined(seconds: Seconds, same: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the times with arms that do the same work as one, by the name of the first: in each
    round their mean.

    - `same`: Runs.same().
    """
    times: dict[str, list[Sequence[Any]]] = {}
    for name, rounds in seconds.items():
        times.setdefault(same.get(name, name), []).append(rounds)
    return {
        first: [np.mean(of_round, axis=0) for of_round in zip(*each, strict=True)]
        for first, each in times.items()
    }


def joined_of(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The same of a row; of older files and predictions nobody knows what is the same."""
    return joined(row["seconds"], row.get("same", {}))


def arms_of(seconds: Seconds) -> list[str]:
    return [name for name in seconds if name != "auto" and name not in ABLATIONS]


def best_by_others(arms: np.ndarray) -> np.ndarray:
    """Returns the arm that is the fastest in the other rounds, for each round: int64[rounds]. A
    sole round is its own other.

    - `arms`: float64[arms, rounds].
    """
    rounds = arms.shape[1]
    others = [np.delete(arms, r, axis=1) if rounds > 1 else arms for r in range(rounds)]
    return np.array([np.argmin(np.median(times, axis=1)) for times in others])


def regrets(arms: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the regret of each round, float64[rounds].

    - `arms`: float64[arms, rounds].
    - `times`: float64[rounds].
    """
    return times / arms[best_by_others(arms), np.arange(len(times))] - 1


def interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the order statistics between which the median is but for MISSED, whatever the
    distribution; those furthest apart where the values are too few for that."""
    ordered, count = np.sort(values), len(values)
    outside = 2 * np.cumsum([math.comb(count, i) for i in range(count)]) / 2**count
    left = max(int(np.sum(outside <= MISSED)) - 1, 0)
    return float(ordered[left]), float(ordered[-1 - left])


def mean_of(cells: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Returns the geometric mean of regrets over cells, and between what it is but for MISSED if
    rounds are drawn anew."""
    rng, logs = np.random.default_rng(0), [np.log1p(regrets) for regrets in cells]
    drawn = [np.mean([rng.choice(each, len(each)).mean() for each in logs]) for _ in range(1000)]
    low, high = np.quantile(drawn, [MISSED / 2, 1 - MISSED / 2])
    mean, low, high = np.expm1([np.mean([each.mean() for each in logs]), low, high]).tolist()
    return mean, low, high


def figures(seconds: Seconds) -> dict[str, Any]:
    """Returns the figures of a cell that follow from its times. None: the best arms of phases where
    the times are not by phase."""
    phases = phases_by_round(seconds)
    totals = {name: times.sum(axis=1) for name, times in phases.items()}
    names, auto = arms_of(seconds), totals["auto"]
    arms = np.array([totals[name] for name in names])
    medians = np.median(arms, axis=1)
    rounds = np.arange(len(auto))
    parts = np.array([phases[name] for name in names])
    at_best = None
    if parts.shape[2] > 1:
        chosen = [part[best_by_others(part), rounds] for part in np.moveaxis(parts, 2, 0)]
        at_best = float(np.median(regrets(arms, np.sum(chosen, axis=0))))
    regret, to_lru = regrets(arms, auto), auto / totals["lru"] - 1
    return {
        "best": names[int(np.argmin(medians))],
        "best_s": float(medians.min()),
        "auto_s": float(np.median(auto)),
        "regret": float(np.median(regret)),
        "regrets": regret.tolist(),
        "regret_in": interval(regret),
        "to_lru": float(np.median(to_lru)),
        "lru_in": interval(to_lru),
        "at_best": at_best,
        "rounds": len(auto),
        **{
            name: float(np.median(regrets(arms, totals[name])))
            for name in ABLATIONS
            if name in seconds
        },
    }


def said_of(seconds: Seconds, said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what auto said of a cell, its prices compared with the arms' times."""
    prices, phases = said["mean_step_s"], phases_by_round(seconds)
    times = {name: float(np.median(phases[name].sum(axis=1))) for name in arms_of(seconds)}
    tau = kendall([prices[name] for name in times], [*times.values()]) if prices else float("nan")
    return {"tau": tau, "switches": said["switches"], "why": said["why"]}


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Kendall's τ of two rankings: the share of pairs in the same order, less the rest."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    signs = [np.sign((one[i] - one[j]) * (other[i] - other[j])) for i, j in pairs]
    return float(np.mean(signs)) if signs else float("nan")


# ---- simulated

SHAPE: Mapping[str, int] = {"layers": 48, "experts": 128, "top_k": 8}
RECORD = 2 * 3 * 2048 * 768
"""Bytes of an expert of Qwen3-30B-A3B."""
MACHINES = ("RTX 4090", "H100", "RTX 4060 Ti")
"""Stated hardware, the last one for a laptop."""
SHARES = (0.125, 0.25, 0.5)
"""Of the experts that memory holds."""
TOLD = {
    "version_bytes": {"dense": RECORD},
    "slot_bytes": RECORD,
    "slots": 48 * 128,
    "hidden": 2048,
    "page_bytes": 1 << 16,
    "page_tokens": 16,
    "kv_floor_bytes": 0,
    "driver": "device",
    "seed": 0,
}
"""What policies are told."""
SIMULATED = {"chat": (1, 8, 0), "batch": (32, 1, 0), "long": (2, 4, 0), "shift": (1, 8, 2)}
"""Load → sequences, their tokens and those of a phase of topics (0: none), in multiples of
--tokens."""


def simulate(directory: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of predicted cells: loads × machines × shares."""
    for load, (sequences, long, phase) in SIMULATED.items():
        kind = "phases" if phase else "qwen3-like"
        more: dict[str, Any] = {"phase_tokens": phase * args.tokens} if phase else {}
        write_generated_trace(
            directory / load,
            kind,
            **SHAPE,
            sequences=sequences,
            tokens=long * args.tokens,
            about=TOLD,
            **more,
        )
        trace = read_trace(directory / load)
        for machine, share in itertools.product(MACHINES, SHARES):
            cell = {"link": machine, "memory": f"{share:.1%}", "load": load}
            yield cell | predicted(trace, machine, share, sequences, args.ablations)


def predicted(
    trace: Trace, machine: str, share: float, rows: int, ablations: bool
) -> dict[str, Any]:
    costs = stated_costs(machine, **SHAPE, expert_bytes=RECORD, rows=rows)
    cells = round(share * SHAPE["experts"])
    policy = Auto((cells,) * SHAPE["layers"], costs, bare=True)
    seconds: dict[str, list[float]] = {}
    said: dict[str, Any] = {}
    for name, way in ways_of(policy, ablations).items():
        with ablated(name):
            run = predict(trace, costs, policies=(way,), cells=cells)
        seconds[name] = [float(run.seconds.sum())]
        if name == "auto":
            said = (run.simulation.control or {})["said"]["auto"]
    moved = said["switched_experts"] * RECORD / 1e6
    return {"seconds": seconds, "own": None, "switch_mb": moved, **said_of(seconds, said)}


# ---- the command


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    positive(args, "tokens", "rounds", "least", "most")
    if args.counted and args.driver == "host":
        raise UserError(
            "--counted counts what steps wait for, and prefetches run beside them; with --driver "
            "host leave it out"
        )
    columns = (
        *((name, f"{{{name}}}") for name in ("link", "memory", "load", "best")),
        ("best s", "{best_s:.2f}"),
        ("auto s", "{auto_s:.2f}"),
        ("regret", "{regret:+.1%}"),
        ("regret in", "{regret_in[0]:+.1%} {regret_in[1]:+.1%}"),
        ("to lru", "{to_lru:+.1%}"),
        ("lru in", "{lru_in[0]:+.1%} {lru_in[1]:+.1%}"),
        ("tau", "{tau:.2f}"),
        ("switches", "{switches}"),
        ("MB", "{switch_mb:.1f}"),
        ("rounds", "{rounds}"),
        ("own", "{own:+.1%}"),
        ("at best", "{at_best:+.1%}"),
        *((name, f"{{{name}:+.1%}}") for name in ABLATIONS if args.ablations),
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        cells = simulate(Path(directory), args) if args.simulated else measured(args)
        shown = (row | figures(joined_of(row)) for row in cells)
        kept = (rows.append(row) or row for row in shown)
        lines = map(json.dumps, kept) if args.json else running(columns, kept)
        for line in lines:
            print(line, flush=True)
    if not args.json:
        print(*summary(rows), sep="\n")
    return 0


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of measured cells: links × memories × loads, also those of --keep."""
    every = [args.links.split(","), args.memories.split(","), args.loads.split(",")]
    names = {":".join(cell) for cell in itertools.product(*every)}
    chosen = set(args.cells.split(",")) if args.cells else names
    if unknown := chosen - names:
        raise UserError(
            f"--cells has no cell {min(unknown)!r}; cells are LINK:MEMORY:LOAD of --links "
            f"{args.links}, --memories {args.memories} and --loads {args.loads}"
        )
    names = "model", "context", "tokens", "ablations", "counted", "driver", "prefetch"
    of = {name: getattr(args, name) for name in names}
    kept = {
        tuple(row["cell"]): row
        for row in kept_rows(args.keep)
        if of.items() <= {"driver": "device", "prefetch": None, **row["of"]}.items()
        and "seconds" in row
    }
    done = {cell for cell, row in kept.items() if not args.go_on or enough(joined_of(row), args)}
    for link, memory in itertools.product(*every[:2]):
        loads = [load for load in every[2] if f"{link}:{memory}:{load}" in chosen]
        yield from (kept[link, memory, load] for load in loads if (link, memory, load) in done)
        loads = [load for load in loads if (link, memory, load) not in done]
        if not loads:
            continue
        with opened(args, link, memory) as llm:
            for load in loads:
                before = kept.get((link, memory, load), {}).get("seconds")
                found = measure(llm, load, args, before)
                row = {"link": link, "memory": memory, "load": load, **found}
                log_to(args.keep, {"cell": [link, memory, load], "of": of, **row})
                yield row


@contextmanager
def opened(args: argparse.Namespace, link: str, memory: str) -> Iterator[LLM]:
    """An engine whose programs are compiled."""
    # A pool has the cells of a budget: none go to KV.
    amount: dict[str, Any] = {"memory" if args.driver == "device" else "expert_budget": memory}
    with LLM(
        args.model,
        policy="auto",
        driver=args.driver,
        prefetch=args.prefetch,
        **amount,
        transfers=f"queue,rate={link}",
        max_num_seqs=32,
        max_model_len=args.context,
        enable_prefix_caching=False,
        progress=False,
    ) as llm:
        assert llm.engine.control is not None  # whose policies may read routers
        llm.plan = dataclasses.replace(llm.plan, spec=llm.engine.control.controller.spec)
        begin(llm, auto_of(llm))
        llm.engine.runner.wait_compiled(everything=True)
        every = phases_of("shift", args.context, args.tokens)[:3]
        run_load(llm, [(count, length, 4) for count, length, _ in every])
        yield llm


def kept_rows(path: Path | None) -> list[dict[str, Any]]:
    """Returns the lines of a file of --keep, if it is there."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the cells say together."""
    near = sum(row["regret"] <= NEAR for row in rows)
    timed = [row for row in rows if row["own"] is not None]  # others' figures are exact
    open_ = sum(map(_may_be_either, timed))
    worst = max(row["to_lru"] for row in rows)
    behind = sum(row["to_lru"] > BEHIND for row in rows)
    shifted = [row for row in rows if row["load"] == "shift"]
    tau = [row["tau"] for row in rows if not np.isnan(row["tau"])]
    found = [
        f"regret at most {NEAR:.0%} in {near} of {len(rows)} cells, either way in {open_}; "
        f"at worst {worst:+.1%} to lru, more than {BEHIND:.0%} behind it in {behind}",
        f"median tau {statistics.median(tau):.2f}" if tau else "no prices were named",
    ]
    mean, low, high = mean_of([row["regrets"] for row in rows])
    found.append(f"mean regret {mean:+.1%}, with 90% {low:+.1%} to {high:+.1%}")
    moved, switches = (sum(row[name] for row in rows) for name in ("switch_mb", "switches"))
    found.append(f"{switches} changes moved {moved:.1f} MB")
    if shifted:
        ahead = sum(row["regret"] < 0 for row in shifted)
        few = [row for row in timed if row["rounds"] < FEWEST]
        surely = sum(row["regret_in"][1] < 0 for row in shifted if row not in few)
        found.append(
            f"ahead of the best arm in {ahead} of {len(shifted)} cells that shift, "
            f"with 90% in {surely}"
        )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--model", default="demo", help="(default: %(default)s)")
    add("--links", default="500MB/s,1GB/s,4GB/s", metavar="RATE,…", help="(default: %(default)s)")
    add(
        "--memories",
        default="12MiB,20MiB,32MiB",
        metavar="SIZE,…",
        help="of experts and KV; with --driver host expert budgets (default: %(default)s)",
    )
    add("--driver", choices=("device", "host"), default="device", help="(default: %(default)s)")
    add("--prefetch", metavar="NAME", help="the arm beside evictions, with --driver host")
    add("--loads", default=",".join(LOADS), metavar="NAME,…", help="(default: %(default)s)")
    add("--cells", metavar="LINK:MEMORY:LOAD,…", help="only these of them")
    add("--context", type=int, default=512, help="most tokens of a sequence")
    add("--tokens", type=int, default=96, help="decode steps of a load (default: %(default)s)")
    add("--rounds", type=int, default=FEWEST, help="at least (default: %(default)s)")
    add("--least", type=float, default=2.0, help="seconds of each arm (default: %(default)s)")
    add("--most", type=float, default=8.0, help="more are for 5%% alone (default: %(default)s)")
    add("--keep", type=Path, metavar="FILE", help="lines of JSON")
    add("--go-on", action="store_true", help="kept cells get the rounds that they lack")
    add("--ablations", action="store_true", help="auto also with parts left out")
    add("--counted", action="store_true", help="count steps and bytes: for a busy machine")
    add("--simulated", action="store_true", help="48 layers of 128 experts on stated hardware")
    add("--json", action="store_true", help="one JSON object a cell")
    return parser
