"""The report's table of how fast cells were simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.evaluate.experiments.records import Records

SPEED = (
    "Simulated in a second, reading the trace included; a reference is an expert that a layer of a "
    "step needs"
)
SPEED_HEADINGS = (
    *("policy", "batch", "runs", "references", "M references/s", "slowest", "fastest"),
    "µs a step",
)


def speed_rows(records: Records) -> list[list[str]]:
    """A row under SPEED_HEADINGS for each policy and batch: medians over its cells. None where
    something was measured or predicted too, or records are older than the column."""
    rows = records.of_mode("simulated")
    if records.asked.get("modes") != ["simulated"] or not all("wall_s" in row for row in rows):
        return []
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["policy"], row["batch"]), []).append(row)
    return [[policy, str(batch), *_figures(of)] for (policy, batch), of in found.items()]


def _figures(rows: list[Mapping[str, Any]]) -> list[str]:
    references, steps, seconds = np.array([_counts(row) for row in rows]).T
    millions = references / seconds / 1e6
    return [
        str(len(rows)),
        f"{np.median(references):.0f}",
        *(f"{found:.2f}" for found in (np.median(millions), millions.min(), millions.max())),
        f"{np.median(seconds / steps) * 1e6:.0f}",
    ]


def _counts(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """References, steps and seconds."""
    counted = [row[f"{kind}_{of}"] for kind in ("prefill", "decode") for of in ("hits", "misses")]
    return sum(counted), row["prefill_steps"] + row["decode_steps"], row["wall_s"]
