"""FluxMoE's planner in the engine: KV grows into what experts give at once and they come back, with
the bits of full residency through all of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from host_offload.control.window import HOST
from host_offload.memory.arena import SlotClass
from moejax import LLM, SamplingParams
from moejax.engine.residency import ResidencyPlanner
from moejax.step.drivers.stream import StreamRunner
from tests.moejax.engine.test_stream import LIMITS
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LAYERS, EXPERTS, SLOT = 4, 16, 98304
LEAST_KV = 3
"""Slots of one sequence of max_model_len."""
MEMORY = (45 + LEAST_KV) * SLOT
"""The window, a quarter of the experts packed (or, computed as they are, three), and KV of one
sequence."""


def open_llm(tiers: str = "flux,packed=25%,interval=2", **options) -> LLM:
    given = {"driver": "stream", "memory": MEMORY, "tiers": tiers, **LIMITS, **options}
    return LLM("demo", progress=False, enable_prefix_caching=False, **given)


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """A batch that grows and shrinks: one sequence runs throughout, others come and go."""
    greedy = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    short = dataclasses.replace(greedy, max_tokens=20)
    drawn = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    long = [*range(3, 163)]
    return [([5, 6, 7, 300], greedy), (long, short), (long[::-1], drawn), (long[20:], short)]


COMES = (0, 4, 6, 30)
"""The step before which each comes."""


def answers(llm: LLM, *, check: bool = False, seen=None) -> list[list[int]]:
    """Token ids of each job. check: all invariants after every step. seen: called then."""
    engine, requests, step = llm.engine, [], 0
    while len(requests) < len(COMES) or not engine.idle:
        while len(requests) < len(COMES) and COMES[len(requests)] <= step:
            requests.append(engine.add(*jobs()[len(requests)]))
        engine.step()
        step += 1
        if seen is not None:
            seen(engine)
        if check:
            assert not engine.runner.faults()
    engine.drain()
    assert all(request.error is None for request in requests)
    return [request.output for request in requests]


@functools.cache
def at_rest() -> list[list[int]]:
    with open_llm(driver="device", tiers=None, memory=None) as llm:
        return answers(llm)


def as_if(planner: ResidencyPlanner, seconds: float) -> None:
    """Loading that the model thinks so fast, or so slow, that ρ is far from its dead zone: seconds
    of an expert."""
    rate = planner.model.record_bytes / seconds
    planner.model = dataclasses.replace(planner.model, host_rate=rate, packed_rate=3 * rate)


FAST, SLOW = 1e-12, 1.0


@pytest.mark.parametrize(
    "tiers",
    ["flux,packed=25%", pytest.param("flux-direct,packed=75%", marks=pytest.mark.slow)],
)
def test_kv_grows_into_what_experts_give_and_they_come_back(tiers):
    """Loading is modelled as slow, so experts take all that KV leaves, and give it at once."""
    kept: list[tuple[int, int]] = []

    def seen(engine) -> None:
        arena, planner = engine.scheduler.arena, engine.planner
        window = engine.runner.window
        kept.append((arena.count(SlotClass.KV), int(window.placement[0, HOST])))
        # The hard constraint, after every call: what KV uses, it has.
        taken = planner.model.experts_bytes(window.placement)
        assert taken == window.rows * arena.layout.hidden * 2
        assert taken <= (arena.slots - arena.count(SlotClass.KV)) * SLOT
        used = -(-(arena.pages - engine.scheduler.cache.available) // arena.layout.pages_per_slot)
        assert max(used, LEAST_KV) <= arena.count(SlotClass.KV)

    with open_llm(f"{tiers},interval=2") as llm:
        as_if(llm.engine.planner, SLOW)
        found = answers(llm, check=True, seen=seen)
        stats = llm.stats()
        moves = stats["planner"]["moves"]
        assert stats["kv"]["preemptions"] == 0 and stats["kv"]["swapped_out_bytes"] == 0
        assert {move["why"] for move in moves} == {"kv", "rho"}
        # Staggered: all layers have as many in each tier, after every move.
        assert all(move[tier] % LAYERS == 0 for move in moves for tier in ("packed", "dense"))
        assert all(move["expert_bytes"] + move["kv_slots"] * SLOT <= MEMORY for move in moves)
    slots, hosts = zip(*kept, strict=True)
    # KV began with the least, grew by what came, and gave back; experts the other way around.
    assert LEAST_KV == slots[0] < max(slots) > slots[-1]
    assert hosts[int(np.argmax(slots))] > hosts[-1]
    assert max(slots) >= 2 * LEAST_KV
    assert found == at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["flux,packed=50%,dense=25%", "flux-direct,packed=50%"])
@pytest.mark.parametrize("seconds", [FAST, SLOW])
def test_residents_of_both_tiers_go_and_come(tiers, seconds):
    """No KV in the way: ρ alone, to the one bound or the other, one expert of each layer every two
    steps, in the other bits' place."""
    with open_llm(f"{tiers},interval=2", memory=120 * SLOT) as llm:
        planner = llm.engine.planner
        as_if(planner, seconds)
        before = llm.engine.runner.window.placement
        found = answers(llm, check=True)
        after = llm.engine.runner.window.placement
        assert {move["why"] for move in planner.stats()["moves"]} == {"rho"}
        assert np.all(after == after[0]) and len(planner.moves) >= 4
    if seconds == FAST:
        assert np.all(after[:, HOST] > before[:, HOST])
    else:
        assert np.all(after[:, HOST] < before[:, HOST])
    assert found == at_rest()


