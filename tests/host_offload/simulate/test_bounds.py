"""Bounds are the optimum where they say so, below it elsewhere, and below every policy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.simulate.bounds import (
    min_bytes,
    min_transfers,
    read_references,
    stall_bound,
)
from host_offload.traces.reader import TraceError
from tests.host_offload.traces.traces_of import random_routing, references_of, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def optimum(
    sets: Sequence[set[int]], sizes: Sequence[int], capacity: int, unknown: Sequence[int] = ()
) -> int:
    """The fewest bytes by trying everything: any residents that fit before and after each step, a
    byte for each byte that a step needs or moves ahead and that is not there."""
    experts = range(len(sizes))

    def size(of) -> int:
        return sum(sizes[e] for e in of)

    subsets = (set(c) for n in range(len(sizes) + 1) for c in itertools.combinations(experts, n))
    states = [frozenset(s) for s in subsets if size(s) <= capacity]
    cost = {frozenset(): 0}
    for step, needed in enumerate(sets):
        if step in unknown:
            cost = dict.fromkeys(states, min(cost.values()))
        following = {}
        for state in states:
            following[state] = min(
                before + size(needed - there) + size(state - there - needed)
                for there, before in cost.items()
            )
        cost = following
    return min(cost.values())


SETS = st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=7)


def as_array(sets: Sequence[set[int]], experts: int = 5) -> np.ndarray:
    return np.array([[[e in members for e in range(experts)]] for members in sets])


@settings(max_examples=60)
@given(sets=SETS, more=st.integers(0, 2), unknown=st.sets(st.integers(0, 6)))
def test_min_is_the_optimum(sets, more, unknown):
    unknown = tuple(sorted(step for step in unknown if step < len(sets)))
    cells = max(map(len, sets)) + more
    references = references_of(as_array(sets), unknown)
    assert min_transfers(references, cells).tolist() == [optimum(sets, [1] * 5, cells, unknown)]


@settings(max_examples=60)
@given(
    sets=SETS,
    sizes=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    more=st.integers(0, 9),
    unknown=st.sets(st.integers(0, 6)),
)
def test_pfoo_is_below_the_optimum(sets, sizes, more, unknown):
    unknown = tuple(sorted(step for step in unknown if step < len(sets)))
    capacity = max(sum(sizes[e] for e in members) for members in sets) + more
    found = min_bytes(references_of(as_array(sets), unknown), np.array([sizes]), capacity)
    best = optimum(sets, sizes, capacity, unknown)
    assert found <= best
    if capacity >= sum(sizes):
        assert found == best  # everything fits, so nothing is traded between moments


def test_pfoo_trades_moments():
    """By hand: capacity 1, experts 0 1 0 1 and 0 again; at each moment one of two could stay."""
    sets = as_array([{0}, {1}, {0}, {1}, {0}], 2)
    references = references_of(sets)
    assert min_transfers(references, 1).tolist() == [optimum([{0}, {1}, {0}, {1}, {0}], [1, 1], 1)]
    # Three intervals of length 2 in four moments of room: two of them.
    assert min_transfers(references, 1).tolist() == [3]
    assert min_bytes(references, np.array([[1, 1]]), 1) == 3
    assert min_bytes(references, np.array([[4, 4]]), 5) == 10  # 10 of 12 bytes × moments: 2.5


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        (1, "layer 0 has 1 cells, its largest set 2 experts; no bound is claimed below"),
        ([2, 0], "layer 1 has 0 cells, its largest set 1 experts"),
    ],
)
def test_no_bound_below_the_largest_step_set(cells, match):
    sets = np.zeros((2, 2, 3), bool)
    sets[1, 0, :2] = sets[0, 1, 2] = True
    with pytest.raises(ValueError, match=match):
        min_transfers(references_of(sets), cells)
    with pytest.raises(ValueError, match="step needs 20 bytes of experts, more than 19: no"):
        min_bytes(references_of(sets), np.full((2, 3), 10), 19)


def test_what_bounds_refuse(tmp_path):
    references = references_of(np.ones((2, 1, 3), bool))
    for sizes in (np.ones((3, 1)), np.array([[1, 1, 0]])):
        with pytest.raises(ValueError, match=r"sizes must be positive and of shape \(1, 3\)"):
            min_bytes(references, sizes, 9)
    with pytest.raises(ValueError, match="bytes and seconds cannot be negative"):
        stall_bound(1, -1.0, seconds_per_byte=1.0)
    routing = random_routing(np.random.default_rng(0), 5, 1, 4, 2)
    trace = write_trace(tmp_path / "t", routing, 4)
    with pytest.raises(TraceError, match="has no prefill to look at"):
        read_references(trace, "prefill")
    header = dataclasses.replace(trace.header, absent=["step.kind"])
    with pytest.raises(TraceError, match=r"has no step\.kind: it was converted or generated"):
        read_references(dataclasses.replace(trace, header=header), "decode")


def test_the_link_is_busy_or_the_steps_are():
    assert stall_bound(2e9, 0.5, seconds_per_byte=1e-9) == pytest.approx(1.5)
    assert stall_bound(2e9, 3.0, seconds_per_byte=1e-9) == 0
