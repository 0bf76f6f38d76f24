"""One request, one interrupt or one thread must never take the rest down."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest

from host_offload.memory.arena import SlotClass
from moejax import LLM, SamplingParams, UserError
from moejax.engine.resize import cells_of
from moejax.engine.sampling import _PARAMETERS
from moejax.interrupt import deferred_interrupt
from moejax.requests.sampling_params import _RANGES

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 128}


class PanicException(BaseException):
    """As pyo3's: no Exception."""


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", expert_budget="50%", progress=False, **LIMITS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def engine_is_free(llm):
    yield
    scheduler = llm.engine.scheduler
    assert llm.engine.idle and scheduler.cache.available == scheduler.arena.pages


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


WIDE = [2**31, -(2**31), 2**63, -(2**64), 10**400, -(10**400), 10**5000, 1e39, 1e308, 1e-320]


@pytest.mark.parametrize("name", _RANGES)
def test_a_number_is_refused_by_name_or_fits_what_the_step_reads(name):
    for value in WIDE:
        given: Any = {name: value}
        refusal, params = None, None
        try:
            params = SamplingParams(**given)
        except UserError as error:
            refusal = str(error)
        if params is None:
            assert refusal is not None and f"{name} must be" in refusal and len(refusal) < 300
        elif name in _PARAMETERS:
            dtype, _ = _PARAMETERS[name]
            with np.errstate(all="raise", under="ignore"):
                assert np.isfinite(np.array(getattr(params, name), dtype))


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_of_any_size_are_refused(llm, field):
    for token in (2**31, 10**400, 10**5000):
        given: Any = {"logit_bias": {token: 1}, "stop_token_ids": [token]}[field]
        with pytest.raises(UserError):
            llm.generate([[5]], SamplingParams(**{field: given}))
    with pytest.raises(UserError, match=r"logit_bias\[3\] must be a finite number"):
        SamplingParams(logit_bias={3: 10**400})
    with pytest.raises(UserError, match="outside of the vocabulary"):
        llm.generate([[10**5000]], GREEDY)


@pytest.mark.slow
def test_the_extremes_of_all_ranges_run(llm):
    for name, allowed in _RANGES.items():
        for value in (allowed.least, allowed.most):
            if name in ("n", "max_tokens", "min_tokens"):
                continue
            params = SamplingParams(**{"max_tokens": 2, name: value})
            assert llm.generate([[5, 6]], params, use_tqdm=False)[0].finished


def test_a_failed_submission_leaves_nothing(llm, monkeypatch):
    add, calls = llm.engine.add, iter(range(100))

    def fails(*arguments, **options):
        if next(calls) == 2:
            raise PanicException("in the middle")
        return add(*arguments, **options)

    monkeypatch.setattr(llm.engine, "add", fails)
    with pytest.raises(UserError, match="PanicException"):
        llm.generate([[5]], SamplingParams(n=4, max_tokens=2))
    assert llm.engine.idle


# ---- interrupts and threads


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_at_any_moment_leaves_the_engine_idle(llm, seed):
    """Also while requests are still being encoded and submitted."""
    prompts = [[5 + i % 90, 6, 7] for i in range(2000)]
    main = threading.main_thread().ident
    assert main is not None
    wait = random.Random(seed).uniform(0.0, 0.2)
    timer = threading.Timer(wait, lambda: signal.pthread_kill(main, signal.SIGINT))

    def generate() -> None:
        with deferred_interrupt() as held:  # in generate, and neither before nor after it
            timer.start()
            while not held:
                llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
                assert llm.engine.idle

    with pytest.raises(KeyboardInterrupt):
        generate()
    timer.join()
    arena = llm.engine.scheduler.arena
    llm.engine.set_budget(cells_of(arena), arena.count(SlotClass.KV))


def test_a_second_thread_is_refused_by_name(llm):
    alone = llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0].token_ids
    wrong, refused, right = [], [], []

    def call():
        for _ in range(5):
            try:
                found = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                (right if found == alone else wrong).append(found)
            except UserError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=call, name=f"caller-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and right
    assert all("caller-" in text and "one thread at a time" in text for text in refused)


@pytest.mark.parametrize("ids", [5, [1.5, 2], [[1], [2]], np.zeros((3, 2), int), "text"])
def test_what_is_no_list_of_token_ids_cannot_be_scored(llm, ids):
    with pytest.raises(UserError, match="scoring takes lists of token ids"):
        llm.score(ids)
    with pytest.raises(UserError, match=r"outside of the vocabulary|tokens"):
        llm.score(itertools.count())


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5]], {"session_id": range(10**9)}, "1 prompts but 1000000000 session_id"),
        ([[5]], {"priority": np.zeros(0)}, "1 prompts but 0 priority"),
    ],
)
def test_lists_without_end_are_not_read(llm, prompts, options, message):
    with pytest.raises(UserError, match=message):
        llm.generate(prompts, GREEDY, **options)


@pytest.mark.parametrize(
    "messages", [5, "hello", np.zeros((2, 2)), None, range(10**9), ["hello"], [None, []]]
)
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(UserError, match="messages are a list of messages or of conversations"):
        llm.chat(messages)
