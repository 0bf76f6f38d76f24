"""Throughput and decode latency of placements, measured in one engine at equal memory (PreScope).

python -m scripts.policies processors MODEL [--arms prescope,greedy,...] [--rows 1,4,16]
    [--input 512] [--output 64] [--expert-budget 25%] [--rounds 3] [--first 0] [--json]
    [--learned FILE | --predict gates] [--forest FILE] [--text FILE,...]
    [--link-rate 2GB/s] [--attention 1ms] [--store file]
    [--test threads=1+1,accelerator=...,startup=...,per_token=...,attention=...]
    [--cells FILE --group NAME] [--runs FILE]

One engine with a second processor runs every arm: the same cells, the same prompts (pieces of the
last fifth of each --text, else random tokens), policies and tables begun anew, a round of each arm
after the other; --first numbers the first round, whose number is its prompts' seed. So arms differ
by their rule alone. An arm's first batch of a round, short, fills its cells and is not counted.
--test states the times that two processors of one machine take at least, with --link-rate also the
costs that rules go by; --attention says t_attn to the rules alone, where asking them takes long
beside the stated one. What is not stated is measured. With --learned (of `moejax train-predictor`)
or --predict gates, arms that look ahead do. Residents are those used most (lfu), PreScope's table.

Arms are placements, and: load-all, which loads whatever is missed; expertflow, which does too, and
has the prefetches and residents of --forest FILE (of `moejax train-predictor --predictor forest`);
prescope without a part:
no-hot-table (residents by last use), no-llapor (gates predict; needs --learned), no-async
(equation (2), nothing ahead, and the second processor begins when the loads are there). greedy is
no PreSched; buffers-2 and buffers-4 are prescope with buffers=2 and 4 (their table is their own).

--cells and --group: batch, lengths, link, store and arms (those of --arms too) are a group's of a
definition file, scripts/policies/placed/cells.yaml. --runs: each run is appended to the file as a
line and not done again, so that a measurement may be in pieces, and the table is of all its runs.

Columns: batch; tokens a second (median of the rounds); median time between tokens; experts missed
in a layer; share of them that the second processor computed; difference of when both were done in a
layer in which both had work, mean and largest; share of the time that the link was busy; what a
load took; what passed between the experts of two layers, and the part of it in which policies were
asked; how many more tokens a second `prescope` (or the first arm) gives. All arms must give the
same tokens, or the command fails. On stderr, each run as it ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Policy
from host_offload.policies.eviction.names import eviction_policy
from host_offload.policies.placement.names import with_placement
from host_offload.policies.placement.policy import AHEAD
from host_offload.policies.placement.rivals import SCHEDULERS
from host_offload.policies.prefetch.names import with_prefetch
from moejax import LLM, SamplingParams
from moejax.errors import UserError
from moejax.start.options import Options
from moejax.start.second import placement_of
from moejax.step.drivers.placed import PlacedRunner
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned
from scripts.policies.placed.cells import read_groups

LESS = {
    "load-all": "fate",
    "expertflow": "fate",
    "no-hot-table": "prescope",
    "no-llapor": "prescope",
    "no-async": "no-prediction",
    "buffers-2": "prescope",
    "buffers-4": "prescope",
}
"""Arm → its placement, where that has another name."""

BUFFERS = {"buffers-2": 2, "buffers-4": 4}
"""Arm → N of buffers=N."""

ARMS = (*SCHEDULERS, *LESS)

ALONE = ("load-all", "expertflow", "no-llapor")
"""Those without networks."""

CHARACTERS = 8
"""How many of a text are taken for each token of a prompt: more than tokens have."""

WARM_INPUT = 128
"""Most prompt tokens of a batch that is not counted."""

DEFAULT = ("prescope", "greedy", "hybrimoe", "fiddler", "fiddler-code", "llama.cpp", "load-all")

FIGURES = (
    *("tokens_per_s", "token_ms", "missed", "beside", "gap_ms", "most_gap_ms", "link", "load_ms"),
    *("between_ms", "asked_ms"),
)

COLUMNS = [
    ("batch", "{rows}"),
    ("arm", "{arm}"),
    ("tokens/s", "{tokens_per_s:.1f}"),
    ("token ms", "{token_ms:.2f}"),
    ("missed", "{missed:.1f}"),
    ("beside", "{beside:.0%}"),
    ("gap ms", "{gap_ms:.2f}"),
    ("most", "{most_gap_ms:.1f}"),
    ("link", "{link:.0%}"),
    ("load ms", "{load_ms:.2f}"),
    ("between ms", "{between_ms:.2f}"),
    ("asked ms", "{asked_ms:.2f}"),
    ("prescope is", "{over:+.1%}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        arms = (args.arms or ",".join(DEFAULT)).split(",")
        if args.cells:
            arms = _of_group(args)
        if unknown := [arm for arm in arms if arm not in ARMS]:
            raise UserError(f"there is no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
        if "no-llapor" in arms and not args.learned:
            raise UserError("no-llapor is prescope without --learned FILE; name one")
        if "expertflow" in arms and not args.forest:
            raise UserError("expertflow prefetches by --forest FILE; name one")
        done = Runs(args)
        found = [
            row for rows in args.rows.split(",") for row in _measured(args, arms, int(rows), done)
        ]
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(*aligned(COLUMNS, found), sep="\n")
    return 0


def _of_group(args: argparse.Namespace) -> list[str]:
    """The group's arms; args is as it says."""
    groups = read_groups(args.cells, ARMS)
    if args.group not in groups:
        raise UserError(f"--group {args.group}: {args.cells} has {', '.join(groups)}")
    group = groups[args.group]
    args.input, args.output = group.input, group.output
    args.rows, args.store = ",".join(map(str, group.rows)), group.store
    args.link_rate = group.link_rate
    return [arm for arm in group.arms if not args.arms or arm in args.arms.split(",")]


