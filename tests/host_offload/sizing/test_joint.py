"""Width, KV and cells together: the choice is the best of all, and its curves are side by side."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.interface import Costs, Decision, Moment, Observation
from host_offload.control.rules import PolicyError, check_decision
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.sizing.joint import (
    DecodeModel,
    choose,
    decode_model,
    generated_sequences,
    resident_seconds,
    side_by_side,
    widened,
)
from host_offload.sizing.miss_curves import curves_of
from host_offload.sizing.split import Division, SplitError
from host_offload.traces.reader import TraceError
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.traces.traces_of import random_routing, write_trace


def model(rng: np.random.Generator, widths=(1, 2, 4, 8), caps: int = 6) -> DecodeModel:
    misses = np.sort(rng.random((len(widths), caps + 1)) * 20, axis=1)[:, ::-1]
    return DecodeModel(
        np.array(widths), np.sort(misses, axis=0), np.sort(rng.random(len(widths))), 0.05
    )


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    demand=st.integers(0, 12),
    pages=st.floats(0.5, 12),
    total=st.integers(200, 1500),
)
def test_the_choice_is_the_best_of_all(seed, demand, pages, total):
    found_model = model(np.random.default_rng(seed))
    try:
        division = Division(total, 100, 10, 6, 5)
        found = choose(found_model, division, pages_per_sequence=pages, demand=demand)
    except SplitError:
        return
    rates = {
        (width, cap): width / found_model.step_s(width, cap)
        for width in range(1, min(max(demand, 1), 8) + 1)
        for cap in range(7)
        if division.pages_at(cap) >= max(5, width * pages)
    }
    assert found.tokens_per_s == pytest.approx(max(rates.values()))
    assert rates[found.width, found.cap] == pytest.approx(found.tokens_per_s)
    assert found.pages == division.pages_at(found.cap) >= found.width * pages


def test_width_against_cells():
    """Cheap misses: as wide as KV allows. Dear ones: narrow, with the experts resident. A short
    queue: no wider than it."""
    division = Division(1000, 100, 10, 8, 5)
    misses = np.outer([1, 2, 4, 8], 8 - np.arange(9.0))
    cheap = DecodeModel(np.array([1, 2, 4, 8]), misses, np.full(4, 0.01), 1e-6)
    dear = dataclasses.replace(cheap, misses=misses + 10 * (misses > 0), miss_s=1.0)
    ask = dict(pages_per_sequence=10.0, demand=8)
    assert choose(cheap, division, **ask)[:2] == (8, 2)
    assert choose(dear, division, **ask)[:2] == (2, 8)
    assert choose(cheap, division, pages_per_sequence=10.0, demand=3).width == 3


def test_side_by_side_is_a_batch(tmp_path):
    """Curves by width from one trace: of each request's tokens in their order, next to others."""
    rng = np.random.default_rng(0)
    routing = random_routing(rng, 30, 2, 8, 2, 1)
    trace = write_trace(tmp_path / "t", routing, 8)

    class Requests:
        """Request 0 has steps 0, 3, 6 …, in reverse order of position."""

        def __init__(self, chunk):
            self.chunk = chunk

        def array(self, name):
            found = self.chunk.array(name)
            if name == "token.request":
                return np.arange(len(found), dtype=np.int32) % 3
            return found[::-1] if name == "token.position" else found

    trace = dataclasses.replace(trace, chunks=tuple(Requests(c) for c in trace.chunks))
    sequences = list(generated_sequences(trace))
    assert [len(s) for s in sequences] == [10, 10, 10]
    np.testing.assert_array_equal(sequences[0][0], routing[27][0])
    sets = list(side_by_side(sequences, 2, 8))
    assert len(sets) == 10  # the third has nobody beside it
    both = np.zeros((2, 8), bool)
    for ids in (routing[27][0], routing[28][0]):
        both[np.arange(2)[:, None], ids] = True
    np.testing.assert_array_equal(sets[0], both)
    found = decode_model(trace, step_s={1: 0.5, 4: 0.7}, miss_s=0.1, users=3)
    assert found.widths.tolist() == [1, 2, 3]
    curves = curves_of(side_by_side(sequences, 1, 8))
    np.testing.assert_allclose(found.misses[0], curves.warm.sum(axis=0) / 30)
    assert found.resident_s.tolist() == [0.5, 0.7, 0.7]
    assert found.step_s(1.5, 3) == pytest.approx((found.step_s(1, 3) + found.step_s(2, 3)) / 2)
    with pytest.raises(
        SplitError, match="steps of 4 sequences cannot be predicted: the trace has 3"
    ):
        decode_model(trace, step_s={4: 0.7}, miss_s=0.1, users=4)
    header = dataclasses.replace(trace.header, absent=["token.phase"])
    lacking = tuple(dataclasses.replace(c.chunk, header=header) for c in trace.chunks)
    with pytest.raises(TraceError, match=r"has no token\.phase: it was converted or generated"):
        list(generated_sequences(dataclasses.replace(trace, header=header, chunks=lacking)))


