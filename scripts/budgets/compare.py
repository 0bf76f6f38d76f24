"""Ways to divide one memory between experts and KV, at equal bytes: what each misses and costs.

python -m scripts.budgets compare DIR [--seeds 5] [--link 25GB/s] [--costs FILE]
python -m scripts.budgets compare DIR --trace T --memory 3MiB [--costs FILE]

Without --trace, sessions are made up: conversations with a document of their own that take turns
(`python -m scripts.check sessions` plays the same ones), whose routing is drawn by a generator
fitted to Qwen3 (host_offload.traces.generators), other hot experts for each domain, and half of the
layers more skewed than the other half. Regimes:
  kv        many sessions with long documents: KV that is gone must come back
  experts   some sessions, short documents, long answers: experts are what is missed, but the
            largest cap leaves too little KV (the best one lies below it)
  shifts    kv and experts by turns: the best split of one workflow is wrong for the next

Arms, all with the same bytes:
  mv_wsa         Algorithm 2 online, after every turn, after it has seen another seed's sessions
  mv_wsa cold    the same, knowing nothing, from an even split
  as printed, cold   that, by WiSP's histograms alone: until sessions return, KV seems worth
                 nothing
  mv_wsa γ 0.8   mv_wsa that forgets all but about the last 5 turns
  mv_wsa offline the configurator (equation 7) on another seed's sessions, held
  peak           equations (8) to (10) after every turn: KV gets the peak of 16 turns and headroom
  50-50, 25-75, 75-25   fixed, experts' share first
  flux-prop      every layer the distinct experts of a turn, KV the rest
  static layers  whole layers resident, the others streamed in every step; split as 50-50
  hindsight      the best single split of all caps, in hindsight
  per workflow   that, then the best of each workflow, one after the other, in hindsight

Both streams are replayed exactly (scripts.budgets.replay.replay_split: the engine's pager
for experts, an LRU pool for KV): counts are the simulator's. Seconds are predicted: misses times
measured costs (--costs), or an expert's bytes over --link, and a page's tokens over --prefill-rate,
since KV that is gone is computed again (WiSP's r). Computing is not in them. The second table
shares half of the memory over layers by the curves of the first half's decode steps (of a trace:
of all steps), and counts those of the second half. DIR gets budgets.jsonl and budgets.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.simulate.simulator import spec_of
from host_offload.sizing.configurator import Turn, turns_of
from host_offload.sizing.split import Division, MissCosts, division_of, miss_costs
from host_offload.traces.generators import RoutingGenerator, routing_generator
from host_offload.traces.reader import TraceError, read_trace
from moejax import UserError
from moejax.costs.store import load_cost_model
from moejax.sizes import parse_rate, parse_size
from scripts.budgets.arms import Arm, arms_of, cost_of, half_of, layer_arms
from scripts.parts.commands import new_parser, refuse
from scripts.parts.plots import pyplot
from scripts.parts.text_table import aligned
from scripts.parts.workloads import Workload, conversations, synthetic_corpus

EXPERT, PAGE, PAGE_TOKENS = 9 << 20, 16 * 96 << 10, 16
"""Bytes of Qwen3-30B-A3B: an expert, and a page of 16 tokens over all of its layers."""
LAYERS, EXPERTS, TOP_K = 8, 64, 6
"""The made-up model; KV is scaled with the layers."""
REGIMES = ("kv", "experts", "shifts")


class Scene(NamedTuple):
    """Turns and what they share."""

    name: str
    turns: list[Turn]
    workflow: np.ndarray
    """int[n]: which workflow each turn belongs to."""
    before: list[Turn]
    """Turns of another seed, for arms that are chosen ahead."""
    division: Division


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        lines = list(compare(args))
    except (UserError, TraceError, ValueError) as error:
        return refuse(__name__, error)
    args.directory.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (args.directory / "budgets.jsonl").write_text(text)
    for line in report(lines):
        print(line)
    if not args.no_plots:
        draw(lines, args.directory / "budgets.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    add = parser.add_argument
    add("--regimes", default=",".join(REGIMES), help="of those above (default: all)")
    add("--seeds", type=int, default=5, help="sessions drawn so often (default: 5)")
    add("--first-seed", type=int, default=1, help="(default: 1; γ was chosen on seed 0)")
    add("--scale", type=float, default=1.0, help="of the number of turns (default: 1)")
    add("--trace", metavar="T", help="a trace of the engine instead of made-up sessions")
    add("--memory", default="2GiB", help="of the arena (default: 2GiB)")
    add("--link", default="25GB/s", help="host to device (default: 25GB/s, stated, not measured)")
    add(
        "--prefill-rate",
        type=float,
        default=10_000.0,
        help="tokens a second of prompts that are computed again (default: 10000, stated)",
    )
    add("--costs", metavar="FILE", help="of moejax calibrate, instead of --link; needs --trace")
    add("--no-plots", action="store_true", help="no budgets.png")
    return parser


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each arm and seed."""
    link = parse_rate(args.link)
    if args.costs and not args.trace:
        raise UserError("--costs are of a trace's model; give --trace too")
    regimes = ["trace"] if args.trace else args.regimes.split(",")
    if unknown := [r for r in regimes if r not in (*REGIMES, "trace")]:
        raise UserError(f"unknown regime {unknown[0]!r}; known: {', '.join(REGIMES)}")
    if args.seeds < 1 or min(args.scale, args.prefill_rate) <= 0:
        raise UserError("--seeds must be at least 1, --scale and --prefill-rate above 0")
    for regime in regimes:
        for i in range(1 if args.trace else args.seeds):
            seed = args.first_seed + i
            scene, costs = (
                recorded(args)
                if args.trace
                else (made_up(regime, seed, parse_size(args.memory), args.scale), None)
            )
            page_s = scene.division.page_tokens / args.prefill_rate
            costs = costs or MissCosts(scene.division.unit / link, page_s)
            common = {"regime": scene.name, "seed": seed, "turns": len(scene.turns)}
            common["bytes"] = scene.division.total_bytes
            arms = arms_of(scene.turns, scene.before, scene.workflow, scene.division, costs)
            for arm in arms:
                yield {**common, "kind": "split", **_line(arm, scene.turns, scene, costs)}
            decode = scene.turns
            if not args.trace:  # the first of a turn is its prefill step
                decode = [turn._replace(active=turn.active[1:]) for turn in scene.turns]
            for arm in layer_arms(decode, scene.division):
                found = _line(arm, decode, scene, costs, first=half_of(decode))
                yield {**common, "kind": "layers", **found}


