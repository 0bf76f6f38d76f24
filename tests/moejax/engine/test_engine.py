"""The engine when something goes wrong in the middle, and between requests."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import jax
import numpy as np
import pytest

from host_offload.memory.arena import SlotClass
from moejax import LLM, SamplingParams, UserError
from moejax.engine.snapshot import RoutingCounts
from moejax.step.executor import Executor
from pallas_kernels.cpu.arena import TransferFailure
from scripts.check.kv_faults import kv_faults
from tests.moejax.models.families import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", expert_budget="50%", progress=False, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate([7, 8, 9], GREEDY)[0].outputs[0].token_ids


def all_free(llm):
    arena, scheduler = llm.engine.scheduler.arena, llm.engine.scheduler
    return scheduler.cache.available == arena.pages and sorted(scheduler.free_rows) == [0, 1, 2, 3]


def run_to_the_end(llm):
    while not llm.engine.idle:
        llm.engine.step()


def test_ctrl_c_in_the_middle_of_a_budget_s_move_waits_for_its_end(llm, expected, monkeypatch):
    arena, grant = llm.engine.scheduler.arena, llm.engine.runner.grant_cells
    before = [llm.engine.runner.tables.cell_row.shape[0] * [8], arena.count(SlotClass.KV)]

    def interrupted(cell_row):
        os.kill(os.getpid(), signal.SIGINT)
        grant(cell_row)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "grant_cells", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.set_budget([4, 4, 4, 4], before[1])
    cells = (np.asarray(llm.engine.runner.tables.cell_row) >= 0).sum(axis=1)
    assert cells.tolist() == [4, 4, 4, 4] and not llm.engine.runner.faults()
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0].token_ids == expected
    llm.engine.set_budget(*before)


def test_an_iterator_that_is_collected_in_the_middle_of_a_step_ends_after_it(
    llm, expected, monkeypatch
):
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    pieces, scheduler = llm.stream("The old house", long), llm.engine.scheduler
    next(pieces)
    schedule, closed = scheduler.next_work, []

    def collected():
        work = schedule()
        if work is not None and work.rows and not closed:
            closed.append(pieces.close())
        return work

    monkeypatch.setattr(scheduler, "next_work", collected)
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0].token_ids == expected
    assert closed and llm.engine.idle and all_free(llm) and not kv_faults(scheduler)


def test_a_failing_listener_costs_nobody_a_token(llm, expected):
    request = llm.engine.add([7, 8, 9], GREEDY)
    steps = iter(range(100))

    def fail(step):
        if next(steps) == 4:
            raise ZeroDivisionError

    llm.engine.listener = fail
    failures = 0
    while request.finish_reason is None:
        try:
            llm.engine.step()
        except ZeroDivisionError:
            failures += 1
    llm.engine.listener = None
    llm.engine.drain()
    assert failures == 1 and request.output == expected


def test_routing_is_counted_without_keeping_logits(llm):
    engine, logits = llm.engine, []
    counts = RoutingCounts(engine)

    def listen(step):
        counts.listen(step)
        logits.append(weakref.ref(step.output.logits))
        assert len(counts._steps) <= 8

    engine.listener = listen
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.generate([7, 8, 9], params)
    engine.listener = None
    gc.collect()
    assert len(logits) >= 20 and all(each() is None for each in logits)
    # The prompt's tokens and all generated ones except the last, which may be computed as well.
    config = engine.runner.config
    chosen = counts.read().sum(axis=1) // config.num_experts_per_tok
    assert {*chosen.tolist()} <= {22, 23} and len({*chosen.tolist()}) == 1


def test_a_failing_step_aborts_its_requests_and_no_others(llm, expected, monkeypatch):
    first = llm.engine.add([7, 8, 9], GREEDY)
    for _ in range(3):
        llm.engine.step()

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "prefill", fail)
        second = llm.engine.add([5, 6], GREEDY)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.engine.step()
    assert second.finish_reason == "abort"
    while first.finish_reason is None:
        llm.engine.step()
    llm.engine.drain()
    assert first.output == expected and all_free(llm)


def test_pages_that_cannot_be_moved_abort_the_step_and_lose_nobody(llm, expected, monkeypatch):
    arena, cache = llm.engine.scheduler.arena, llm.engine.scheduler.cache
    before = llm.stats()["arena"]
    llm.engine.set_budget([0] * 4, -(-17 // arena.layout.pages_per_slot))
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    requests = [llm.engine.add([7 + i, 8, 9] * 20, long) for i in range(3)]

    def fail(rows):
        raise RuntimeError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "read", fail)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            run_to_the_end(llm)
    assert kv_faults(llm.engine.scheduler) == []
    run_to_the_end(llm)
    # Nobody finds KV that was never written.
    for request in requests:
        again = llm.generate(request.prompt, long)[0].outputs[0].token_ids
        assert again[: len(request.output)] == request.output
    # Who was not part of the step that failed goes on.
    assert "length" in {r.finish_reason for r in requests} <= {"abort", "length"} and all_free(llm)
    llm.engine.set_budget(before["cells_per_layer"], before["kv_slots"])
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0].token_ids == expected


def test_an_engine_is_idle_after_a_request_that_stopped_early(llm, expected, monkeypatch):
    monkeypatch.setattr(llm.engine, "eos_token_ids", frozenset(expected[2:3]))
    llm.generate([7, 8, 9], SamplingParams(temperature=0, max_tokens=12))
    assert llm.engine.idle
    cells, kv = [8] * 4, llm.stats()["arena"]["kv_slots"]
    llm.engine.set_budget([3, 0, 8, 16], kv - 5)
    assert llm.stats()["arena"]["cells_per_layer"] == [3, 0, 8, 16]
    llm.engine.set_budget(cells, kv)


@pytest.mark.parametrize(
    ("cells", "kv_slots"), [([2] * 4, -3), ([2] * 3, 5), ([17, 0, 0, 0], 5), ([2] * 4, 10_000)]
)
def test_a_budget_that_is_refused_changes_nothing(llm, cells, kv_slots):
    before = llm.stats()["arena"]
    with pytest.raises(ValueError, match="cells"):
        llm.engine.set_budget(cells, kv_slots)
    assert llm.stats()["arena"] == before


def test_budgets_do_not_move_under_running_requests(llm):
    request = llm.engine.add([7, 8, 9], GREEDY)
    llm.engine.step()
    with pytest.raises(ValueError, match="requests are running"):
        llm.engine.set_budget([1] * 4, 20)
    llm.engine.abort([request])
    llm.engine.drain()
    assert all_free(llm)


def test_a_score_that_is_aborted_or_refused_costs_nothing(llm):
    request = llm.engine.add([7] * 100, GREEDY, targets=[8] * 100)
    llm.engine.step()
    llm.engine.abort([request])
    while not llm.engine.idle:
        llm.engine.step()
    assert request.finish_reason == "abort" and all_free(llm)
    for token in (4096, -1):
        with pytest.raises(UserError, match=f"token id {token} is outside"):
            llm.score([5, 6, token])


def test_a_start_that_fails_frees_what_it_took(monkeypatch):
    built = []
    original = Executor.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        built.append(self)

    def fail(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Executor, "__init__", remember)
    monkeypatch.setattr(Executor, "wait_compiled", fail)
    with pytest.raises(KeyboardInterrupt):
        LLM("demo", progress=False, **LIMITS)
    (runner,) = built
    arrays = jax.tree.leaves((runner.arena, runner.tables, runner.stores, runner.params))
    assert all(array.is_deleted() for array in arrays)


@pytest.mark.slow
def test_a_folder_named_demo_does_not_shadow_the_model(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    with LLM("demo", progress=False, **LIMITS) as llm:
        assert llm.config.num_experts == 16
    with pytest.raises(UserError, match=r"model\.safetensors"):
        LLM("./demo", progress=False)


@pytest.mark.slow
def test_states_of_a_step_without_an_expert_are_withdrawn(tmp_path, monkeypatch):
    """Also those that the next step copied, which was dispatched before the failure was read."""
    directory = write_checkpoint(tmp_path, "Lfm2MoeForCausalLM")
    with LLM(directory, progress=False, **LIMITS | {"max_num_batched_tokens": 64}) as llm:
        engine, failed = llm.engine, [TransferFailure(0, 0, "an injected error")]
        monkeypatch.setattr(engine.runner, "failures", lambda writes: failed)
        request = engine.add([5] * 192, GREEDY)  # its state is copied after 128 tokens
        engine.step()
        engine.step()
        assert "injected" in str(request.error) and len(engine.scheduler.states) > 0
        assert not engine.scheduler.cache.published