@pytest.mark.slow
def test_moves_that_are_not_staggered_are_of_one_layer():
    with open_llm("flux,packed=50%,planner=one-layer,interval=2", memory=120 * SLOT) as llm:
        as_if(llm.engine.planner, FAST)
        seen: list[np.ndarray] = []
        found = answers(llm, check=True, seen=lambda e: seen.append(e.runner.window.placement))
        assert llm.stats()["planner"]["staggered"] is False
    changes = [after - before for before, after in itertools.pairwise(seen)]
    moves = [change for change in changes if change.any()]
    assert moves and all(np.any(change, axis=1).sum() == 1 for change in moves)
    assert {int(change[:, HOST].sum()) for change in moves} == {LAYERS}
    assert found == at_rest()


def test_compute_is_profiled_by_bucket_and_without_waits():
    given = {"memory": 120 * SLOT, "link_rate": "100MB/s"}
    with open_llm("flux,packed=50%,interval=1000", **given) as llm:
        answers(llm)
        stats = llm.stats()
        compute = stats["planner"]["compute_s"]
        assert set(compute) == {1, 2, 4}
        # A step waits for 32 experts at 100 MB/s, which is none of its compute.
        waited = stats["transfers"]["wait_s"] / sum(stats["steps"].values())
        assert waited > 0.015 and max(compute.values()) < waited
        rho = stats["planner"]["rho"]
        assert all(0 < rho[rows] < 1 for rows in compute) and not stats["planner"]["moves"]


def no_kv_first(monkeypatch) -> None:
    """KV is not asked what it needs."""
    monkeypatch.setattr(ResidencyPlanner, "kv_needs", lambda self: self.least_kv_slots)


def nothing_is_copied(monkeypatch) -> None:
    """Cells move, and what is in them does not."""
    original = StreamRunner.change_window

    def change_window(self, window):
        before = self.memory.view().copy()
        original(self, window)
        self.memory.view()[:] = before

    monkeypatch.setattr(StreamRunner, "change_window", change_window)


def never_back(monkeypatch) -> None:
    original = StreamRunner.change_window

    def change_window(self, window):
        if window.rows < self.window.rows:
            original(self, window)

    monkeypatch.setattr(StreamRunner, "change_window", change_window)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [no_kv_first, nothing_is_copied, never_back])
def test_a_planner_with_a_mistake_is_found(mistake, monkeypatch):
    at_rest()
    mistake(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  by whichever check sees it first
        test_kv_grows_into_what_experts_give_and_they_come_back("flux,packed=25%")
