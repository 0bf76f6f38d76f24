"""The closed form, equations (8) to (10): as printed, against WiSP's Table 6, and as a policy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.interface import Decision, Moment, Observation
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.sizing.split import Division, SplitError, division_of, peak_headroom
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.sizing.test_split import CAP, PAGE


def test_table_6():
    """Qwen3, os: 36 → 40 moves 4 caps = 1.81·10⁹ bytes, KV 3.65 → 1.84, in 10⁹ bytes."""
    total = 36 * CAP + 3_650_000_000
    division = Division(total, CAP, PAGE, 128, 64, least_cap=8, page_tokens=16)
    assert peak_headroom(division, peak_pages=1000, headroom=0.1, cap=36, dead=2) == 40
    pages = division.pages_at(40)
    assert round(pages * PAGE / 1e9, 2) == 1.84
    assert round(4 * CAP / 1e9, 2) == 1.81
    assert round((division.pages_at(36) - pages) * PAGE / 1e9, 2) == 1.81


@given(
    total=st.integers(3_000, 100_000),
    cap_bytes=st.integers(20, 900),
    page=st.integers(1, 60),
    peak=st.integers(0, 3000),
    cap=st.integers(0, 64),
    floor=st.integers(0, 40),
    least=st.integers(0, 1),
    dead=st.integers(1, 4),
)
def test_what_remains_is_below_a_page(total, cap_bytes, page, peak, cap, floor, least, dead):
    """WiSP, checkable 4: 0 ≤ B − C·b_e − N·b_k < b_k; the floor is never crossed; a move leaves
    the dead zone; and KV gets all it wanted unless experts are at their least."""
    try:
        division = Division(total, cap_bytes, page, 64, floor, least)
    except SplitError:
        assert total - least * cap_bytes < floor * page
        return
    found = peak_headroom(division, peak_pages=peak, headroom=0.1, cap=cap, dead=dead)
    if found is None:
        return
    pages = division.pages_at(found)
    assert 0 <= total - found * cap_bytes - pages * page < page
    assert pages >= floor and least <= found <= 64 and abs(found - cap) >= dead
    assert pages >= 1.1 * peak or found == least


def test_all_experts_resident_give_the_surplus_back():
    """The clamp to E: equation (10) returns what experts cannot use."""
    division = Division(1000, 10, 5, 20, 4)
    assert peak_headroom(division, peak_pages=2, headroom=0.5, cap=3, dead=1) == 20
    assert division.pages_at(20) == 160


# ---- the policy

TOLD = spec(
    version_bytes={"dense": np.full(2, 100)},
    budget_bytes=2000,
    slot_bytes=100,
    page_bytes=10,
    kv_floor_bytes=200,
)
"""Two layers of eight experts; 20 slots of ten pages, two of them the floor."""


def run(
    policy: PeakHeadroom, used, kv_pages: int, waiting: int = 0, swapped: int = 0
) -> list[Decision]:
    """The decisions after each turn, where the engine carries them out. used: for each turn, the
    pages in use at its steps. waiting: requests with prompts of 40 tokens, three pages. swapped:
    pages on the host."""
    state, made = policy.init(TOLD), []

    def ask(moment: Moment, pages: int) -> Decision:
        nonlocal state
        facts = dict(step=0, age=1, interval=0, turn=-1, layer=-1, seconds=0.0)
        use = dict(waiting=waiting, waiting_tokens=40 * waiting)
        use |= dict(kv_used=pages, kv_swapped=swapped, kv_pages=kv_pages)
        seen = Observation(moment=moment, **use, **facts)
        state, decision = policy.decide(state, seen)
        return decision

    for turn in used:
        assert all(ask(Moment.STEP_END, pages) == Decision() for pages in turn)
        decision = ask(Moment.TURN_END, turn[-1])
        made.append(decision)
        kv_pages = kv_pages if decision.kv_pages is None else decision.kv_pages
    return made


def test_kv_gives_back_what_it_does_not_use():
    (decision,) = run(PeakHeadroom(dead=1), [[10, 50, 30]], kv_pages=150)
    # 55 pages with headroom are six slots; 14 remain for two layers.
    assert decision.cells is not None and decision.cells.tolist() == [7, 7]
    assert decision.kv_pages == 60


def test_a_pool_at_its_peak_grows():
    """What it wants is more than it has, until experts are at their least, top-k."""
    made = run(PeakHeadroom(headroom=0.5, dead=1), [[40], [60], [100], [160]], kv_pages=40)
    assert [d.kv_pages for d in made] == [60, 100, 160, None]
    assert [None if d.cells is None else d.cells[0] for d in made] == [7, 5, 2, None]
    made = run(PeakHeadroom(headroom=0.5, dead=1, least_cap=0), [[160]], kv_pages=160)
    assert made[0].kv_pages == 200


def test_a_prompt_that_does_not_fit_makes_the_pool_grow():
    """A quarter of headroom is less than a cap step, so a full pool would stay as it is."""
    still = run(PeakHeadroom(headroom=0.25, dead=2), [[38]] * 3, kv_pages=40)
    assert [d.kv_pages for d in still] == [None] * 3
    grows = run(PeakHeadroom(headroom=0.25, dead=2), [[38]] * 3, kv_pages=40, waiting=2)
    assert [d.kv_pages for d in grows] == [80, None, None]  # then there is room for the prompts


def test_sessions_that_take_each_others_pages_make_the_pool_grow():
    """A full pool says nothing of what was moved out of it; with that, P is what they hold."""
    still = run(PeakHeadroom(), [[38]] * 3, kv_pages=40)
    assert [d.kv_pages for d in still] == [None] * 3
    (grows, *later) = run(PeakHeadroom(), [[38]] * 3, kv_pages=40, swapped=52)
    assert grows.kv_pages == 100 and grows.cells is not None and grows.cells.tolist() == [5, 5]
    assert [d.kv_pages for d in later] == [None, None]


def test_the_peak_of_some_turns_counts():
    """A peak is remembered for `window` turns, then forgotten; a small change is none."""
    made = run(PeakHeadroom(window=3, dead=2), [[90, 5], [5], [5], [5]], kv_pages=100)
    assert [d.kv_pages for d in made] == [None, None, None, 40]
    assert made[-1].cells is not None and made[-1].cells.tolist() == [8, 8]


def test_what_it_refuses():
    with pytest.raises(ValueError, match="dead and window at least 1"):
        PeakHeadroom(window=0).init(TOLD)
    assert (
        PeakHeadroom().init(dataclasses.replace(TOLD, kv_floor_bytes=1900)).division.least_cap == 0
    )
    with pytest.raises(SplitError, match="no cap from 0 on works"):
        PeakHeadroom().init(dataclasses.replace(TOLD, kv_floor_bytes=3000))
    with pytest.raises(SplitError, match="no cap from 8 on works"):
        PeakHeadroom(least_cap=8).init(dataclasses.replace(TOLD, kv_floor_bytes=500))
    assert division_of(TOLD).largest_cap == 8
