"""Slots over layers: optimal is the optimum, marginal is near it and says how near."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.memory.budget import cells_per_layer
from host_offload.simulate.simulator import simulate
from host_offload.sizing.cell_allocation import (
    ALLOCATIONS,
    allocate,
    hull_misses,
    lower_hulls,
)
from host_offload.sizing.miss_curves import trace_curves
from tests.host_offload.traces.traces_of import random_routing, write_trace


def curves(rng: np.random.Generator, layers: int, cells: int) -> np.ndarray:
    """Non-increasing, not convex."""
    return np.sort(rng.integers(0, 12, (layers, cells + 1)), axis=1)[:, ::-1].astype(float)


def optimum(misses: np.ndarray, slots: int, least: np.ndarray) -> float:
    """By trying everything."""
    layers, columns = misses.shape
    choices = itertools.product(*(range(least[layer], columns) for layer in range(layers)))
    rows = np.arange(layers)
    return min(misses[rows, list(c)].sum() for c in choices if sum(c) <= slots)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_optimal_is_the_optimum_and_marginal_knows_its_gap(seed):
    rng = np.random.default_rng(seed)
    layers, most = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    misses, least = curves(rng, layers, most), rng.integers(0, 2, layers)
    slots = int(rng.integers(least.sum(), layers * most + 3))
    best = optimum(misses, slots, least)
    found = {rule: allocate(rule, misses, slots, least=least) for rule in ALLOCATIONS}
    assert found["optimal"].misses == best and found["optimal"].gap == 0
    assert found["optimal"].misses <= found["marginal"].misses <= found["uniform"].misses
    for allocation in found.values():
        assert allocation.cells.sum() == min(slots, layers * most)
        assert (least <= allocation.cells).all() and (allocation.cells <= most).all()
        assert allocation.misses == misses[np.arange(layers), allocation.cells].sum()
        assert allocation.misses - allocation.gap <= best + 1e-9


def every_product(misses: np.ndarray, slots: int, least: np.ndarray) -> float:
    """The optimum by min-plus products of all that there is, nothing ruled out."""
    best = np.full(slots + 1, np.inf)
    best[0] = 0.0
    for curve, fewest in zip(misses, least.tolist(), strict=True):
        grown = np.full(slots + 1, np.inf)
        for c in range(fewest, min(len(curve) - 1, slots) + 1):
            grown[c:] = np.minimum(grown[c:], best[: slots + 1 - c] + curve[c])
        best = grown
    return float(best.min())


def with_cliffs(rng: np.random.Generator, layers: int, most: int) -> np.ndarray:
    """Bimodal distances: falls, a flat stretch, a cliff."""
    misses = np.sort(rng.random((layers, most + 1)), axis=1)[:, ::-1] * rng.integers(1, 50)
    far = np.arange(most + 1) < rng.integers(0, most + 2, layers)[:, None]
    return misses + far * 100.0 * rng.random((layers, 1))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_what_the_hulls_rule_out_is_never_the_optimum(seed):
    """Larger than trying everything allows; real numbers, cliffs, floors."""
    rng = np.random.default_rng(seed)
    layers, most = int(rng.integers(1, 9)), int(rng.integers(1, 24))
    misses, least = with_cliffs(rng, layers, most), rng.integers(0, most // 2 + 1, layers)
    slots = int(rng.integers(least.sum(), layers * most + 1))
    found = allocate("optimal", misses, slots, least=least)
    assert found.misses == pytest.approx(every_product(misses, slots, least), rel=1e-9)
    assert found.cells.sum() == slots and (found.cells >= least).all()


def lower_hull(curve: np.ndarray) -> np.ndarray:
    """int64[H]: the corners of one curve's lower convex hull (Andrew's monotone chain)."""
    corners: list[int] = []
    values = curve.tolist()
    for c in range(len(values)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (values[b] - values[a]) * (c - a) < (values[c] - values[a]) * (b - a):
                break
            corners.pop()
        corners.append(c)
    return np.array(corners)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_hulls_of_all_layers_are_those_of_each(seed):
    rng = np.random.default_rng(seed)
    layers, most = int(rng.integers(1, 6)), int(rng.integers(1, 24))
    misses = with_cliffs(rng, layers, most) if seed % 2 else curves(rng, layers, most)
    floor = rng.integers(0, most + 1, layers)
    each = [
        layer * (most + 1) + first + lower_hull(row[first:])
        for layer, (row, first) in enumerate(zip(misses, floor.tolist(), strict=True))
    ]
    np.testing.assert_array_equal(lower_hulls(misses, floor), np.concatenate(each))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_marginal_is_optimal_where_hull_pieces_end(seed):
    """On convex curves that is everywhere; the gap is at most what one piece saves."""
    rng = np.random.default_rng(seed)
    drops = -np.sort(-rng.integers(0, 20, (3, 6)), axis=1)
    convex = np.concatenate([np.cumsum(drops[:, ::-1], axis=1)[:, ::-1], np.zeros((3, 1))], axis=1)
    misses = curves(rng, 3, 6)
    pieces = [-np.diff(row[lower_hull(row)]) for row in misses]
    for slots in (1, 5, 8, 13):
        assert (
            allocate("marginal", convex, slots).misses == allocate("optimal", convex, slots).misses
        )
        hull = hull_misses(convex, np.array([slots]))[0]
        assert hull == pytest.approx(allocate("optimal", convex, slots).misses)
        assert allocate("marginal", misses, slots).gap <= max(p.max() for p in pieces) + 1e-9


def test_a_cliff_is_seen_from_afar():
    """One layer saves nothing before its sixth cell; a rule that looks one cell ahead (the
    mutation) never gets there."""
    cliff = np.array([100.0, 100, 100, 100, 100, 100, 0])
    slope = np.array([30.0, 25, 20, 15, 10, 5, 0])
    misses = np.stack([cliff, slope])
    assert allocate("marginal", misses, 6).cells.tolist() == [6, 0]
    assert allocate("optimal", misses, 6).misses == 30
    cells = [0, 0]
    for _ in range(6):
        gains = [misses[layer, cells[layer]] - misses[layer, cells[layer] + 1] for layer in (0, 1)]
        cells[int(np.argmax(gains))] += 1
    assert cells == [0, 6] and misses[[0, 1], cells].sum() == 100


def test_uniform_is_as_start_up_shares():
    for slots in range(31):
        found = allocate("uniform", np.zeros((4, 8)), slots).cells
        expected = cells_per_layer(min(slots, 28), 4, 7)
        assert found.tolist() == list(expected)


def test_fewer_misses_in_the_pager(tmp_path):
    """Layers of different skew: what the curves promise is what the simulator then does."""
    rng = np.random.default_rng(0)
    routing = random_routing(rng, 200, 4, 16, 2)
    flat = [np.sort(rng.permutation(16)[:2]) for _ in routing]
    for ids, alike in zip(routing, flat, strict=True):
        ids[:, 0] = alike
        ids[:, 1] = [0, 1]
    trace = write_trace(tmp_path / "t", routing, 16)
    found = trace_curves(trace)
    misses = {}
    for rule in ALLOCATIONS:
        allocation = allocate(rule, found.misses, 24, least=found.exact_from)
        run = simulate(trace, eviction="lru", cells=allocation.cells)
        misses[rule] = run.misses.sum()
        assert misses[rule] == allocation.misses
    assert misses["optimal"] <= misses["marginal"] < 0.9 * misses["uniform"]


def test_optimal_takes_no_seconds_at_full_size():
    misses = np.sort(np.random.default_rng(0).random((48, 129)), axis=1)[:, ::-1]
    begin = time.thread_time()
    optimal = allocate("optimal", misses, 48 * 64)
    assert time.thread_time() - begin < 1  # 2 ms on an idle core
    assert optimal.misses <= allocate("marginal", misses, 48 * 64).misses
    least = np.zeros(48, np.int64)
    assert optimal.misses == pytest.approx(every_product(misses, 48 * 64, least), rel=1e-9)


@pytest.mark.parametrize(
    ("rule", "misses", "slots", "least", "match"),
    [
        ("best", np.zeros((1, 3)), 1, 0, "cells are uniform, marginal, optimal, not 'best'"),
        ("uniform", np.array([[1, 2]]), 1, 0, "curves .* that never increase"),
        ("uniform", np.zeros(3), 1, 0, "must be curves"),
        ("marginal", np.zeros((2, 3)), 1, 1, "1 slots cannot give 2 layers their least cells, 2"),
        ("marginal", np.zeros((2, 3)), 9, 3, "of at most 2 each"),
    ],
)
def test_what_is_refused(rule, misses, slots, least, match):
    with pytest.raises(ValueError, match=match):
        allocate(rule, misses, slots, least=least)
