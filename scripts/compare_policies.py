"""Every policy over the same routing: misses and transfers against budget, beside MIN.

python scripts/compare_policies.py curves DIR [--batches 1,8,32] [--budgets 5]
python scripts/compare_policies.py coactivation DIR --shared 0,0.2,0.5,0.8
python scripts/compare_policies.py draw DIR

`curves` runs all evictions and prefetches through the simulator, writes DIR/curves.jsonl, and plots
of it (draw makes them again). `coactivation` asks WiSP's question: what does prefetch by
co-activation bring at tight and loose budgets? It writes DIR/coactivation.jsonl.

Traces are recorded by the engine where DIR does not have them yet: prompts are windows of a text,
what is generated is sampled. A text's first 60% are `train`, its last 20% `test`; what learns is
fitted once on the train parts of all texts together (generated routing: on the first half of its
tokens), nothing is tuned, figures are of decode steps of `test`. docs/protocol.md has the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from policy_report import BOUNDS, draw, pyplot, show
from policy_traces import Source, generated, recorded

from host_offload.bounds import min_transfers
from host_offload.controller import Event
from host_offload.eviction import POLICIES
from host_offload.policies.oracle import oracle_of
from host_offload.policies.static import Static
from host_offload.policies.static_layers import StaticLayers
from host_offload.policy import Policy, Transfer
from host_offload.policy_rules import BETWEEN_LAYERS
from host_offload.prefetch import FIT, PREFETCH
from host_offload.prefetch_score import PrefetchScore
from host_offload.simulator import simulate, spec_of
from host_offload.step_sets import References, in_one_pool, read_references
from host_offload.traces import Trace, TraceError
from moejax import UserError


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared: a name and the policies."""

    name: str
    policies: tuple[Policy, ...]
    seeds: int = 1

    @property
    def learned_bytes(self) -> int:
        fitted = (getattr(policy, "fitted", None) for policy in self.policies)
        return sum(found.nbytes for found in fitted if found is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        path = args.directory / f"{args.what}.jsonl"
        if args.what == "draw":
            draw(read_lines(args.directory / "curves.jsonl"), args.directory)
            return 0
        if args.what == "curves" and not args.no_plots:
            pyplot()
        if min(args.sequences, args.tokens, args.prompt_tokens, args.budgets, *args.batches) < 1:
            raise UserError("sizes must be at least 1")
        sources = [*recorded(args), *(generated(args, shared) for shared in args.shared)]
        if not sources:
            raise UserError("there is nothing to look at; give --text or --shared")
        lines = []
        with open(path, "w") as file:
            for line in curves(args, sources) if args.what == "curves" else coactivation(sources):
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
    except (UserError, TraceError) as error:
        print(f"compare_policies: error: {error}", file=sys.stderr)
        return 2
    show(lines)
    if args.what == "curves" and not args.no_plots:
        draw(lines, args.directory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("curves", "coactivation", "draw"))
    parser.add_argument("directory", type=Path, metavar="DIR", help="of traces and results")
    shared = Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--model", default=str(shared / "models/tri"), help="default: %(default)s")
    parser.add_argument(
        "--text",
        nargs="*",
        default=[str(shared / f"corpora/{name}.txt") for name in ("text", "math", "code")],
        help="files, a domain each (default: ../shared/corpora); none: only generated routing",
    )
    parser.add_argument("--batches", type=_numbers(int), metavar="B,…", default=[1, 8, 32])
    parser.add_argument("--sequences", type=int, default=32, help="of a domain (default: 32)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--tokens", type=int, default=32, help="generated of each (default: 32)")
    parser.add_argument("--budgets", type=int, default=5, help="how many (default: 5)")
    parser.add_argument(
        "--shared",
        type=_numbers(float),
        metavar="S,…",
        default=[],
        help="also qwen3-like routing with these parts of noise common to all layers",
    )
    parser.add_argument("--layers", type=int, default=12, help="of generated routing (default: 12)")
    parser.add_argument("--no-plots", action="store_true", help="figures only, no matplotlib")
    return parser


def _numbers(number: type) -> Any:
    return lambda text: [number(part) for part in text.split(",") if part]


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); run curves first") from error


# ---- policies


def arms(source: Source, trace: Trace) -> Iterator[Arm]:
    """Every eviction, then every prefetch with LRU. Those with a gate need gate inputs."""
    for name, policy in POLICIES.items():
        learned = Static(hot=hot_set(source.train)) if name == "static" else policy()
        yield Arm(name, (learned,))
    yield Arm("static-layers", (StaticLayers(),))
    for name in sorted({*PREFETCH, *FIT}):
        if name in FIT and (name != "promoe" or source.router is not None):
            yield Arm(name, (FIT[name](source.train),))
        elif name in PREFETCH:
            policy = PREFETCH[name]()
            if source.router is not None or "router" not in policy.needs:
                yield Arm(name, (policy,), seeds=3 if name == "random" else 1)
    yield Arm("oracle", (oracle_of(trace),))


