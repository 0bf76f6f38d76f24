"""Eviction policies by name."""

import pytest

from host_offload.policies.eviction.names import EVICTION
from pallas_kernels.plan.victim import MAX_WEIGHT


def test_weights():
    assert EVICTION["lru"] == (1, 0, 0)
    assert EVICTION["lfu"] == (0, 1, 0)


@pytest.mark.parametrize("eviction", EVICTION)
def test_weights_are_within_what_the_key_can_hold(eviction):
    assert all(abs(weight) <= MAX_WEIGHT for weight in EVICTION[eviction])
