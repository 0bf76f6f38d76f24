"""Random workloads under all invariants: a sample of what `python -m scripts.check fuzz` does."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from host_offload.memory.kv_cache import KVCache
from moejax import LLM, SamplingParams
from scripts.check import fuzz as fuzz_engine
from scripts.check.fuzz import Fault, run_episode
from scripts.check.kv_faults import kv_faults
from scripts.parts.bench_engine import SMALL
from tests.moejax.engine.scheduler_model import Device, Turn, run
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.runs import json_lines, refusal

pytestmark = pytest.mark.slow

SEED = 0
EPISODES = 4
"""About 1500 steps."""
SHORT = 5
"""An episode of few steps."""

REACHED = (
    *("preemptions", "prefix hit tokens", "session hit tokens", "sessions evicted"),
    *("pages swapped out", "pages swapped in", "cached pages dropped", "budgets moved"),
    *("expert fills", "expert hits", "experts read through", "staged transfers"),
    *("siblings", "forks", "queued turns", "rewritten turns", "ended sessions", "refusals"),
    *("penalties", "biases", "logprobs", "prompt_logprobs", "scores", "stopped by a string"),
    *("cancelled running", "cancelled waiting", "ended by stop", "ended by length"),
    *("failed steps", "recomputed", "compared"),
)


def run_some(llm, episodes):
    counts = Counter()
    for number in range(episodes):
        counts.update(run_episode(llm, SEED, number, check_every=16).counts)
    return counts


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **SMALL) as llm:
        yield llm


@pytest.mark.nightly
def test_a_sample_of_random_workloads(llm):
    counts = run_some(llm, EPISODES)
    missing = [name for name in REACHED if not counts[name]]
    assert not missing, (missing, counts)


IN_THE_WAY = (
    *("injected delays", "injected errors", "injected short reads", "prefetches tried again"),
    *("ended by a failed transfer", "failed steps", "preemptions", "cancelled running"),
    *("budgets moved", "budgets moved meanwhile", "prefetches that came late"),
)


@pytest.mark.nightly
@NATIVE
def test_a_sample_with_transfers_from_memory_and_files(capsys):
    given = ["--steps", "2500", "--link-rate", "1GB/s", "--store", "both", "--check-every", "16"]
    (summary,) = json_lines(capsys, fuzz_engine.main, *given)
    missing = [name for name in IN_THE_WAY if not summary["counts"][name]]
    assert not missing, summary


def test_what_was_in_the_way_is_said_in_a_line():
    counts = Counter({"cancelled running": 2, "cancelled waiting": 3, "budgets moved": 1})
    said = fuzz_engine.in_the_way(counts)
    assert "5 requests cancelled" in said and "1 resizes" in said and "0 preemptions" in said


@pytest.mark.nightly
def test_an_episode_depends_on_its_number_only(llm):
    first = run_episode(llm, SEED, SHORT, check_every=64)
    run_episode(llm, SEED, SHORT + 1, check_every=64)
    assert run_episode(llm, SEED, SHORT, check_every=64) == first


@pytest.mark.nightly
def test_a_page_that_is_not_brought_back_is_found(llm, monkeypatch):
    def swap_in(cache, blocks):
        moving = [b for b in blocks if b.row is None]
        cache._place(moving, cache._rows(len(moving)))
        cache.swapped -= len(moving)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "swap_in", swap_in)
        with pytest.raises(Fault, match="differs from its solo run"):
            run_some(llm, 3)


def test_what_differs_is_named(llm):
    fuzz_engine.reset(llm, [4] * 4, 4)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, seed=0)
    request = llm.engine.add([5, 6, 7], params)
    again, _ = fuzz_engine.run_alone(llm, request, None)
    assert request.finish_reason == "length" and fuzz_engine.differs(request, again) is None
    begun = dataclasses.replace(again, output=again.output[:3], finish_reason="abort")
    assert fuzz_engine.differs(begun, again) is None
    begun.output[1] += 1
    assert fuzz_engine.differs(begun, again) == "output at 1, 3 and 3 of them"
    again.stop_reason = 9
    assert "stop_reason" in str(fuzz_engine.differs(request, again))


def test_a_failure_says_how_to_run_it_again(llm, monkeypatch, capsys):
    def fail(llm, seed, number, check_every):
        raise Fault(f"episode {number}")

    monkeypatch.setattr(fuzz_engine, "run_episode", fail)
    monkeypatch.setattr(fuzz_engine, "LLM", lambda *a, **k: llm)
    monkeypatch.setattr(type(llm), "__exit__", lambda *a: None)
    assert fuzz_engine.main(["--seed", "3", "--episode", "5"]) == 1
    said = capsys.readouterr().err
    assert "--seed 3 --episode 5" in said and "--store memory --chunk-bytes 16KiB" in said


def test_the_command(llm, monkeypatch, capsys):
    monkeypatch.setattr(fuzz_engine, "LLM", lambda *a, **k: llm)
    monkeypatch.setattr(type(llm), "__exit__", lambda *a: None)
    (summary,) = json_lines(
        capsys, fuzz_engine.main, "--episode", str(SHORT), "--check-every", "32"
    )
    assert summary["episodes"] == 1 and summary["steps"] > 50
    assert summary["counts"]["requests"] > 0
    assert "at least 1" in refusal(capsys, fuzz_engine.main, "--steps", "0")


def test_budgets_hold_at_least_one_longest_sequence(llm):
    rng = np.random.default_rng(0)
    layout = llm.engine.scheduler.arena.layout
    for _ in range(50):
        cells, slots = fuzz_engine.draw_budget(rng, llm)
        assert slots * layout.pages_per_slot * layout.page.block_size >= 192
        assert sum(cells) + slots <= llm.engine.scheduler.arena.slots


# ---- what it found


def test_a_turn_moved_out_in_the_step_that_it_came_in_begins_once():
    device = Device(pages=12, rows=3, prefill_chunks=4, max_model_len=256)
    run(device, [Turn((5,) * 100, 3, "a")])
    first = device.add((7,) * 190, Turn((), 1))
    first.params = dataclasses.replace(first.params, prompt_logprobs=0)  # another executable
    turn = device.add([*device.scheduler.sessions["a"].tokens, 8, 9], Turn((), 2, "a"))
    while turn.finish_reason is None:
        device.step()
        assert not [f for f in kv_faults(device.scheduler) if "references" in f]
    assert turn.preemptions > 0


def test_turns_after_a_recomputed_one_say_so_too():
    device = Device(pages=20, overflow="recompute", rows=4, prefill_chunks=4, max_model_len=512)
    turns = [
        Turn((5,) * 100, 3, "a"),
        Turn((6,) * 250, 3, arrival=20),
        Turn((7,), 3, "a", arrival=40),
        Turn((8,), 3, "a", arrival=60),
    ]
    assert [r.recomputed for r in run(device, turns)] == [False, False, True, True]


def test_a_score_that_is_computed_again_has_each_token_once(llm):
    fuzz_engine.reset(llm, [16] * 4, 3)
    conditions = dataclasses.replace(fuzz_engine.ALONE, overflow="recompute", share_chunks=1)
    fuzz_engine.apply(llm, conditions, seed=0)
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # Of 18 pages these two take 6 at first and 14 at last; the score, with 12, comes in between.
    for token in (5, 6):
        engine.add([token] * 47, params)
    engine.step()
    scored = engine.add([7] * 180, SamplingParams(), [8] * 180, priority=1)
    while not engine.idle:
        engine.step()
    assert scored.preemptions > 0
    again, _ = fuzz_engine.run_alone(llm, scored, None)
    assert scored.scores == again.scores and len(scored.scores) == 180


def test_a_budget_that_sessions_are_in_the_way_of_changes_nothing(llm):
    fuzz_engine.apply(llm, dataclasses.replace(fuzz_engine.ALONE, swap_pages=0), seed=0)
    fuzz_engine.reset(llm, [8] * 4, 4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.generate([[5] * 150], params, session_id="held")
    arena = llm.engine.scheduler.arena
    before = arena.slot_class.copy(), arena.cell_row.copy()
    with pytest.raises(ValueError, match="hold live pages"):
        llm.engine.set_budget([4] * 4, 1)
    assert np.array_equal(arena.slot_class, before[0])
    assert np.array_equal(arena.cell_row, before[1])
    llm.end_session("held")
    llm.engine.set_budget([4] * 4, 1)