def hot_set(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """The experts of each layer, those of most tokens first."""
    ids = trace.array("token.ids")
    experts = trace.header.experts
    counts = [
        np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])
    ]
    return tuple(tuple(np.argsort(-count, kind="stable").tolist()) for count in counts)


def measure(trace: Trace, arm: Arm, cells: int, router: np.ndarray | None) -> dict[str, Any]:
    """Figures of the decode steps, means over the arm's seeds."""
    between = any(policy.moments & BETWEEN_LAYERS for policy in arm.policies)
    spec = dataclasses.replace(
        spec_of(trace.header), driver="host" if between else "device", router=router
    )
    (size,) = (int(sizes[0]) for sizes in spec.version_bytes.values())
    found = []
    for seed in range(arm.seeds):
        events: list[Event] = []
        run = simulate(
            trace,
            policies=arm.policies,
            cells=cells,
            spec=dataclasses.replace(spec, seed=seed),
            driver=spec.driver,
            listener=events.append,
        )
        decode = run.of_kind("decode")
        steps = set(run.number[decode].tolist())
        ahead = [e for e in events if isinstance(e, Transfer) and e.published in steps]
        used = sum(transfer.first_use in steps for transfer in ahead)
        misses, staged = int(run.misses[decode].sum()), int(run.staged[decode].sum())
        if staged != len(ahead):
            raise RuntimeError(f"{arm.name}: {staged} transfers ahead, {len(ahead)} in the log")
        score = PrefetchScore(staged, used, misses, staged * size, (staged - used) * size)
        found.append(
            {
                "misses": misses,
                "ahead": staged,
                "transfers": misses + staged,
                "bytes": (misses + staged) * size,
                "recall": score.recall,
                "precision": score.precision,
                "wasted_bytes": score.wasted_bytes,
            }
        )
    means = {name: float(np.mean([line[name] for line in found])) for name in found[0]}
    spread = {"transfers_by_seed": [line["transfers"] for line in found]} if arm.seeds > 1 else {}
    return {**means, "learned_bytes": arm.learned_bytes, "seeds": arm.seeds, **spread}


def bounds_of(references: References, cells: int) -> dict[str, int]:
    """BOUNDS → transfers; none below the largest step set."""
    if cells < references.largest.max():
        return {}
    pool = in_one_pool(references)
    least = min_transfers(references, cells), min_transfers(pool, cells * references.layers)
    return {name: int(moved.sum()) for name, moved in zip(BOUNDS, least, strict=True)}


def curves(args: argparse.Namespace, sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """A line for each source, batch, budget and policy. Raises RuntimeError for a policy that moves
    less than its bound."""
    references = {
        (s.name, b): read_references(t, "decode") for s in sources for b, t in s.test.items()
    }
    for source in sources:
        alike = [s for s in sources if s.train.header.experts == source.train.header.experts]
        for batch, trace in source.test.items():
            of = references[source.name, batch]
            header = trace.header
            # Panels of one model have the same budgets; from `least` on there are bounds in all.
            least = max(int(references[s.name, batch].largest.max()) for s in alike)
            ranges = np.linspace([header.top_k, least], of.experts, args.budgets)
            budgets = np.unique(ranges.round().astype(int))
            told = list(arms(source, trace))
            for cells in budgets.tolist():
                bounds = bounds_of(of, cells)
                about = {
                    "date": datetime.date.today().isoformat(),
                    "source": source.name,
                    "batch": batch,
                    "cells": cells,
                    "experts": of.experts,
                    "steps": of.steps,
                    "references": len(of.step),
                    "largest_step": int(of.largest.max()),
                }
                size = spec_of(header).version_bytes
                expert_bytes = int(next(iter(size.values()))[0])
                for name, moved in bounds.items():
                    same = {"misses": moved, "transfers": moved, "bytes": moved * expert_bytes}
                    yield {**about, "policy": name, **same}
                for arm in told:
                    line = {
                        **about,
                        "policy": arm.name,
                        **measure(trace, arm, cells, source.router),
                    }
                    # Static layers move cells between layers.
                    bound = bounds.get(BOUNDS[arm.name == "static-layers"], 0)
                    if line["transfers"] < bound:
                        raise RuntimeError(f"{line} is below the bound {bound}")
                    yield line


def coactivation(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """LRU with and without prefetch by co-activation, at a quarter and three quarters of a layer's
    experts."""
    for source in sources:
        for batch, trace in source.test.items():
            of = read_references(trace, "decode")
            for budget, cells in (("tight", of.experts // 4), ("loose", 3 * of.experts // 4)):
                off = Arm("lru", (POLICIES["lru"](),))
                on = Arm("lru + coactivation", (*off.policies, FIT["coactivation"](source.train)))
                for arm in (off, on):
                    yield {
                        "date": datetime.date.today().isoformat(),
                        "source": source.name,
                        "batch": batch,
                        "budget": budget,
                        "cells": cells,
                        "experts": of.experts,
                        "steps": of.steps,
                        "references": len(of.step),
                        "largest_step": int(of.largest.max()),
                        "policy": arm.name,
                        **measure(trace, arm, cells, source.router),
                    }


if __name__ == "__main__":
    sys.exit(main())
