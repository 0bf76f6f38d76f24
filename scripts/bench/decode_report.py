"""Measured decode steps beside their floors, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.costs.rates import Rates
from moejax.step.runner import Runner
from scripts.parts.bench_engine import described
from scripts.parts.decode_timing import Samples, step_bytes
from scripts.parts.text_table import aligned


def measured_line(
    runner: Runner, rates: Rates, samples: Samples, *, batch: int, cells: int, context: int
) -> dict[str, Any]:
    """What a case measured, each figure beside its floor; the fields of the bench's JSON lines.

    cells: per layer. context: tokens that each of `batch` sequences attends to, at least. The floor
    of a step is max(memory, link): dense weights, KV and active experts at the memory's read rate,
    missed experts at the link's. The least misses are the active experts beyond a layer's cells.
    """
    record = runner.layout.records[0].nbytes
    active, fills, read_through = (
        np.array(counts, float)  # [steps, L]
        for counts in (samples.active, samples.fills, samples.read_through)
    )
    misses = float(np.mean(np.sum(fills + read_through, axis=1)))
    read = step_bytes(runner, float(np.mean(np.sum(active, axis=1))), batch=batch, context=context)
    floor_memory = sum(read.values()) / rates.memory
    floor_link = misses * record / rates.link
    floor = max(floor_memory, floor_link)
    median = float(np.median(samples.step_s))
    return {
        **described(runner),
        "context": context,
        "rows": runner.shapes.bucket(batch),
        "batch": batch,
        "cells_per_layer": cells,
        "steps": len(samples.step_s),
        "ms_per_step": median * 1e3,
        "ms_per_step_p99": float(np.percentile(samples.step_s, 99)) * 1e3,
        "floor_ms": floor * 1e3,
        "floor_memory_ms": floor_memory * 1e3,
        "floor_link_ms": floor_link * 1e3,
        "tokens_per_s": batch / median,
        "ceiling_tokens_per_s": batch / floor,
        "active_per_step": float(np.mean(np.sum(active, axis=1))),
        "misses_per_step": misses,
        "fills_per_step": float(np.mean(np.sum(fills, axis=1))),
        "read_through_per_step": float(np.mean(np.sum(read_through, axis=1))),
        "least_misses_per_step": float(np.mean(np.sum(np.maximum(active - cells, 0.0), axis=1))),
        "link_gb_per_s": misses * record / median / 1e9,
        "link_rate_gb_per_s": rates.link / 1e9,
        "memory_rate_gb_per_s": rates.memory / 1e9,
        "host_ms": float(np.median(samples.host_s)) * 1e3 if samples.host_s else 0.0,
    }


COLUMNS = (
    ("batch", "{batch}"),
    ("cells", "{cells_per_layer}"),
    ("ms/step", "{ms_per_step:.2f}"),
    ("p99", "{ms_per_step_p99:.2f}"),
    ("floor", "{floor_ms:.2f}"),
    ("memory", "{floor_memory_ms:.2f}"),
    ("link", "{floor_link_ms:.2f}"),
    ("tok/s", "{tokens_per_s:.1f}"),
    ("ceiling", "{ceiling_tokens_per_s:.1f}"),
    ("misses", "{misses_per_step:.1f}"),
    ("fills", "{fills_per_step:.1f}"),
    ("read-thr", "{read_through_per_step:.1f}"),
    ("least", "{least_misses_per_step:.1f}"),
    ("link GB/s", "{link_gb_per_s:.2f}"),
    ("rate", "{link_rate_gb_per_s:.2f}"),
    ("host ms", "{host_ms:.2f}"),
)
"""Heading → how a line is shown under it."""


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of text for people. lines: of one run, measured_line's fields with shape and
    routing."""
    first = lines[0]
    yield (
        "{shape}, {layers} layers of {experts} experts, {dtype}, on {device}, jax {jax}; "
        "{routing} routing, context {context}, {steps} steps".format(**first)
    )
    yield (
        "measured: link {link_rate_gb_per_s:.2f} GB/s, memory {memory_rate_gb_per_s:.2f} GB/s; "
        "floor = max(memory, link)".format(**first)
    )
    yield from aligned(COLUMNS, lines)
