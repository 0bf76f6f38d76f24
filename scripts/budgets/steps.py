"""What a resize adds to a step, while requests run.

NPROC=1 python -m scripts.budgets steps [--resizes 200] [--shape S --layers N]

Times of single steps, beside those of the same step without resizes: no cell of a grid has them.
Sequences decode while slots go from KV to experts and back, a third of what is beside their KV at
once, a move every few steps; the time between the results of two steps, of steps that a resize
touches and of the others. Rounds with resizes and rounds of the same prompts with either split held
take turns; tokens must be the same in all. Goal: p99 of a resize's steps, over at least --resizes
of them, ≤ 1.2 × the median of the run: decode steps of a full batch, every single one. What rounds
without resizes have says what the machine and the misses alone add. Timed on this machine, by the
engine's own loop. NPROC=1 keeps XLA on one thread of a CPU: handing parts of a step from thread to
thread takes longer and longest now and then. --shape demo --layers 48 has longer steps than the
model demo, random weights. Minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Policy, Spec
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.random_model import expert_layout, random_model, shape
from moejax.device import select_device
from moejax.engine.control import control_of
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.sizes import parse_size
from moejax.start.build import start_engine
from moejax.start.options import Options
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.controllers import start_controller
from scripts.parts.text_table import aligned

GOAL = 1.2
LENGTH, PROMPT = 256, 96
"""Tokens of a sequence, and of its prompt."""

SHORTEST = 16
"""Tokens that a sequence generates at least."""


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    found = list(steps(args))
    print(*found, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--model", default="demo", help="(default: demo)")
    add("--json", action="store_true", help="JSON lines, no table")
    add("--resizes", type=int, default=200, help="at least (default: 200)")
    add("--every", type=int, default=4, help="steps between two (default: 4)")
    add("--batch", type=int, default=8, help="sequences (default: 8)")
    add("--length", type=int, default=LENGTH, help=f"tokens of one, {PROMPT} of them its prompt")
    add("--shape", help="random weights of this shape instead of --model")
    add("--layers", type=int, help="of the shape (default: all)")
    add("--memory", help="of the arena (default: 4MiB; of a shape: half of its experts)")
    return parser


@dataclasses.dataclass(frozen=True)
class ToAndFro:
    """Moves as many slots as it can between experts and KV, every so many steps."""

    every: int
    kv_pages: tuple[int, int]
    cells: tuple[tuple[int, ...], ...]

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


@dataclasses.dataclass
class Times:
    """Decode steps of a kind."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    misses: list[int] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)
    """To the median of the same step, of the same prompts, in the rounds without resizes (for one
    of those: in the others)."""


Round = list[tuple[bool, bool, float, int]]
"""decode_times of some prompts."""


