"""Memory, descriptors and threads over many requests, and over engines that are opened and closed;
the host's work for a prompt in calls of few and of many.

    python -m scripts.check flat [--requests 20000] [--engines 100] [--prompts 10000]

Prints what the process holds, ten times each. From the second line to the last it may grow by 32
MiB and by two descriptors and threads. Then it prints what a prompt costs in one call of 100 and in
one of `--prompts`: function calls in Python, which may grow by a tenth, and processor time. Exits
with status 1 if something grows by more.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from moejax import LLM, SamplingParams
from scripts.attacks.engine import LIMITS, PROMPTS
from scripts.attacks.engines import held
from scripts.parts.commands import new_parser

MOST_GROWTH = (32 << 20, 2, 2)
"""Bytes, descriptors and threads."""

WAYS: tuple[dict[str, Any], ...] = (
    {"expert_budget": "50%"},
    {"store": "shared"},
    {"transfers": "queue", "expert_budget": "25%"},
    {"driver": "host"},
)


def run_requests(count: int) -> Iterator[int]:
    """Yields the number of requests that one engine has answered, ten times."""
    part = max(count // 10, 1)
    options: dict[str, Any] = LIMITS | {"expert_budget": "50%"}
    with LLM("demo", **options) as llm:
        for begin in range(0, count, part):
            each = range(begin, begin + part)
            prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in each]
            llm.generate(prompts, [SamplingParams(max_tokens=1 + i % 2, seed=i) for i in each])
            yield begin + part


def run_engines(count: int) -> Iterator[int]:
    """Yields the number of engines that were opened and closed, ten times."""
    for i in range(count):
        options: dict[str, Any] = LIMITS | WAYS[i % len(WAYS)]
        with LLM("demo", **options) as llm:
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        del llm
        if (i + 1) % max(count // 10, 1) == 0:
            yield i + 1


def is_flat(name: str, counts: Iterator[int]) -> bool:
    """Prints what is held after each count. Returns whether it stays."""
    sizes: list[tuple[int, int, int]] = []
    for count in counts:
        gc.collect()
        sizes.append(held())
        nbytes, descriptors, threads = sizes[-1]
        print(
            f"{count} {name}: {nbytes / 2**20:.1f} MiB, {descriptors} descriptors, "
            f"{threads} threads",
            flush=True,
        )
    begin, end = sizes[min(1, len(sizes) - 1)], sizes[-1]
    flat = all(b - a <= most for a, b, most in zip(begin, end, MOST_GROWTH, strict=True))
    print(f"{name}: {'flat' if flat else '✗ NOT flat'}")
    return flat


def calls_of(function: Callable[[], Any]) -> int:
    """Returns how many functions were called, or generators resumed, in this thread."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def is_linear(count: int, options: dict[str, Any]) -> bool:
    """Prints what a prompt costs in calls of 100 and of `count`. Returns whether it is the same."""
    params, costs = SamplingParams(max_tokens=1), []
    with LLM("demo", **LIMITS, **options) as llm:
        for prompts in (100, 100, count):  # the first one warms up
            given = [[1 + i % 50, 2 + i // 50 % 50] for i in range(prompts)]
            calls = calls_of(partial(llm.generate, given, params)) / prompts
            began = time.process_time()
            llm.generate(given, params)
            seconds = (time.process_time() - began) / prompts
            costs.append(calls)
            print(f"{prompts} prompts in a call: {calls:.0f} calls, {seconds * 1e3:.2f} ms each")
    linear = costs[-1] <= 1.1 * costs[1]
    print(f"prompts of {options}: {'linear' if linear else '✗ NOT linear'}", flush=True)
    return linear


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="default: 20000")
    parser.add_argument("--engines", type=int, default=100, help="default: 100")
    parser.add_argument("--prompts", type=int, default=10_000, help="default: 10000")
    args = parser.parse_args(arguments)
    good = not args.requests or is_flat("requests", run_requests(args.requests))
    good &= not args.engines or is_flat("engines", run_engines(args.engines))
    for options in ({}, {"resize": "peak_headroom"}) if args.prompts else ():
        good &= is_linear(args.prompts, options)
    return 0 if good else 1
