"""Eviction policies by name."""

import numpy as np
import pytest

from host_offload.policies.eviction import static
from host_offload.policies.eviction.names import EVICTION
from pallas_kernels.plan.victim import MAX_WEIGHT
from tests.host_offload.traces.traces_of import write_trace


def test_weights():
    assert EVICTION["lru"] == (1, 0, 0)
    assert EVICTION["lfu"] == (0, 1, 0)


@pytest.mark.parametrize("eviction", EVICTION)
def test_weights_are_within_what_the_key_can_hold(eviction):
    assert all(abs(weight) <= MAX_WEIGHT for weight in EVICTION[eviction])


def test_a_static_set_is_learned_from_a_trace(tmp_path):
    """The hottest first in each layer, ties by id."""
    routed = [np.array([[[3, 1], [0, 2]], [[3, 2], [2, 3]]]), np.array([[[2, 3], [0, 2]]])]
    trace = write_trace(tmp_path / "trace", [np.sort(ids) for ids in routed], 4)
    assert static.fit(trace).hot == ((3, 2, 1, 0), (2, 0, 3, 1))
