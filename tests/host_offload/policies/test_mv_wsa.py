"""The online controller over streams of turns: it finds the split, follows a shift, and costs what
a miss was seen to cost."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from host_offload.control.controller import Controller
from host_offload.control.interface import Costs, Decision, Moment, Observation
from host_offload.control.rules import PolicyError
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.sizing.configurator import Streams
from host_offload.sizing.kv_reuse import PageRecency, expected_returns, page_references
from host_offload.sizing.split import MissCosts, SplitError, division_of, objective
from host_offload.sizing.step_times import StepTimes
from host_offload.traces.reader import TraceError
from host_offload.traces.recency import tails
from host_offload.traces.writer import TraceWriter
from tests.host_offload.control.policy_runs import record, spec, use
from tests.host_offload.traces.traces_of import random_routing, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LAYERS, EXPERTS = 2, 16
TOLD = spec(
    experts=EXPERTS,
    cell_bound=EXPERTS,
    version_bytes={"dense": np.full(LAYERS, 100)},
    budget_bytes=4000,
    slot_bytes=100,
    page_bytes=20,
    kv_floor_bytes=200,
)
"""40 slots; 32 hold all experts; five pages a slot, ten the floor."""


@dataclasses.dataclass
class Run:
    """A policy alone with a stream of turns, each of some steps of one row."""

    policy: MvWsa
    kv_pages: int = 100
    running: int = 1
    waiting: int = 0

    def __post_init__(self):
        self.state = self.policy.init(TOLD)
        self.step, self.seconds = 0, 0.0
        self.decisions: list[Decision] = []

    def turn(self, ids: np.ndarray, pages: np.ndarray, *, miss_s: float = 0.0, rng=None) -> None:
        """ids int[steps, L, k]. miss_s: what a miss costs in this world."""
        for row in ids:
            missed = np.zeros((LAYERS, EXPERTS), bool)
            if rng is not None:
                missed = rng.random(missed.shape) < rng.random()
            self.seconds += 0.01 + miss_s * np.count_nonzero(missed)
            self.ask(Moment.STEP_END, ids=row[None].astype(np.int16), missed=missed)
            self.step += 1
        decision = self.ask(Moment.TURN_END, kv_refs=pages)
        if decision.kv_pages is not None:
            self.decisions.append(decision)
            self.kv_pages = decision.kv_pages

    def ask(self, moment: Moment, **fields) -> Decision:
        self.state, decision = self.policy.decide(
            self.state,
            Observation(
                moment=moment,
                step=self.step,
                age=1,
                interval=0,
                turn=-1,
                layer=-1,
                seconds=self.seconds,
                kv_pages=self.kv_pages,
                bucket=8,
                compiled=False,
                phase=np.ones(1, np.uint8),
                running=self.running,
                waiting=self.waiting,
                **fields,
            ),
        )
        return decision

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


@pytest.mark.parametrize(
    ("sessions", "pages", "skew", "page_s"),
    [(4, 20, 1.0, 1.0), (4, 20, 1.0, 0.01), (9, 12, 2.0, 3.0), (2, 30, 0.5, 10.0)],
)
def test_it_ends_within_a_grid_step_of_the_exhaustive_argmin(sessions, pages, skew, page_s):
    """WiSP, checkable 5, on stationary streams, from two sides; the argmin is over all caps of (4)
    with nothing forgotten. Or the gate keeps it where no more than 2% is to be gained."""
    costs, ends = MissCosts(1.0, page_s), []
    for start in (10, 150):
        run = Run(MvWsa(costs=costs, calibrate=False), kv_pages=start)
        total = None
        for ids, held in turns(0, sessions=sessions, pages=pages, skew=skew):
            run.turn(ids, held)
            now = run.state
            found = Streams(now.curves.histogram, now.pages)
            total = (
                found
                if total is None
                else Streams(*(a + b for a, b in zip(total, found, strict=True)))
            )
        assert total is not None
        division = run.policy.division_now(run.state)
        assert division.floor_pages == max(pages, 10)
        # The sum of decayed histograms is the plain one but for the edges, times 1/(1 − γ).
        experts, kv = tails(total.experts).sum(axis=0), tails(total.pages)
        seconds = objective(division, experts, kv, costs)
        best = division.split_at(int(seconds.argmin()))
        cap = division.cap_at(run.split)
        near = abs(run.split - best) <= 1 / 40 + division.cap_bytes / division.total_bytes
        assert near or seconds[cap] <= 1.05 * seconds.min(), (run.split, best)
        ends.append(seconds[cap])
    assert max(ends) <= 1.05 * min(ends)


def test_it_follows_a_workflow():
    """Experts matter first, then a crowd of sessions returns: the line moves over and back. Every
    decision is legal, changes at most `rate` of the memory and keeps equal memory (D1)."""
    run = Run(MvWsa(costs=MissCosts(1.0, 10.0), calibrate=False))
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
    Whatever waits, it is at most `floor_share` of the memory."""

    def pages(policy: MvWsa, waiting: int) -> int:
        run = Run(policy, running=2, waiting=waiting)
        for number, (ids, held) in enumerate(
            turns(0, sessions=1, pages=12, skew=0.2, count=20, steps=20)
        ):
            run.turn(ids, held - np.array([1 + number, 0]))
        assert not run.state.pages.any()
        return run.kv_pages

    costs = MissCosts(1.0, 1.0)
    assert pages(MvWsa(costs=costs, calibrate=False, concurrent=1), 9) == 40  # all experts fit
    assert 4 * 12 <= pages(MvWsa(costs=costs, calibrate=False), 2) < 4 * 12 + 10
    assert 8 * 12 <= pages(MvWsa(costs=costs, calibrate=False), 90) < 8 * 12 + 10  # of 8 rows
    assert pages(MvWsa(costs=costs, calibrate=False, floor_share=0.25), 90) == 50


