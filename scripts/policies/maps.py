"""What expert maps are worth, and when (fMoE, Figures 8 and 11): counts of the simulator.

python -m scripts.policies maps similarity TRACE... [--capacity 128] [--json]
python -m scripts.policies maps online TRACE... [--cells 25,50] [--capacity 128] [--json]
python -m scripts.policies maps drawn [--cells 25,50] [--json]

TRACE is one with `--trace-arrays probs,embedding`, such as those below `traces` of a grid with
expert_map. `similarity`: maps of the first 70% of its requests; for each decode step of the others
how alike the nearest map is, and which share of the routed experts is among its top-k: Pearson's
coefficient of the two. `online`: with maps of those 70%, the hit rate of the other requests; from
empty, the decode step and request at which windows of 32 steps first have 90% of that.
`drawn`: generated routing (recurring.py) whose iterations recur more or less, and whose gates tell
more or less of the next layer: maps beside LFU with a gate that looks one layer ahead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Policy, Spec
from host_offload.policies.eviction.weights import LFU, GlobalLFU
from host_offload.policies.prefetch.expert_map.policy import ExpertMap, fit
from host_offload.policies.prefetch.expert_map.store import (
    MapStore,
    Trajectory,
    semantic_scores,
    stored,
)
from host_offload.simulate.simulator import Simulation, simulate
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.schema import TraceError
from scripts.experiments.gate_ahead import GateAhead
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned
from scripts.policies.recurring import Recurring, recurring_trace

SHARE = 0.7
"""Share of the requests whose maps are given (the paper's offline runs)."""

WINDOW = 32
"""Decode steps whose hits are counted together."""

REACHED = 0.9
"""Share of the offline hit rate."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        lines = list(_LINES[args.what](args))
    except (TraceError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        for line in lines:
            print(json.dumps(line))
        return 0
    columns = [(name.replace("_", " "), f"{{{name}:{_FORM.get(name, '')}}}") for name in lines[0]]
    print(*aligned(columns, lines), sep="\n")
    return 0


# ---- similarity


def _similarity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.traces:
        trace = read_trace(name)
        policy = fit(trace, capacity=args.capacity, share=SHARE)
        assert policy.fitted is not None
        store = stored(policy.fitted.arrays["embeddings"], policy.fitted.arrays["maps"])
        found = matches(trace, store, policy.distance, _first_left_out(trace))
        yield {
            "trace": Path(name).name,
            **{
                f"{kind}_{what}": value
                for kind, pairs in found.items()
                for what, value in (
                    ("r", float(np.corrcoef(pairs.T)[0, 1])),
                    ("score", float(pairs[:, 0].mean())),
                    ("hits", float(pairs[:, 1].mean())),
                    ("n", len(pairs)),
                )
            },
        }


def matches(
    trace: Trace, store: MapStore, distance: int, first_request: int
) -> dict[str, np.ndarray]:
    """By kind of search, float[n, 2] of the decode steps of requests from one on: the score of the
    nearest map, and the share of the routed experts that are its top-k; a row for each token
    (`semantic`, the mean of the first layers), or token and layer (`trajectory`)."""
    semantic: list[np.ndarray] = []
    trajectory: list[np.ndarray] = []
    layers = trace.header.layers
    for step in trace.step_traces():
        mine = (step.request >= first_request) & (step.phase > 0)
        if not mine.any():
            continue
        assert step.embedding is not None and step.probabilities is not None
        embedding, maps, ids = (x[mine] for x in (step.embedding, step.probabilities, step.ids))
        scores = semantic_scores(store, embedding)
        shares = [_share(store, scores, layer, ids[:, layer]) for layer in range(distance)]
        semantic.append(np.stack([scores.max(axis=1), np.mean(shares, axis=0)], axis=1))
        seen = Trajectory.of(store, len(ids))
        for layer in range(layers - distance):
            seen = seen.after(store, layer, maps[:, layer])
            scores, target = seen.scores(store, layer), layer + distance
            share = _share(store, scores, target, ids[:, target])
            trajectory.append(np.stack([scores.max(axis=1), share], axis=1))
    if not semantic:
        raise TraceError(f"{trace.directory} has no decode step after {SHARE:.0%} of its requests")
    return {"semantic": np.concatenate(semantic), "trajectory": np.concatenate(trajectory)}


def _share(store: MapStore, scores: np.ndarray, layer: int, ids: np.ndarray) -> np.ndarray:
    """float[N]: of the routed experts int[N, k], those in the top-k of the nearest map."""
    nearest = store.maps[layer, np.argmax(scores, axis=1)]
    best = np.argsort(-nearest, axis=1, kind="stable")[:, : ids.shape[1]]
    return np.mean((ids[:, :, None] == best[:, None]).any(axis=2), axis=1)


def _first_left_out(trace: Trace) -> int:
    """The first request whose maps are not given, as of expert_map.policy.fit."""
    requests = np.unique(trace.array("token.request"))
    kept = max(int(SHARE * len(requests)), 1)
    if kept == len(requests):
        raise TraceError(f"{trace.directory} has one request; 70% of several are needed")
    return int(requests[kept])


# ---- online


def _online(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.traces:
        trace = read_trace(name)
        first = _first_left_out(trace)
        given = fit(trace, capacity=args.capacity, share=SHARE)
        for share in _shares(args.cells):
            cells = _cells(trace, share)
            offline, online = (
                simulate(trace, policies=[policy], cells=cells, driver="host")
                for policy in (given, ExpertMap(capacity=args.capacity))
            )
            rate = hit_rate(offline, first_step(trace, first))
            wanted = REACHED * rate
            reached = when(online, wanted)
            yield {
                "trace": Path(name).name,
                "cells": f"{share:.0%}",
                "offline": rate,
                "online": hit_rate(online, first_step(trace, first)),
                "steps": -1 if reached is None else reached,
                "request": -1 if reached is None else request_at(trace, reached),
                "all_steps": int(online.of_kind("decode").sum()),
            }


def hit_rate(found: Simulation, first: int = 0) -> float:
    """Hits among what the decode steps from a step's number on needed."""
    steps = found.of_kind("decode") & (found.number >= first)
    return float(found.hits[steps].sum() / max(_needed(found)[steps].sum(), 1))


def when(found: Simulation, wanted: float) -> int | None:
    """Decode steps until windows of WINDOW of them have that hit rate for the first time; None:
    never."""
    decode = found.of_kind("decode")
    hits, needed = (np.cumsum(x[decode].sum(axis=1)) for x in (found.hits, _needed(found)))
    for end in range(WINDOW, len(hits) + 1):
        before = end - WINDOW
        ago = (hits[before - 1], needed[before - 1]) if before else (0, 0)
        if hits[end - 1] - ago[0] >= wanted * (needed[end - 1] - ago[1]):
            return end
    return None


def _needed(found: Simulation) -> np.ndarray:
    return found.hits + found.misses


def first_step(trace: Trace, request: int) -> int:
    """The number of the first step that has tokens of requests from one on."""
    return next(s.number for s in trace.step_traces() if (s.request >= request).any())


def request_at(trace: Trace, decode_steps: int) -> int:
    """The largest number of a request that is running after so many decode steps."""
    passed = 0
    for step in trace.step_traces():
        passed += step.kind == "decode"
        if passed == decode_steps:
            return int(step.request.max())
    raise TraceError(f"{trace.directory} has fewer than {decode_steps} decode steps")


# ---- drawn


DRAWN: Mapping[str, Recurring] = {
    f"{'flat' if flat else 'skewed'} recurrence={recurrence} ahead={ahead}": Recurring(
        recurrence, ahead, flat
    )
    for flat in (False, True)
    for ahead in (1.0, 0.0)
    for recurrence in (0.0, 0.5, 0.9)
}


def _drawn(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, shape in DRAWN.items():
        shape = dataclasses.replace(shape, layers=args.layers)
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "trace"
            sizes = {"sequences": args.sequences, "prompt": 16, "output": args.output}
            trace, spec = recurring_trace(place, shape, **sizes)
            for share in _shares(args.cells):
                yield {"routing": name, "cells": f"{share:.0%}", **compared(trace, spec, share)}


def arms() -> dict[str, tuple[Policy, ...]]:
    """What is compared on drawn routing."""
    return {
        "lfu": (LFU(),),
        "global_lfu": (GlobalLFU(),),
        "lfu_gate": (LFU(), GateAhead()),
        "global_gate": (GlobalLFU(), GateAhead()),
        "maps": (ExpertMap(capacity=128),),
        "maps_own": (ExpertMap(capacity=128, pool=False),),
    }


def compared(trace: Trace, spec: Spec, share: float) -> dict[str, float]:
    """Hit rates of the arms in decode steps of the last requests, and bytes over the link of maps
    beside those of LFU with a gate."""
    first = first_step(trace, _first_left_out(trace))
    found = {
        name: simulate(
            trace, policies=policies, cells=_cells(trace, share), driver="host", spec=spec
        )
        for name, policies in arms().items()
    }
    moved = {name: int(each.transfers.sum()) for name, each in found.items()}
    rates = {name: hit_rate(each, first) for name, each in found.items()}
    return {**rates, "maps_to_gate_bytes": moved["maps"] / max(moved["lfu_gate"], 1)}


def _cells(trace: Trace, share: float) -> int:
    return max(round(share * trace.header.experts), 1)


def _shares(text: str) -> list[float]:
    found = [float(part) / 100 for part in text.split(",")]
    if not all(0 < share <= 1 for share in found):
        raise ValueError(f"--cells are percentages of a layer's experts, such as 25,50, not {text}")
    return found


_LINES = {"similarity": _similarity, "online": _online, "drawn": _drawn}

_FORM = {
    **{f"{kind}_{what}": ".3f" for kind in ("semantic", "trajectory") for what in ("r", "score")},
    **{f"{kind}_hits": ".1%" for kind in ("semantic", "trajectory")},
    **dict.fromkeys(("offline", "online", *arms()), ".1%"),
    "maps_to_gate_bytes": ".2f",
}


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in _LINES:
        command = commands.add_parser(name)
        if name == "drawn":
            for size, value in (("layers", 12), ("sequences", 8), ("output", 48)):
                command.add_argument(f"--{size}", type=int, default=value, help=f"default: {value}")
        else:
            command.add_argument("traces", nargs="+", metavar="TRACE")
            command.add_argument("--capacity", type=int, default=128, help="maps; default: 128")
        if name != "similarity":
            command.add_argument("--cells", default="25,50", help="percent; default: 25,50")
        command.add_argument("--json", action="store_true", help="one JSON object a line instead")
    return parser
