"""The arithmetic of the split: WiSP's tables, both sides of equation (5), Algorithm 2."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.interface import Costs
from host_offload.sizing.configurator import (
    Streams,
    Turn,
    configure,
    histograms_of,
    turns_of,
)
from host_offload.sizing.kv_reuse import PageRecency, page_references
from host_offload.sizing.miss_curves import curves_of
from host_offload.sizing.split import (
    Division,
    MissCosts,
    SplitError,
    SplitRule,
    division_of,
    miss_costs,
    objective,
)
from host_offload.traces.reader import TraceError
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.sizing.equations import admission_floor, equimarginal_cap, marginals
from tests.host_offload.sizing.replayed_splits import replay_split
from tests.host_offload.traces.traces_of import random_routing, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

MIB = 2**20
CAP = 48 * 9 * MIB
"""b_e of Qwen3-30B-A3B: 432 MiB."""
PAGE = 16 * 96 * 2**10
"""b_k: 16 tokens of 96 KiB."""


def qwen(total: int, floor_tokens: int = 131_072) -> Division:
    floor = admission_floor(1, floor_tokens, 16)
    return Division(total, CAP, PAGE, 128, floor, least_cap=8, page_tokens=16)


def test_table_3():
    """Cap 8, 16, 32 leave 375,792, 338,928, 265,200 KV tokens; 64 leaves 117,744, which one
    sequence of 131,072 does not fit, and is refused."""
    division = qwen(8 * CAP + 375_792 * 96 * 2**10)
    assert [division.pages_at(cap) * 16 for cap in (8, 16, 32, 64)] == [
        *(375_792, 338_928, 265_200, 117_744)
    ]
    division.check(32)
    with pytest.raises(SplitError, match="leaves KV 117744 tokens, fewer than its floor of 131072"):
        division.check(64)
    assert division.largest_cap == 61
    division.check(61)
    with pytest.raises(SplitError, match="no cap from 8 on works: raise the memory or lower"):
        qwen(8 * CAP + 100)


def test_admission_floor():
    assert admission_floor(4, 1000, 16) == 4 * 63
    assert division_of(spec()).floor_pages == 5


def test_splits_and_caps():
    division = qwen(40 * 2**30)
    for cap in (8, 33, division.largest_cap):
        assert division.cap_at(division.split_at(cap)) == cap
    assert division.cap_at(0.0) == 8 and division.cap_at(1.0) == division.largest_cap
    with pytest.raises(SplitError, match="sizes must be positive and 0 ≤ least_cap ≤ caps"):
        Division(100, 10, 0, 4, 1)


def test_the_arena_is_divided_in_slots():
    """Equation (10) with pages of slots: what remains is less than a slot."""
    told = spec(slot_bytes=100, budget_bytes=1090, page_bytes=30, kv_floor_bytes=60)
    division = division_of(told)
    assert (division.total_bytes, division.cap_bytes, division.unit_pages) == (1000, 200, 3)
    assert [division.pages_at(cap) for cap in range(6)] == [30, 24, 18, 12, 6, 0]
    assert division.largest_cap == 4


def step_curve(at: int, height: float, size: int) -> np.ndarray:
    return np.where(np.arange(size) < at, height, 0.0)


def convex(rng: np.random.Generator, size: int) -> np.ndarray:
    drops = -np.sort(-(rng.random(size - 1) ** 4))
    return np.append(np.cumsum(drops[::-1])[::-1], 0.0)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_equal_marginals_are_the_minimum(seed):
    """Equation (5) on convex curves: the cap where both sides meet is the argmin of (4)."""
    rng = np.random.default_rng(seed)
    division = Division(1000, 20, 5, 40, int(rng.integers(0, 60)), 1)
    experts, kv = convex(rng, 41), convex(rng, 201)
    costs = MissCosts(*rng.random(2))
    seconds = objective(division, experts, kv, costs)
    found = equimarginal_cap(division, experts, kv, costs)
    # A cap is four pages here, so the finite differences meet within one of it.
    assert abs(found - int(seconds.argmin())) <= 1
    expert, page = marginals(division, experts, kv, costs)
    cap = int(division.legal.argmax())
    assert expert[cap] == pytest.approx(costs.expert_s * (experts[cap] - experts[cap + 1]) / 20)
    pages = division.pages_at(cap)
    assert page[cap] == pytest.approx(costs.page_s * (kv[pages] - kv[min(pages + 1, 200)]) / 5)


def test_illegal_caps_cost_infinitely_much():
    division = Division(1000, 100, 10, 12, 30, 2)
    seconds = objective(division, np.arange(12, -1, -1), np.zeros(101), MissCosts(1, 1))
    assert np.isinf(seconds[:2]).all() and np.isinf(seconds[8:]).all()
    assert np.isfinite(seconds[2:8]).all()


def rest(rule: SplitRule, split: float, *args) -> float:
    """Where the rule comes to rest."""
    for _ in range(100):
        moved = rule.next_split(split, *args)
        if moved == split:
            return split
        split = moved
    raise AssertionError("the rule does not rest")


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), start=st.floats(0, 1))
def test_the_rule_ends_beside_the_minimum(seed, start):
    """WiSP, checkable 5, on any convex curves and from anywhere: within a grid step of the argmin
    of (4), or where less than the gate is to be gained; never below the floor."""
    rng = np.random.default_rng(seed)
    division = Division(1000, 20, 5, 40, int(rng.integers(0, 60)), 1)
    experts, kv, costs = convex(rng, 41), convex(rng, 201), MissCosts(*rng.random(2))
    rule = SplitRule()
    split = rest(
        rule, min(start, division.split_at(division.largest_cap)), division, experts, kv, costs
    )
    seconds = objective(division, experts, kv, costs)
    cap = division.cap_at(split)
    assert division.pages_at(cap) >= division.floor_pages
    near = abs(split - division.split_at(int(seconds.argmin()))) <= 1 / 40 + 20 / 1000
    assert near or seconds[cap] * (1 - rule.gate) <= seconds.min() + 1e-12


def test_no_stall_between_two_modes():
    """Distances within a turn and across sessions, nothing between: at the start both densities
    are zero, so a rule that compares them there (the mutation) stays for ever."""
    division = Division(1000, 20, 5, 40, 4, 1)
    experts = step_curve(35, 80.0, 41)  # pays from cap 35 on, 70% of the bytes
    kv = step_curve(30, 1000.0, 201)  # all sessions fit in 30 pages
    costs = MissCosts(1.0, 1.0)
    rule = SplitRule()
    assert division.cap_at(rest(rule, 0.3, division, experts, kv, costs)) >= 35
    cap = division.cap_at(0.3)
    expert, page = marginals(division, experts, kv, costs)
    assert expert[cap] == page[cap] == 0  # by density there is nothing to gain


def test_noise_below_the_gate_moves_nothing():
    division, rule = Division(1000, 20, 5, 40, 4, 1), SplitRule()
    rng = np.random.default_rng(0)
    moves = {}
    for size in (0.005, 0.5):
        split, moved = 0.5, 0
        for _ in range(200):
            experts = 100 * (1 + size * rng.uniform(-1, 1, 41))
            experts = np.maximum.accumulate(experts[::-1])[::-1]
            found = rule.next_split(split, division, experts, np.full(201, 50.0), MissCosts(1, 1))
            moved += found != split
            split = found
        moves[size] = moved
    assert moves[0.005] == 0 < moves[0.5]


def test_a_move_is_limited_and_a_dead_zone_stays():
    division, rule = Division(1000, 20, 5, 40, 4, 1), SplitRule()
    experts, kv = np.linspace(100, 0, 41), np.zeros(201)
    costs = MissCosts(1.0, 1.0)
    assert rule.next_split(0.2, division, experts, kv, costs) == pytest.approx(0.3)
    top = division.split_at(division.largest_cap)
    assert rule.next_split(top - 0.01, division, experts, kv, costs) == top - 0.01
    assert rule.next_split(0.5, division, 0 * experts, kv, costs) == 0.5


@pytest.mark.parametrize("fields", [{"decay": 2.0}, {"points": 1}, {"rate": 0.0}, {"gate": 1.0}])
def test_parameters_that_mean_nothing(fields):
    with pytest.raises(ValueError, match=r"lies? in"):
        SplitRule(**fields)


def test_costs_of_a_miss():
    costs = Costs(
        fill=np.array([1e-4, 1e-9]),
        stage=np.zeros(2),
        gpu_expert=np.zeros((1, 2)),
        cpu_expert=np.zeros(2),
        step_s={1: 0.01},
        attention_s=0.0,
        prefill_s_per_token=2e-3,
        kv_swap_s_per_byte=1e-8,
    )
    # An expert of 100 bytes; a page of 10 goes out and comes back.
    assert miss_costs(costs, spec()) == pytest.approx((1e-4 + 1e-7, 2 * 10 * 1e-8))
    assert miss_costs(costs, spec(), "recompute").page_s == pytest.approx(16 * 2e-3)
    better = dataclasses.replace(costs, recompute_s_per_token=1e-3)
    assert miss_costs(better, spec(), "recompute").page_s == pytest.approx(16e-3)
    # What crosses the link counts: 60 bytes of an expert that a cell has 100 of.
    moved = {"dense": np.full(2, 60), "small": np.full(2, 40)}
    assert miss_costs(costs, spec(moved_bytes=moved)).expert_s == pytest.approx(1e-4 + 6e-8)
    with pytest.raises(ValueError, match="kv_miss is swap or recompute, not 'drop'"):
        miss_costs(costs, spec(), "drop")


# ---- the KV stream


def pool(turns, size: int) -> int:
    """Warm misses of an LRU pool of pages, in plain Python; a turn of no session is released."""
    held: list = []
    seen, missed = set(), 0
    for session, count in turns:
        pages = [(session, p) for p in range(count)]
        missed += sum(page in seen and page not in held for page in pages)
        seen.update(pages if session >= 0 else ())
        held = [p for p in held if p not in pages] + pages
        held = held[max(len(held) - size, 0) :]
        held = [p for p in held if p[0] >= 0]
    return missed


@settings(max_examples=60)
@given(
    turns=st.lists(st.tuples(st.integers(-3, 4), st.integers(0, 6)), max_size=20),
    size=st.integers(0, 20),
)
def test_kv_misses_are_those_of_an_lru_pool(turns, size):
    """Exactly, at every size, with pages that are released in between."""
    recency, distances, played = PageRecency(), [], []
    for session, count in turns:
        pages = np.array([(session, p) for p in range(count)], np.int64).reshape(-1, 2)
        recency, found = page_references(recency, pages)
        distances.extend(found.tolist())
        played.append(Turn([np.ones((1, 1), bool)], pages))
    pages = np.bincount(np.array(distances, np.int64), minlength=201).astype(np.float64)
    curve = Streams(np.zeros((1, 1)), pages).kv_misses
    assert curve[size] == pool(turns, size)
    replayed = replay_split(played, [np.ones(1, np.int64)] * len(turns), [size] * len(turns))
    assert replayed.kv_misses.sum() == pool(turns, size)


def test_deep_pages_are_forgotten():
    """With a limit a page that was too deep is new when it comes back."""
    recency = PageRecency()
    for session in (0, 1, 2):
        pages = np.array([(session, p) for p in range(4)])
        recency, _ = page_references(recency, pages, limit=8)
    assert len(recency.keys) == 8
    assert not page_references(recency, np.array([(0, 0)]), limit=8)[1].size
    assert page_references(recency, np.array([(1, 0)]), limit=8)[1].tolist() == [7]


# ---- the configurator


def turns(rng: np.random.Generator, sessions: int, pages: int, count: int, steps: int = 6):
    """Sessions in turn; one layer of 16 experts, more popular ones first."""
    share = 1 / np.arange(1, 17) ** 1.5
    for turn in range(count):
        active = []
        for _ in range(steps):
            chosen = rng.choice(16, 2, replace=False, p=share / share.sum())
            active.append(np.isin(np.arange(16), chosen)[None])
        held = [(turn % sessions, p) for p in range(pages)]
        yield Turn(active, np.array(held, np.int64).reshape(-1, 2))


@pytest.mark.parametrize(("sessions", "page_s"), [(3, 1.0), (3, 0.01), (9, 0.3)])
def test_the_configurator_finds_the_split(sessions, page_s):
    """Within a grid step of the exhaustive argmin, or as good but for the gate; the prediction is
    what an exact replay misses."""
    division = Division(1000, 50, 10, 16, 5, 2)
    costs = MissCosts(1.0, page_s)
    played = list(turns(np.random.default_rng(0), sessions, 6, 60))
    found = configure(played, division, costs)
    assert found.settled
    assert found.kv_pages == (1000 - found.cap * 50) // 10 >= 5

    # M_K is that of the whole trace; its last column has what no pool could keep.
    streams = list(histograms_of(played, 100))
    whole = Streams(*(sum(parts) for parts in zip(*streams, strict=True)))
    seconds = objective(division, whole.expert_misses.sum(axis=0), whole.kv_misses, costs)
    near = abs(found.cap - seconds.argmin()) * 50 / 1000 <= 1 / 40 + 50 / 1000
    assert near or seconds[found.cap] <= seconds.min() / (1 - 0.02)

    replayed = replay_split(played, [found.cells] * 60, [found.kv_pages] * 60)
    assert replayed.expert_misses.sum() - replayed.expert_first == found.expert_misses
    assert replayed.kv_misses.sum() == found.kv_misses
    assert found.seconds == pytest.approx(found.expert_misses + page_s * found.kv_misses)
    exact = curves_of([a for turn in played for a in turn.active])
    assert exact.warm[0, found.cap] == found.expert_misses


@pytest.mark.parametrize("sessions", [6, 20])
def test_pages_that_no_pool_can_keep_are_missed_by_every_pool(sessions):
    """Sessions return deeper than the largest pool, or than all but the largest: KV's misses are
    those of an exact replay at every cap, cap 0 and its whole memory of KV too."""
    division = Division(320, 32, 8, 16, 1)
    played = list(turns(np.random.default_rng(1), sessions, 10, 60))
    costs = MissCosts(1.0, 10.0)
    streams = list(histograms_of(played, int(division.pages[0])))
    whole = Streams(*(sum(parts) for parts in zip(*streams, strict=True)))
    caps = np.flatnonzero(division.legal)
    assert caps[0] == 0 and len(whole.kv_misses) == division.pages[0] + 1 == 41
    for cap in caps:
        pages = division.pages_at(cap)
        replayed = replay_split(played, [np.full(1, cap)] * 60, [pages] * 60)
        assert replayed.kv_misses.sum() == whole.kv_misses[pages]
    found = configure(played, division, costs)
    # No pool keeps anything, so all of it is better spent on experts.
    assert found.kv_misses == whole.kv_misses[found.kv_pages] == (60 - sessions) * 10
    seconds = objective(division, whole.expert_misses.sum(axis=0), whole.kv_misses, costs)
    assert seconds.argmin() > 0 and found.cap > 0


def test_turns_of_a_trace(tmp_path):
    """Steps up to each turn's end, with the pages of the request that ended."""
    routing = random_routing(np.random.default_rng(0), 9, 2, 8, 2)
    trace = write_trace(tmp_path / "t", routing, 8, spec={"page_tokens": 4})
    steps = [
        step._replace(finished={4: (5,), 6: (7,)}.get(step.number, ()))
        for step in trace.step_traces()
    ]
    ended = dataclasses.replace(trace, chunks=(Ended(steps),))
    count = list(turns_of(ended))
    assert [len(turn.active) for turn in count] == [5, 2, 2]
    # Request 5 had positions 0 … 4: two pages of four tokens; 7 is unknown; then nobody ended.
    assert [turn.pages.tolist() for turn in count] == [[[-6, 0], [-6, 1]], [], []]
    with pytest.raises(SplitError, match="there is no turn to configure from"):
        configure([], Division(1000, 50, 10, 16, 5), MissCosts(1, 1))
    header = dataclasses.replace(trace.header, absent=["token.request"])
    with pytest.raises(TraceError, match=r"has no token\.request, so its turns are not known"):
        list(turns_of(dataclasses.replace(trace, header=header)))
    header = dataclasses.replace(trace.header, spec={})
    with pytest.raises(TraceError, match="does not say page_tokens"):
        list(turns_of(dataclasses.replace(trace, header=header)))


@dataclasses.dataclass(frozen=True)
class Ended:
    """A chunk of given steps."""

    steps: list

    def step_traces(self):
        return iter(self.steps)
