"""Whether a split that nobody named should move by itself: the mode `rule` of `resize`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from host_offload.control.interface import Policy
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.sizing.split import link_costs
from moejax import LLM, UserError
from moejax.engine.control import spec_of_engine
from moejax.engine.resize import cells_of
from scripts.budgets.bursts import (
    LIMITS,
    Arm,
    Played,
    add_prices,
    check,
    costs_of,
    paired_ratio,
    run,
)
from scripts.parts.text_table import aligned
from scripts.parts.workloads import Workload

WORKLOADS: dict[str, Workload] = {
    "sessions": Workload(
        sessions=10, turns=4, rate=8, document_tokens=160, think_s=1, answer_tokens=24
    ),
    "two users": Workload(
        sessions=2, turns=8, rate=1, document_tokens=100, think_s=1, answer_tokens=40
    ),
    "batch, short": Workload(sessions=60, turns=1, rate=1000, document_tokens=20, answer_tokens=40),
    "batch": Workload(sessions=40, turns=1, rate=1000, document_tokens=120, answer_tokens=48),
    "batch, long": Workload(
        sessions=24, turns=1, rate=1000, document_tokens=400, answer_tokens=120
    ),
}
"""rate 1000: all are there at once."""


def add_arguments(mode: argparse.ArgumentParser) -> None:
    mode.add_argument("--seeds", type=int, default=5, help="of each workload (default: 5)")
    mode.add_argument(
        "--memories", default="2MiB,4MiB,6MiB", help="of the arena (default: %(default)s)"
    )
    mode.add_argument("--max-num-seqs", type=int, default=16, help="(default: 16)")
    add_prices(mode)


def rule(args: argparse.Namespace) -> Iterator[str]:
    if args.seeds < 2:
        raise UserError("--seeds must be at least 2, for an interval")
    lines = [line for memory in args.memories.split(",") for line in _lines(args, memory)]
    if args.json:
        yield from map(json.dumps, lines)
        return
    yield f"{args.model}, {args.max_num_seqs} sequences at most, {args.seeds} seeds; predicted"
    yield from aligned(
        [
            ("memory", "{memory}"),
            ("workload", "{workload}"),
            ("cells", "{cells}"),
            ("tokens/s, held", "{held:.1f}"),
            ("moving / held", "{ratio:.3f}"),
            ("95% from", "{low:.3f}"),
            ("to", "{high:.3f}"),
            ("worst seed", "{worst:.3f}"),
        ],
        lines,
    )
    yield "every token the same, no turn unserved that the split held serves"


def _lines(args: argparse.Namespace, memory: str) -> Iterator[dict[str, Any]]:
    limits = {**LIMITS, "max_num_seqs": args.max_num_seqs}
    first = MvWsa(calibrate=False, costs=costs_of(args))
    with LLM(args.model, memory=memory, progress=False, policies=[first], **limits) as llm:
        # The rule's: an eighth for KV, or one sequence; as many cells in each layer.
        cap = min(cells_of(llm.engine.scheduler.arena))
        arms = [Arm("held", cap, None), Arm("moving", cap, _policy(llm))]
        for name, workload in WORKLOADS.items():
            played: list[list[Played]] = []
            for seed in range(args.seeds):
                seeded = dataclasses.replace(workload, arrival="bursty", seed=seed)
                played.append([run(llm, args, arm, seeded) for arm in arms])
                check(arms, played[-1], seed)
            rates = np.array([[found.rate for found in row] for row in played])
            yield {
                "memory": memory,
                "workload": name,
                "cells": cap,
                "held": float(rates[:, 0].mean()),
                **paired_ratio(rates[:, 1], rates[:, 0]),
            }


def _policy(llm: LLM) -> Policy:
    """From a cold start, misses priced at one byte a second over one link (the rule of the split
    looks at ratios)."""
    length = llm.engine.scheduler.max_model_len
    spec = spec_of_engine(llm.engine.runner, max_model_len=length, seed=0)
    return MvWsa(calibrate=False, costs=link_costs(spec, bytes_per_s=1.0))
