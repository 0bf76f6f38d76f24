"""Budget policies over streams of turns: the online controller finds the split and follows a shift;
the closed form as printed and by turns; width, KV and cells
together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.control.rules import PolicyError, check_decision
from host_offload.control.step_record import StepRecord
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom, ResidentHeadroom
from host_offload.policies.budget.user_caps import UserCaps
from host_offload.sizing.coactivation_counts import coactivation_counts, predicted_use
from host_offload.sizing.split import (
    Division,
    MissCosts,
    SplitError,
    division_of,
    peak_headroom,
)
from host_offload.traces.reader import TraceError
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.memory.resident_device import resident, spec_for
from tests.host_offload.policies.test_contract import COSTS
from tests.host_offload.sizing.test_split import CAP, PAGE
from tests.host_offload.traces.traces_of import random_routing, rewritten, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LAYERS, EXPERTS = 2, 16
DENSE = {"version_bytes": {"dense": np.full(LAYERS, 100)}, "slot_bytes": 100, "kv_floor_bytes": 200}
TOLD = spec(experts=EXPERTS, cell_bound=EXPERTS, budget_bytes=4000, page_bytes=20, **DENSE)
"""40 slots; 32 hold all experts; five pages a slot, ten the floor."""
SMALL = spec(budget_bytes=2000, costs=COSTS, **DENSE)
"""Two layers of eight experts; 20 slots of ten pages, two of them the floor."""


@dataclasses.dataclass
class Run:
    """A policy alone with a stream of turns. Its wishes for KV are carried out, and checked."""

    policy: Any
    told: Spec = TOLD
    kv_pages: int = 100
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What each observation has beside the stream."""

    def __post_init__(self):
        self.state = self.policy.init(self.told)
        self.step, self.seconds = 0, 0.0
        self.decisions: list[Decision] = []

    def ask(self, moment: Moment, **fields) -> Decision:
        known = dict(kv_pages=self.kv_pages, bucket=8, phase=np.ones(1, np.uint8))
        known |= dict(running=1, waiting=0, waiting_tokens=0, kv_swapped=0) | self.facts | fields
        place = moment, self.step, 1, 0, -1, -1, self.seconds
        self.state, decision = self.policy.decide(self.state, Observation(*place, **known))
        check_decision(decision, self.policy, self.told, moment.name)
        if decision.kv_pages is not None:
            self.decisions.append(decision)
            self.kv_pages = decision.kv_pages
        return decision

    def turn(self, ids: np.ndarray, pages: np.ndarray) -> Decision:
        """ids int[steps, L, k] of one row."""
        for row in ids:
            self.seconds += 0.01
            self.ask(Moment.STEP_END, ids=row[None].astype(np.int16))
            self.step += 1
        return self.ask(Moment.TURN_END, kv_refs=pages)

    @property
    def split(self) -> float:
        assert self.state.split is not None
        return self.state.split


