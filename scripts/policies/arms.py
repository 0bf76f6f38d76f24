"""What the commands `compare` and `times` compare, and what one of them did in a trace."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.controller import Event
from host_offload.control.interface import Policy, Transfer
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.policies.eviction.names import POLICIES
from host_offload.policies.eviction.static import Static
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.names import FIT, PREFETCH
from host_offload.policies.prefetch.oracle import oracle_of
from host_offload.simulate.bounds import (
    References,
    in_one_pool,
    min_transfers,
    read_references,
    stall_bound,
)
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.traces.reader import Trace, read_trace
from scripts.policies.prefetch_score import PrefetchScore
from scripts.policies.report import BOUNDS
from scripts.policies.static_layers import StaticLayers

SEEDS = 10
"""Runs of policies that draw (docs/protocol.md, 9)."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared: a name and the policies."""

    name: str
    policies: tuple[Policy, ...]
    seeds: int = 1
    on_host: bool = False
    """Runs with driver="host" although it need not."""

    @property
    def driver(self) -> str:
        between = any(policy.moments & BETWEEN_LAYERS for policy in self.policies)
        return "host" if between or self.on_host else "device"


@dataclasses.dataclass(frozen=True)
class Link:
    """What the link and a step's arithmetic cost: predicted times only."""

    seconds_per_byte: float
    compute_s: Mapping[int, float]
    """Batch → seconds of a decode step with everything resident."""

    def of(self, moved: float, steps: int, batch: int) -> dict[str, float]:
        """Seconds a step: moving_s, what the link needs, which is what a step waits for where
        nothing overlaps; stall_s, what it must wait for however well all overlaps."""
        least = stall_bound(
            moved, self.compute_s[batch] * steps, seconds_per_byte=self.seconds_per_byte
        )
        return {"moving_s": moved * self.seconds_per_byte / steps, "stall_s": least / steps}


@dataclasses.dataclass(frozen=True)
class Place:
    """One panel's point: routing and a budget. Small, since processes are sent it."""

    source: str
    context: str
    batch: int
    cells: int
    train: Path
    test: Path
    """Directories of traces."""
    router: Path | None
    """A file of float32[L, D, E]; None: no gate inputs either."""


def arms(train: Trace, test: Trace | None, router: np.ndarray | None) -> Iterator[Arm]:
    """Every eviction, then every prefetch with LRU, then the oracle of `test`. Those with a gate
    need gate inputs, and expert maps what they are made of."""
    for name, policy in POLICIES.items():
        learned = Static(hot=hot_set(train)) if name == "static" else policy()
        yield Arm(name, (learned,))
    yield Arm("static-layers", (StaticLayers(),))
    mapped = train.header.probabilities and train.header.embedding
    for name in sorted({*PREFETCH, *FIT}):
        if name == "expert_map" and not mapped:
            continue
        if name in FIT and (name != "promoe" or router is not None):
            yield Arm(name, (FIT[name](train),))
        elif name in PREFETCH:
            policy = PREFETCH[name]()
            if router is not None or "router" not in policy.needs:
                yield Arm(name, (policy,), seeds=SEEDS if name == "random" else 1)
    if test is not None:
        yield Arm("oracle", (oracle_of(test),))


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
    spec = dataclasses.replace(spec_of(trace.header), driver=arm.driver, router=router)
    size = expert_bytes(trace)
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
    return {
        **means,
        "learned_bytes": learned_bytes(arm.policies, spec),
        "seeds": arm.seeds,
        **spread,
    }


def expert_bytes(trace: Trace) -> int:
    (sizes,) = spec_of(trace.header).version_bytes.values()
    return int(sizes[0])


def bounds_of(references: References, cells: int) -> dict[str, int]:
    """BOUNDS → transfers; none below the largest step set."""
    if cells < references.largest.max():
        return {}
    pool = in_one_pool(references)
    least = min_transfers(references, cells), min_transfers(pool, cells * references.layers)
    return {name: int(moved.sum()) for name, moved in zip(BOUNDS, least, strict=True)}


def about(place: Place, references: References) -> dict[str, Any]:
    """What all lines of a place have."""
    return {
        "date": datetime.date.today().isoformat(),
        "source": place.source,
        "context": place.context,
        "batch": place.batch,
        "cells": place.cells,
        "experts": references.experts,
        "steps": references.steps,
        "references": len(references.step),
        "largest_step": int(references.largest.max()),
    }


def lines_of(place: Place, link: Link | None) -> list[dict[str, Any]]:
    """The bounds, then every arm. Raises RuntimeError for a policy that moves less than its
    bound."""
    trace, router, told = _opened(place.train, place.test, place.router)
    references = _references(place.test)
    common = about(place, references)
    bounds = bounds_of(references, place.cells)
    size = expert_bytes(trace)
    found = [
        {**common, "policy": name, "misses": moved, "transfers": moved, "bytes": moved * size}
        for name, moved in bounds.items()
    ]
    for arm in told:
        line = {**common, "policy": arm.name, **measure(trace, arm, place.cells, router)}
        # Static layers move cells between layers.
        bound = bounds.get(BOUNDS[arm.name == "static-layers"], 0)
        if line["transfers"] < bound:
            raise RuntimeError(f"{line} is below the bound {bound}")
        found.append(line)
    if link is not None:
        for line in found:
            line |= link.of(line["bytes"], references.steps, place.batch)
    return found


@functools.lru_cache(maxsize=1)
def _opened(
    train: Path, test: Path, router: Path | None
) -> tuple[Trace, np.ndarray | None, Sequence[Arm]]:
    """The test trace, its routers and the arms; places of one trace follow each other."""
    trace = read_trace(test)
    weights = None if router is None else np.load(router)
    return trace, weights, tuple(arms(read_trace(train), trace, weights))


@functools.lru_cache(maxsize=64)
def _references(test: Path) -> References:
    return read_references(read_trace(test), "decode")
