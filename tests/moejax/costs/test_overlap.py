"""A layer's seconds, from what its ops recorded."""

import pytest

from host_offload.simulate.timeline import DEVICE, TimelineEvent
from moejax.costs.overlap import layer_seconds


def test_a_layers_seconds_are_a_median_without_experts_and_fills():
    events, now = [], 0.0
    for step in range(3):
        slow = 10.0 if step == 1 else 1.0
        for layer in range(2):
            for name, seconds in (("linear", slow), ("fill", 7.0), ("expert_ffn", 4.0)):
                events.append(TimelineEvent(DEVICE, name, now, now + seconds, layer))
                now += seconds
            events.append(TimelineEvent(DEVICE, "combine", now, now + 0.5, layer))
            now += 0.5
        events.append(TimelineEvent(DEVICE, "linear", now, now + 3.0, None))
        now += 3.0
    assert layer_seconds(events) == pytest.approx(1.5)
