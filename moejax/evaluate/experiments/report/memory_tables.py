"""The report's table of conversations: splits of one memory that are held, and policies that move
the line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.evaluate.experiments.records import PLACE, Records

SHARED = "Conversations, one memory of {memory} for experts and KV, priced"
SHARED_HEADINGS = (
    *("conversations", "batch", "policy", "begins with", "tokens/s", "/ best held, other seeds"),
    *(
        "95%",
        "worst seed",
        "/ best held, hindsight",
        "misses",
        "KV pages moved",
        "cells at the end",
    ),
    "unserved",
)
"""best held, other seeds: the split that is best on all other seeds, held on this one."""

Row = Mapping[str, Any]


def shared_rows(records: Records) -> list[list[str]]:
    """Rows under SHARED_HEADINGS, splits that are held first; means over seeds."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in records.of_mode("priced"):
        places.setdefault(tuple(row[n] for n in PLACE if n in ("text", "batch")), []).append(row)
    return [line for rows in places.values() for line in _rows(rows)]


def _rows(rows: Sequence[Row]) -> list[list[str]]:
    arms: dict[tuple[str, str], dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row["moves_memory"]):
        arms.setdefault((row["policy"], row["budget"]), {})[row["seed"]] = row
    seeds = sorted(set.intersection(*({*found} for found in arms.values())))
    held = [found for found in arms.values() if not found[next(iter(found))]["moves_memory"]]
    rates = np.array([[found[seed]["tokens_per_s"] for found in held] for seed in seeds])
    lines = []
    for (policy, budget), found in arms.items():
        mine = np.array([found[seed]["tokens_per_s"] for seed in seeds])
        told = ["–"] * 4
        if held and len(seeds) > 1:
            others = [np.delete(rates, i, axis=0).mean(axis=0).argmax() for i in range(len(seeds))]
            ratio, low, high, worst = paired_ratio(mine, rates[np.arange(len(seeds)), others])
            best = paired_ratio(mine, rates.max(axis=1))[0]
            told = [f"{ratio:.3f}", f"{low:.3f}–{high:.3f}", f"{worst:.3f}", f"{best:.3f}"]
        each = [found[seed] for seed in seeds]
        names = "misses", "kv_pages_moved", "cells_end"
        misses, pages, cells = (float(np.mean([row[name] for row in each])) for name in names)
        unserved = f"{sum(row['unserved'] for row in each)}/{sum(row['turns'] for row in each)}"
        place = [each[0]["text"], str(each[0]["batch"]), policy, budget, f"{mine.mean():.1f}"]
        lines.append([*place, *told, f"{misses:.0f}", f"{pages:.0f}", f"{cells:.1f}", unserved])
    return lines


def paired_ratio(rates: np.ndarray, base: np.ndarray) -> tuple[float, float, float, float]:
    """rates / base, seed by seed: the geometric mean, its 95% interval (Student's t for the mean of
    the logarithms) and the worst seed."""
    ratio = np.log(rates / base)
    half = _t95(len(ratio) - 1) * ratio.std(ddof=1) / math.sqrt(len(ratio))
    mean, low, high = np.exp([ratio.mean(), ratio.mean() - half, ratio.mean() + half]).tolist()
    return mean, low, high, math.exp(ratio.min())


def _t95(degrees: int) -> float:
    """Two-sided 95% point of Student's t."""
    known = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14]
    return known[degrees - 1] if degrees <= len(known) else 1.96 + 2.5 / degrees
