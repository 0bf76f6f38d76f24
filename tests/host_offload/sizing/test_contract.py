"""Sizing finds the best of all that there is, against trying everything: width and cells, a working
set, cells over layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.policies.prefetch.coactivation import fit
from host_offload.sizing.cell_allocation import ALLOCATIONS, allocate, hull_misses
from host_offload.sizing.coactivation_counts import predicted_use
from host_offload.sizing.joint import DecodeModel, choose, widen
from host_offload.sizing.miss_curves import trace_curves
from host_offload.sizing.right_size import right_size, right_size_of_use, working_sets
from host_offload.sizing.split import Division
from tests.host_offload.sizing.curves import curves_of
from tests.host_offload.traces.traces_of import random_routing, rewritten, write_trace


def width_and_cells(rng: np.random.Generator, decide) -> tuple[float, list[float]]:
    misses = np.sort(np.sort(rng.random((4, 7)) * 20, axis=1)[:, ::-1], axis=0)
    seconds = np.sort(rng.random(4))[:, None] + 0.05 * misses
    model = DecodeModel(np.array([1, 2, 4, 8]), seconds)
    division = Division(int(rng.integers(300, 1500)), 100, 10, 6, 5)
    pages, demand = float(rng.uniform(0.5, 12)), int(rng.integers(13))
    found = decide(model, division, pages_per_sequence=pages, demand=demand)
    rates = {
        (width, cap): -width / model.step_s(width, cap)
        for width in range(1, min(max(demand, 1), 8) + 1)
        for cap in range(7)
        if division.pages_at(cap) >= max(5, width * pages)
    }
    assert found.pages == division.pages_at(found.cap) >= found.width * pages
    return rates[found.width, found.cap], [*rates.values()]


def as_wide_as_it_goes(model, division, **ask):
    """A mistake: rows before cells."""
    found = choose(model, division, **ask)
    width = min(max(ask["demand"], 1), 8)
    while division.pages_at(0) < width * ask["pages_per_sequence"]:
        width -= 1
    return found._replace(width=width, cap=0, pages=division.pages_at(0))


def working_set(rng: np.random.Generator, decide) -> tuple[float, list[float]]:
    curves, epsilon = curves_of(rng.random((30, 2, 8)) < 0.3), float(rng.uniform(0, 0.3))
    allowed = epsilon * (curves.references - curves.first)
    least = [int(np.argmax(curves.warm[layer] <= allowed[layer])) for layer in range(2)]
    cells = decide(curves, epsilon)
    assert (curves.warm[np.arange(2), cells] <= allowed).all()
    return cells.sum(), [sum(least)]


SUBJECTS: dict[str, tuple[Callable, Callable, list[Callable]]] = {
    "width": (width_and_cells, choose, [as_wide_as_it_goes]),
    "working set": (working_set, right_size, [lambda curves, epsilon: right_size(curves, 0.0)]),
}
"""Name → an instance (what was decided is worth, what all there is is worth, of which the least is
the best), what decides, mistakes."""


@pytest.mark.parametrize("name", SUBJECTS)
@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_it_is_the_best_of_all_that_there_is(name, seed):
    instance, decide, _ = SUBJECTS[name]
    found, every = instance(np.random.default_rng(seed), decide)
    assert found == pytest.approx(min(every))


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_mistake_is_found(name):
    instance, _, mistakes = SUBJECTS[name]
    for mistake in mistakes:
        instances = (instance(np.random.default_rng(seed), mistake) for seed in range(40))
        assert any(found > min(every) + 1e-6 for found, every in instances)


# ---- cells


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_marginal_lies_between_the_hulls_and_uniform(seed):
    """No allocation is below the hulls; where curves are convex the marginal one is the best."""
    rng = np.random.default_rng(seed)
    layers, most = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    falls = rng.integers(0, 12, (layers, most))
    if convex := bool(seed % 2):
        falls = np.sort(falls, axis=1)[:, ::-1]
    misses = np.pad(falls[:, ::-1].cumsum(axis=1)[:, ::-1], ((0, 0), (0, 1)))
    least = rng.integers(0, 2, layers)
    slots = int(rng.integers(least.sum(), layers * most + 3))
    rows, given_out = np.arange(layers), min(slots, layers * most)
    every = itertools.product(*(range(least[layer], most + 1) for layer in range(layers)))
    best = min(misses[rows, list(c)].sum() for c in every if sum(c) <= slots)
    found = {rule: allocate(rule, misses, slots, least=least) for rule in ALLOCATIONS}
    for each in found.values():
        assert each.cells.sum() == given_out and (each.cells >= least).all()
        assert each.misses == misses[rows, each.cells].sum() >= best
    assert found["marginal"].misses <= found["uniform"].misses
    assert not convex or found["marginal"].misses == best
    assert hull_misses(misses, np.array([given_out]), least)[0] <= best + 1e-9


def test_a_cliff_some_cells_away_is_reached():
    """A layer that loops over five experts saves nothing before it has five cells."""
    loop, slope = [10, 10, 10, 10, 10, 0], [5, 4, 3, 2, 1, 0]
    assert allocate("marginal", np.array([loop, slope]), 5).cells.tolist() == [5, 0]


# ---- width


def test_wider_is_what_independent_sequences_miss():
    """A step of 4 sequences, 10 absent experts, each missed by a sequence with chance 0.1."""
    misses, absent = np.array([10 * (1 - 0.9**4), 0.0]), np.array([10.0, 0.0])
    found = widen(misses, 4, np.array([1, 4, 64]), absent)
    np.testing.assert_allclose(found[:, 0], [1.0, misses[0], 10 * (1 - 0.9**64)])
    assert not found[:, 1].any()


# ---- working sets


def of_working_set(rng: np.random.Generator, sizes, steps: int = 300) -> list[np.ndarray]:
    """ids int[1, L, 2]: layer l uses sizes[l] of 16 experts, each as often."""
    own = [rng.permutation(16)[:size] for size in sizes]
    return [
        np.stack([np.sort(rng.permutation(experts)[:2]) for experts in own])[None]
        for _ in range(steps)
    ]


def test_nearer_layers_weigh_more():
    """The layer before predicts expert 0, and the one before that, at half the weight, expert 1."""
    pairs = np.zeros((3, 2, 2, 2))
    pairs[1, 0] = np.eye(2)
    pairs[2, 0, :, 0] = pairs[2, 1, :, 1] = 1
    np.testing.assert_allclose(predicted_use(pairs, 1)[2], [2 / 3, 1 / 3])


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


def test_the_users_with_most_tokens(tmp_path):
    """Of nine users the four with most tokens, by their numbers; a model with one layer of experts
    has nothing to predict from."""
    rng = np.random.default_rng(5)
    for layers in (1, 2):
        routing = random_routing(rng, 60, layers, 8, 2)
        trace = write_trace(tmp_path / str(layers), routing, 8)
        owner = np.minimum(np.arange(60, dtype=np.int32) ** 2 // 400, 8)
        steps = (s._replace(user=owner[s.number][None]) for s in trace.step_traces())
        found = working_sets(rewritten(tmp_path / f"{layers} owned", trace, steps), most=4)
        assert [one.user for one in found] == [None, 0, 1, 2, 3]
        assert [one.tokens for one in found[1:]] == np.bincount(owner)[:4].tolist()
        assert all((one.by_coactivation is None) == (layers == 1) for one in found)


MODEL = DecodeModel(
    np.array([1, 4, 16]),
    np.array([[0.010], [0.012], [0.020]]) + 0.001 * np.outer([8, 24, 60], (8 - np.arange(9)) / 8.0),
)
# ---- what is refused

TIGHT = Division(1000, 100, 10, 6, 5)


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda: allocate("best", np.zeros((1, 3)), 1), "are uniform, marginal, not 'b"),
        (lambda: allocate("uniform", np.array([[1, 2]]), 1), "curves .* that never increase"),
        (lambda: allocate("uniform", np.zeros(3), 1), "must be curves"),
        (lambda: allocate("marginal", np.zeros((2, 3)), 1, least=1), "1 slots cannot give 2 lay"),
        (lambda: allocate("marginal", np.zeros((2, 3)), 9, least=3), "of at most 2 each"),
        (
            lambda: choose(MODEL, TIGHT, pages_per_sequence=101, demand=1),
            "have no room for 1 sequences of 101 pages",
        ),
        (lambda: predicted_use(np.zeros((3, 2, 4, 4)), 2), "counts are empty in some layer"),
    ],
)
def test_what_cannot_be_is_refused(ask, match):
    with pytest.raises(ValueError, match=match):
        ask()