def test_the_floor_has_no_more_than_can_run():
    """Steps have eight rows, of which an engine for three sequences uses three."""
    policy = MvWsa(costs=MissCosts(1.0, 1.0), calibrate=False)
    floors = []
    for most in (None, 3):
        run = Run(policy, waiting=90)
        run.state = policy.init(dataclasses.replace(TOLD, max_num_seqs=most))
        for ids, held in turns(0, sessions=1, pages=12, skew=0.2, count=3):
            run.turn(ids, held)
        floors.append(policy.division_now(run.state).floor_pages)
    assert floors == [8 * 12, 3 * 12]


def test_a_wish_that_was_not_carried_out_is_wished_again():
    """The device refuses every copy, so the pool stays as it was; the policy goes on wishing what
    it decided last. Once the pool is as wished it says nothing."""
    run = Run(MvWsa(costs=MissCosts(1.0, 1.0), calibrate=False), kv_pages=150)
    made = []
    for ids, held in turns(0, sessions=1, pages=12, skew=0.2, count=40, steps=20):
        run.turn(ids, held)
        made.append(run.decisions[-1].kv_pages if run.decisions else None)
        run.kv_pages = 150
    last = made[-1]
    assert last is not None and last < 150 and len(run.decisions) > 30
    assert run.decisions[-1].cells.tolist() == run.state.cells.tolist()
    run.decisions, run.kv_pages = [], last
    run.turn(ids, held)
    assert run.decisions == []


def test_the_floor_forgets_a_peak():
    """Ten more wait for a tenth of the steps: the floor has the two that run or wait in the mean,
    not eleven, whom a rule by the most (the mutation) keeps room for during `window` turns."""
    run = Run(MvWsa(costs=MissCosts(1.0, 1.0), calibrate=False))
    for number, (ids, held) in enumerate(turns(0, sessions=1, pages=12, skew=0.2, count=3)):
        run.waiting = 10
        for row in ids[:4]:
            facts = {"ids": row[None].astype(np.int16), "missed": np.zeros((LAYERS, EXPERTS), bool)}
            run.ask(Moment.STEP_END, **facts)
        run.waiting = 0
        run.turn(ids[4:], held - np.array([1 + number, 0]))
        assert run.policy.division_now(run.state).floor_pages == 2 * 12


def turns_in_a_trace(directory: Path, stream, **header) -> Path:
    """Turns of one request each, as the engine would have written them."""
    ids = [row for steps, _ in stream for row in steps]
    routing = [np.sort(row[None], axis=2) for row in ids]
    plain = write_trace(directory / "plain", routing, EXPERTS, **header)
    number, steps = 0, plain.step_traces()
    with TraceWriter(directory / "turns", plain.header) as writer:
        for turn, (rows, held) in enumerate(stream):
            for _ in rows:
                step = next(steps)
                done = number == len(rows) * (turn + 1) - 1
                step = step._replace(
                    request=np.array([turn], np.int32),
                    user=held[:1, 0].astype(np.int32),
                    position=np.array([16 * len(held) - 1], np.int32),
                    finished=(turn,) if done else (),
                )
                writer.append(step)
                number += 1
    return directory / "turns"


def test_a_trace_is_what_it_begins_with(tmp_path):
    """The histograms that turns in an engine would have left, so that KV has a worth before a
    session returns; without them experts grow at KV's cost."""
    stream = [*turns(0, sessions=4, pages=20, skew=1.0, count=12)]
    plain = dict(costs=MissCosts(1.0, 10.0), calibrate=False, expect_returns=False)
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