def test_widened_is_what_independent_sequences_miss():
    """A step of 4 sequences, 10 absent experts, each missed by a sequence with chance 0.1."""
    misses, absent = np.array([10 * (1 - 0.9**4), 0.0]), np.array([10.0, 0.0])
    found = widened(misses, 4, np.array([1, 4, 64]), absent)
    np.testing.assert_allclose(found[:, 0], [1.0, misses[0], 10 * (1 - 0.9**64)])
    assert not found[:, 1].any()


def test_what_is_refused():
    with pytest.raises(SplitError, match="measured up to 4 rows, not 5"):
        resident_seconds({1: 0.1, 4: 0.2}, [1, 5])
    found = model(np.random.default_rng(0))
    with pytest.raises(SplitError, match="width 9 is not within 1…8"):
        found.step_s(9, 0)
    with pytest.raises(SplitError, match="widths must ascend from at least 1"):
        dataclasses.replace(found, widths=np.array([1, 1, 2, 3]))
    with pytest.raises(SplitError, match="a row for each of 4 widths"):
        dataclasses.replace(found, resident_s=np.zeros(3))
    with pytest.raises(SplitError, match="have no room for 1 sequences of 101 pages"):
        choose(found, Division(1000, 100, 10, 6, 5), pages_per_sequence=101, demand=1)


# ---- the policy

COSTS = Costs(
    fill=np.array([0.0, 1e-5]),
    stage=np.zeros(2),
    gpu_expert=np.zeros((1, 2)),
    cpu_expert=np.zeros(2),
    step_s={4: 0.01, 8: 0.012},
    attention_s=0.0,
    prefill_s_per_token=1e-3,
    kv_swap_s_per_byte=1e-8,
)
TOLD = spec(
    version_bytes={"dense": np.full(2, 100)},
    budget_bytes=2000,
    slot_bytes=100,
    page_bytes=10,
    kv_floor_bytes=50,
    costs=COSTS,
)


def observed(moment: Moment, rng: np.random.Generator, **facts) -> Observation:
    """Two rows that decode, of requests with contexts of 20 pages."""
    told = dict(step=0, age=1, interval=0, turn=-1, layer=-1, seconds=0.0, running=2)
    told |= dict(waiting=0, waiting_tokens=0, phase=np.ones(2, np.uint8))
    ids = np.sort(rng.permuted(np.tile(np.arange(8), (2, 2, 1)), axis=2)[..., :2])
    if moment == Moment.TURN_END:
        told["kv_refs"] = np.stack([np.zeros(20, np.int64), np.arange(20)], axis=1)
    return Observation(moment=moment, ids=ids.astype(np.int16), **(told | facts))


def after_turns(policy: JointBudget, turns: int = 8, refuses: bool = False, **facts):
    """(state, decisions) after turns of 20 steps each. refuses: the device does what is wished."""
    rng, decisions, state = np.random.default_rng(0), [], policy.init(TOLD)
    facts = {"kv_pages": 60, **facts}
    for _ in range(turns):
        for _ in range(20):
            state, decision = policy.decide(state, observed(Moment.STEP_END, rng, **facts))
            assert decision == Decision()
        state, decision = policy.decide(state, observed(Moment.TURN_END, rng, **facts))
        if decision.max_running is not None:
            check_decision(decision, policy, TOLD, "a turn")
            decisions.append(decision)
            if not refuses:
                facts["kv_pages"] = decision.kv_pages
    return state, decisions


def test_the_policy_widens_for_a_queue_and_only_then():
    """Nobody waits: few pages, all experts. A queue: more rows and pages, at once and not when the
    next turn ends."""
    policy, rng = JointBudget(), np.random.default_rng(1)
    state, (first, *_) = after_turns(policy)
    assert first.max_running == 8 and first.cells[0] == 8
    assert state.chosen is not None and state.chosen.width == 2
    queue = observed(Moment.STEP_END, rng, waiting=6, waiting_tokens=6)
    state, decision = policy.decide(state, queue)
    assert decision.kv_pages > first.kv_pages
    assert decision.max_running > 2 and decision.kv_pages >= 20 * decision.max_running
    check_decision(decision, policy, TOLD, "a step")
    # As long as no more come, steps decide nothing, and prefill steps change nothing.
    state, again = policy.decide(state, queue)
    assert again == Decision()
    prefill = dataclasses.replace(queue, phase=np.zeros(2, np.uint8))
    assert policy.decide(state, prefill)[0] is state
    seen = observed(Moment.TURN_END, rng, waiting=6, waiting_tokens=6)
    before = pickle.dumps(state)
    answers = [pickle.dumps(policy.decide(state, seen)) for _ in range(2)]
    assert answers[0] == answers[1] and pickle.dumps(state) == before  # pure