class Runs:
    """The runs of a file, by batch, arm and round; without one, those of this process."""

    def __init__(self, args: argparse.Namespace):
        """Raises UserError for another command's runs."""
        self.path = None if args.runs is None else Path(args.runs)
        self.cell = {
            name: getattr(args, name)
            for name in ("input", "output", "link_rate", "store", "expert_budget", "test")
        }
        self.found: dict[tuple[int, str, int], dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                run = json.loads(line)
                if {name: run[name] for name in self.cell} == self.cell:
                    self.found[run["rows"], run["arm"], run["round"]] = run

    def add(self, rows: int, arm: str, number: int, run: dict[str, Any]) -> None:
        """Appends it, and says it on stderr. Raises UserError where its tokens are others than
        those of another arm of the round."""
        run = {"rows": rows, "arm": arm, "round": number, **run, **self.cell}
        for (batch, other, of), known in self.found.items():
            if (batch, of) == (rows, number) and known["said"] != run["said"]:
                raise UserError(f"arm {arm} gave other tokens than {other}: a bug, report it")
        self.found[rows, arm, number] = run
        print(json.dumps(run), file=sys.stderr, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps(run), file=file)

    def middle(self, rows: int) -> dict[str, dict[str, float]]:
        """Arm → median of each figure over the rounds of this batch."""
        arms = dict.fromkeys(arm for batch, arm, _ in self.found if batch == rows)
        of = {
            a: [r for (b, arm, _), r in self.found.items() if (b, arm) == (rows, a)] for a in arms
        }
        return {
            arm: {name: statistics.median(run[name] for run in runs) for name in FIGURES}
            for arm, runs in of.items()
        }


def _measured(
    args: argparse.Namespace, arms: Sequence[str], rows: int, done: Runs
) -> Iterator[dict[str, Any]]:
    """A row of the table for each arm, at one batch."""
    rounds = range(args.first, args.first + args.rounds)
    left = [(n, arm) for n in rounds for arm in arms if (rows, arm, n) not in done.found]
    if left:
        _run(args, left, rows, done)
    middle = done.middle(rows)
    first = middle.get("prescope", middle[next(iter(middle))])["tokens_per_s"]
    for arm, row in middle.items():
        yield {"rows": rows, "arm": arm, **row, "over": first / row["tokens_per_s"] - 1}


def _run(args: argparse.Namespace, left: Sequence[tuple[int, str]], rows: int, done: Runs) -> None:
    """Runs of these rounds and arms, in one engine."""
    with _engine(args, rows) as llm:
        # What compiles in the background would be the first arms' cost.
        llm.engine.runner.wait_compiled(everything=True)
        assert llm.engine.control is not None
        spec = llm.engine.control.controller.spec
        cells = np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1).tolist()
        for number, arm in left:
            llm.engine.begin_anew(spec, _policies(args, arm), cells)
            assert isinstance(llm.engine.runner, PlacedRunner)
            llm.engine.runner.serial = arm == "no-async"
            _batch(llm, _prompts(llm, args, rows, 2 * number, min(args.input, WARM_INPUT)), 4)
            prompts = _prompts(llm, args, rows, 2 * number + 1, args.input)
            run, said = _counted(llm, prompts, args.output)
            digest = hashlib.sha256(json.dumps([*map(list, said)]).encode()).hexdigest()[:16]
            figures = {name: round(value, 4) for name, value in run.items()}
            done.add(rows, arm, number, {**figures, "said": digest})


