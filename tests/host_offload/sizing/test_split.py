"""The arithmetic of the split: WiSP's tables, equations (4) and (5), Algorithm 2."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from host_offload.control.interface import Costs
from host_offload.sizing.configurator import (
    Streams,
    Turn,
    configure,
    histograms_of,
    turns_of,
)
from host_offload.sizing.miss_curves import PageRecency, page_references
from host_offload.sizing.split import (
    Division,
    MissCosts,
    SplitError,
    SplitRule,
    miss_costs,
    objective,
)
from host_offload.traces.reader import TraceError
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.sizing.curves import curves_of
from tests.host_offload.traces.traces_of import random_routing, rewritten, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

MIB = 2**20
CAP = 48 * 9 * MIB
"""b_e of Qwen3-30B-A3B: 432 MiB."""
PAGE = 16 * 96 * 2**10
"""b_k: 16 tokens of 96 KiB."""


def qwen(total: int, floor_tokens: int = 131_072) -> Division:
    return Division(total, CAP, PAGE, 128, floor_tokens // 16, least_cap=8, page_tokens=16)


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


def test_splits_and_caps():
    division = qwen(40 * 2**30)
    for cap in (8, 33, division.largest_cap):
        assert division.cap_at(division.split_at(cap)) == cap
    assert division.cap_at(0.0) == 8 and division.cap_at(1.0) == division.largest_cap
    with pytest.raises(SplitError, match="sizes must be positive and 0 ≤ least_cap ≤ caps"):
        Division(100, 10, 0, 4, 1)


def step_curve(at: int, height: float, size: int) -> np.ndarray:
    return np.where(np.arange(size) < at, height, 0.0)


def convex(rng: np.random.Generator, size: int) -> np.ndarray:
    drops = -np.sort(-(rng.random(size - 1) ** 4))
    return np.append(np.cumsum(drops[::-1])[::-1], 0.0)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_at_the_minimum_both_sides_of_equation_5_meet(seed):
    """On convex curves a cap up to the argmin of (4) saves more by its experts per byte than its
    pages would, c_E·ΔM_E/b_e ≥ c_K·ΔM_K/b_k, and a cap beyond it less."""
    rng = np.random.default_rng(seed)
    division = Division(1000, 20, 5, 40, int(rng.integers(0, 60)), 1)
    experts, kv, costs = convex(rng, 41), convex(rng, 201), MissCosts(*rng.random(2))
    best = int(objective(division, experts, kv, costs).argmin())
    pages = division.pages
    for cap in range(2, division.largest_cap + 1):
        saved = costs.expert_s * (experts[cap - 1] - experts[cap]) / 20
        lost = costs.page_s * (kv[pages[cap]] - kv[pages[cap - 1]]) / (5 * 4)
        assert (saved >= lost - 1e-12) if cap <= best else (saved <= lost + 1e-12)


def rest(rule: SplitRule, split: float, *args) -> float:
    """Where the rule comes to rest."""
    for _ in range(100):
        moved = rule.next_split(split, *args)
        if moved == split:
            return split
        split = moved
    raise AssertionError("the rule does not rest")


@settings(max_examples=100)
@example(seed=887, start=0.625)  # ends exactly as far off as it may
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
    near = abs(split - division.split_at(int(seconds.argmin()))) <= 1 / 40 + 20 / 1000 + 1e-9
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
    pages = division.pages_at(cap)
    assert experts[cap] == experts[cap + 1] and kv[pages] == kv[pages + 1]


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
    with pytest.raises(SplitError, match="a missing expert costs nothing"):
        miss_costs(dataclasses.replace(costs, fill=np.zeros(2)), spec())


# ---- the KV stream


def pool(turns, size: int) -> int:
    """Warm misses of an LRU pool of pages, in plain Python; a turn of no session is released."""
    held: list = []
    seen, missed = set(), 0
    for each in turns:
        pages = [(int(session), int(page)) for session, page in each]
        missed += sum(page in seen and page not in held for page in pages)
        seen.update(page for page in pages if page[0] >= 0)
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
    recency, distances = PageRecency(), []
    pages = [np.array([(s, p) for p in range(n)], np.int64).reshape(-1, 2) for s, n in turns]
    for each in pages:
        recency, found = page_references(recency, each)
        distances.extend(found.tolist())
    counts = np.bincount(np.array(distances, np.int64), minlength=201).astype(np.float64)
    assert Streams(np.zeros((1, 1)), counts).kv_misses[size] == pool(pages, size)


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
    what a replay misses."""
    division = Division(1000, 50, 10, 16, 5, 2)
    costs = MissCosts(1.0, page_s)
    played = list(turns(np.random.default_rng(0), sessions, 6, 60))
    found = configure(played, division, costs)
    assert found.kv_pages == (1000 - found.cap * 50) // 10 >= 5

    # M_K is that of the whole trace; its last column has what no pool could keep.
    streams = list(histograms_of(played, 100))
    whole = Streams(*(sum(parts) for parts in zip(*streams, strict=True)))
    seconds = objective(division, whole.expert_misses.sum(axis=0), whole.kv_misses, costs)
    near = abs(found.cap - seconds.argmin()) * 50 / 1000 <= 1 / 40 + 50 / 1000
    assert near or seconds[found.cap] <= seconds.min() / (1 - 0.02)

    assert found.kv_misses == pool([turn.pages for turn in played], found.kv_pages)
    assert found.seconds == pytest.approx(found.expert_misses + page_s * found.kv_misses)
    exact = curves_of([a for turn in played for a in turn.active])
    assert exact.warm[0, found.cap] == found.expert_misses


def test_turns_of_a_trace(tmp_path):
    """Steps up to each turn's end, with the pages of the request that ended."""
    routing = random_routing(np.random.default_rng(0), 9, 2, 8, 2)
    trace = write_trace(tmp_path / "t", routing, 8, spec={"page_tokens": 4})
    steps = (
        step._replace(finished={4: (5,), 6: (7,)}.get(step.number, ()))
        for step in trace.step_traces()
    )
    count = list(turns_of(rewritten(tmp_path / "ended", trace, steps)))
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
