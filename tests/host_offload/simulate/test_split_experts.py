"""MoEpic's caches of tops: times by hand, more hits in the same memory, the search for splits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from host_offload.simulate.split_experts import (
    Prefilled,
    SplitConfig,
    configure,
    play_split,
    stall_s,
)
from host_offload.simulate.timeline import Link
from host_offload.sizing.miss_curves import gather_curves

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

SIZES = {"record_bytes": 120, "link": Link(120.0, chunk_bytes=10), "layer_s": 0.5, "expert_s": 0.25}
"""An expert crosses the link in a second."""


def sets(*each: tuple[int, ...], layers: int = 2, experts: int = 8) -> list[np.ndarray]:
    """Each step needs the same experts in all layers."""
    found = [np.zeros((layers, experts), bool) for _ in each]
    for active, chosen in zip(found, each, strict=True):
        active[:, list(chosen)] = True
    return found


def split(cells: int, top: float, layers: int = 2) -> SplitConfig:
    return SplitConfig(np.full(layers, cells), np.full(layers, top))


def test_times_by_hand():
    steps = sets((0, 1), (0, 1))
    # Without a split two cells hold both, after a step that waits two seconds a layer for them.
    whole = play_split(steps, split(2, 1.0), **SIZES)
    assert whole.seconds == pytest.approx([2 * (0.5 + 2.0 + 0.25), 2 * (0.5 + 0.5)])
    assert (whole.bytes, whole.hits, whole.needed) == (480, 4, 8)
    # A prefill step takes no time here and leaves both.
    warm = play_split([Prefilled(steps[:1]), *steps[:1]], split(2, 1.0), **SIZES)
    assert warm.seconds == pytest.approx(whole.seconds[1:]) and (warm.hits, warm.needed) == (4, 4)
    # One cell holds both tops. Their bottoms come beside the tops' computing.
    halves = play_split(steps, split(1, 0.5), **SIZES)
    assert halves.seconds[1] == pytest.approx(2 * (0.5 + 1.0 + 0.125))
    assert (halves.bytes, halves.hits) == (480 + 240, 4)
    one = play_split(steps, split(1, 1.0), **SIZES)
    assert one.hits < halves.hits and one.seconds[1] > halves.seconds[1]
    # Predicted, the second layer's bottoms come while the first one waits and computes.
    ahead = play_split(steps, split(1, 0.5), predicted=steps, **SIZES)
    assert ahead.seconds[1] < halves.seconds[1] - 0.4 and ahead.bytes == halves.bytes
    wrong = play_split(steps, split(1, 0.5), predicted=sets((6, 7), (6, 7)), **SIZES)
    # Of two that are not needed the second one has not begun when that is known.
    assert wrong.bytes == halves.bytes + 240 and wrong.seconds[1] >= halves.seconds[1]


def curves_of(steps):
    found = gather_curves(((step,), True) for step in steps)
    assert found is not None
    return found


def test_the_configuration_is_the_best_of_all():
    """Two layers, one with a small working set and one with a large one; a fixed point of turns
    need not be the best, and is here."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        active = np.zeros((2, 8), bool)
        active[0, rng.choice(3, 2, replace=False)] = True
        active[1, rng.choice(8, 2, replace=False)] = True
        steps.append(active)
    curves, tops = curves_of(steps), (0.5, 0.75, 1.0)
    for cells, hidden in itertools.product((4, 6, 8), (0.2, 0.8)):
        given = {"load_s": 1.0, "hidden_s": hidden}
        found = configure(curves, cells, tops=tops, **given)

        def cost(held, top, given=given):
            parts = zip(range(2), held, top, strict=True)
            return sum(stall_s(curves, i, n, t, **given) for i, n, t in parts)

        least = min(
            cost((n, cells - n), top)
            for n in range(max(cells - 8, 0), min(cells, 8) + 1)
            for top in itertools.product(tops, repeat=2)
        )
        assert found.cells.sum() <= cells
        assert cost(found.cells, found.top) == pytest.approx(least, abs=0.15 * (least + 0.2))


def test_what_hides_bottoms_makes_a_split_pay():
    """A working set of twice the memory: halves of all of it are cached, and bottoms come beside
    computing. Where nothing hides them, hits cost bytes, and no split is chosen for a set that
    fits."""
    loop = sets(*[(2 * i % 8, (2 * i + 1) % 8) for i in range(64)])
    curves = curves_of(loop)
    found = configure(curves, 8, load_s=1.0, hidden_s=1.0)
    assert (found.top == 0.5).all() and found.cells.tolist() == [4, 4]
    fits = configure(curves_of(sets(*[(0, 1)] * 20)), 4, load_s=1.0, hidden_s=0.0)
    assert (fits.top == 1.0).all() and fits.cells.tolist() == [2, 2]
