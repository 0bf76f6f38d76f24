"""One request, one line, one interrupt or one thread must never take the rest down."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from host_offload.memory.arena import SlotClass
from moejax import LLM, AsyncLLM, SamplingParams, UserError
from moejax.engine.resize import cells_of
from moejax.engine.sampling import _PARAMETERS
from moejax.errors import OutOfKV
from moejax.interrupt import deferred_interrupt
from moejax.requests import bounded_process
from moejax.requests.request import GenerationRequest
from moejax.requests.sampling_params import _RANGES
from moejax.serve.batch import result_file
from moejax.serve.batch.job import MOST_MESSAGE, Job, open_job
from moejax.serve.batch.lines import MOST_LINE

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
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


async def last(outputs):
    return [output async for output in outputs][-1]


# ---- what a request asks for


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


def test_the_extremes_of_all_ranges_run(llm):
    for name, allowed in _RANGES.items():
        for value in (allowed.least, allowed.most):
            if name in ("n", "max_tokens", "min_tokens"):
                continue
            params = SamplingParams(**{"max_tokens": 2, name: value})
            assert llm.generate([[5, 6]], params, use_tqdm=False)[0].finished


def test_stop_strings_are_few():
    with pytest.raises(UserError, match="at most 1024 stop strings"):
        SamplingParams(stop=[str(i) for i in range(2000)])


def test_a_request_checks_its_types():
    for wrong in ({"sampling_params": None}, {"session_id": ["s"]}, {"priority": True}):
        given: Any = wrong
        with pytest.raises(UserError, match=f"{next(iter(wrong))} must be"):
            GenerationRequest([5], **given)


# ---- what goes wrong inside for one request


@pytest.fixture
def poisoned(llm, monkeypatch):
    """Decoding a request panics whose prompt ends in 11."""
    from moejax.requests.tokenizer import Detokenizer

    def decode(self, token_ids, decode=Detokenizer._decode):
        if 11 in self._context[-8:]:
            raise PanicException("index out of bounds")
        return decode(self, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", decode)


BAD = [9, 10, 11]


@pytest.fixture
def failing_append(llm, monkeypatch):
    """Reading the third token of a request fails whose prompt is BAD."""
    append = llm.engine._append

    def fails(request, *arguments):
        if request.prompt == BAD and len(request.output) == 2:
            raise PanicException("a bug")
        append(request, *arguments)

    monkeypatch.setattr(llm.engine, "_append", fails)


def test_what_fails_for_one_request_fails_that_one(llm, failing_append):
    expected = llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0]
    asked = [GenerationRequest(ids, GREEDY) for ids in ([7, 8, 9], BAD, [7, 8, 9])]
    found = [output for _, output in llm.generate_each(asked)]
    failed = [output for output in found if isinstance(output, UserError)]
    assert len(failed) == 1 and "PanicException: a bug" in str(failed[0])
    assert [o.outputs[0] for o in found if not isinstance(o, UserError)] == [expected] * 2
    with pytest.raises(UserError, match="this request failed"):
        llm.generate([[7, 8, 9], BAD], GREEDY)
    with pytest.raises(UserError, match="this request failed"):
        list(llm.stream(BAD, GREEDY))


def test_what_fails_for_one_client_fails_that_one(llm, failing_append):
    expected = llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0]

    async def main():
        async with AsyncLLM(llm) as served:
            calls = [served.generate(ids, GREEDY) for ids in ([7, 8, 9], BAD, [7, 8, 9])]
            found = await asyncio.gather(*map(last, calls), return_exceptions=True)
            again = await last(served.generate([7, 8, 9], GREEDY))
            return found, again

    (first, failed, second), again = run(main())
    assert isinstance(failed, UserError) and "PanicException" in str(failed)
    assert first.outputs[0] == second.outputs[0] == again.outputs[0] == expected


def test_a_tokenizer_that_panics_fails_one_request(llm, poisoned):
    async def main():
        async with AsyncLLM(llm) as served:
            with pytest.raises(UserError, match="PanicException"):
                await last(served.generate(BAD, GREEDY))
            return await last(served.generate([7, 8, 9], GREEDY))

    assert run(main()).finished
    with pytest.raises(UserError, match="PanicException"):
        llm.generate([BAD], GREEDY)


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


# ---- lines of a file job


def results_of(tmp_path, llm, lines: list[bytes]):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    job = Job(str(source), str(output), sampling={"max_tokens": 2}, on_error="skip")
    said: list[str] = []
    with open_job(job) as work:
        work.run(llm, warn=said.append)
    assert all(len(text) < MOST_MESSAGE + 300 for text in said)
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(found) == len(lines)
    return {result["id"]: result["error"] for result in found}


def test_any_line_is_at_most_an_error_of_its_own(tmp_path, llm):
    digits = b"1" + b"0" * 400
    hostile = {
        "temperature": b'"prompt": "a", "temperature": ' + digits,
        "bias": b'"prompt": "a", "logit_bias": {"5": ' + digits + b"}",
        "biased": b'"prompt": "a", "logit_bias": {"' + digits + b'": 1}',
        "top_k": b'"prompt": "a", "top_k": 2147483648',
        "top_k digits": b'"prompt": "a", "top_k": ' + digits,
        "too many digits": b'"prompt": "a", "top_k": ' + digits * 20,
        "ids": b'"prompt_token_ids": [' + digits + b"]",
        "session": b'"prompt": "a", "session_id": {}',
        "list": b'"prompt": "a", "n": [1]',
        "priority": b'"prompt": "a", "priority": 1e400',
        "nested": b'"prompt": ' + b"[" * 100_000 + b"]" * 100_000,
        "half": b'"prompt": "\\ud800"',
        "field": b'"' + b"q" * 1_000_000 + b'": 1, "prompt": "a"',
        "spaces": b'"prompt": "' + b" " * 10_000_000 + b'x"',
        "messages": b'"messages": [{"role": "user", "content": "x"}]',
    }
    lines = [b'{"id": "%s", %s}' % (name.encode(), rest) for name, rest in hostile.items()]
    random.Random(0).shuffle(lines)
    lines = [b'{"id": "first", "prompt": "a"}', *lines, b'{"id": "last", "prompt": "a"}']
    began = time.monotonic()
    errors = results_of(tmp_path, llm, lines)
    assert time.monotonic() - began < 60
    assert errors.pop("first") is None and errors.pop("last") is None
    # A line that is no JSON has no id of its own.
    assert all(error is not None for error in errors.values()), errors
    assert all(len(error["message"]) <= MOST_MESSAGE + 1 for error in errors.values())


@pytest.mark.slow
def test_a_line_of_50_megabytes_is_not_even_parsed(tmp_path, llm):
    long = b'{"id": "long", "prompt": "' + b"a" * 50_000_000 + b'"}'
    assert len(long) > MOST_LINE
    errors = results_of(tmp_path, llm, [long, b'{"id": "b", "prompt": "a"}'])
    assert errors["b"] is None
    assert "longer than" in errors["line-1"]["message"]


def test_a_tokenizer_that_panics_is_an_error_of_that_line(tmp_path, llm, monkeypatch):
    tokenizer = type(llm.get_tokenizer())

    def panics(self, text="", *rest, call=tokenizer.__call__, **options):
        if text == "boom":
            raise PanicException("retry-limit-in-match over")
        return call(self, text, *rest, **options)

    monkeypatch.setattr(tokenizer, "__call__", panics)
    lines = [b'{"id": "bad", "prompt": "boom"}', b'{"id": "good", "prompt": "a"}']
    errors = results_of(tmp_path, llm, lines)
    assert errors["good"] is None and "PanicException" in errors["bad"]["message"]


@pytest.mark.parametrize("tail", [b"\0" * 5000, b'{"id": "b", "re\0\0\0', b'{"i' + b"\0" * 9])
def test_an_output_that_ends_in_nul_bytes_loses_only_its_tail(tmp_path, llm, tail):
    lines = [b'{"id": "a", "prompt": "x"}', b'{"id": "b", "prompt": "y"}']
    assert set(results_of(tmp_path, llm, lines).values()) == {None}
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(whole[0] + tail)
    job = Job(str(tmp_path / "in.jsonl"), str(output), sampling={"max_tokens": 2}, on_error="skip")
    with open_job(job) as work:
        assert work.done == 1
        work.run(llm)
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    texts = {f["id"]: f["text"] for f in found}
    assert texts == {f["id"]: f["text"] for f in map(json.loads, whole)}


# ---- interrupts


@pytest.mark.parametrize("seed", range(8))
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


def test_an_interrupt_while_requests_are_submitted(llm, monkeypatch):
    add, calls = llm.engine.add, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return add(*arguments, **options)

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 100, GREEDY)
    assert llm.engine.idle and len(calls) == 7
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        list(llm.generate_each(GenerationRequest([5], GREEDY) for _ in range(100)))
    assert llm.engine.idle
    calls[:] = [1] * 6
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream([5], GREEDY))


def test_an_output_pipe_that_nobody_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(result_file, "READER_S", 0.2)
    pipe, source = tmp_path / "pipe", tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    os.mkfifo(pipe)
    with (
        pytest.raises(UserError, match="a pipe that nobody reads"),
        open_job(Job(str(source), str(pipe))),
    ):
        pass
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_job(Job(str(source), str(pipe))) as work:
        assert not work.results.regular
    os.close(reader)


# ---- threads


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


def test_another_thread_may_call_between_the_results_of_a_generator(llm):
    results = llm.generate_each([GenerationRequest([5 + i], GREEDY) for i in range(8)])
    first = next(results)
    found = []
    thread = threading.Thread(target=lambda: found.append(llm.generate([[7, 8, 9]], GREEDY)))
    thread.start()
    thread.join(60)
    assert found and first[1].finished and len(list(results)) == 7


def test_figures_wait_for_a_thread_that_moves_the_budget(llm):
    """stats and explain read tables that set_budget, which is the engine's, gives away."""
    found: list[Any] = []
    for look in (llm.stats, llm.explain):
        thread = threading.Thread(target=lambda look=look: found.append(look()))
        with llm.engine.undisturbed():
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
        thread.join(60)
    assert len(found) == 2