def test_expected_returns_are_the_places_of_held_pages():
    held = PageRecency()
    for session, pages in ((1, 2), (2, 3), (-5, 4)):
        held, _ = page_references(held, np.array([(session, page) for page in range(pages)]))
    # Session 2 had places 0 to 2 and 1 had 3 and 4; then four pages without a session came.
    assert expected_returns(held, 9, 0.5, 1).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert expected_returns(held, 6, 0.5, 3).tolist() == [0, 0, 0, 0, 0.25, 0.25]


def test_sessions_are_expected_back_until_they_had_time_to_return():
    """Without that (as printed) KV shrinks before the first session returns, and must grow again.
    Where none ever returns it wears off; requests without a session are not expected at all."""
    plain = MvWsa(costs=MissCosts(1.0, 10.0), calibrate=False, expect_returns=False)
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


def test_policies_are_pure():
    """Neither the state nor the observation changes, and equal ones give equal decisions."""
    run = Run(MvWsa(costs=MissCosts(1.0, 1.0), allocation="marginal"))
    for ids, held in turns(0, sessions=2, pages=9, skew=1.0, count=6):
        before = pickle.dumps(run.state)
        states = []
        for _ in range(2):
            again = Run(run.policy)
            again.state, again.step, again.seconds = run.state, run.step, run.seconds
            again.turn(ids, held)
            states.append(pickle.dumps((again.state, again.decisions)))
        assert states[0] == states[1] and pickle.dumps(run.state) == before
        run.turn(ids, held)


def test_noise_moves_nothing():
    """White noise: after it settled the line is still."""
    run = Run(MvWsa(costs=MissCosts(1.0, 0.0), calibrate=False), kv_pages=40)
    for ids, held in turns(5, sessions=1, pages=1, skew=0.0, count=30, steps=100):
        run.turn(ids, held)
    settled = len(run.decisions)
    for ids, held in turns(6, sessions=1, pages=1, skew=0.0, count=60, steps=100):
        run.turn(ids, held)
    assert len(run.decisions) == settled


def test_it_learns_what_a_miss_costs():
    """The start value is ten times too small; steps say 2 ms."""
    policy = MvWsa(costs=MissCosts(2e-4, 1.0))
    run, rng = Run(policy), np.random.default_rng(0)
    for ids, held in turns(0, sessions=2, pages=3, skew=1.0, count=30):
        run.turn(ids, held, miss_s=2e-3, rng=rng)
    # It may leave the start value by a factor of 10 and no more.
    assert policy.costs_now(run.state).expert_s == pytest.approx(2e-3, rel=0.1)
    still = MvWsa(costs=MissCosts(2e-4, 1.0), calibrate=False)
    assert still.costs_now(run.state).expert_s == 2e-4


def seen(times: StepTimes, misses: int, now: float, usable: bool = True, tokens: int = 0):
    return times.see(bucket=4, tokens=tokens, misses=misses, read_s=now, usable=usable, miss_s=1e-3)


def test_step_times_refuse_what_says_nothing():
    """Prefill steps, first runs, pauses, and steps that all miss as often."""
    times = StepTimes()
    for step in range(50):
        times = seen(times, 7, 0.01 * (step + 1))
    assert times.miss_s(3.0) == 3.0
    rng, now, misses = np.random.default_rng(0), 1.0, 0
    for step in range(500):
        misses = int(rng.integers(20))
        usable = step % 10 != 0
        now += 0.01 + 1e-3 * misses * (1 if usable else 50)
        times = seen(times, misses, now, usable)
    assert times.miss_s(5e-4) == pytest.approx(1e-3, rel=0.15)
    paused = seen(times, 3, now + 60.0)
    assert paused.miss_s(5e-4) == times.miss_s(5e-4)
    assert times.miss_s(1e-6) == pytest.approx(1e-5)


def test_prefill_steps_say_what_a_prompt_token_costs():
    """0.3 ms a token beside 1 ms a miss; the start value is 1 ms. Where KV is moved out instead of
    computed again, they say nothing."""
    rng, times, now = np.random.default_rng(0), StepTimes(), 0.0
    for _ in range(600):
        tokens, misses = int(rng.integers(10, 200)), int(rng.integers(30))
        pause = 30.0 * (rng.random() < 0.02)
        now += 3e-4 * tokens + 1e-3 * misses + pause
        times = seen(times, misses, now, tokens=tokens)
    assert times.token_s(1e-3) == pytest.approx(3.9e-4, rel=0.1)  # 64 of 500 steps are 1 ms
    assert StepTimes().token_s(1e-3) == 1e-3
    policy = MvWsa(costs=MissCosts(1.0, 16e-3), kv_miss="recompute")
    state = policy.init(TOLD)._replace(times=times)
    assert policy.costs_now(state).page_s == pytest.approx(16 * times.token_s(1e-3))
    assert MvWsa(costs=MissCosts(1.0, 16e-3)).costs_now(state).page_s == 16e-3


