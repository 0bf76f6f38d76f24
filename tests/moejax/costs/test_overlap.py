"""Shares of a step, from what its ops recorded."""

import pytest

from host_offload.simulate.timeline import DEVICE, TimelineEvent
from host_offload.sizing.cost_model import CostError, Shares, StepCost
from moejax.costs.overlap import layer_seconds, shares_of


def test_a_layers_seconds_are_medians_without_fills():
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
    assert layer_seconds(events) == (pytest.approx(1.0), pytest.approx(0.5))


def test_what_no_layer_has_is_outside():
    cost = StepCost(step=10.0, part=0.0, span=0.0, expert=1.0, tile=0.0)
    found = shares_of(cost, 10.0, 2, before=2.0, after=1.0)
    assert (found.outside, found.after) == (pytest.approx(0.4), pytest.approx(1 / 3))
    # More in the layers than the step has, and a step of nothing.
    assert shares_of(cost, 10.0, 2, 5.0, 1.0).outside == 0
    none = StepCost(0.0, 1.0, 1.0, 1.0, 0.0)
    assert shares_of(none, 2.0, 2, 0.5, 0.1) == Shares(0.0, 0.0)
    with pytest.raises(CostError, match=r"outside must lie in 0…1, not 1\.5"):
        Shares(outside=1.5)
