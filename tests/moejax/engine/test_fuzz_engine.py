"""Random workloads under all invariants: a sample of what `python -m scripts.check fuzz` does."""

import dataclasses

import numpy as np
import pytest

from moejax import LLM, SamplingParams
from scripts.check import fuzz as fuzz_engine
from scripts.check.kv_faults import kv_faults
from scripts.parts.bench_engine import SMALL
from tests.moejax.engine.scheduler_model import Device, Turn, run
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.runs import json_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **SMALL) as llm:
        yield llm


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


@pytest.mark.nightly
def test_a_sample_with_states(capsys):
    given = ["--steps", "1000", "--family", "Qwen3NextForCausalLM", "--check-every", "16"]
    (summary,) = json_lines(capsys, fuzz_engine.main, *given)
    wanted = (
        *("preemptions", "pages swapped in", "turns", "forks", "siblings", "prefix hit tokens"),
        *("session hit tokens", "budgets moved", "budgets moved meanwhile"),
    )
    missing = [name for name in wanted if not summary["counts"][name]]
    assert not missing, summary


@pytest.mark.nightly
@NATIVE
def test_a_sample_with_prefetches_placements_and_drafts(capsys):
    given = ["--steps", "1500", "--driver", "host", "--check-every", "16"]
    (summary,) = json_lines(capsys, fuzz_engine.main, *given)
    wanted = ("bursts with PlacementPolicy", "staged transfers", "drafts: accepted")
    missing = [name for name in wanted if not summary["counts"][name]]
    assert not missing, summary


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
