"""What takes the matcher's place, offline and online runs, and searches beside inference."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from host_offload.control.controller import Controller
from host_offload.control.interface import Moment
from host_offload.policies.prefetch.expert_map import policy as expert_map
from host_offload.policies.prefetch.expert_map.matcher import Matcher
from host_offload.policies.prefetch.expert_map.policy import ExpertMap, recorded
from host_offload.policies.prefetch.expert_map.trackers import TRACKERS
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.moe_infinity import MoEInfinity
from host_offload.policies.prefetch.names import prefetch_policy
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from host_offload.simulate.simulated_engine import PagerDevice
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, TraceError
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.policies.kinds import (
    EXPERTS,
    KINDS,
    LAYERS,
    PROBABILITIES,
    ROUTER,
    ROUTES,
    TOP_K,
    experts,
    routed,
    trace_of_kinds,
    wanted,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def moment(which: Moment, kinds: list[int], layer: int = -1, step: int = 0, turn: int = -1):
    """All that a moment of a step of these kinds may show, row r of request r."""
    rows = slice(None) if layer < 0 else slice(layer, layer + 1)
    seen = routed(max(layer, 0), kinds)
    return dataclasses.replace(
        seen,
        moment=which,
        layer=layer,
        step=step,
        turn=turn,
        request=np.arange(len(kinds), dtype=np.int32),
        phase=np.ones(len(kinds), np.uint8),
        embedding=np.eye(KINDS, dtype=np.float16)[kinds],
        probs=PROBABILITIES[kinds][:, rows],
        ids=ROUTES[kinds].astype(np.int16)[:, rows],
    )


def walk(policy: ExpertMap, state: Any, kinds: list[int], step: int = 0):
    """A step: (what was wanted at EMBEDDED and after each router, the state after)."""
    state, decision = policy.decide(state, moment(Moment.EMBEDDED, kinds, step=step))
    found = [wanted(decision)]
    for layer in range(LAYERS):
        state, decision = policy.decide(state, moment(Moment.ROUTED, kinds, layer, step))
        found.append(wanted(decision))
    return found, policy.decide(state, moment(Moment.STEP_END, kinds, step=step))[0]


# ---- trackers


def test_speculate_asks_the_gate_of_a_later_layer(told):
    policy = ExpertMap(tracker="speculate", distance=2)
    found, _ = walk(policy, policy.init(told), [4])
    assert not found[0] and set(found[1]) == experts(2, 4)
    assert set(found[2]) == experts(2, 4) | experts(3, 4) and set(found[3]) == experts(3, 4)
    best = int(np.argmax(ROUTER[2, 4]))
    assert found[1][0] == (2, best)
    assert policy.needs == {"gate_input", "router"} and policy.memory(told) == 0


def test_hit_count_takes_the_nearest_request_and_what_was_popular(told):
    policy = ExpertMap(tracker="hit_count", distance=1, capacity=2)
    state = policy.init(told)
    for turn, kind in enumerate((0, 0, 3)):  # of the first two the older one goes
        found, state = walk(policy, state, [kind], turn)
        state, _ = policy.decide(state, moment(Moment.TURN_END, [kind], turn=0))
    assert len(state.tracker.collection) == 2 and not state.tracker.running
    found, state = walk(policy, state, [3], 3)
    # Popular of two requests: what either used.
    assert len(found[0]) == TOP_K and {n for n, _ in found[0]} == {0}
    assert set(found[0]) <= experts(0, 0, 3)
    for layer in range(LAYERS - 1):
        assert set(found[layer + 1]) == experts(layer + 1, 3)
    # Counts are the request's, over its steps.
    assert state.tracker.running[0].sum() == LAYERS * TOP_K
    again = walk(policy, state, [3], 4)[1]
    assert again.tracker.running[0].sum() == 2 * LAYERS * TOP_K
    # What a step counts between layers is not counted again at its end.
    assert state.tracker.step[0].sum() == state.tracker.running[0].sum()


def test_every_tracker_runs_and_the_maps_know_what_repeats(told, tmp_path):
    """Property 3 with a cache: with the trace's maps and room, no layer behind the first ones
    misses; the cells hold what is wanted and no more. (Kinds 1 and 3 have one first layer.)"""
    rng = np.random.default_rng(1)
    kinds = [[int(rng.integers(3)), int(rng.integers(4, 6))] for _ in range(40)]
    trace = trace_of_kinds(tmp_path, kinds)
    run: dict[str, Any] = dict(cells=TOP_K * 2, driver="host", spec=told)
    misses = {}
    for tracker in TRACKERS:
        policy = ExpertMap(tracker=tracker, distance=2)
        if tracker != "speculate":
            policy = expert_map.fit(trace, distance=2, tracker=tracker)
        misses[tracker] = simulate(trace, policies=[policy], **run).misses
    assert not misses["map_t"][:, 2:].any() and misses["map_t"][:, :2].any()
    assert not misses["map_ts"].any() and not misses["map_tsd"].any()
    assert not misses["speculate"][:, 2:].any() and misses["speculate"][:, :2].any()
    assert misses["hit_count"].sum() > misses["map_t"].sum()


def test_tables_are_copied_once_a_layer_while_nothing_moves(trace, told, monkeypatch):
    """A moment waits for a copy of the tables only where experts or a list have changed them."""
    copies: list[int] = []
    snapshot = PagerDevice.snapshot
    monkeypatch.setattr(PagerDevice, "snapshot", lambda it: copies.append(1) or snapshot(it))
    run: dict[str, Any] = dict(cells=trace.header.experts, driver="host", spec=told)
    simulate(trace, policies=[ExpertMap(tracker="map_ts", learns=False, distance=2)], **run)
    assert len(copies) == trace.steps * (LAYERS + 1) + 1  # after each step, and before the first
    copies.clear()
    found = simulate(trace, policies=[expert_map.fit(trace, distance=2)], **run)
    lists = int((found.staged.sum(axis=1) > 0).sum())
    assert lists and len(copies) > trace.steps * (LAYERS + 1) + 1


# ---- offline and online


def test_offline_fills_the_store_with_a_share_of_the_requests(trace, told, tmp_path):
    """Of two requests the first, and nothing is added while it runs; online adds."""
    half = expert_map.fit(trace, distance=2, share=0.5)
    assert half.fitted is not None and len(half.fitted.arrays["maps"]) == 40
    for kind in range(KINDS):
        is_there = any(
            np.allclose(one, PROBABILITIES[kind].astype(np.float32), atol=1e-3)
            for one in half.fitted.arrays["maps"]
        )
        assert is_there == (kind < 3)
    state = walk(half, half.init(told), [5])[1]
    assert state.tracker.store.size == 40
    online = dataclasses.replace(half, learns=True)
    assert walk(online, online.init(told), [5])[1].tracker.store.size == 41
    half.fitted.write(tmp_path / "half")
    again: Any = prefetch_policy(f"expert_map={tmp_path / 'half'}")
    assert not again.learns and again.tracker == "map_tsd"
    counts = expert_map.fit(trace, distance=2, tracker="hit_count", share=0.5)
    assert counts.fitted is not None and counts.fitted.arrays["matrices"].shape[0] == 1
    counts.fitted.write(tmp_path / "counts")
    again = prefetch_policy(f"expert_map={tmp_path / 'counts'}")
    assert again.tracker == "hit_count" and len(again.init(told).tracker.collection) == 1


def test_what_cannot_be_fitted_is_refused(trace, told, tmp_path):
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"tracker": "speculate"}, {"capacity": 0}):
        with pytest.raises(ValueError, match=r"share lie in \(0, 1\], and tracker learn something"):
            expert_map.fit(trace, distance=2, **wrong)
    nameless = trace_of_kinds(tmp_path, [[0]] * 2, absent=("token.request",))
    for given in ({"share": 0.5}, {"tracker": "hit_count"}):
        with pytest.raises(TraceError, match="does not say which request a token belongs to"):
            expert_map.fit(nameless, distance=2, **given)
    maps = expert_map.fit(trace, distance=2)
    with pytest.raises(ValueError, match="fit with tracker='hit_count'"):
        dataclasses.replace(maps, tracker="hit_count").init(told)
    counts = expert_map.fit(trace, distance=2, tracker="hit_count")
    with pytest.raises(ValueError, match="2 requests are given and capacity is 1"):
        dataclasses.replace(counts, capacity=1).init(told)


def test_memory_of_a_store_counts_before_it_is_full(trace, told):
    row = KINDS + LAYERS * EXPERTS + LAYERS
    online = ExpertMap(capacity=50)
    assert online.memory(told) == 50 * row * 4
    fitted = expert_map.fit(trace, capacity=50, distance=2)
    assert fitted.fitted is not None and fitted.memory(told) == fitted.fitted.nbytes
    assert dataclasses.replace(fitted, learns=True).memory(told) == 50 * row * 4
    full = walk(online, online.init(told), [0] * 50)[1]
    assert online.stats(full)["learned_bytes"] == 50 * row * 4
    counts = ExpertMap(tracker="hit_count", capacity=50)
    assert counts.memory(told) == 50 * LAYERS * EXPERTS * 4
    assert learned_bytes([RandomPrefetch(), online], told) == 50 * row * 4
    assert learned_bytes([MoEInfinity(capacity=3)], told) == 3 * LAYERS * EXPERTS * 4


# ---- beside inference


class Held:
    """Keeps a matcher's thread busy until it is let go."""

    def __init__(self, matcher: Matcher):
        self._go = threading.Event()
        matcher._thread.submit(self._go.wait, 3.0)  # a caller that waits fails, and does not hang

    def let_go(self, matcher: Matcher) -> None:
        self._go.set()
        matcher.wait()