def turns(
    seed: int, *, sessions: int, pages: int, skew: float, count: int = 60, steps: int = 40
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stationary: routing by a fixed popularity, sessions that return in turn with all pages."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, EXPERTS + 1.0) ** -skew
    for turn in range(count):
        score = np.log(share) + rng.gumbel(size=(steps, LAYERS, EXPERTS))
        ids = np.argsort(-score, axis=2)[..., :2]
        held = [(turn % sessions, page) for page in range(pages)]
        yield ids, np.array(held, np.int64)


# ---- the online controller


def test_it_follows_a_workflow():
    """Experts matter first, then a crowd of sessions returns: the line moves over and back. Every
    decision is legal, changes at most `rate` of the memory and keeps equal memory (D1)."""
    run = Run(MvWsa(costs=MissCosts(1.0, 10.0)))
    division, splits, before = division_of(TOLD), [], None
    for phase in (1, 8, 1):
        for ids, held in turns(phase, sessions=phase, pages=18, skew=0.6, count=40):
            run.turn(ids, held + np.array([100 * phase, 0]))
            assert before is None or abs(run.split - before) <= 0.1 + 1e-9
            before = run.split
        splits.append(run.split)
    assert splits[0] > splits[1] + 0.1 < splits[2]
    for decision in run.decisions:
        assert decision.cells is not None and decision.kv_pages is not None
        slots = int(decision.cells.sum()) + decision.kv_pages // division.unit_pages
        assert slots == 40 and decision.kv_pages >= division.floor_pages


def test_the_floor_is_what_runs_at_once():
    """Requests that never return are worth nothing to equation (4); the floor (6) keeps room for as
    many as run or wait, which a rule with the model's floor alone (the mutation) gives to experts.
    Whatever waits, it is at most half of the memory."""

    def pages(waiting: int, held_pages: int = 12, running: int = 2) -> int:
        run = Run(MvWsa(costs=MissCosts(1.0, 1.0)), facts={"running": running, "waiting": waiting})
        for number, (ids, held) in enumerate(
            turns(0, sessions=1, pages=held_pages, skew=0.2, count=20, steps=20)
        ):
            run.turn(ids, held - np.array([1 + number, 0]))
        assert not run.state.pages.any()
        return run.kv_pages

    assert pages(0, running=1) == 40  # all experts fit
    assert 4 * 12 <= pages(2) < 4 * 12 + 10
    assert 8 * 12 <= pages(90) < 8 * 12 + 10  # of 8 rows
    assert pages(90, held_pages=20) == 100


def turns_in_a_trace(directory: Path, stream, **header) -> Path:
    """Turns of one request each, as the engine would have written them."""
    ids = [row for steps, _ in stream for row in steps]
    routing = [np.sort(row[None], axis=2) for row in ids]
    plain = write_trace(directory / "plain", routing, EXPERTS, **header)
    count = len(stream[0][0])

    def of_turn(step: StepRecord) -> StepRecord:
        turn, number = divmod(step.number, count)
        held = stream[turn][1]
        return step._replace(
            request=np.array([turn], np.int32),
            user=held[:1, 0].astype(np.int32),
            position=np.array([16 * len(held) - 1], np.int32),
            finished=(turn,) if number == count - 1 else (),
        )

    rewritten(directory / "turns", plain, map(of_turn, plain.step_traces()))
    return directory / "turns"


def test_a_trace_is_what_it_begins_with(tmp_path):
    """The histograms that turns in an engine would have left, so that KV has a worth before a
    session returns; without them experts grow at KV's cost."""
    stream = [*turns(0, sessions=4, pages=20, skew=1.0, count=12)]
    plain = dict(costs=MissCosts(1.0, 10.0), expect_returns=False)
    cold = MvWsa(**plain)
    warm = MvWsa(**plain, trace=str(turns_in_a_trace(tmp_path, stream)))
    live = Run(cold)
    for ids, held in stream:
        live.turn(ids, held)
    state = warm.init(TOLD)
    np.testing.assert_allclose(state.curves.histogram, live.state.curves.histogram)
    np.testing.assert_allclose(state.pages, live.state.pages)
    assert state.pages.any() and state.turns == ()
    assert state.ended == live.state.ended == 12
    assert not len(state.held.keys) and state.split is None
    first = [(ids, held + np.array([100, 0])) for ids, held in stream[:4]]  # nobody has returned
    assert kv_pages_after(cold, first) + 10 <= kv_pages_after(warm, first)


def kv_pages_after(policy: MvWsa, stream) -> int:
    run = Run(policy)
    for ids, held in stream:
        run.turn(ids, held)
    return run.kv_pages


def test_sessions_are_expected_back_until_they_had_time_to_return():
    """Without that (as printed) KV shrinks before the first session returns, and must grow again.
    Where none ever returns it wears off; requests without a session are not expected at all."""
    plain = MvWsa(costs=MissCosts(1.0, 10.0), expect_returns=False)
    hopeful = dataclasses.replace(plain, expect_returns=True)
    stream = [*turns(0, sessions=4, pages=20, skew=1.0, count=60)]
    assert kv_pages_after(plain, stream[:4]) + 10 <= kv_pages_after(hopeful, stream[:4])
    ends = [kv_pages_after(policy, stream) for policy in (plain, hopeful)]
    assert abs(ends[0] - ends[1]) <= 10  # a unit of the cap
    never = [(ids, held + np.array([10 * n, 0])) for n, (ids, held) in enumerate(stream)]
    alone = [(ids, held - np.array([10 * n + 9, 0])) for n, (ids, held) in enumerate(stream)]
    assert kv_pages_after(hopeful, never[:4]) > kv_pages_after(plain, never[:4])
    assert kv_pages_after(hopeful, never) == kv_pages_after(plain, never)
    for n in (1, 4, 60):
        assert kv_pages_after(hopeful, alone[:n]) == kv_pages_after(plain, alone[:n])


def test_traces_that_are_of_no_use(tmp_path):
    def init(name: str) -> None:
        MvWsa(costs=MissCosts(1, 1), trace=str(tmp_path / name)).init(TOLD)

    with pytest.raises(TraceError, match="nowhere"):
        init("nowhere")
    routing = random_routing(np.random.default_rng(0), 3, LAYERS, EXPERTS, 2)
    write_trace(tmp_path / "endless", routing, EXPERTS)
    with pytest.raises(ValueError, match=r"no request ends in .*endless"):
        init("endless")
    write_trace(tmp_path / "other", routing, EXPERTS + 1)
    with pytest.raises(ValueError, match="of another model: 2 layers of 17 experts"):
        init("other")
    write_trace(tmp_path / "pages", routing, EXPERTS, spec={"page_tokens": 32})
    with pytest.raises(ValueError, match=r"pages of 32 tokens; this one has .* pages of 16"):
        init("pages")


def test_a_wish_that_was_not_carried_out_is_wished_again():
    """The device refuses every copy, so the pool stays as it was; the policy goes on wishing what
    it decided last. Once the pool is as wished it says nothing."""
    run = Run(MvWsa(costs=MissCosts(1.0, 1.0)), kv_pages=150)
    for ids, held in turns(0, sessions=1, pages=12, skew=0.2, count=40, steps=20):
        run.turn(ids, held)
        run.kv_pages = 150
    last = run.decisions[-1].kv_pages
    assert last is not None and last < 150 and len(run.decisions) > 30
    run.decisions, run.kv_pages = [], last
    run.turn(ids, held)
    assert run.decisions == []


def test_layer_cells_keeps_the_number_of_cells():
    """One layer loops over many experts, one over few: cells go to the first."""
    run = Run(LayerCells(interval="24 steps"))
    cells = np.array([8, 12], np.int32)
    for step in range(24):
        ids = np.array([[[step % 14, (step + 1) % 14], [step % 4, (step + 1) % 4]]], np.int16)
        assert run.ask(Moment.STEP_END, ids=np.sort(ids), cells=cells).cells is None
    found = run.ask(Moment.INTERVAL, ids=ids, cells=cells).cells
    assert found is not None and found.tolist() == [16, 4]
    assert run.ask(Moment.INTERVAL, ids=ids, cells=found).cells is None


# ---- right-sizing


def test_experts_get_the_working_set_of_the_users_that_run():
    """WiSP, section 5.4: user 1 needs 4 experts of each layer, user 2 needs 12. A user whose first
    turn runs gets all that KV's floor leaves; then each gets its own set, and KV the rest."""
    run, rng = Run(UserCaps()), np.random.default_rng(0)
    largest = division_of(TOLD).largest_cap

    def step(*users: int) -> Decision:
        ids = [np.sort(rng.permutation({1: 4, 2: 12}[u])[:2]) for u in users]
        rows = np.array(ids, np.int16)[:, None].repeat(LAYERS, 1)
        request = np.array([10 * u for u in users])
        run.facts |= {"ids": rows, "user": np.array(users), "request": request}
        return run.ask(Moment.STEP_END)

    def turn(user: int) -> None:
        for _ in range(80):
            step(user)
        place = Moment.TURN_END, run.step, 1, 0, 10 * user, -1, 0.0
        seen = Observation(*place, kv_pages=run.kv_pages, **run.facts)
        run.state, decision = run.policy.decide(run.state, seen)
        run.kv_pages = decision.kv_pages or run.kv_pages

    def cap() -> int:
        return (4000 - run.kv_pages * 20) // 200

    step(1)
    assert cap() == largest
    turn(1)
    assert cap() == 4
    step(2)
    assert cap() == largest
    turn(2)
    assert cap() == 12
    step(1)
    assert cap() == 4
    step(1, 2)
    assert cap() == 12
    assert run.policy.stats(run.state) == {"caps": {"1": 4, "2": 12}}
    # What the co-activation predictor of the same tokens says is what is counted here.
    ids = np.argsort(rng.gumbel(size=(200, 3, EXPERTS)) - np.arange(EXPERTS), axis=2)[..., :2]
    use = predicted_use(coactivation_counts(ids, EXPERTS, reach=1), 2)
    counted = np.stack(
        [np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(3)]
    )
    np.testing.assert_allclose(use, counted / counted.sum(axis=1, keepdims=True), atol=1e-6)


# ---- the closed form, equations (8) to (10)


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


def after(policy: PeakHeadroom, used, kv_pages: int) -> list[Decision]:
    """The decisions after each turn. used: for each turn, the pages in use at its steps."""
    run, made = Run(policy, SMALL, kv_pages), []
    for turn in used:
        assert all(run.ask(Moment.STEP_END, kv_used=pages) == Decision() for pages in turn)
        made.append(run.ask(Moment.TURN_END, kv_used=turn[-1]))
    return made


def test_a_pool_at_its_peak_grows():
    """What it wants is more than it has, until experts are at their least, top-k."""
    made = after(PeakHeadroom(headroom=0.5, dead=1), [[40], [60], [100], [160]], kv_pages=40)
    assert [d.kv_pages for d in made] == [60, 100, 160, None]
    assert [None if d.cells is None else d.cells[0] for d in made] == [7, 5, 2, None]
    (made,) = after(PeakHeadroom(headroom=0.5, dead=1, least_cap=0), [[160]], kv_pages=160)
    assert made.kv_pages == 200


def test_the_peak_of_some_turns_counts():
    """A peak is remembered for `window` turns, then forgotten; a small change is none."""
    made = after(PeakHeadroom(window=3, dead=2), [[90, 5], [5], [5], [5]], kv_pages=100)
    assert [d.kv_pages for d in made] == [None, None, None, 40]
    assert made[-1].cells is not None and made[-1].cells.tolist() == [8, 8]


def test_the_closed_form_never_asks_for_less_than_all_low():
    where = resident([[1] * 4, [1] * 4], 12, capacity=(7, 8))
    told = spec_for(where, page_bytes=4, slot_bytes=8, budget_bytes=20 * 8, kv_floor_bytes=8)
    run = Run(ResidentHeadroom(), told, 16, {"waiting": 3, "waiting_tokens": 900})
    assert run.state.division.least_cap == -(-where.least_slots() // 2) == 3
    decision = run.ask(Moment.TURN_END, kv_used=39)
    assert decision.cells is None and decision.kv_pages == (20 - 6) * 2


# ---- width, KV and cells together


def test_it_widens_for_a_queue_and_only_then():
    """Nobody waits: few pages, all experts. A queue: more rows and pages, at once and not when the
    next turn ends. Prefill steps change nothing."""
    two, rng = {"phase": np.ones(2, np.uint8), "running": 2}, np.random.default_rng(0)
    run = Run(JointBudget(), SMALL, 60, two)
    pages = np.stack([np.zeros(20, np.int64), np.arange(20)], axis=1)
    for _ in range(8):
        for _ in range(20):
            ids = np.sort(rng.permuted(np.tile(np.arange(8), (2, 2, 1)), axis=2)[..., :2])
            assert run.ask(Moment.STEP_END, ids=ids) == Decision()
        run.ask(Moment.TURN_END, ids=ids, kv_refs=pages)
    (first,) = run.decisions
    assert first.max_running == 8 and first.cells is not None and first.cells[0] == 8
    assert run.state.chosen is not None and run.state.chosen.width == 2
    queue = {"ids": ids, "waiting": 6, "waiting_tokens": 6}
    decision = run.ask(Moment.STEP_END, **queue)
    assert decision.kv_pages is not None and first.kv_pages is not None
    assert decision.max_running is not None and decision.kv_pages > first.kv_pages
    assert decision.max_running > 2 and decision.kv_pages >= 20 * decision.max_running
    assert run.ask(Moment.STEP_END, **queue) == Decision()
    state = run.state
    run.ask(Moment.STEP_END, **queue, phase=np.zeros(2, np.uint8))
    assert run.state is state
    # A wish that was not carried out is wished again; no cap leaves KV room for a huge turn.
    run.kv_pages = 60
    assert run.ask(Moment.TURN_END, **queue, kv_refs=pages).kv_pages == decision.kv_pages
    assert run.ask(Moment.TURN_END, **queue, kv_refs=np.zeros((10**5, 2), int)) == Decision()


@pytest.mark.parametrize(("gate", "rare", "moves"), [(0.02, 200, 0), (0.0, 200, 1), (0.02, 4, 1)])
def test_a_small_gain_moves_nothing(gate, rare, moves):
    """Shorter turns leave room for the last expert, which one step in `rare` misses: where that is
    a gain below the gate, nothing is decided. Without the gate (the mutation) slots move."""
    run = Run(JointBudget(gate=gate), SMALL, 60, {"phase": np.ones(2, np.uint8), "running": 2})

    def turn(pages: int) -> None:
        for step in range(200):
            expert = 7 if step % rare == 0 else (step + 1) % 7
            ids = np.sort(np.array([[[step % 7, expert]] * 2] * 2, np.int16))
            run.ask(Moment.STEP_END, ids=ids)
        held = np.stack([np.zeros(pages, np.int64), np.arange(pages)], axis=1)
        run.ask(Moment.TURN_END, ids=ids, kv_refs=held)

    for _ in range(3):
        turn(25)
    assert [decision.kv_pages for decision in run.decisions] == [60]  # 7 of 8 cells a layer
    for _ in range(12):
        turn(10)
    assert [decision.kv_pages for decision in run.decisions[1:]] == [40] * moves


# ---- what is refused

ONE = MissCosts(1, 1)


@pytest.mark.parametrize(
    ("policy", "changes", "error", "match"),
    [
        (MvWsa(allocation="x", costs=ONE), {}, ValueError, "are uniform, marginal, not"),
        (LayerCells(allocation="x"), {}, ValueError, "are uniform, marginal, not 'x'"),
        (MvWsa(window=0, costs=ONE), {}, ValueError, "at least 1"),
        (MvWsa(costs=ONE), {"kv_floor_bytes": 9999}, SplitError, "no cap from 0 on works: raise"),
        (JointBudget(), {"kv_floor_bytes": 9999}, SplitError, "no cap from 0 on works"),
        (PeakHeadroom(window=0), {}, ValueError, "dead and window at least 1"),
        (PeakHeadroom(), {"kv_floor_bytes": 3000}, SplitError, "no cap from 0 on works"),
        (PeakHeadroom(least_cap=8), {"kv_floor_bytes": 500}, SplitError, "no cap from 8 on works"),
        (ResidentHeadroom(), {}, ValueError, "for two versions with every expert resident"),
    ],
)
def test_what_cannot_be_is_refused(policy, changes, error, match):
    with pytest.raises(error, match=match):
        policy.init(dataclasses.replace(SMALL, **changes))


def test_no_row_at_all_is_refused():
    with pytest.raises(PolicyError, match=r"max_running must be an integer of at least 1, not 0"):
        check_decision(Decision(max_running=0), JointBudget(), SMALL, "x")
