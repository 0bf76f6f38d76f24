"""HOBBIT's choice of a miss's version, and the full version that follows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import Spec, Transition
from host_offload.policies.precision.hobbit import Hobbit, Promotions
from host_offload.policies.precision.precision_names import precision_of


def test_experts_behind_most_of_the_weight_come_in_fewer_bits():
    """Two rows; an expert that matters to one of them comes whole."""
    policy = Hobbit(threshold=0.6)
    spec: Spec = SimpleNamespace(layers=2, experts=8)  # pyright: ignore[reportAssignmentType]
    ids = np.array([[[1, 3, 5]], [[3, 5, 6]]])
    weights = np.array([[[0.5, 0.2, 0.3]], [[1.0, 0.8, 0.2]]], np.float16)
    seen = SimpleNamespace(layer=1, ids=ids, weights=weights)
    _, decision = policy.decide(policy.init(spec), seen)  # pyright: ignore[reportArgumentType]
    # Before 1, 5 and 3 there are 0, 0.5 and 0.8; before 3, 5 and 6 of the other 0, 0.5 and 0.9.
    assert decision.fill_version.tolist() == [[0] * 8, [1, 0, 1, 0, 1, 0, 1, 1]]
    with pytest.raises(ValueError, match="threshold must be a share from 0 to 1, not 2"):
        precision_of("hobbit,threshold=2")
    found = precision_of("hobbit,hi=int8,lo=int2,threshold=0.5")
    assert found.paged and found.policies == (Hobbit(0.5),) and found.lossy


def test_the_full_version_follows_while_little_is_missed():
    """The latest used first, one of a layer, and only in place of what was used before."""
    policy = Promotions(most=5)
    spec: Spec = SimpleNamespace(  # pyright: ignore[reportAssignmentType]
        layers=3, experts=6, capacity=(4, 9), has_all_versions=np.array([True, True, False])
    )
    # Two high cells in layers 0 and 1, none in layer 2; a cell of layer 1 is free.
    version = np.array([[0, 0, 1, 1, 1, -1], [-1, -1, -1, 0, 1, 1], [1, -1, -1, -1, -1, -1]])
    last_used = np.array([[4, 6, 7, 5, 8, -1], [-1, -1, -1, 9, 2, 9], [9, -1, -1, -1, -1, -1]])
    first = np.zeros((3, 6), bool)
    first[[0, 0, 1, 2], [2, 3, 4, 0]] = True

    def follow(state, missed, version=version, last_used=last_used, policy=policy):
        seen: Any = SimpleNamespace(missed=missed, version=version, last_used=last_used)
        state, decision = policy.decide(state, seen)
        return state, [*decision.transitions]

    begun = policy.init(spec)
    state, none = follow(begun, first | (version == 0))  # seven misses leave nothing
    assert none == []
    _, due = follow(begun, first)
    assert due == [Transition(0, 2, 0)]
    assert follow(state, first & False)[1] == [Transition(0, 2, 0), Transition(1, 4, 0)]
    # A resident that no miss brought does not follow, nor one that left or is there in full.
    gone, there = version.copy(), version.copy()
    gone[0, 2], there[0, 2] = -1, 0
    for other in (gone, there):
        after, due = follow(state, first & False, other)
        assert (0, 2) not in [place[:2] for place in due] and not after.experts[0, 2]
    # The high residents were all used later.
    later = np.where(version == 0, 10, last_used)
    assert follow(state, first & False, last_used=later)[1] == [Transition(1, 4, 0)]
    full = version.copy()
    full[1, 2] = 0
    later[1, 2] = 10
    assert follow(state, first & False, full, later)[1] == []


def test_promotions_are_a_setting():
    found = precision_of("hobbit,promote=4")
    assert found.policies == (Hobbit(), Promotions(4)) and found.report()["promote"] == 4
    assert precision_of("hobbit").policies == (Hobbit(),)
    for text in ("hobbit,promote=0", "dynaexq,promote=2"):
        with pytest.raises(ValueError, match="promote"):
            precision_of(text)