def steps(args: argparse.Namespace) -> Iterator[str]:
    positive(args, "resizes", "every", "batch")
    if args.length <= PROMPT + SHORTEST:
        raise UserError(f"--length must be above {PROMPT + SHORTEST}, got {args.length}")
    with engine_of(args) as engine:
        arena = engine.scheduler.arena
        layers, per_slot = len(cells_of(arena)), arena.layout.pages_per_slot
        least = -(-args.batch * -(-args.length // arena.layout.page.block_size) // per_slot)
        most = least + max((arena.slots - least) // 3, 1)
        if most >= arena.slots:
            raise UserError("the memory holds the KV of the sequences and no more; raise --memory")
        # The same place in memory is KV's and experts' by turns.
        splits = [
            ([min((arena.slots - slots) // layers, arena.experts)] * layers, slots)
            for slots in (least, most)
        ]
        policy = ToAndFro(
            args.every,
            (least * per_slot, most * per_slot),
            tuple(tuple(cells) for cells, _ in splits),
        )
        times = timed_steps(engine, args, policy, splits)
        stats, device = engine.resizer.stats(), engine.runner.device.device_kind
    yield from _report(args, device, times, stats)


@contextmanager
def engine_of(args: argparse.Namespace) -> Iterator[Engine]:
    """An engine with everything compiled that a resize needs."""
    sizes: dict[str, Any] = dict(
        max_model_len=args.length, max_num_seqs=args.batch, max_num_batched_tokens=512
    )
    # So that pages can be moved; the policy itself follows once the arena is known.
    probe = ToAndFro(args.every, (0, 0), ((), ()))
    if args.shape is None:
        if args.layers is not None:
            raise UserError("--layers are of a --shape")
        memory = args.memory or "4MiB"
        with LLM(args.model, memory=memory, policies=[probe], progress=False, **sizes) as llm:
            yield llm.engine
        return
    config, device = shape(args.shape, args.layers), select_device()
    memory = parse_size(args.memory) if args.memory else None
    if memory is None:
        records = sum(config.moe_layers) * config.num_experts
        memory = records * expert_layout(config).nbytes // 2
    loaded = random_model(config, "auto", device, 0)
    try:
        options = Options(args.shape, memory=memory, policies=[probe], **sizes)
        engine, _ = start_engine(loaded, options, device)
        engine.runner.wait_compiled(everything=True)
        yield engine
    finally:
        loaded.store.delete()


def timed_steps(
    engine: Engine,
    args: argparse.Namespace,
    policy: Policy,
    splits: list[tuple[list[int], int]],
) -> dict[str, Times]:
    """Rounds of the same prompts: with resizes, and with each of the two splits held. A slot that
    moves before step t is dispatched keeps the host busy while t − 1 runs and the device before it
    runs t, so both are steps of a resize. Timed are decode steps with a full batch: the queue is
    never empty while they run, and with fewer rows a step has less to do."""
    rng = np.random.default_rng(0)
    times = {name: Times() for name in ("of a resize", "between resizes", "without resizes")}
    rounds, resizes = 0, 0
    while resizes < args.resizes or rounds < 2:
        # Those that end sooner leave holes between others' pages: so slots have to be emptied.
        shape_ = 3 * args.batch, PROMPT
        prompts = rng.integers(1, engine.runner.config.vocab_size, shape_).tolist()
        lengths = rng.integers(SHORTEST, args.length - PROMPT, 3 * args.batch).tolist()
        arms = [(policy, splits[0]), (None, splits[0]), (policy, splits[1]), (None, splits[1])]
        said = []
        played: list[tuple[bool, Round]] = []
        first = rounds % len(arms)
        for arm, split in arms[first:] + arms[:first]:
            use(engine, None)
            engine.set_budget(*split)
            use(engine, arm)
            found, tokens = decode_times(engine, prompts, lengths)
            said.append(tokens)
            if rounds:  # the first brings whatever compiles late
                resizes += sum(moved for moved, *_ in found)
                played.append((arm is None, found))
        _add(times, played)
        if any(tokens != said[0] for tokens in said):
            raise UserError("tokens differ between splits, which must never be")
        # Between rounds: a bar that redraws itself would be timed as well.
        print(f"{resizes} of {args.resizes} resizes", file=sys.stderr)
        rounds += 1
        if rounds > 5 and not resizes:
            raise UserError("no slot moved; raise --memory")
    return times


def _add(times: dict[str, Times], played: list[tuple[bool, Round]]) -> None:
    """played: rounds of the same prompts, each with whether its split was held. Steps of the same
    place compute the same rows; only what they miss differs, between arms and, little, with what
    the round before left in the slots."""
    seconds = np.array([[seconds for *_, seconds, _ in found] for _, found in played])
    held = np.array([fixed for fixed, _ in played], bool)
    for which, (fixed, found) in enumerate(played):
        others = held & (np.arange(len(played)) != which)
        usual = np.median(seconds[others], axis=0)
        for place, kind in enumerate(_kinds(found, fixed)):
            times[kind].seconds.append(seconds[which, place])
            times[kind].misses.append(found[place][-1])
            times[kind].ratios.append(seconds[which, place] / float(usual[place]))


def _kinds(found: Round, fixed: bool) -> list[str]:
    """Which of Times each step of a round belongs to."""
    if fixed:
        return ["without resizes"] * len(found)
    near = [now or after for now, after, *_ in found]
    return ["of a resize" if one else "between resizes" for one in near]


def use(engine: Engine, policy: Policy | None) -> None:
    """This policy in an idle engine, as new; None: none."""
    engine.control = None
    if policy is not None:
        length = engine.scheduler.max_model_len
        controller = start_controller(engine.runner, [policy], max_model_len=length, seed=0)
        engine.control = control_of(engine.runner, controller, engine.resizer)


def decode_times(
    engine: Engine, prompts: list[list[int]], lengths: list[int]
) -> tuple[Round, list[list[int]]]:
    """For each decode step of a full batch after another one: whether slots moved before it and
    before the step that follows, the seconds between both results, its misses; and the tokens of
    all requests."""
    resizer, seen, before = engine.resizer, [], engine.resizer.slots_moved
    rows = engine.scheduler.max_num_seqs

    def listen(step: Any) -> None:
        nonlocal before
        moved = resizer.slots_moved > before
        full = step.kind == "decode" and len(step.work.rows) == rows
        seen.append((step.number, full, moved, step.output))
        before = resizer.slots_moved

    engine.events.clear()
    engine.listener = listen
    try:
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        while not engine.idle:
            engine.step()
    finally:
        engine.listener = None
    if any(request.finish_reason != "length" for request in requests):
        raise UserError("a request was not served to its end, which must never be")
    read = {event.step: event.seconds for event in engine.events if event.what == "read"}
    found = []
    for (earlier, full, _, _), now, after in zip(seen, seen[1:], seen[2:], strict=False):
        number, _, moved, output = now
        if full and now[1] and number in read and earlier in read:
            paging = output.paging
            misses = int(np.sum(paging.fills + paging.read_through))
            found.append((moved, after[2], read[number] - read[earlier], misses))
    return found, [list(request.output) for request in requests]


def _report(
    args: argparse.Namespace, device: str, times: dict[str, Times], stats: dict[str, Any]
) -> Iterator[str]:
    resized = [*times["of a resize"].seconds, *times["between resizes"].seconds]
    median = float(np.median(resized))
    lines = []
    for name, found in times.items():
        if not found.seconds:
            continue
        p50, p99 = np.percentile(found.seconds, [50, 99])
        same50, same99 = np.percentile(found.ratios, [50, 99])
        lines.append(
            {
                "steps": name,
                "count": len(found.seconds),
                "ms": p50 * 1e3,
                "ms_p99": p99 * 1e3,
                "ratio": p99 / median,
                "same_step": same50,
                "same_step_p99": same99,
                "misses": float(np.mean(found.misses)),
            }
        )
    ratio = lines[0]["ratio"]
    quiet = lines[-1]["ms_p99"] / lines[-1]["ms"]
    verdict = {
        "ratio": ratio,
        "goal": GOAL,
        "within": bool(ratio <= GOAL),
        "without": quiet,
    }
    if args.json:
        yield from (json.dumps({"device": device, **line, **stats}) for line in lines)
        yield json.dumps({"steps": "verdict", **verdict})
        return
    what = args.model if args.shape is None else f"{args.shape}, layers {args.layers or 'all'}"
    yield f"{what} on {device}, batch {args.batch}: {stats}"
    yield from aligned(
        [
            ("steps", "{steps}"),
            ("count", "{count}"),
            ("median ms", "{ms:.3f}"),
            ("p99 ms", "{ms_p99:.3f}"),
            ("p99 / median of the run", "{ratio:.2f}"),
            ("/ the same step without: median", "{same_step:.3f}"),
            ("p99", "{same_step_p99:.2f}"),
            ("misses", "{misses:.1f}"),
        ],
        lines,
    )
    yield (
        f"p99 of a resize's steps / median: {ratio:.2f}, goal {GOAL}; p99 / median without resizes "
        f"(what the machine and the misses add): {quiet:.2f}"
    )
    if quiet > GOAL:
        yield "steps without resizes exceed the goal as well: the machine is too busy to tell"
