"""Eviction policies by name."""

import pytest

from host_offload.policies.eviction.names import EVICTION, victim_weights
from pallas_kernels.plan.victim import MAX_WEIGHT


def test_weights():
    assert victim_weights("lru") == (1, 0, 0)
    assert victim_weights("lfu") == (0, 1, 0)


@pytest.mark.parametrize("eviction", EVICTION)
def test_weights_are_within_what_the_key_can_hold(eviction):
    assert all(abs(weight) <= MAX_WEIGHT for weight in victim_weights(eviction))


def test_refuses():
    with pytest.raises(ValueError, match="unknown eviction policy 'fifo'; known: lru, lfu"):
        victim_weights("fifo")
