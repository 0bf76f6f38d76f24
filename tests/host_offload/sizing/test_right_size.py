"""The least memory that is enough, for a working set and for a speed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import host_offload.sizing.coactivation
from host_offload.policies.prefetch.coactivation import fit
from host_offload.sizing.coactivation import coactivation_counts, predicted_use
from host_offload.sizing.joint import DecodeModel
from host_offload.sizing.miss_curves import curves_of, trace_curves
from host_offload.sizing.right_size import (
    memory_for,
    right_size,
    right_size_of_use,
    users_for,
    working_sets,
)
from host_offload.sizing.split import Division, SplitError
from tests.host_offload.traces.traces_of import random_routing, write_trace


def of_working_set(rng: np.random.Generator, sizes, steps: int = 300) -> list[np.ndarray]:
    """ids int[1, L, 2]: layer l uses sizes[l] of 16 experts, each as often."""
    own = [rng.permutation(16)[:size] for size in sizes]
    return [
        np.stack([np.sort(rng.permutation(experts)[:2]) for experts in own])[None]
        for _ in range(steps)
    ]


def test_both_find_the_working_set(tmp_path):
    """Where a user uses w experts of a layer, predicted and measured faults collapse at w."""
    sizes = [4, 9, 2, 13]
    routing = of_working_set(np.random.default_rng(0), sizes)
    trace = write_trace(tmp_path / "t", routing, 16)
    curves = trace_curves(trace)
    assert right_size(curves, 0.0).tolist() == sizes
    use = predicted_use(fit(trace).fitted.arrays["pairs"], 2)
    np.testing.assert_allclose(use.sum(axis=1), 1)
    assert right_size_of_use(use, 0.0).tolist() == sizes
    for layer, size in enumerate(sizes):
        assert not curves.warm[layer, size] and curves.warm[layer, size - 1]


def test_the_counts_are_the_predictors(tmp_path, monkeypatch):
    """Those that the policy counts step by step, in blocks that end anywhere."""
    routing = random_routing(np.random.default_rng(4), 40, 6, 12, 3, rows=2)
    trace = write_trace(tmp_path / "t", routing, 12)
    monkeypatch.setattr(host_offload.sizing.coactivation, "BLOCK", 17)
    counts = coactivation_counts(trace.array("token.ids"), 12)
    np.testing.assert_array_equal(counts, fit(trace).fitted.arrays["pairs"])


def test_the_users_with_most_tokens(tmp_path):
    """Of nine users the four with most tokens, by their numbers; a model with one layer of experts
    has nothing to predict from."""
    rng = np.random.default_rng(5)
    for layers in (1, 2):
        routing = random_routing(rng, 60, layers, 8, 2)
        trace = write_trace(tmp_path / str(layers), routing, 8)
        owner = np.minimum(np.arange(60) ** 2 // 400, 8)

        class Owned:
            """A chunk whose tokens belong to those users."""

            def __init__(self, chunk, owner):
                self.chunk, self.path, self.owner = chunk, chunk.path, owner

            def array(self, name):
                return self.owner if name == "token.user" else self.chunk.array(name)

        owned = dataclasses.replace(trace, chunks=tuple(Owned(c, owner) for c in trace.chunks))
        found = working_sets(owned, most=4)  # type: ignore[arg-type]
        assert [one.user for one in found] == [None, 0, 1, 2, 3]
        assert [one.tokens for one in found[1:]] == np.bincount(owner)[:4].tolist()
        assert all((one.by_coactivation is None) == (layers == 1) for one in found)


def test_a_user_needs_less_than_everybody(tmp_path):
    """Two users with working sets of their own, counts of each and of both."""
    rng = np.random.default_rng(1)
    parts = [of_working_set(rng, [5, 5, 5]) for _ in range(2)]
    traces = [write_trace(tmp_path / str(i), part, 16) for i, part in enumerate(parts)]
    mixed = [ids for pair in zip(*parts, strict=True) for ids in pair]
    everybody = write_trace(tmp_path / "all", mixed, 16)
    sizes = [right_size_of_use(predicted_use(fit(t).fitted.arrays["pairs"], 2)) for t in traces]
    all_of_it = right_size_of_use(predicted_use(fit(everybody).fitted.arrays["pairs"], 2))
    assert (np.array(sizes) <= 5).all() and (all_of_it > 5).all()
    assert (right_size(trace_curves(everybody)) > 5).all()


def test_counts_of_all_and_a_first_layer_know_a_user(tmp_path):
    """Two groups of experts that go together in every layer: who is in one of them at the first
    layer will need that one in the others."""
    rng = np.random.default_rng(2)
    routing = []
    for step in range(400):
        low = 8 * (step % 2)
        routing.append(np.stack([np.sort(low + rng.permutation(8)[:2]) for _ in range(3)])[None])
    pairs = fit(write_trace(tmp_path / "t", routing, 16)).fitted.arrays["pairs"]
    first = np.where(np.arange(16) < 8, 1.0, 0.0)
    use = predicted_use(pairs, 2, first=first)
    assert not use[:, 8:].any()
    assert right_size_of_use(use).tolist() == [8, 8, 8]
    assert right_size_of_use(predicted_use(pairs, 2)).tolist() == [16, 16, 16]


def test_the_predicted_set_has_what_comes_next(tmp_path):
    """Sized on the first half by the predictor, measured on the second: what is not in the set is
    about the part that was allowed."""
    rng = np.random.default_rng(3)
    routing = random_routing(rng, 3000, 4, 32, 4)
    trace = write_trace(tmp_path / "t", routing[:1500], 32)
    use = predicted_use(fit(trace).fitted.arrays["pairs"], 4)
    for epsilon in (0.05, 0.2):
        cells = right_size_of_use(use, epsilon)
        assert (cells < 32).all()
        hot = np.argsort(np.argsort(-use, axis=1), axis=1) < cells[:, None]
        ids = np.concatenate(routing[1500:])
        share = 1 - hot[np.arange(4)[:, None], ids].mean(axis=(0, 2))
        assert (np.abs(share - epsilon) < 0.03).all(), (epsilon, share)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), epsilon=st.floats(0, 0.3))
def test_the_size_is_the_smallest(seed, epsilon):
    active = np.random.default_rng(seed).random((30, 2, 8)) < 0.3
    curves = curves_of(active)
    warm, cells = curves.warm, right_size(curves, epsilon)
    allowed = epsilon * (curves.references - curves.first)
    for layer, c in enumerate(cells):
        assert warm[layer, c] <= allowed[layer]
        assert c == 0 or warm[layer, c - 1] > allowed[layer]


MODEL = DecodeModel(
    np.array([1, 4, 16]),
    np.outer([8, 24, 60], (8 - np.arange(9)) / 8.0),
    np.array([0.010, 0.012, 0.020]),
    0.001,
)
DIVISION = Division(10_000, 400, 10, 8, 20, unit_bytes=100, unit_pages=10)


@pytest.mark.parametrize(("users", "tpot_s"), [(1, 0.014), (4, 0.03), (16, 0.05), (10, 0.05)])
def test_memory_for_a_speed_and_users_for_a_memory(users, tpot_s):
    """The least cap that is fast enough, one less is not; and the memory serves those users."""
    found = memory_for(MODEL, DIVISION, users=users, tpot_s=tpot_s, pages_per_user=15)
    assert found.step_s <= tpot_s < MODEL.step_s(users, found.cap - 1)
    assert found.memory == found.cap * 400 + -(-max(users * 15, 20) // 10) * 100
    assert found.kv_pages >= users * 15
    of_it = dataclasses.replace(DIVISION, total_bytes=found.memory)
    served = users_for(MODEL, of_it, tpot_s=tpot_s, pages_per_user=15)
    assert served.users >= users and served.step_s <= tpot_s
    # A slot less and there is a cell less in each layer, or less KV than they need.
    try:
        less = dataclasses.replace(DIVISION, total_bytes=found.memory - 100)
        fewer = users_for(MODEL, less, tpot_s=tpot_s, pages_per_user=15).users
    except SplitError:
        fewer = 0
    assert fewer < users


def test_what_no_memory_gives():
    with pytest.raises(SplitError, match="every expert resident it takes 20 ms; ask for that"):
        memory_for(MODEL, DIVISION, users=16, tpot_s=0.01, pages_per_user=1)
    with pytest.raises(SplitError, match="width 17 is not within 1…16"):
        memory_for(MODEL, DIVISION, users=17, tpot_s=1.0, pages_per_user=1)
    small = dataclasses.replace(DIVISION, total_bytes=1000)
    with pytest.raises(SplitError, match="do not give 1 users a token every 1 ms: it would take"):
        users_for(MODEL, small, tpot_s=0.001, pages_per_user=15)
    with pytest.raises(SplitError, match="their KV does not fit"):
        users_for(MODEL, small, tpot_s=1.0, pages_per_user=500)
    with pytest.raises(ValueError, match="co-activation counts are empty in some layer"):
        predicted_use(np.zeros((3, 2, 4, 4)), 2)