def asynchronous(trace: Trace, **given: Any) -> ExpertMap:
    policy = expert_map.fit(trace, distance=2)
    return dataclasses.replace(policy, asynchronous=True, **given)


def test_inference_waits_for_no_search_and_a_late_one_is_counted(trace, told):
    policy = asynchronous(trace)
    state: Any = policy.init(told)
    held = Held(state.tracker)
    # The thread is held, and every moment returns, wanting nothing.
    found, state = walk(policy, state, [4])
    assert found == [[]] * (LAYERS + 1) and policy.stats(state)["late"] == 0
    held.let_go(state.tracker)
    # Found now: of a step that has ended. And the next step has what comes in time.
    state, decision = policy.decide(state, moment(Moment.EMBEDDED, [4], step=1))
    state.tracker.wait()
    late = policy.stats(state)["late"]
    assert late >= LAYERS - 1  # the embedding's, and all but the last two routers'
    state, decision = policy.decide(state, moment(Moment.ROUTED, [4], 0, 1))
    assert set(wanted(decision)) == experts(1, 4)  # layer 0 is too late
    assert policy.stats(state)["late"] == late + 1
    state.tracker.wait()
    state, decision = policy.decide(state, moment(Moment.ROUTED, [4], 1, 1))
    assert set(wanted(decision)) == experts(2, 4)
    assert policy.stats(state)["searches"] == LAYERS + 1 + 3