@pytest.mark.parametrize("ids", [5, [1.5, 2], [[1], [2]], np.zeros((3, 2), int), "text"])
def test_what_is_no_list_of_token_ids_cannot_be_scored(llm, ids):
    with pytest.raises(UserError, match="scoring takes lists of token ids"):
        llm.score(ids)
    with pytest.raises(UserError, match=r"outside of the vocabulary|tokens"):
        llm.score(itertools.count())


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (range(10**9), {}, "the prompt has more than 256 tokens"),
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


# ---- KV that nobody can give


def test_requests_that_wait_for_kv_for_ever_fail_and_those_after_them_run(llm, monkeypatch):
    step, calls = llm.engine.step, itertools.count()

    def stuck():
        if next(calls) == 3:
            raise OutOfKV("requests wait for KV pages and none can be freed")
        return step()

    monkeypatch.setattr(llm.engine, "step", stuck)
    asked = [GenerationRequest([5 + i], GREEDY, tag=i) for i in range(5)]
    found = {r.tag: output for r, output in llm.generate_each(asked, max_in_flight=2)}
    assert all(isinstance(found[i], OutOfKV) for i in (0, 1)) and len(found) == 5
    assert all(output.finished for tag, output in found.items() if tag > 1)


# ---- clients


@pytest.fixture
def looping(llm, monkeypatch):
    """A chat template that never ends."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", loop)
    return {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.slow
def test_a_prompt_that_takes_long_keeps_no_other_waiting(llm, looping, monkeypatch):
    monkeypatch.setattr(bounded_process, "WORK_S", 1.5)

    async def main():
        async with AsyncLLM(llm) as served:
            hostile = [
                asyncio.create_task(last(served.generate(prompt, GREEDY)))
                for prompt in (looping, "a b" * 2_000_000, looping)
            ]
            await asyncio.sleep(0)
            for _ in range(5):
                assert (await last(served.generate("The old house", GREEDY))).finished
            assert not hostile[2].done()
            return await asyncio.gather(*hostile, return_exceptions=True)

    refused = run(main())
    assert all(isinstance(error, UserError) for error in refused)
    assert "characters" in str(refused[1])


def test_close_does_not_wait_for_a_template(llm, looping):
    async def main():
        served = AsyncLLM(llm)
        calls = [asyncio.create_task(last(served.generate(looping, GREEDY))) for _ in range(3)]
        while llm.encoder._bounded._connection is None:  # it stands, and works
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await served.close()
        took = time.monotonic() - began
        return took, await asyncio.gather(*calls, return_exceptions=True)

    took, refused = run(main())
    assert took < 5 and all(isinstance(error, UserError) for error in refused)
    assert llm.generate("The old house", GREEDY)[0].finished


def test_turns_of_a_session_keep_their_order(llm, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    add, order = llm.engine.add, []

    def noted(ids, *rest, **options):
        order.append(len(ids))
        return add(ids, *rest, **options)

    monkeypatch.setattr(llm.engine, "add", noted)
    slow = {"messages": [{"role": "user", "content": "The old house"}]}

    async def main():
        async with AsyncLLM(llm) as served:
            turns = [slow, [7] * 40, [7] * 50]
            calls = [last(served.generate(turn, GREEDY, session_id="s")) for turn in turns]
            await asyncio.gather(*calls)
            assert not served._slow_sessions
            await served.end_session("s")

    run(main())
    assert order[1:] == [40, 50]


# ---- forks


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_fork_is_refused_and_the_process_that_made_the_llm_goes_on(llm):
    own = llm.generate([[7, 8, 9]], GREEDY)[0].outputs
    served = AsyncLLM(llm)

    def refused(use) -> bool:
        try:
            use()
        except UserError as error:
            return "before a fork" in str(error)
        return False

    child = os.fork()
    if child == 0:
        signal.alarm(30)
        uses = (llm.stats, lambda: llm.generate([[5]], GREEDY), lambda: run(served.stats()))
        os._exit(0 if all(map(refused, uses)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    run(served.close())
    assert llm.generate([[7, 8, 9]], GREEDY)[0].outputs == own
