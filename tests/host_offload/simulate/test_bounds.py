"""Bounds are the optimum where they say so, below it elsewhere, and below every policy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.simulate.bounds import min_transfers, read_references
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


def test_what_bounds_refuse(tmp_path):
    routing = random_routing(np.random.default_rng(0), 5, 1, 4, 2)
    trace = write_trace(tmp_path / "t", routing, 4)
    with pytest.raises(TraceError, match="has no prefill to look at"):
        read_references(trace, "prefill")
    header = dataclasses.replace(trace.header, absent=["step.kind"])
    with pytest.raises(TraceError, match=r"has no step\.kind: it was converted or generated"):
        read_references(dataclasses.replace(trace, header=header), "decode")