def test_arrivals_in_a_prefill_step_are_seen_after_an_idle_engine():
    """The last turn ended with nobody left, so a split for one sequence was chosen; five come at
    once."""
    policy, rng = JointBudget(), np.random.default_rng(1)
    state, decisions = after_turns(policy, running=0)
    assert state.chosen is not None and state.chosen.width == 1
    assert decisions[-1].max_running == 8, "that there is one is no reason to let no others run"
    phase = np.zeros(2, np.uint8)
    facts = dict(phase=phase, running=1, waiting=4, waiting_tokens=4)
    state, decision = policy.decide(state, observed(Moment.STEP_END, rng, **facts))
    assert decision.kv_pages > decisions[-1].kv_pages and state.chosen.width > 1


def test_nothing_is_planned_for_rows_that_never_run():
    """Steps of up to eight rows were measured; no more than three sequences run."""
    policy = JointBudget()
    state = policy.init(dataclasses.replace(TOLD, max_num_seqs=3))
    assert state.widths.tolist() == [1, 2, 3] and len(policy.init(TOLD).widths) == 8
    rng = np.random.default_rng(0)
    facts = dict(waiting=6, waiting_tokens=6, kv_pages=60)
    for _ in range(20):
        state, _ = policy.decide(state, observed(Moment.STEP_END, rng, **facts))
    state, decision = policy.decide(state, observed(Moment.TURN_END, rng, **facts))
    assert decision.max_running <= 3 and decision.kv_pages < 8 * 20


def test_a_wish_that_was_not_carried_out_is_wished_again():
    """The device refuses every copy; later the pool is as wished, and nothing is."""
    policy = JointBudget()
    state, decisions = after_turns(policy, refuses=True)
    assert len(decisions) == 8 and len({d.kv_pages for d in decisions}) == 1
    rng, kv_pages = np.random.default_rng(1), decisions[-1].kv_pages
    seen = observed(Moment.TURN_END, rng, kv_pages=kv_pages)
    assert policy.decide(state, seen)[1] == Decision()
    assert len(after_turns(policy)[1]) == 1


def test_who_waits_needs_its_prompt():
    """Turns ended with 20 pages; prompts of 60 tokens wait, a page each: fewer fit at once."""
    policy, rng = JointBudget(), np.random.default_rng(1)
    state, _ = after_turns(policy)
    choices = []
    for tokens in (6, 6 * 60 * TOLD.page_tokens):
        seen = observed(Moment.STEP_END, rng, waiting=6, waiting_tokens=tokens)
        choices.append(policy.decide(state, seen)[1])
    pages = (2 * 20 + 6 * 60) / 8
    assert choices[1].kv_pages >= pages * choices[1].max_running
    assert choices[1].max_running < choices[0].max_running


def test_what_is_known_is_of_the_same_turns():
    """Misses and steps are forgotten alike, also while nothing can be chosen: of a stationary
    stream the misses of a step stay what they are."""
    policy = JointBudget()
    state, _ = after_turns(policy, turns=4)  # first sights are left out, so not the first
    assert state.model is not None
    for turns in (8, 16):
        later, _ = after_turns(policy, turns=turns)
        assert later.model is not None
        assert later.model.misses[1, 0] == pytest.approx(state.model.misses[1, 0], rel=0.15)
    huge = observed(Moment.TURN_END, np.random.default_rng(0))
    huge = dataclasses.replace(huge, kv_refs=np.zeros((100_000, 2), np.int64))
    blocked, decision = policy.decide(state, huge)
    assert decision == Decision()  # no cap leaves KV that much
    assert blocked.steps == pytest.approx(policy.decay * state.steps)


def test_the_policy_needs_costs_and_decides_what_can_be():
    with pytest.raises(PolicyError, match=r"max_running must be an integer of at least 1, not 0"):
        check_decision(Decision(max_running=0), JointBudget(), TOLD, "x")
    assert "costs" in JointBudget().needs
    told = dataclasses.replace(TOLD, kv_floor_bytes=9999)
    with pytest.raises(SplitError, match="no cap from 0 on works"):
        JointBudget().init(told)
