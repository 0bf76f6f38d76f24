"""Throughput and decode latency of placements, measured in one engine at equal memory (PreScope).

python -m scripts.policies processors MODEL [--arms prescope,greedy,...] [--rows 1,4,16]
    [--input 512] [--output 64] [--expert-budget 25%] [--rounds 3] [--json]
    [--learned FILE] [--predict gates] [--link-rate 2GB/s] [--attention 1ms]
    [--test threads=1+1,accelerator=...,startup=...,per_token=...]

One engine with a second processor runs every arm: the same cells, the same prompts (random tokens),
policies and tables begun anew, a round of each arm after the other. So arms differ by their rule
alone. An arm's first batch of a round fills its cells and is not counted. `load-all` loads whatever
is missed (fate without predictions). --test states the rates of two processors of one machine, with
`--link-rate` and --attention the costs that rules go by; what is not stated is measured. With
--learned (of `moejax train-predictor`) or --predict gates, arms that look ahead do.

Columns: batch; tokens a second (median of the rounds); median time between tokens; share of the
missed experts that the second processor computed; mean difference of when both were done in a layer
in which both had work; share of the time that the link was busy; how many more tokens a second
`prescope` (or the first arm) gives. All arms must give the same tokens, or the command fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
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
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

ARMS = (*SCHEDULERS, "load-all")

DEFAULT = ("prescope", "greedy", "hybrimoe", "fiddler", "fiddler-code", "llama.cpp", "load-all")

COLUMNS = [
    ("batch", "{rows}"),
    ("arm", "{arm}"),
    ("tokens/s", "{tokens_per_s:.1f}"),
    ("token ms", "{token_ms:.2f}"),
    ("beside", "{beside:.0%}"),
    ("gap ms", "{gap_ms:.2f}"),
    ("link", "{link:.0%}"),
    ("prescope is", "{over:+.1%}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        arms = args.arms.split(",")
        if unknown := [arm for arm in arms if arm not in ARMS]:
            raise UserError(f"there is no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
        found = [row for rows in args.rows.split(",") for row in _measured(args, arms, int(rows))]
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(*aligned(COLUMNS, found), sep="\n")
    return 0


def _measured(args: argparse.Namespace, arms: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
    """A row of the table for each arm, at one batch."""
    with _engine(args, rows) as llm:
        assert llm.engine.control is not None
        spec = llm.engine.control.controller.spec
        cells = np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1).tolist()
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        tokens: dict[int, list] = {}
        for number in range(args.rounds):
            for arm in arms:
                llm.engine.begin_anew(spec, _policies(args, arm), cells)
                _batch(llm, args, rows, seed=2 * number)
                run, said = _counted(llm, args, rows, seed=2 * number + 1)
                if tokens.setdefault(number, said) != said:
                    raise UserError(f"arm {arm} gave other tokens than {arms[0]}: a bug, report it")
                runs[arm].append(run)
    middle = {
        arm: {name: statistics.median(run[name] for run in of_arm) for name in of_arm[0]}
        for arm, of_arm in runs.items()
    }
    first = middle.get("prescope", middle[arms[0]])["tokens_per_s"]
    for arm, row in middle.items():
        yield {"rows": rows, "arm": arm, **row, "over": first / row["tokens_per_s"] - 1}


def _engine(args: argparse.Namespace, rows: int) -> LLM:
    return LLM(
        args.model,
        driver="host",
        placement=_named(args, "prescope"),
        prefetch=args.learned and f"learned={args.learned}",
        placement_test=args.test,
        link_rate=args.link_rate,
        expert_budget=args.expert_budget,
        max_num_seqs=rows,
        max_num_batched_tokens=min(args.input * rows, 2048),
        max_model_len=-(-(args.input + args.output + 1) // 64) * 64,
        enable_prefix_caching=False,
        progress=False,
    )


def _named(args: argparse.Namespace, arm: str) -> str:
    """The arm's placement as options say it, with what is stated of costs."""
    parts = ["fate" if arm == "load-all" else arm]
    if args.attention:
        parts.append(f"attention={args.attention}")
    if args.predict and arm != "load-all":
        parts.append(f"predict={args.predict}")
    return ",".join(parts)


def _policies(args: argparse.Namespace, arm: str) -> list[Policy]:
    """As an engine with these options would have them."""
    options = Options(
        args.model,
        placement=_named(args, arm),
        placement_test=args.test,
        link_rate=args.link_rate,
    )
    networks: Sequence[Policy] = ()
    if args.learned and arm in AHEAD:
        networks = with_prefetch(f"learned={args.learned}", ())
    return [eviction_policy("lru"), *with_placement(placement_of(options), networks)]


def _batch(llm: LLM, args: argparse.Namespace, rows: int, *, seed: int) -> list:
    vocabulary = llm.engine.runner.config.vocab_size
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, vocabulary, (rows, args.input)).tolist()
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def _counted(
    llm: LLM, args: argparse.Namespace, rows: int, *, seed: int
) -> tuple[dict[str, Any], list]:
    """Figures of one batch, and its tokens."""
    before, times = llm.stats(), llm.engine.statistics.token_times
    times.clear()
    began = time.perf_counter()
    said = _batch(llm, args, rows, seed=seed)
    took = time.perf_counter() - began
    after = llm.stats()

    def more(part: str, name: str) -> float:
        return after[part][name] - before[part][name]

    layers, link = more("placement", "layers"), 0.0
    missed = more("experts", "activations") - more("experts", "hits")
    gap = more("placement", "gap_s")
    if after["transfers"] is not None:
        link = more("transfers", "busy_s") / took
    return {
        "tokens_per_s": rows * args.output / took,
        "token_ms": 1e3 * float(np.median(times)),
        "beside": more("placement", "experts") / missed if missed else 0.0,
        "gap_ms": 1e3 * gap / layers if layers else 0.0,
        "link": link,
    }, said


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("model")
    parser.add_argument("--arms", default=",".join(DEFAULT), metavar="ARM,…")
    parser.add_argument("--rows", default="1,4,16", metavar="N,…")
    parser.add_argument("--input", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--expert-budget", default="25%", metavar="SIZE|SHARE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--learned", metavar="FILE")
    parser.add_argument("--predict", choices=("gates",))
    parser.add_argument("--link-rate", metavar="RATE")
    parser.add_argument("--test", metavar="KEY=VALUE…")
    parser.add_argument("--attention", metavar="TIME")
    parser.add_argument("--json", action="store_true")
    return parser
