"""Measured prefill steps beside their floors, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax.models.config import ModelConfig
from moejax.step.runner import Runner
from scripts.bench.prefill_timing import PrefillSample
from scripts.parts.bench_engine import described
from scripts.parts.text_table import aligned


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured in this run."""

    link: float
    """Bytes per second, of the fill op on the store."""
    matrix: float
    """Operations per second, of a large product in the run's dtype."""


def prefill_operations(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Floating point operations (a multiplication and an addition are two) that a prefill step over
    prompts of these lengths needs: dense products, each token's experts, causal attention, and the
    LM head on each prompt's last token. Norms, rope and softmax are not counted.
    """
    hidden, tokens = config.hidden_size, sum(lengths)
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    window = config.sliding_window
    attended = sum(
        min(position + 1, window or position + 1)
        for length in lengths
        for position in range(length)
    )
    experts = config.num_experts_per_tok * config.moe_intermediate_size
    operations = 2 * hidden * config.vocab_size * len(lengths)
    for is_moe in config.moe_layers:
        per_token = hidden * (2 * heads + 2 * kv_heads)
        if is_moe:
            per_token += hidden * config.num_experts + 3 * hidden * experts
        else:
            per_token += 3 * hidden * config.intermediate_size
        operations += 2 * per_token * tokens + 4 * heads * attended
    return operations


def measured_line(
    runner: Runner,
    rates: Rates,
    samples: Sequence[PrefillSample],
    lengths: Sequence[int],
    *,
    cells: int,
) -> dict[str, Any]:
    """What a case measured, each figure beside its floor; the fields of the bench's JSON lines.

    cells: per layer. The floor is max(link, compute): the missed
    experts' bytes, each once, at the link's rate; prefill_operations at the matrix rate.
    """
    config, record = runner.config, runner.layout.records[0].nbytes
    tokens, operations = sum(lengths), prefill_operations(config, lengths)
    median = float(np.median([sample.seconds for sample in samples]))
    fills = float(np.mean([sample.fills for sample in samples]))
    read_through = float(np.mean([sample.read_through for sample in samples]))
    floor_link = (fills + read_through) * record / rates.link
    floor_compute = operations / rates.matrix
    floor = max(floor_link, floor_compute)
    return {
        **described(runner),
        "tokens": tokens,
        "prompts": len(lengths),
        "chunk": runner.shapes.chunk,
        "waves": runner.shapes.waves,
        "cells_per_layer": cells,
        "prefill_steps": len(samples),
        "ms": median * 1e3,
        "ms_best": min(sample.seconds for sample in samples) * 1e3,
        "floor_ms": floor * 1e3,
        "floor_link_ms": floor_link * 1e3,
        "floor_compute_ms": floor_compute * 1e3,
        "times_floor": median / floor,
        "tokens_per_s": tokens / median,
        "ceiling_tokens_per_s": tokens / floor,
        "active": float(np.mean([sample.active for sample in samples])),
        "fills": fills,
        "read_through": read_through,
        "filled_gb": fills * record / 1e9,
        "read_through_gb": read_through * record / 1e9,
        "operations": operations,
        "tflops": operations / median / 1e12,
        "matrix_rate_tflops": rates.matrix / 1e12,
        "link_rate_gb_per_s": rates.link / 1e9,
        "compile_s": runner.compile_s,
    }


COLUMNS = (
    ("tokens", "{tokens}"),
    ("prompts", "{prompts}"),
    ("cells", "{cells_per_layer}"),
    ("ms", "{ms:.1f}"),
    ("best", "{ms_best:.1f}"),
    ("floor", "{floor_ms:.1f}"),
    ("link", "{floor_link_ms:.1f}"),
    ("compute", "{floor_compute_ms:.1f}"),
    ("× floor", "{times_floor:.2f}"),
    ("tok/s", "{tokens_per_s:.0f}"),
    ("ceiling", "{ceiling_tokens_per_s:.0f}"),
    ("filled GB", "{filled_gb:.3f}"),
    ("read-thr GB", "{read_through_gb:.3f}"),
    ("TFLOP/s", "{tflops:.3f}"),
)
"""Heading → how a line is shown under it."""


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of text for people. lines: of one run, measured_line's fields with shape."""
    first = lines[0]
    yield (
        "{shape}, {layers} layers of {experts} experts, {dtype}, on {device}, jax {jax}; "
        "chunks of {chunk} tokens, {waves} wave(s), {prefill_steps} prefill steps a row".format(
            **first
        )
    )
    yield (
        "measured: link {link_rate_gb_per_s:.2f} GB/s, products {matrix_rate_tflops:.3f} TFLOP/s; "
        "floor = max(link, compute)".format(**first)
    )
    yield from aligned(COLUMNS, lines)