def _line(
    arm: Arm, turns: Sequence[Turn], scene: Scene, costs: MissCosts, first: int = 0
) -> dict[str, Any]:
    experts, kv = arm.misses(turns, first)
    caps = [float(np.mean(c)) for c in arm.cells]
    return {
        "arm": arm.name,
        "expert_misses": experts,
        "kv_misses": kv,
        "seconds": cost_of(experts, kv, costs),
        "cap": [min(caps), max(caps)],
        "pages": [min(arm.pages), max(arm.pages)],
        "used_bytes": arm.most_bytes(scene.division),
    }


# ---- scenes


def recorded(args: argparse.Namespace) -> tuple[Scene, MissCosts | None]:
    """A trace of the engine; what is chosen ahead is chosen from its first half."""
    trace = read_trace(args.trace)
    spec = dataclasses.replace(spec_of(trace.header), budget_bytes=parse_size(args.memory))
    turns = list(turns_of(trace))
    if len(turns) < 4:
        raise UserError(f"{args.trace} has {len(turns)} turns; that is too few to compare")
    half = len(turns) // 2
    scene = Scene(
        Path(args.trace).name,
        turns[half:],
        np.zeros(len(turns) - half, int),
        turns[:half],
        division_of(spec),
    )
    if not args.costs:
        return scene, None
    return scene, miss_costs(load_cost_model(args.costs).costs(), spec, "recompute")


def made_up(regime: str, seed: int, memory: int, scale: float = 1.0) -> Scene:
    """Sessions of the workflows of a regime, one after the other."""
    page = PAGE * LAYERS // 48
    division = Division(
        total_bytes=memory // EXPERT * EXPERT,
        cap_bytes=EXPERT * LAYERS,
        page_bytes=page,
        caps=EXPERTS,
        floor_pages=48,
        unit_bytes=EXPERT,
        unit_pages=EXPERT // page,
        page_tokens=PAGE_TOKENS,
    )
    names = ["kv", "experts", "kv", "experts"] if regime == "shifts" else [regime]

    def play(start: int, first: int = 0) -> tuple[list[Turn], np.ndarray]:
        turns: list[Turn] = []
        workflow: list[int] = []
        for part, name in enumerate(names):
            found = list(sessions(name, start + part, scale / len(names), first + part * 1000))
            turns += found
            workflow += [part] * len(found)
        return turns, np.array(workflow)

    turns, workflow = play(100 * seed)
    before, _ = play(100 * seed + 50, 10**6)
    return Scene(regime, turns, workflow, before, division)


WORKFLOWS: dict[str, dict[str, Any]] = {
    "kv": dict(sessions=14, turns=8, document_tokens=3000, answer_tokens=8, shift_share=0.0),
    "experts": dict(sessions=8, turns=8, document_tokens=600, answer_tokens=40, shift_share=0.4),
}


