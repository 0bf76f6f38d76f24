"""Engines in turn: whether they compute the same, how long it takes them, the table of it."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.evaluate.experiments.intervals import median_interval
from scripts.cpu.engines.protocol import Worker

CASES = ("decode 1", "decode 8", "prefill")

BARS = {"llama.cpp BF16": 1.0, "transformers bf16": 2.0}
"""Engine → how many times its tokens a second the first engine is to reach. Quantized ones have
none."""

AGREEMENT = {"bf16": 0.03, "int8": 0.1, "int4": 0.5}
"""Stage → largest median difference of two engines' log-probabilities. Those of the forced tokens
have a standard deviation of some 0.9, so engines that compute something else differ by that."""

PAUSE = 0.05
"""Seconds between two blocks, in which the threads of the one before stop waiting for more."""


@dataclasses.dataclass(frozen=True)
class Plan:
    rounds: int
    block_s: float
    """Seconds that a block of decode steps lasts."""
    limit_s: float
    """A block that takes longer is not repeated."""
    prompt: int
    """Tokens."""


@dataclasses.dataclass
class Blocks:
    """What one engine took for a case, a round each: seconds and processor seconds of a step."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)


def agreement(workers: Mapping[str, Worker], most: float, **question: int) -> list[str]:
    """How far the engines' log-probabilities of the forced tokens are from the first one's, in
    words. question: fields of "check", else as many sequences as an engine has. Raises RuntimeError
    where the median of an engine's is over `most`."""
    first, *others = workers
    found = {}
    for name, worker in workers.items():
        batch = 1 if name.startswith("transformers") else worker.task.batch
        found[name] = np.array(worker.ask("check", **{"batch": batch, **question})["scores"])
    lines = []
    for name in others:
        theirs = found[name]
        apart = np.abs(found[first][:, : theirs.shape[1]] - theirs)
        lines.append(
            f"Log-probabilities of {theirs.size} forced tokens (standard deviation "
            f"{theirs.std():.2f}), {first} and {name}: median difference {np.median(apart):.4f}, "
            f"99% within {np.percentile(apart, 99):.3f}."
        )
        if not np.median(apart) <= most:
            raise RuntimeError(f"the engines do not compute the same (over {most}): {lines[-1]}")
    return lines


def measure(
    plan: Plan, workers: Mapping[str, Worker], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row of the table for each case and engine."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        what, _, batch = case.partition(" ")
        question = {"batch": int(batch), "seconds": plan.block_s} if batch else {}
        found = {name: Blocks() for name in workers}
        slow: set[str] = set()
        began = time.perf_counter()
        for i in range(plan.rounds + 1):  # the first one warms up
            for name, worker in workers.items():
                if name in slow:
                    continue
                time.sleep(PAUSE)
                answer = worker.ask(what, **question)
                if sum(answer["seconds"]) > plan.limit_s:
                    slow.add(name)
                elif i == 0:
                    continue
                found[name].seconds.append(float(np.median(answer["seconds"])))
                found[name].processor.append(answer["processor"] / len(answer["seconds"]))
        progress(f"{case}: {time.perf_counter() - began:.0f} s")
        of_case = case_rows(case, int(batch or plan.prompt), found)
        if batch:
            add_bytes(of_case, workers, int(batch))
        rows += of_case
    return rows


def case_rows(case: str, tokens: int, found: Mapping[str, Blocks]) -> list[dict[str, Any]]:
    """A row for each engine. tokens: of a step. ratio: the first engine's tokens a second over this
    one's; of an engine with other rounds than the first one's, of the medians."""
    first = next(iter(found.values()))
    rows = []
    for name, blocks in found.items():
        median = float(np.median(blocks.seconds))
        row: dict[str, Any] = {"case": case, "engine": name, "ms": 1e3 * median}
        row |= {"tokens_per_s": tokens / median, "rounds": len(blocks.seconds)}
        row["processor_ms"] = 1e3 * float(np.median(blocks.processor))
        if blocks is not first:
            row["ratio"], row["interval"] = paired(blocks.seconds, first.seconds)
            row["processor_ratio"], _ = paired(blocks.processor, first.processor)
            if bar := BARS.get(name):
                row |= {"bar": bar, "met": row["ratio"] >= bar}
        rows.append(row)
    return rows


def paired(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, list[float] | None]:
    """The median of theirs / ours and its 95% interval; None with fewer than six pairs."""
    if len(theirs) != len(ours):
        return float(np.median(theirs) / np.median(ours)), None
    ratios = np.divide(theirs, ours).tolist()
    return float(np.median(ratios)), list(median_interval(ratios)) if len(ratios) > 5 else None


def add_bytes(rows: Sequence[dict[str, Any]], workers: Mapping[str, Worker], batch: int) -> None:
    """Adds what a step of each engine reads, in GB. Experts are the first engine's latest step's;
    the same tokens choose the same ones, but for rounding."""
    answers = [worker.ask("bytes", batch=batch)["bytes"] for worker in workers.values()]
    ours = answers[0]
    share = ours.pop("share")
    for row, theirs in zip(rows, answers, strict=True):
        if theirs is None or theirs is ours:
            row["gb"] = sum(ours.values()) / 1e9
        else:
            read = theirs["experts"] * share + theirs["others"] + ours["KV"]
            row["gb"] = read / 1e9


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    headings = ["case", "engine", "tokens/s", "ms", "processor ms", "GB a step", "GB/s"]
    headings += ["ours ÷ theirs, tokens/s", "processor", "bar"]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        cells = [row["case"], row["engine"], f"{row['tokens_per_s']:.1f}", f"{row['ms']:.1f}"]
        cells.append(f"{row['processor_ms']:.0f}")
        gb = row.get("gb", math.nan)
        cells += ["", ""] if math.isnan(gb) else [f"{gb:.2f}", f"{1e3 * gb / row['ms']:.1f}"]
        cells += ["", "", ""]
        if "ratio" in row:
            low_high = row["interval"] and "[{:.2f}, {:.2f}]".format(*row["interval"])
            cells[-3] = f"{row['ratio']:.2f} {low_high or '(' + str(row['rounds']) + ' rounds)'}"
            cells[-2] = f"{row['processor_ratio']:.2f}"
        if "bar" in row:
            cells[-1] = f"≥ {row['bar']:.1f}: {'met' if row['met'] else '**missed**'}"
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield f"Load {os.getloadavg()[0]:.1f}; medians of {max(row['rounds'] for row in rows)} rounds."
