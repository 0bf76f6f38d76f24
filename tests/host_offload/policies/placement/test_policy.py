"""Placement: what a scheduler says of a layer becomes decisions, and a name becomes a placement."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment
from host_offload.control.rules import PolicyError
from host_offload.control.step_record import LayerRouting, LinkUse, StepRows
from host_offload.policies.eviction.static import hot_beside_prefetches
from host_offload.policies.placement.placement_names import (
    placement_policy,
    said,
    with_placement,
)
from host_offload.policies.placement.placement_policy import COSTS, PlacementPolicy, costs_of
from host_offload.policies.placement.presched import PlacementCosts
from host_offload.policies.prefetch.llapor import Learned
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from tests.host_offload.control.policy_runs import scripted, spec
from tests.host_offload.sizing.cost_models import MODEL

pytestmark = pytest.mark.slow  # numpy

STATED = "per_token=1,startup=1,load=4,accelerator=1,attention=2"
ROUTER = np.eye(4, 8, dtype=np.float32)[None].repeat(2, 0)
"""[L, D, E]: input i asks for expert i."""
PAGED = {"dense": np.full(2, 100)}


def told(**changes):
    return spec(version_bytes=PAGED, second_processor=True, driver="host", **changes)


def seen(layer: int, counts, there=(), **fields):
    """An observation between layers. there: (layer, expert) of residents."""
    every, version = np.zeros((2, 8), int), np.full((2, 8), -1)
    every[layer, : len(counts)] = counts
    for key in there:
        version[key] = 0
    values = {"moment": Moment.EXPERTS_BEGIN, "layer": layer, "counts": every, "version": version}
    return SimpleNamespace(**{**values, **LinkUse()._asdict(), "cells": np.zeros(2, int), **fields})


def test_light_misses_go_to_the_second_processor_and_heavy_ones_are_loaded_in_their_order():
    policy = placement_policy(f"fiddler-code,{STATED}")
    state = policy.init(told())
    # Rows of experts 0…4; 1 is resident. 7 a row against 70 a load: from 10 rows on it is loaded.
    _, decision = policy.decide(state, seen(0, [3, 90, 30, 0, 10], there=[(0, 1)]))
    assert decision.execute.tolist() == [1, 0, 0, 0]
    assert decision.load_order.tolist() == [2, 2, 1, 0]  # the list of loads ascends
    assert decision.stages is None


def test_costs_are_those_of_each_layers_bytes():
    """Of layers of 180 and of 20 bytes an expert, stated costs are those of one of 100 bytes."""
    policy, counts = placement_policy(f"prescope,{STATED}"), [1, 2, 3, 4, 5, 9]
    computed = {}
    for sizes in ((100, 100), (180, 20)):
        told_so = dataclasses.replace(told(), version_bytes={"checkpoint": np.array(sizes)})
        state = policy.init(told_so)
        found = [policy.decide(state, seen(layer, counts))[1].execute for layer in (0, 1)]
        computed[sizes] = [int(np.sum(execute)) for execute in found]
    assert computed == {(100, 100): [3, 3], (180, 20): [4, 2]}


def test_free_cells_are_filled_with_the_heaviest_misses_whatever_the_rule():
    policy = placement_policy(f"fiddler,{STATED}")
    state, cells = policy.init(told()), np.array([3, 3])
    counts = [3, 90, 30, 0, 10]
    _, decision = policy.decide(state, seen(0, counts, there=[(0, 1)], cells=cells))
    assert decision.execute.tolist() == [1, 0, 0, 0]
    there = [(0, 1), (0, 5), (0, 6)]
    _, decision = policy.decide(state, seen(0, counts, there=there, cells=cells))
    assert decision.execute.tolist() == [1, 0, 1, 1]


def test_what_is_predicted_comes_ahead_and_what_the_link_still_has_to_bring_delays_it():
    policy = placement_policy(f"prescope,{STATED},predict=gates")
    state = policy.init(told(router=ROUTER))
    inputs = np.eye(4, dtype=np.float16)[[2, 2, 3]][:, None]
    fields = {"gate_input": inputs}
    _, decision = policy.decide(state, seen(0, [1, 1], **fields))
    assert decision.execute.tolist() == [1, 1]
    assert [stage[:2] for stage in decision.stages] == [(1, 0), (1, 2)]  # of most rows first
    assert {stage.cause for stage in decision.stages} == {"prescope"}
    _, decision = policy.decide(state, seen(0, [9, 8], **fields))
    _, later = policy.decide(state, seen(0, [9, 8], **fields, link_bytes_left=1000))
    # The link is busy for ten loads: nobody waits for it, everybody is computed.
    assert decision.execute.tolist() == [0, 1] and later.execute.tolist() == [1, 1]


def test_a_critical_prefetch_that_nobody_uses_lowers_its_rate_of_hits():
    policy = placement_policy(f"greedy,{STATED},predict=gates,hit=0.5")
    state = policy.init(told(router=ROUTER))
    inputs = {"gate_input": np.eye(4, dtype=np.float16)[[2]][:, None]}
    state, decision = policy.decide(state, seen(0, [9], **inputs))
    last = decision.stages[-1]
    assert state.critical == ((1, last.expert),)
    used = np.zeros(8, int)
    used[last.expert] = 1
    after, _ = policy.decide(state, seen(1, used, **inputs))
    assert after.hit == pytest.approx(0.55) and after.critical == ()
    after, _ = policy.decide(state, seen(1, 1 - used, **inputs))
    assert after.hit == pytest.approx(0.45)


def test_costs_follow_what_the_link_and_the_second_processor_do():
    """The paper's Timer is live: a tenth of what each looks like since the last layer."""
    costs = PlacementCosts(1.0, 2.0, 4.0, 1.0, 3.0)
    before = LinkUse(link_arrived=3, link_busy_us=5_000_000, second_us=1_000_000)
    assert costs.follow(before, before) == costs
    # Two loads in 12 s; two experts of three rows, for which 7 s are predicted, in 14 s.
    now = LinkUse(0, 0, 5, 0, 17_000_000, 2, 3, 15_000_000)
    found = costs.follow(before, now)
    assert found == dataclasses.replace(costs, load=4.2, per_token=1.1, startup=2.2)
    policy = placement_policy(f"prescope,{STATED},predict=gates")
    state = policy.init(told(router=ROUTER))
    inputs = {"gate_input": np.eye(4, dtype=np.float16)[[2]][:, None]}
    for arrived in (1, 2):
        use = {"link_arrived": arrived, "link_busy_us": 14_000_000 * arrived}
        state, _ = policy.decide(state, seen(0, [9], **inputs, **use))
    assert state.costs.load == pytest.approx(4 + 1 + 0.9)


