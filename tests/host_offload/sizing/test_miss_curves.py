"""Miss curves are what the pager does at every number of cells, from one look at the references."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.simulate.bounds import min_transfers
from host_offload.simulate.simulator import simulate
from host_offload.sizing import miss_curves
from host_offload.sizing.miss_curves import trace_curves
from host_offload.traces.reader import TraceError
from host_offload.traces.recency import Recency, reference
from tests.host_offload.sizing.curves import curves_of
from tests.host_offload.traces.traces_of import random_routing, references_of, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def paged(active: np.ndarray, cells: int) -> np.ndarray:
    """int64[L]: misses of the pager under LRU with as many cells in each layer."""
    _, layers, experts = active.shape
    pager = Pager(cold_tables(np.full(layers, cells), experts, (1, 0, 0)))
    return sum(
        (np.count_nonzero(pager.reference(a).missing, axis=1) for a in active),
        np.zeros(layers, np.int64),
    )


def sets(seed: int, steps: int = 25) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, steps)), 2, int(rng.integers(2, 9)))
    return rng.random(shape) < rng.random() * 0.7


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_curves_are_the_pager_at_every_capacity(seed):
    active = sets(seed)
    curves = curves_of(active)
    for cells in range(active.shape[2] + 1):
        found = paged(active, cells)
        exact = cells >= curves.exact_from
        np.testing.assert_array_equal(found[exact], curves.misses[exact, cells])
    np.testing.assert_array_equal(curves.exact_from, active.sum(axis=2).max(axis=0))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_shape_of_a_curve(seed):
    """WiSP, checkable 2: non-increasing, M(E) is what was ever seen, the warm curve ends at 0."""
    active = sets(seed)
    curves = curves_of(active)
    assert (np.diff(curves.misses, axis=1) <= 0).all()
    np.testing.assert_array_equal(curves.misses[:, -1], active.any(axis=0).sum(axis=1))
    np.testing.assert_array_equal(curves.misses[:, 0], active.sum(axis=(0, 2)))
    assert not curves.warm[:, -1].any()
    references = references_of(active)
    for cells in range(int(references.largest.max()), active.shape[2] + 1):
        assert (min_transfers(references, cells) <= curves.misses[:, cells]).all()


def smaller_id_first(recency: Recency, active: np.ndarray):
    """The mutation: of experts used together the smaller id counts as used last."""
    recency, distances = reference(recency, active)
    place = recency.place.copy()
    for row, used in enumerate(active):
        place[row, used] = place[row, used][::-1]
    return Recency(place, recency.seen), distances


def test_another_order_is_another_curve(monkeypatch):
    """Ties the other way are found by the comparison with the pager."""
    wrong = 0
    for seed in range(20):
        active = sets(seed)
        with monkeypatch.context() as patch:
            patch.setattr(miss_curves, "reference", smaller_id_first)
            curves = curves_of(active)
        largest = int(active.sum(axis=2).max())
        wrong += any(
            (paged(active, cells) != curves.misses[:, cells]).any()
            for cells in range(largest, active.shape[2] + 1)
        )
    assert wrong >= 5


def test_a_trace_has_the_curve_that_the_simulator_finds(tmp_path):
    """With prefill steps, whose waves are references of their own; by phase, and in
    order."""
    rng = np.random.default_rng(0)
    waves = (1 + 2 * (rng.random(80) < 0.1)).tolist()
    trace = write_trace(tmp_path / "t", random_routing(rng, 80, 3, 12, 2, 2), 12, waves=waves)
    whole = trace_curves(trace)
    parts = {
        "decode": trace_curves(trace, kind="decode"),
        "prefill": trace_curves(trace, kind="prefill"),
    }
    for cells in range(int(whole.exact_from.max()), 13):
        run = simulate(trace, eviction="lru", cells=cells)
        misses = run.misses.astype(np.int64)
        np.testing.assert_array_equal(whole.misses[:, cells], misses.sum(axis=0))
        for kind, curves in parts.items():
            expected = misses[run.of_kind(kind)].sum(axis=0)
            np.testing.assert_array_equal(curves.misses[:, cells], expected)
    assert whole.steps == 80 == sum(part.steps for part in parts.values())


def test_what_curves_refuse(tmp_path):
    trace = write_trace(tmp_path / "t", random_routing(np.random.default_rng(0), 5, 1, 4, 2), 4)
    with pytest.raises(TraceError, match="has no prefill to look at"):
        trace_curves(trace, kind="prefill")
    header = dataclasses.replace(trace.header, absent=["step.kind"])
    with pytest.raises(TraceError, match=r"has no step\.kind: it was converted or generated"):
        trace_curves(dataclasses.replace(trace, header=header), kind="decode")