def test_slots_per_layer_live():
    """One layer loops over many experts, one over few: `marginal` moves cells to the first."""
    run = Run(MvWsa(costs=MissCosts(1.0, 0.0), calibrate=False, allocation="marginal"), 100)
    for turn in range(20):
        loop = np.add.outer(np.arange(24), [0, 1]) + 24 * turn
        ids = np.stack([loop % 14, loop % 4], axis=1)
        run.turn(np.sort(ids, axis=2), np.array([(0, 0)]))
    cells = run.decisions[-1].cells
    assert cells is not None and cells[0] >= 14 > cells[1] >= 4
    assert run.decisions[-1].kv_pages == (40 - cells.sum()) * 5


def test_layer_cells_keeps_the_number_of_cells():
    policy = LayerCells(interval="24 steps")
    state, decision = policy.init(TOLD), Decision()
    cells = np.array([8, 12], np.int32)
    for step in range(24):
        ids = np.array([[[step % 14, (step + 1) % 14], [step % 4, (step + 1) % 4]]], np.int16)
        facts = dict(step=step, age=1, interval=0, turn=-1, layer=-1, seconds=0.0)
        seen = Observation(moment=Moment.STEP_END, ids=np.sort(ids), cells=cells, **facts)
        state, decision = policy.decide(state, seen)
        assert decision.cells is None
    seen = Observation(moment=Moment.INTERVAL, ids=ids, cells=cells, **facts)
    state, decision = policy.decide(state, seen)
    assert decision.cells is not None and decision.cells.tolist() == [16, 4]
    seen = dataclasses.replace(seen, cells=decision.cells)
    assert policy.decide(state, seen)[1].cells is None
    with pytest.raises(ValueError, match="cells are uniform, marginal, optimal, not 'x'"):
        LayerCells(allocation="x").init(TOLD)


def test_it_runs_under_the_controller():
    """The needs are met, decisions are accepted and held until the engine takes them."""
    costs = Costs(
        fill=np.array([0.0, 1e-9]),
        stage=np.zeros(2),
        gpu_expert=np.zeros((1, 2)),
        cpu_expert=np.zeros(2),
        step_s={1: 0.01},
        attention_s=0.0,
        prefill_s_per_token=1e-3,
        kv_swap_s_per_byte=1e-8,
    )
    with pytest.raises(PolicyError, match="MvWsa needs 'costs', which this Spec does not have"):
        Controller(TOLD, [MvWsa()])
    controller = Controller(dataclasses.replace(TOLD, costs=costs), [MvWsa()])
    assert not controller.needs_residency
    step = 0
    for turn, (ids, _) in enumerate(turns(0, sessions=1, pages=1, skew=0.3, count=20)):
        for row in ids:
            controller.begin_step(step, seconds=0.01 * step)
            done = record(
                step,
                ids=np.sort(row[None].astype(np.int16)),
                missed=np.zeros((LAYERS, EXPERTS), bool),
                request=np.array([turn], np.int32),
                user=np.array([-1], np.int32),
                position=np.array([step % 40], np.int32),
                rows=1,
                compiled=False,
                use=use(kv_pages=150, running=1, waiting=0),
                finished=(turn,) if step % 40 == 39 else (),
            )
            controller.end_step(done, age=1, seconds=0.01 * step)
            step += 1
    assert controller.wanted_cells is not None
    assert controller.wanted_cells.tolist() == [16, 16]
    assert controller.wanted_kv_pages == 40


def test_what_it_refuses():
    with pytest.raises(ValueError, match="cells are uniform, marginal, optimal, not 'x'"):
        MvWsa(allocation="x", costs=MissCosts(1, 1)).init(TOLD)
    with pytest.raises(SplitError, match="no cap from 0 on works: raise the memory"):
        MvWsa(costs=MissCosts(1, 1)).init(dataclasses.replace(TOLD, kv_floor_bytes=9999))
    for fields in ({"window": 0}, {"concurrent": 0}, {"floor_share": 2.0}):
        with pytest.raises(ValueError, match=r"at least 1|lies in"):
            MvWsa(costs=MissCosts(1, 1), **fields).init(TOLD)