def _engine(args: argparse.Namespace, rows: int) -> LLM:
    return LLM(
        args.model,
        driver="host",
        # With the routers, so that every arm's predictions can be made.
        placement=_named(args, "no-llapor"),
        placement_test=args.test,
        link_rate=args.link_rate,
        store=args.store,
        expert_budget=args.expert_budget,
        max_num_seqs=rows,
        max_num_batched_tokens=min(args.input * rows, 2048),
        max_model_len=-(-(args.input + args.output + 1) // 64) * 64,
        enable_prefix_caching=False,
        progress=False,
    )


def _named(args: argparse.Namespace, arm: str) -> str:
    """The arm's placement as options say it, with what is stated of costs."""
    parts = [LESS.get(arm, arm)]
    if args.attention:
        parts.append(f"attention={args.attention}")
    if arm == "no-llapor" or (args.predict and arm not in ALONE):
        parts.append("predict=gates")
    if arm in BUFFERS:
        parts.append(f"buffers={BUFFERS[arm]}")
    return ",".join(parts)


def _policies(args: argparse.Namespace, arm: str) -> Sequence[Policy]:
    """As an engine with these options would have them."""
    options = Options(
        args.model,
        placement=_named(args, arm),
        placement_test=args.test,
        link_rate=args.link_rate,
    )
    if arm == "expertflow":
        forests = with_prefetch(f"expertflow={args.forest}", ())
        return with_placement(placement_of(options), forests)
    networks: Sequence[Policy] = ()
    if args.learned and LESS.get(arm, arm) in AHEAD and arm not in ALONE:
        networks = with_prefetch(f"learned={args.learned}", ())
    tables = [] if arm in BUFFERS else [eviction_policy("lru" if arm == "no-hot-table" else "lfu")]
    return [*tables, *with_placement(placement_of(options), networks)]


def _prompts(
    llm: LLM, args: argparse.Namespace, rows: int, seed: int, tokens: int
) -> list[list[int]]:
    """Token ids of a batch."""
    rng = np.random.default_rng(seed)
    if not args.text:
        vocabulary = llm.engine.runner.config.vocab_size
        return rng.integers(1, vocabulary, (rows, tokens)).tolist()
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise UserError("--text needs a model with a tokenizer; leave it out for random tokens")
    found, texts = [], [Path(name).read_text() for name in args.text.split(",")]
    for row in range(rows):
        text = texts[row % len(texts)]
        begin = int(rng.integers(len(text) * 4 // 5, len(text) - CHARACTERS * tokens))
        ids = tokenizer.encode(text[begin : begin + CHARACTERS * tokens])
        if len(ids) < tokens:
            raise UserError(f"{len(ids)} tokens in {CHARACTERS * tokens} characters: less --input")
        found.append(list(ids[:tokens]))
    return found


def _batch(llm: LLM, prompts: list[list[int]], output: int) -> list:
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def _counted(llm: LLM, prompts: list[list[int]], output: int) -> tuple[dict[str, Any], list]:
    """Figures of one batch, and its tokens."""
    before, times = llm.stats(), llm.engine.statistics.token_times
    times.clear()
    began = time.perf_counter()
    assert isinstance(llm.engine.runner, PlacedRunner)
    totals = llm.engine.runner.placement_totals
    totals.most_gap_s = 0.0
    steps = -sum(llm.engine.statistics.steps.values())
    said = _batch(llm, prompts, output)
    steps += sum(llm.engine.statistics.steps.values())
    took = time.perf_counter() - began
    after = llm.stats()

    def more(part: str, name: str) -> float:
        return after[part][name] - before[part][name]

    layers, between = more("placement", "layers"), more("placement", "between")
    missed = more("experts", "activations") - more("experts", "hits")
    link, loads = 0.0, 0.0
    if after["transfers"] is not None:
        loads = more("transfers", "demands") + sum(
            after["transfers"]["prefetches"][name] - before["transfers"]["prefetches"][name]
            for name in after["transfers"]["prefetches"]
        )
        link = more("transfers", "busy_s")
    return {
        "tokens_per_s": len(prompts) * output / took,
        "token_ms": 1e3 * float(np.median(times)),
        "missed": missed / (steps * len(llm.engine.runner.tables.clock)),
        "beside": more("placement", "experts") / missed if missed else 0.0,
        "gap_ms": 1e3 * more("placement", "gap_s") / layers if layers else 0.0,
        "most_gap_ms": 1e3 * totals.most_gap_s,
        "link": link / took,
        "load_ms": 1e3 * link / loads if loads else 0.0,
        "between_ms": 1e3 * more("placement", "between_s") / between if between else 0.0,
        "asked_ms": 1e3 * more("placement", "decided_s") / between if between else 0.0,
    }, said


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("model")
    parser.add_argument("--arms", metavar="ARM,…", help=f"default: {','.join(DEFAULT)}")
    parser.add_argument("--rows", default="1,4,16", metavar="N,…")
    parser.add_argument("--input", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--expert-budget", default="25%", metavar="SIZE|SHARE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    predicted = parser.add_mutually_exclusive_group()
    predicted.add_argument("--learned", metavar="FILE")
    predicted.add_argument("--predict", choices=("gates",))
    parser.add_argument("--forest", metavar="FILE")
    parser.add_argument("--text", metavar="FILE,…")
    parser.add_argument("--link-rate", metavar="RATE")
    parser.add_argument("--store", choices=("memory", "file"), default="memory")
    parser.add_argument("--cells", metavar="FILE")
    parser.add_argument("--group", metavar="NAME")
    parser.add_argument("--runs", metavar="FILE")
    parser.add_argument("--test", metavar="KEY=VALUE…")
    parser.add_argument("--attention", metavar="TIME")
    parser.add_argument("--json", action="store_true")
    return parser
