"""The balanced split and the planner of residency: checkable properties 2 to 5 of
shared/papers.md 3.7."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import host_offload.sizing.tiers as tiers
from host_offload.control.window import WindowSpec, tiers_of
from host_offload.sizing.tiers import (
    DEAD_ZONE,
    DENSE,
    HOST,
    PACKED,
    PlannerState,
    StorageModel,
    move_in_one_layer,
    move_one_each,
    plan_residency,
    uniform_placement,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

MODEL = StorageModel(
    layers=6, experts=32, record_bytes=1000, host_rate=1e6, packed_rate=3e6, kappa=0.75
)
TWO_TIERS = StorageModel(layers=6, experts=32, record_bytes=1000, host_rate=1e6)
ALL = 6 * 32 * 1000


def test_what_no_machine_is_is_refused():
    for dense, packed in ((20, 20), (-1, 0)):
        with pytest.raises(ValueError, match="cannot be dense, packed and at the host"):
            uniform_placement(MODEL, dense, packed)
    with pytest.raises(ValueError, match="cannot be dense"):
        uniform_placement(TWO_TIERS, 0, 1)


# ---- memory


def test_experts_take_what_the_paper_says():
    """κ·α·P_total + 2·P_layer without a dense tier; with one alone, the engine's window."""
    for packed in range(33):
        placement = uniform_placement(MODEL, 0, packed)
        assert MODEL.experts_bytes(placement) == 0.75 * packed / 32 * ALL + 2 * ALL / 6
    for dense in range(33):
        slots = 6 * dense + 2 * (32 - dense)
        assert TWO_TIERS.experts_bytes(uniform_placement(TWO_TIERS, dense, 0)) == slots * 1000


@pytest.mark.parametrize("direct", [False, True])
def test_the_engines_window_takes_what_the_model_says(direct):
    """Also of layers that differ, whose window is as large as the largest's."""
    model = dataclasses.replace(MODEL, direct=direct)
    unlike = move_in_one_layer(uniform_placement(MODEL, 2, 20), PACKED, HOST, 2)
    for placement in (uniform_placement(MODEL, 3, 7), unlike):
        spec = WindowSpec(tiers_of(placement), 1000, 1000, 750, direct=direct)
        assert spec.rows == model.experts_bytes(placement)
        assert np.array_equal(spec.placement, placement)
    streamed = 10 + (0 if direct else 20) + 6 * direct
    assert spec.half == streamed


# ---- moves


def test_a_staggered_move_changes_each_layers_share_by_one_expert():
    before = uniform_placement(MODEL, 0, 20)
    staggered, unstaggered = (
        move_one_each(before, PACKED, HOST),
        move_in_one_layer(before, PACKED, HOST, 2),
    )
    assert staggered is not None and unstaggered is not None
    assert (staggered[:, HOST] - before[:, HOST]).tolist() == [1] * 6
    assert (unstaggered[:, HOST] - before[:, HOST]).tolist() == [0, 0, 6, 0, 0, 0]
    assert staggered.sum(axis=0).tolist() == unstaggered.sum(axis=0).tolist()
    one = MODEL.record_bytes / MODEL.host_rate
    worst = MODEL.layer_seconds(staggered).max()
    assert MODEL.layer_seconds(unstaggered).max() == pytest.approx(worst + 5 * one)
    assert move_one_each(uniform_placement(MODEL, 0, 0), PACKED, HOST) is None
    assert move_in_one_layer(uniform_placement(MODEL, 0, 5), PACKED, HOST, 2) is None


# ---- the planner on a plant


def plant(model, placement, compute, room, *, noise=0.05, seed=0, interval=20):
    """The states after each step of a plant whose ideal compute, compute(step), is observed with
    noise, while KV leaves room(step) bytes."""
    random, state, states = np.random.default_rng(seed), PlannerState(placement), []
    for step in range(2000):
        observed = compute(step) * random.uniform(1 - noise, 1 + noise)
        state = tiers.plan_residency(
            model, state, compute_s=observed, room_bytes=room(step), interval=interval
        )
        states.append(state)
    return states


def rho(model, state, compute) -> float:
    return compute / max(model.load_seconds(state.placement), 1e-12)