def test_hybrimoe_prefetches_when_the_layer_s_experts_are_computed():
    policy = placement_policy(f"hybrimoe,{STATED},predict=gates")
    assert policy.moments == {Moment.EXPERTS_BEGIN, Moment.LAYER_BEGIN}
    state = policy.init(told(router=ROUTER))
    inputs = {"gate_input": np.eye(4, dtype=np.float16)[[2]][:, None]}
    state, decision = policy.decide(state, seen(0, [9], **inputs))
    assert decision.stages == ()
    begun = SimpleNamespace(moment=Moment.LAYER_BEGIN, layer=1)
    state, decision = policy.decide(state, begun)
    assert {stage.expert for stage in decision.stages} == {0, 2}
    assert policy.decide(state, begun)[1] == Decision()


def test_costs_are_what_is_stated_then_what_was_measured():
    measured = told(costs=MODEL.costs())
    found = costs_of(placement_policy("prescope,load=3ms"), measured, 100)
    assert found.load == pytest.approx(3e-3)
    assert (found.startup, found.per_token) == (70.0, 1.0)
    link = told(costs=MODEL.costs(), link=(1e-3, 1e-4))
    assert costs_of(placement_policy("prescope,load=link"), link, 100).load == pytest.approx(0.011)
    with pytest.raises(ValueError, match="does not know startup, load, accelerator, attention"):
        placement_policy("prescope,per_token=1").init(told())


def test_a_name_says_all_that_a_replay_needs():
    policy = placement_policy("prescope,load=3ms,predict=gates,hit=0.25")
    text = said(policy, told(costs=MODEL.costs()))
    again = placement_policy(text)
    assert text.startswith("prescope,") and "costs" not in again.needs
    assert (again.scheduler, again.predict, again.hit) == ("prescope", "gates", 0.25)
    wanted = costs_of(policy, told(costs=MODEL.costs()), 100)
    assert costs_of(again, told(), 100) == wanted
    assert set(dict(again.stated)) == {*COSTS}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prescop", "unknown placement 'prescop', did you mean 'prescope'"),
        ("prescope,speed=3", "has no setting 'speed=3'; known:"),
        ("prescope,load=fast", "load='fast' is not a time; write 20us"),
        ("prescope,predict=hope", "predict='hope' is not one of gates"),
        ("prescope,hit=2", "hit='2' is not a share from 0 to 1"),
    ],
)
def test_a_name_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        placement_policy(text)