def test_a_search_that_nothing_can_use_is_left_out(trace, told):
    policy = asynchronous(trace, learns=True)
    state: Any = policy.init(told)
    held = Held(state.tracker)
    _, state = walk(policy, state, [4])
    state, _ = policy.decide(state, moment(Moment.EMBEDDED, [4], step=1))
    held.let_go(state.tracker)
    state, decision = policy.decide(state, moment(Moment.ROUTED, [4], 0, 1))
    assert policy.stats(state)["late"] == LAYERS + 1 + 1  # a step's, and one of layer 0
    assert wanted(decision)  # that of the new step was not left out
    state.tracker.wait()
    assert state.tracker._tracker.store.size == 81  # what a step left was learned


def test_a_search_that_fails_says_so(trace, told):
    policy = asynchronous(trace)
    state: Any = policy.init(told)
    broken = dataclasses.replace(moment(Moment.EMBEDDED, [4]), embedding=None)
    state, _ = policy.decide(state, broken)
    state.tracker.wait()
    with pytest.raises(AttributeError):
        policy.decide(state, moment(Moment.ROUTED, [4], 0))


def test_found_in_time_it_decides_a_moment_later_than_a_search_that_is_waited_for(trace, told):
    now, beside = expert_map.fit(trace, distance=2), asynchronous(trace)
    first: Any = now.init(told)
    second: Any = beside.init(told)
    moments = [moment(Moment.EMBEDDED, [1])]
    moments += [moment(Moment.ROUTED, [1], layer) for layer in range(LAYERS)]
    before: set = set()
    for seen in moments:
        first, decision = now.decide(first, seen)
        second, later = beside.decide(second, seen)
        assert isinstance(second.tracker, Matcher)
        second.tracker.wait()
        assert set(wanted(later)) == {place for place in before if place[0] > seen.layer}
        before |= set(wanted(decision))


def test_decisions_of_a_run_beside_inference_are_taken_again(trace, told, tmp_path):
    """Through the controller: whatever came in time in the run, the same is decided again."""
    policy = dataclasses.replace(asynchronous(trace), pool=False)  # this device has no pool
    events: list = []
    device = LayeredDevice(Controller(told, [policy], listener=events.append), 4)
    device.run(trace)
    decided = tuple((e.step, e.moment.name, e.decision) for e in events if hasattr(e, "decision"))
    assert len(decided) == 40 * (LAYERS + 1)  # each is in the trace, wanted or not
    again = dataclasses.replace(policy, decisions=decided)
    found: list = []
    other = LayeredDevice(Controller(told, [again], listener=found.append), 4)
    other.run(trace)
    assert list(map(repr, found)) == list(map(repr, events))
    np.testing.assert_array_equal(other.missed, device.missed)
    said = device.control.controller.stats()["said"]["ExpertMap"]
    assert said["searches"] == 40 * (LAYERS + 1)
    assert other.control.controller.stats()["said"] == {"ExpertMap": {"decisions": 200}}
    state = again.init(told)
    with pytest.raises(TraceError, match="decided nothing at ROUTED of step 0 in the trace"):
        again.decide(state, moment(Moment.ROUTED, [0], 0))
    with pytest.raises(TraceError, match="has no decisions of ExpertMap"):
        recorded(trace, policy)
