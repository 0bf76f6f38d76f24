"""HOBBIT's choice of a miss's version."""

from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.interface import Spec
from host_offload.policies.precision.hobbit import Hobbit
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