def sessions(name: str, seed: int, scale: float, first: int) -> Iterator[Turn]:
    """Turns in the order of their arrival, one at a time. first: number of the first session."""
    options = dict(WORKFLOWS[name])
    options["turns"] = max(round(options["turns"] * scale), 2)
    workload = Workload(seed=seed, rate=5.0, think_s=8.0, tool_share=0.0, **options)
    found = conversations(workload, synthetic_corpus(1000, domains=3, tokens=4096))
    turns = []
    for session in found:
        moment = session.arrival_s
        for turn in session.turns:
            moment += turn.think_s
            turns.append((moment, session.number, turn))
    tokens = dict.fromkeys(range(len(found)), 0)
    # What a domain is routed to is the model's: the same whatever sessions there are.
    routes = {d: _routing(i) for i, d in enumerate(sorted({t.domain for *_, t in turns}))}
    for _, session, turn in sorted(turns, key=lambda each: each[0]):
        new = len(turn.new_tokens)
        prompt = next(routes[turn.domain])
        # A prefill step over a prompt reads what all of its tokens are routed to.
        for _ in range(min(new, 40) - 1):
            prompt = prompt | next(routes[turn.domain])
        active = [prompt, *(next(routes[turn.domain]) for _ in range(turn.max_tokens))]
        tokens[session] += new + turn.max_tokens
        pages = np.arange(-(-tokens[session] // PAGE_TOKENS), dtype=np.int64)
        yield Turn(active, np.stack([np.full_like(pages, first + session), pages], axis=1))


def _routing(domain: int) -> Iterator[np.ndarray]:
    """bool[L, E] of one token after the other: a domain has its own hot experts."""
    base = routing_generator("qwen3-like", LAYERS // 2, EXPERTS, TOP_K)
    halves: list[RoutingGenerator] = [
        dataclasses.replace(base, skew=2.5),
        dataclasses.replace(base, skew=0.3),
    ]
    streams = [half.steps(1, 1 << 30, seed=10 * domain + i) for i, half in enumerate(halves)]
    while True:
        ids = np.concatenate([next(stream).ids[0] for stream in streams])
        active = np.zeros((LAYERS, EXPERTS), bool)
        np.put_along_axis(active, ids.astype(np.int64), True, axis=1)
        yield active


# ---- what came out


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for each regime: means over seeds, and the seconds beside the best single split."""
    for regime in dict.fromkeys(line["regime"] for line in lines):
        for kind in ("split", "layers"):
            rows = [x for x in lines if x["regime"] == regime and x["kind"] == kind]
            first = "hindsight" if kind == "split" else "uniform"
            best = {x["seed"]: x["seconds"] for x in rows if x["arm"] == first}
            memory, seeds = rows[0]["bytes"] / 2**30, len(best)
            what = "splits of memory" if kind == "split" else "cells of layers at equal bytes"
            yield f"{regime}: {what}, {memory:.3g} GiB, {seeds} seeds, {rows[0]['turns']} turns"
            yield from aligned(
                [
                    ("arm", "{arm:<16}"),
                    ("expert misses", "{expert_misses:,.0f}"),
                    ("KV pages missed", "{kv_misses:,.0f}"),
                    ("seconds, predicted", "{seconds:.2f}"),
                    (f"× {first}", "{ratio:.3f}"),
                    ("range", "{low:.3f}–{high:.3f}"),
                    ("cells a layer", "{cap}"),
                ],
                [_mean(rows, arm, best) for arm in dict.fromkeys(x["arm"] for x in rows)],
            )
            yield ""


def _mean(rows: Sequence[dict[str, Any]], arm: str, best: dict[int, float]) -> dict[str, Any]:
    mine = [x for x in rows if x["arm"] == arm]
    ratios = [x["seconds"] / best[x["seed"]] for x in mine]
    low, high = min(x["cap"][0] for x in mine), max(x["cap"][1] for x in mine)
    names = ("expert_misses", "kv_misses", "seconds")
    return {
        "arm": arm,
        **{name: float(np.mean([x[name] for x in mine])) for name in names},
        "ratio": float(np.mean(ratios)),
        "low": min(ratios),
        "high": max(ratios),
        "cap": f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}",
    }


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds of each arm, experts' and KV's part, a panel a regime."""
    plt = pyplot()
    regimes = list(dict.fromkeys(line["regime"] for line in lines))
    figure, panels = plt.subplots(1, len(regimes), figsize=(5 * len(regimes), 4.6), squeeze=False)
    for panel, regime in zip(panels[0], regimes, strict=True):
        rows = [x for x in lines if x["regime"] == regime and x["kind"] == "split"]
        names = list(dict.fromkeys(x["arm"] for x in rows))
        mean = {n: np.mean([x["seconds"] for x in rows if x["arm"] == n]) for n in names}
        best = mean["hindsight"]
        place = np.arange(len(names))
        ratios = np.array([mean[n] / best for n in names])
        shown = np.minimum(ratios, 3.0)
        colours = ["#d62728" if n.startswith("mv_wsa") else "#7f7f7f" for n in names]
        panel.barh(place, shown, color=colours)
        for y, ratio, width in zip(place, ratios, shown, strict=True):
            panel.text(width + 0.03, y, f"{ratio:.2f}", va="center", fontsize=9)
        panel.set_yticks(place, names)
        panel.invert_yaxis()
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set(
            title=regime, xlabel="predicted time of misses, × best single split", xlim=(0, 3.4)
        )
    figure.suptitle("One memory for experts and KV, at equal bytes (simulator, predicted)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
