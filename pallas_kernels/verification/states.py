"""Checks of the ops that advance states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta import (
    DeltaHeads,
    DeltaOptions,
    DeltaShape,
    DeltaWeights,
    gated_delta,
)
from pallas_kernels.selective_scan import (
    ScanInputs,
    ScanOptions,
    ScanShape,
    ScanWeights,
    selective_scan,
)
from pallas_kernels.short_conv import ConvOptions, ConvWeights, short_conv, short_conv_state
from pallas_kernels.state_pages import Sequences, Shapes, StatePage, state_rows, unpack
from pallas_kernels.verification.check import Check, ModelShape, StateShape, draw, make_check

PREFILLED = ((0, 0, 0, 64), (0, 64, 0, 17), (1, 0, 0, 64), (2, 0, 0, 3), (2, 0, 3, 40))
"""(sequence, start, skip, length) of runs of 64 rows: one goes on from another one's state."""

COPIED = 2, 3
"""A run, and the sequence that gets a copy of its state."""

DECODED = (81, -1, 40, 64)
"""The position of each sequence's token then; −1: it has none."""


class _Op(NamedTuple):
    what: str
    """Its sizes in words."""
    state: Shapes
    inputs: Callable[[int, int], Any]
    """(seed, tokens) → what a token has."""
    weights: Callable[[], Any]
    run: Callable[..., tuple[jax.Array, jax.Array]]
    """(implementation, page, inputs, weights, arena, sequences) → (out, arena)."""


def state_checks(shape: ModelShape, least: int) -> Iterator[Check]:
    """Checks of the model's ops with states, on an arena of at least `least` bytes, with the states
    at its end."""
    for part in shape.states:
        yield _check(shape, part, _of(part, shape.dtype), least)


def _check(shape: ModelShape, part: StateShape, op: _Op, least: int) -> Check:
    page_rows, elements = shape.state_page
    rows = state_rows(op.state, elements)
    page = StatePage(page_rows, elements, rows)
    pages = page.pages(2)  # two layers; the second one is used
    used = 4 * pages * page.page_rows
    unused = max(0, -(-least // (2 * elements)) - used)

    def table():
        order = jax.random.permutation(jax.random.key(3), 4 * pages).reshape(4, pages)
        return (unused + order * page.page_rows).astype(jnp.int32)

    def seen(arena):
        index = rows + jnp.arange(rows)
        places = table()[:, index // page.page_rows] + index % page.page_rows
        return [unpack(each, op.state) for each in arena[places]]

    def operands():
        tokens = len(PREFILLED) * 64, len(DECODED)
        return tuple(op.inputs(seed, count) for seed, count in enumerate(tokens)), op.weights()

    def advanced(name, arena, inputs, weights):
        every, layer = table(), jnp.int32(1)
        sequence, start, skip, length = (jnp.asarray(each) for each in zip(*PREFILLED, strict=True))
        own = every[sequence]
        run, to = COPIED
        copy = jnp.full_like(own, -1).at[run].set(every[to])
        runs = Sequences(own, start, skip, length, jnp.int32(len(PREFILLED)), own, copy)
        first, arena = op.run(name, page, inputs[0], weights, arena, runs, layer)
        position = jnp.asarray(DECODED)
        new = (position >= 0).astype(jnp.int32)
        runs = Sequences(every, position, 0 * new, new, jnp.int32(len(DECODED)))
        last, arena = op.run(name, page, inputs[1], weights, arena, runs, layer)
        at = jnp.arange(64)
        real = (at >= skip[:, None]) & (at < length[:, None])
        masked = (real.reshape(-1), first), (new > 0, last)
        return arena, [jnp.where(mask[:, None], out, 0) for mask, out in masked]

    what = f"{op.what} in {page.page_rows} rows of {elements}" + " offsets 64" * (least > 0)
    arena = lambda: jnp.zeros((unused + used, elements), jnp.uint16)  # noqa: E731
    changed: dict[str, Any] = {"arena": arena, "seen": seen, "wide": least > 0}
    return make_check(part.op, what, shape.dtype, operands, advanced, **changed)


def _of(part: StateShape, dtype: str) -> _Op:
    return {"gated_delta": _delta, "selective_scan": _scan, "short_conv": _conv}[part.op](
        *part.sizes, dtype
    )


def _delta(shape: DeltaShape, by_key_head: bool, dtype: str) -> _Op:
    heads = shape.value_heads
    unpaged = DeltaOptions(shape, StatePage(0, 0, 0), by_key_head=by_key_head)

    def inputs(seed, tokens):
        columns = unpaged.least_columns, heads, shape.decays
        return DeltaHeads(*(draw(3 * seed + i, (tokens, n), dtype) for i, n in enumerate(columns)))

    def weights():
        conv = draw(10, (2, shape.columns, shape.taps), dtype, 0.5)
        a_log, dt_bias = draw(11, (2, heads), dtype), draw(12, (2, shape.decays), dtype)
        return DeltaWeights(conv, a_log, dt_bias, 1)

    def run(name, page, given, weights, arena, sequences, layer):
        options = dataclasses.replace(unpaged, page=page, implementation=name)
        return gated_delta(given, weights, arena, sequences, layer, options)

    what = f"{shape.key_heads}/{heads}x{shape.key_dim}x{shape.value_dim} taps {shape.taps}"
    what += " each" * shape.each + " by key head" * by_key_head
    return _Op(what, shape.state(dtype), inputs, weights, run)


def _scan(shape: ScanShape, limits: tuple[float, float], dtype: str) -> _Op:
    def inputs(seed, tokens):
        sizes = shape.columns, shape.steps
        return ScanInputs(*(draw(2 * seed + i, (tokens, n), dtype) for i, n in enumerate(sizes)))

    def weights():
        rates = (2, shape.steps, shape.state) if shape.each else (2, shape.steps)
        a_log, dt_bias, skip = (
            draw(10 + i, size, "float32") for i, size in enumerate((rates, rates[:2], rates[:2]))
        )
        return ScanWeights(a_log, dt_bias, skip, 1)

    def run(name, page, given, weights, arena, sequences, layer):
        options = ScanOptions(shape, page, name, limits)
        return selective_scan(given, weights, arena, sequences, layer, options)

    what = f"{shape.heads}/{shape.groups}x{shape.state}x{shape.head_dim}" + " each" * shape.each
    return _Op(what, shape.arrays(), inputs, weights, run)


def _conv(width: int, taps: int, silu: bool, dtype: str) -> _Op:
    def weights():
        bias = draw(11, (2, width), dtype) if silu else None
        return ConvWeights(draw(10, (2, width, taps), dtype, 0.5), 1, bias)

    def run(name, page, given, weights, arena, sequences, layer):
        options = ConvOptions(page, name, silu)
        return short_conv(given, weights, arena, sequences, layer, options)

    inputs = lambda seed, tokens: draw(seed, (tokens, width), dtype)  # noqa: E731
    what = f"{width} taps {taps}" + " bias, silu" * silu
    return _Op(what, short_conv_state(width, taps, dtype), inputs, weights, run)