def test_networks_among_the_policies_are_what_it_predicts_by():
    fitted: object = object()
    learned = Learned(fitted)  # type: ignore[arg-type]
    other, found = with_placement("prescope", [learned, RandomPrefetch()])
    assert isinstance(other, RandomPrefetch) and isinstance(found, PlacementPolicy)
    assert found.fitted is fitted and found.writes >= {"stages"}
    assert found.needs >= {"gate_input", "ids", "weights", "position", "link_bytes_left"}
    assert with_placement(None, [learned]) == [learned]
    with pytest.raises(ValueError, match="both predict"):
        with_placement("prescope,predict=gates", [learned])
    with pytest.raises(ValueError, match="fiddler prefetches nothing"):
        with_placement("fiddler", [learned])


# ---- the controller


ROWS = StepRows(*(np.zeros(2, np.int32),) * 4)
ROUTED = LayerRouting(np.array([[[1, 4]], [[4, 6]]], np.int16), np.ones((2, 1, 2), np.float32))


def placed(script, **fields) -> Controller:
    moments = {Moment.ROUTED, Moment.EXPERTS_BEGIN}
    writes = {"execute", "load_order"}
    return Controller(told(**fields), [scripted(script, moments=moments, writes=writes)])


def look(controller: Controller, moment: Moment, layer: int = 0) -> None:
    controller.between_layers(moment, 0, layer, seconds=0.0, rows=ROWS, routing=ROUTED)


def test_decisions_of_a_layer_add_up_until_the_next_one():
    controller = placed(
        {
            (Moment.ROUTED, 0): Decision(execute=np.array([0, 1, 1])),
            (Moment.EXPERTS_BEGIN, 0): Decision(load_order=np.array([2, 0, 1])),
        }
    )
    controller.begin_step(0, seconds=0.0)
    assert controller.assigned(0) is None
    look(controller, Moment.ROUTED)
    look(controller, Moment.EXPERTS_BEGIN)
    assigned = controller.assigned(0)
    assert assigned is not None and controller.assigned(1) is None
    assert np.flatnonzero(assigned.beside).tolist() == [4, 6]
    assert assigned.order[[1, 4, 6]].tolist() == [2, 0, 1]
    controller.begin_step(1, seconds=0.0)
    assert controller.assigned(0) is None


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(execute=np.array([0, 1])), "execute has 2 entries, and 3 experts are active"),
        (Decision(execute=np.array([0, 1, 2])), r"execute must lie in 0…1, not 0…2"),
        (Decision(load_order=np.array([-1, 0, 1])), r"load_order must lie in 0…"),
    ],
)
def test_a_decision_that_fits_no_layer_is_refused(decision, message):
    controller = placed({(Moment.ROUTED, 0): decision})
    with pytest.raises(PolicyError, match=message):
        look(controller, Moment.ROUTED)


def test_there_is_nobody_to_give_experts_to():
    policy = scripted(moments={Moment.ROUTED}, writes={"execute"})
    alone = dataclasses.replace(told(), second_processor=False)
    with pytest.raises(PolicyError, match="there is no second processor; name a placement"):
        Controller(alone, [policy])
    policy = scripted(
        {(Moment.STEP_BEGIN, 0): Decision(execute=np.zeros(0, int))},
        moments={Moment.ROUTED, Moment.STEP_BEGIN},
        writes={"execute"},
    )
    with pytest.raises(PolicyError, match="only to a layer that is routed"):
        Controller(told(), [policy]).begin_step(0, seconds=0.0)


def test_buffers_bring_a_hot_table_that_leaves_cells_to_prefetches():
    """Of each layer so many cells; the table stages nobody, since the placement does, and whoever
    is not hot is read through. Free cells of those are not filled on demand."""
    table, policy = with_placement(f"prescope,{STATED},predict=gates,buffers=2", [])
    assert table == hot_beside_prefetches(2) and policy.buffers == 2
    assert not table.writes & policy.writes and "fill_version" in table.writes
    assert ",buffers=2," in said(policy, told())
    (alone,) = with_placement(f"prescope,{STATED}", [])
    assert alone.buffers is None and "buffers" not in said(alone, told())
    for text in ("-1", "x", ""):
        with pytest.raises(ValueError, match="is not a whole number, 0 or more"):
            with_placement(f"prescope,buffers={text}", [])
    # Three cells, of which two are for who comes ahead: with one resident nothing is filled.
    counts, cells = [3, 90, 30, 0, 10], np.array([3, 3])
    for buffers, wanted in ((2, [1, 1, 1]), (1, [1, 0, 1])):
        policy = placement_policy(f"fiddler,{STATED},buffers={buffers}")
        _, decision = policy.decide(
            policy.init(told()), seen(0, counts, there=[(0, 1)], cells=cells)
        )
        assert decision.execute[[0, 2, 3]].tolist() == wanted
