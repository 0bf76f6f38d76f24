"""Times of decode steps under every policy, in the engine, by docs/protocol.md.

python -m scripts.policies times DIR [--batches 1,8,32] [--expert-budget 50%] [--repeats 6] [--json]

Every policy has an engine of its own, all of one batch size at a time, and they take turns: one
repeat is one run of each. A run generates from the same prompts with the same seeds (tokens must
be equal, or the bench stops), short ones and long ones, whose beginnings engines keep between runs.
A first run of each is not counted. A step takes from the read of the one before it to its own;
steps that compile, and those next to a prefill step, are left out and counted.

A repeat's figure is the mean of its steps. Shown are the median over repeats and the order
statistics that hold it with 95% confidence; the same of the ratio to LRU with the same driver in
the same repeat, which a machine that is busy disturbs less. Policies that look between layers need
driver="host", whose steps cost more: compare within a driver. What is stochastic draws anew in each
run, at least 10 times. What learns was fitted to DIR's train trace, recorded where it is not there
(the command `compare` makes the same one). Nothing is tuned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.rules import name_of
from host_offload.policies.eviction.names import POLICIES
from host_offload.traces.reader import Trace, TraceError
from moejax import LLM, SamplingParams, UserError
from moejax.costs.rates import measure_link_rate
from moejax.engine.step_work import Step
from moejax.evaluate.experiments.intervals import median_interval
from scripts.parts.commands import new_parser, refuse
from scripts.parts.places import TEXTS, TRI
from scripts.parts.workloads import text_corpus
from scripts.policies.arms import SEEDS, Arm, arms
from scripts.policies.traces import TEST, TRAIN, recorded_trace, windows

BASELINES = {"device": "lru", "host": "lru (host)"}
"""Driver → the arm that its others are compared with."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one engine."""

    tokens: list[list[int]]
    seconds: list[float]
    """One for each decode step that counts."""
    left_out: int
    compiled: int
    """How many of the decode steps compiled."""
    misses: int
    """In all decode steps, as the next two."""
    steps: int
    ahead: float
    """Experts moved ahead of need in a step, prefill steps included."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        sizes = args.tokens - 4, args.prompt_tokens, args.sequences, *args.batches
        if min(sizes) < 1 or args.long_prompt_tokens < 0:
            raise UserError("sizes must be at least 1, and --tokens at least 5")
        median_interval([0.0] * args.repeats)
        root = args.directory / f"{Path(args.model).name}-{args.sequences}x{args.prompt_tokens}"
        root = root.with_name(f"{root.name}+32-rows{args.sequences}")
        root.mkdir(parents=True, exist_ok=True)
        told = argparse.Namespace(**{**vars(args), "tokens": 32, "batches": [args.sequences]})
        most = args.sequences
        train = recorded_trace(told, root / "train", args.text, TRAIN, most, args.prompt_tokens)
        lines = []
        with open(args.directory / "times.jsonl", "w") as file:
            for line in measured(args, train, np.load(root / "router.npy")):
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
                if args.json:
                    print(json.dumps(line), flush=True)
    except (UserError, TraceError, ValueError) as error:
        return refuse(__name__, error)
    if not args.json:
        show(lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="of the train trace and times.jsonl")
    add("--model", default=str(TRI), help="default: %(default)s")
    add("--text", nargs="+", default=TEXTS, help="files of prompts (default: ../shared/corpora)")
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    add("--batches", type=numbers, metavar="B,…", default=[1, 8, 32])
    add("--expert-budget", default="50%", help="as of moejax.LLM (default: %(default)s)")
    add("--repeats", type=int, default=6, help="default: 6, the least with a 95%% interval")
    add("--tokens", type=int, default=16, help="generated in a run (default: 16)")
    add("--prompt-tokens", type=int, default=64, help="default: 64")
    add("--long-prompt-tokens", type=int, default=896, help="0: none (default: 896)")
    add("--sequences", type=int, default=32, help="of the train trace (default: 32)")
    add("--policies", default="", metavar="NAME,…", help="only these, and lru (default: all)")
    add("--json", action="store_true", help="one JSON object per row on stdout, no table")
    return parser


def measured(args: argparse.Namespace, train: Trace, router: np.ndarray) -> Iterator[dict]:
    """A line for each batch, context and policy."""
    every = contestants(train, router, [n for n in args.policies.split(",") if n])
    contexts = [n for n in (args.prompt_tokens, args.long_prompt_tokens) if n]
    length = -(-(max(contexts) + args.tokens) // 64) * 64
    for batch in args.batches:
        with contextlib.ExitStack() as stack:
            engines = {
                arm.name: stack.enter_context(
                    LLM(
                        args.model,
                        max_num_seqs=batch,
                        max_model_len=length,
                        expert_budget=args.expert_budget,
                        driver=arm.driver,
                        policies=arm.policies,
                        progress=False,
                    )
                )
                for arm in every
            }
            first = next(iter(engines.values()))
            link = measure_link_rate(first.engine.runner)
            for context in contexts:
                prompts = prompts_of(args, first, batch, context)
                runs = interleaved(engines, every, prompts, args)
                for arm in every:
                    line = {"batch": batch, "prompt_tokens": context, **about(engines[arm.name])}
                    yield line | summary(arm, runs, engines[arm.name], link)


def contestants(train: Trace, router: np.ndarray, names: Sequence[str]) -> list[Arm]:
    """The arms but the oracle, whose future would have to be run first; LRU with either driver.
    Raises UserError for a name that none has."""
    on_host = Arm(BASELINES["host"], (POLICIES["lru"](),), on_host=True)
    found = [on_host, *arms(train, None, router)]
    known = [arm.name for arm in found]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no policy is called {unknown[0]!r}; known: {', '.join(known)}")
    found.sort(key=lambda arm: arm.driver)
    return [a for a in found if not names or a.name in {*names, *BASELINES.values()}]


def prompts_of(
    args: argparse.Namespace, llm: LLM, batch: int, context: int
) -> list[tuple[list[int], SamplingParams]]:
    """From all texts by turns, none of it in the train trace."""
    tokenizer: Any = llm.get_tokenizer()
    corpus = text_corpus(args.text, lambda text: tokenizer(text)["input_ids"])
    per_text = [windows(ids, TEST, batch, context) for ids in corpus.values()]
    return [
        (
            per_text[i % len(per_text)][i],
            SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=i),
        )
        for i in range(batch)
    ]


def interleaved(
    engines: dict[str, LLM],
    every: Sequence[Arm],
    prompts: Sequence[tuple[list[int], SamplingParams]],
    args: argparse.Namespace,
) -> dict[str, list[list[Run]]]:
    """Policy → of each repeat its runs: several where a policy draws. Raises RuntimeError where
    two of them gave other tokens."""
    found: dict[str, list[list[Run]]] = {arm.name: [] for arm in every}
    for repeat in range(args.repeats + 1):
        for arm in every:
            count = math.ceil(SEEDS / args.repeats) if arm.seeds > 1 and repeat else 1
            runs = [run(engines[arm.name], prompts) for _ in range(count)]
            if repeat:
                found[arm.name].append(runs)
            alike = found[every[0].name][0][0].tokens if repeat else runs[0].tokens
            if any(each.tokens != alike for each in runs):
                raise RuntimeError(f"{arm.name} gave other tokens than {every[0].name}")
    return found


def run(llm: LLM, prompts: Sequence[tuple[list[int], SamplingParams]]) -> Run:
    engine, steps, before = llm.engine, [], _transfers(llm)
    engine.events.clear()
    engine.listener = steps.append
    outputs = llm.generate([p for p, _ in prompts], [s for _, s in prompts], use_tqdm=False)
    engine.drain()
    engine.listener = None
    read = {event.step: event.seconds for event in engine.events if event.what == "read"}
    kinds: dict[int, Step] = {step.number: step for step in steps}
    decode = [step for step in steps if step.kind == "decode" and step.number in read]
    counted = [s for s in decode if _counts(s, kinds.get(s.number - 1), read)]
    misses = sum(int(np.sum(s.output.paging.fills + s.output.paging.read_through)) for s in decode)
    return Run(
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        seconds=[read[s.number] - read[s.number - 1] for s in counted],
        left_out=len(decode) - len(counted),
        compiled=sum(step.compiled for step in decode),
        misses=misses,
        steps=len(decode),
        ahead=(_transfers(llm) - before) / max(len(steps), 1),
    )


def _counts(step: Step, before: Step | None, read: dict[int, float]) -> bool:
    if before is None or before.number not in read:
        return False
    return before.kind == "decode" and not (step.compiled or before.compiled)


def _transfers(llm: LLM) -> int:
    control = llm.engine.control
    transfers = {} if control is None else control.controller.stats()["transfers"]
    return sum(counts["done"] for counts in transfers.values())


def about(llm: LLM) -> dict[str, Any]:
    device = llm.engine.runner.device
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "driver": llm.engine.runner.driver,
    }


def summary(arm: Arm, runs: dict[str, list[list[Run]]], llm: LLM, link: float) -> dict[str, Any]:
    """link: bytes a second."""
    means = [_mean_ms(repeat) for repeat in runs[arm.name]]
    against = [_mean_ms(repeat) for repeat in runs[BASELINES[arm.driver]]]
    ratios = [mine / theirs for mine, theirs in zip(means, against, strict=True)]
    every = [run for repeat in runs[arm.name] for run in repeat]
    moved = sum(r.misses for r in every) / sum(r.steps for r in every)
    ahead = float(np.mean([r.ahead for r in every]))
    (record,) = llm.engine.statistics.record_bytes
    ms, ratio = float(np.median(means)), float(np.median(ratios))
    return {
        "policy": arm.name,
        "settings": [name_of(policy) for policy in arm.policies],
        "ms_per_step": ms,
        "ms_interval": median_interval(means),
        "to_lru": ratio,
        "to_lru_interval": median_interval(ratios),
        "misses_per_step": moved,
        "ahead_per_step": ahead,
        "floor_link_ms": (moved + ahead) * record / link * 1e3,
        "repeats": len(means),
        "runs": len(every),
        "steps": sum(len(r.seconds) for r in every),
        "steps_left_out": sum(r.left_out for r in every),
        "steps_that_compiled": sum(r.compiled for r in every),
    }


def _mean_ms(repeat: Sequence[Run]) -> float:
    return 1e3 * float(np.mean([s for each in repeat for s in each.seconds]))


def show(lines: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = f"measured on {lines[0]['device']}; medians of repeats, with 95% intervals"
    table = Table(caption=caption)
    for heading in ("batch", "prompt", "driver", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms/step", "95%", "× lru", "95%", "misses", "ahead", "link ms", "left out"):
        table.add_column(heading, justify="right", no_wrap=True)
    before: Any = None
    for line in lines:
        place = str(line["batch"]), str(line["prompt_tokens"]), line["driver"]
        if before not in (None, place):
            table.add_section()
        left_out = f"{line['steps_left_out']} ({line['steps_that_compiled']} compiled)"
        table.add_row(
            *(place if place != before else ("",) * 3),
            line["policy"],
            f"{line['ms_per_step']:.2f}",
            "–".join(f"{x:.2f}" for x in line["ms_interval"]),
            f"{line['to_lru']:.3f}",
            "–".join(f"{x:.3f}" for x in line["to_lru_interval"]),
            f"{line['misses_per_step']:.1f}",
            f"{line['ahead_per_step']:.1f}",
            f"{line['floor_link_ms']:.3f}",
            left_out,
        )
        before = place
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
