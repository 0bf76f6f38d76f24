"""Miss curves are what the pager does at every number of cells, from one look at the references."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.simulate.bounds import min_transfers, references_of
from host_offload.simulate.simulator import simulate
from host_offload.sizing import miss_curves
from host_offload.sizing.miss_curves import cold_curves, curves_of, trace_curves
from host_offload.traces.reader import TraceError
from host_offload.traces.recency import Distances, Recency, cold_recency, reference, tails
from host_offload.traces.statistics import trace_statistics
from tests.host_offload.traces.traces_of import random_routing, write_trace

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
        assert (curves.least[:, cells] <= found).all()
    np.testing.assert_array_equal(curves.exact_from, active.sum(axis=2).max(axis=0))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_shape_of_a_curve(seed):
    """WiSP, checkable 2: non-increasing, M(E) is what was ever seen, the warm curve ends at 0."""
    active = sets(seed)
    curves = curves_of(active)
    for part in (curves.misses, curves.least):
        assert (np.diff(part, axis=1) <= 0).all()
        np.testing.assert_array_equal(part[:, -1], active.any(axis=0).sum(axis=1))
        np.testing.assert_array_equal(part[:, 0], active.sum(axis=(0, 2)))
    assert not curves.warm[:, -1].any()
    references = references_of(active)
    for cells in range(int(references.largest.max()), active.shape[2] + 1):
        assert (min_transfers(references, cells) <= curves.misses[:, cells]).all()


def one_by_one(recency: Recency, active: np.ndarray):
    """The mutation: a set taken as single references, each of which moves the list."""
    found = []
    for expert in np.flatnonzero(active.any(axis=0)):
        alone = active & (np.arange(active.shape[1]) == expert)
        recency, distances = reference(recency, alone)
        found.append(distances)
    if not found:
        return reference(recency, active)
    places, first, sizes = zip(*found, strict=True)
    return recency, Distances(np.concatenate(places), np.concatenate(first), sum(sizes))


def smaller_id_first(recency: Recency, active: np.ndarray):
    """The mutation: of experts used together the smaller id counts as used last."""
    recency, distances = reference(recency, active)
    place = recency.place.copy()
    for row, used in enumerate(active):
        place[row, used] = place[row, used][::-1]
    return Recency(place, recency.seen), distances


@pytest.mark.parametrize("mutation", [one_by_one, smaller_id_first])
def test_another_order_is_another_curve(monkeypatch, mutation):
    """Sets as sequences, or ties the other way, are found by the comparison with the pager."""
    wrong = 0
    for seed in range(20):
        active = sets(seed)
        with monkeypatch.context() as patch:
            patch.setattr(miss_curves, "reference", mutation)
            curves = curves_of(active)
        largest = int(active.sum(axis=2).max())
        wrong += any(
            (paged(active, cells) != curves.misses[:, cells]).any()
            for cells in range(largest, active.shape[2] + 1)
        )
    assert wrong >= 5


def test_misses_collapse_where_the_working_set_fits():
    """WiSP, checkable 6: 6 of 16 experts in a loop, two at a time."""
    active = np.zeros((60, 1, 16), bool)
    for step in range(60):
        active[step, 0, [(2 * step) % 6, (2 * step + 1) % 6]] = True
    curves = curves_of(active)
    assert curves.warm[0, 5] > 30 and not curves.warm[0, 6:].any()
    assert paged(active, 5)[0] == curves.misses[0, 5] and paged(active, 6)[0] == 6


def test_a_trace_has_the_curve_that_the_simulator_finds(tmp_path):
    """With prefill steps, whose waves are references of their own; by phase, by part, and in
    order."""
    rng = np.random.default_rng(0)
    waves = (1 + 2 * (rng.random(80) < 0.1)).tolist()
    trace = write_trace(tmp_path / "t", random_routing(rng, 80, 3, 12, 2, 2), 12, waves=waves)
    whole = trace_curves(trace)
    parts = {
        "decode": trace_curves(trace, kind="decode"),
        "prefill": trace_curves(trace, kind="prefill"),
    }
    halves = [trace_curves(trace, last=40), trace_curves(trace, first=40)]
    for cells in range(int(whole.exact_from.max()), 13):
        run = simulate(trace, eviction="lru", cells=cells)
        misses = run.misses.astype(np.int64)
        np.testing.assert_array_equal(whole.misses[:, cells], misses.sum(axis=0))
        for kind, curves in parts.items():
            expected = misses[run.of_kind(kind)].sum(axis=0)
            np.testing.assert_array_equal(curves.misses[:, cells], expected)
        for half, rows in zip(halves, (misses[:40], misses[40:]), strict=True):
            np.testing.assert_array_equal(half.misses[:, cells], rows.sum(axis=0))
    assert whole.steps == 80 == sum(part.steps for part in parts.values())


def test_statistics_and_curves_agree(tmp_path):
    """trace_statistics has equation (3) for decode steps too."""
    rng = np.random.default_rng(1)
    trace = write_trace(tmp_path / "t", random_routing(rng, 50, 2, 16, 2), 16)
    curves, found = trace_curves(trace), trace_statistics(trace)
    for cells, share in found.lru_misses.items():
        assert curves.misses[:, cells].sum() / curves.references.sum() == pytest.approx(share)
    assert curves.first.sum() == found.first_uses


def test_a_user_has_a_curve_of_their_own(tmp_path):
    """The curve of the tokens of one user is that of a trace with nobody else in it."""
    rng = np.random.default_rng(2)
    routing = random_routing(rng, 40, 2, 8, 2, 2)
    both = write_trace(tmp_path / "both", routing, 8)
    users = both.array("token.user")
    assert (users == -1).all()
    alone = write_trace(tmp_path / "alone", [ids[:1] for ids in routing], 8)

    class Mixed:
        """The first trace with its rows given to users 0 and 1 in turn."""

        def __init__(self, chunk):
            self.chunk, self.path = chunk, chunk.path

        def array(self, name):
            found = self.chunk.array(name)
            return np.arange(len(found)) % 2 if name == "token.user" else found

    mixed = dataclasses.replace(both, chunks=tuple(Mixed(c) for c in both.chunks))
    np.testing.assert_array_equal(trace_curves(mixed, user=0).misses, trace_curves(alone).misses)
    with pytest.raises(TraceError, match="has no steps to look at of user 7, in steps 0…"):
        trace_curves(mixed, user=7)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_versions_are_lists_of_their_own(seed, tmp_path_factory):
    """Two versions with fixed experts each: every capacity of either, and their bytes."""
    rng = np.random.default_rng(seed)
    routing = random_routing(rng, 20, 2, 8, 2, 2)
    versions = rng.integers(2, size=(2, 8)).astype(np.int8)
    trace = write_trace(tmp_path_factory.mktemp("v") / "t", routing, 8)
    curves = trace_curves(trace, versions=versions)
    if versions.max() == 0:
        return
    sizes = np.array([[100, 120], [30, 40]])
    bytes_missed = curves.misses * sizes.ravel()[:, None]
    for hi, lo in ((8, 8), (4, 4), (5, 4)):
        if (np.array([hi, lo]) < curves.exact_from.reshape(2, 2).max(axis=1)).any():
            continue
        tables = cold_tables(np.full(2, hi + lo), 8, (1, 0, 0), bound=hi + lo)
        tables.cell_version[:, hi:] = 1
        tables.fill_version[:] = versions
        pager, moved = Pager(tables, versions=2), 0
        for ids in routing:
            active = np.zeros((2, 8), bool)
            active[np.arange(2)[:, None], ids] = True
            missing = pager.reference(active).missing
            moved += int((sizes[versions, np.arange(2)[:, None]] * missing).sum())
        assert moved == bytes_missed[:2, hi].sum() + bytes_missed[2:, lo].sum()


def test_live_curves_are_the_same_counts():
    """Without forgetting, what a policy gathers is the warm curve; with it, the past fades."""
    rng = np.random.default_rng(3)
    routing = random_routing(rng, 30, 2, 8, 2, 3)
    active = np.zeros((30, 2, 8), bool)
    live = cold_curves(2, 8)
    for step, ids in enumerate(routing):
        active[step][np.arange(2)[:, None], ids] = True
        live = live.see(ids)
    np.testing.assert_array_equal(live.forget(0.5).misses, curves_of(active).warm)
    before = live.forget(0.5)
    np.testing.assert_array_equal(before.forget(0.5).misses, before.misses / 2)
    np.testing.assert_array_equal(tails(np.array([3, 0, 2])), [5, 2, 2, 0])


def test_what_curves_refuse(tmp_path):
    with pytest.raises(ValueError, match="a miss curve needs at least one reference"):
        curves_of([])
    trace = write_trace(tmp_path / "t", random_routing(np.random.default_rng(0), 5, 1, 4, 2), 4)
    with pytest.raises(ValueError, match="kind must be one of prefill, decode, not 'other'"):
        trace_curves(trace, kind="other")
    with pytest.raises(TraceError, match="has no prefill to look at"):
        trace_curves(trace, kind="prefill")
    header = dataclasses.replace(trace.header, absent=["step.kind"])
    with pytest.raises(TraceError, match=r"has no step\.kind: it was converted or generated"):
        trace_curves(dataclasses.replace(trace, header=header), kind="decode")


def test_recency_is_not_changed_in_place():
    start = cold_recency(1, 4)
    kept = start.place.copy()
    reference(start, np.array([[False, True, False, True]]))
    np.testing.assert_array_equal(start.place, kept)
    assert not start.seen.any()