def wrong_with(model, states, compute, room) -> list[str]:
    """What a plant's last quarter has against property 4."""
    wrong = []
    for step, state in enumerate(states):
        if model.experts_bytes(state.placement) > room(step):
            wrong.append(f"step {step}: KV has too little")
        if len({*map(tuple, state.placement.tolist())}) > 1:
            wrong.append(f"step {step}: layers differ")
    begin, quarter = states[0].placement[0], states[-500:]
    packed = [int(state.placement[0, PACKED]) for state in states]
    dense = [int(state.placement[0, DENSE]) for state in states]
    for i in range(1, len(states)):
        if packed[i] > packed[i - 1] and packed[i] > model.most_packed and not dense[i - 1]:
            wrong.append(f"step {i}: {packed[i]} are packed, beyond x_gpu")
    assert begin.sum() == model.experts
    if len({tuple(map(tuple, state.placement.tolist())) for state in quarter}) > 1:
        wrong.append("it does not come to rest")
    final = rho(model, quarter[-1], compute)
    less = tiers._less(model, quarter[-1].placement)
    more = tiers._more(model, quarter[-1].placement, room(len(states) - 1))
    slack = 0.02  # of the observed mean
    if final > 1 + slack and less is not None:
        if compute >= (DEAD_ZONE + slack) * model.load_seconds(less):
            wrong.append(f"ρ {final:.2f}, and memory could go back")
    elif final < DEAD_ZONE - slack and more is not None:
        wrong.append(f"ρ {final:.2f}, and more could be resident")
    return wrong


@pytest.mark.parametrize("model", [MODEL, TWO_TIERS], ids=["packed", "two tiers"])
@pytest.mark.parametrize("compute", [0.004, 0.02, 0.06, 0.15, 0.4])
@pytest.mark.parametrize("share", [0.4, 0.7, 1.5])
def test_the_planner_comes_to_rest_in_the_dead_zone_or_at_a_bound(model, compute, share):
    """From everything resident, where it fits, and from nothing, under ±5% of noise."""

    def room(_):
        return int(share * ALL)

    starts = [uniform_placement(model, 0, 0)]
    if model.packed_rate:
        starts.append(uniform_placement(model, 0, 32))  # α = 1 is legal
    for seed, start in enumerate(starts):
        states = plant(model, start, lambda _: compute, room, seed=seed)
        assert not wrong_with(model, states, compute, room)


def test_kv_wins_at_once_and_gives_back():
    """KV takes two thirds for a while: the step that sees it has given way, by several moves."""

    def room(step):
        return ALL // 2 if 600 <= step < 700 else 2 * ALL

    states = plant(MODEL, uniform_placement(MODEL, 0, 0), lambda _: 0.03, room, interval=10)
    assert not wrong_with(MODEL, states, 0.03, room)
    before, during = (states[step].placement for step in (599, 600))
    assert (before[:, HOST] + 2 <= during[:, HOST]).all() or before[0, DENSE] > during[0, DENSE]
    assert np.array_equal(states[-1].placement, before)  # by another way
    with pytest.raises(ValueError, match="a window of two layers takes 64000 bytes, and KV leaves"):
        plan_residency(MODEL, PlannerState(before), compute_s=1.0, room_bytes=63999)


def no_hard_constraint(model, state, *, room_bytes, **said):
    return plan_residency(model, state, room_bytes=1 << 60, **said)


def test_a_planner_with_a_mistake_is_found(monkeypatch):
    """KV leaves half of the memory in the second half, which the planner does not heed."""

    def room(step):
        return ALL // 2 if step >= 1000 else 2 * ALL

    start = uniform_placement(MODEL, 0, 0)
    assert not wrong_with(MODEL, plant(MODEL, start, lambda _: 0.03, room), 0.03, room)
    monkeypatch.setattr(tiers, "plan_residency", no_hard_constraint)
    assert wrong_with(MODEL, plant(MODEL, start, lambda _: 0.03, room), 0.03, room)


def test_the_arm_without_balance_takes_the_layer_that_has_most():
    placement = np.array([[3, 0, 5], [6, 0, 2], [6, 2, 0]])
    assert move_in_one_layer(placement, 0, 2).tolist() == [[3, 0, 5], [3, 0, 5], [6, 2, 0]]
    assert move_in_one_layer(placement, 1, 2) is None  # no layer has three
