"""AsyncLLM: many tasks on one engine, cancellation, errors, failure, and the end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from moejax import AsyncLLM, EngineDeadError, SamplingParams, UserError, interrupt
from moejax.serve import async_llm
from scripts.check.kv_faults import kv_faults
from tests.moejax.serve.conftest import LIMITS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate([7, 8, 9], GREEDY)[0].outputs[0]


@pytest.fixture
def engine_is_clean(llm, engine_is_free):
    """Afterwards the LLM is whole, free and its caller's again."""
    yield
    assert sorted(llm.engine.scheduler.free_rows) == [0, 1, 2, 3]
    assert kv_faults(llm.engine.scheduler) == [] and llm.engine.runner.faults() == []
    assert not any(t.name.startswith("moejax-engine") for t in threading.enumerate())


pytestmark = pytest.mark.usefixtures("engine_is_clean")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def last(outputs):
    found = [output async for output in outputs]
    assert found[-1].finished
    return found[-1]


async def used(llm):
    """Requests that run and pages that they hold, by the engine's own account."""
    return (await llm.stats())["kv"]["pages"]["running"]


async def nothing_runs(llm):
    """Returns when that is so. A loop that was left closes its generator a little later."""
    while await used(llm):
        await asyncio.sleep(0.005)


def test_the_same_tokens_as_generate_as_they_come(llm):
    params = SamplingParams(max_tokens=12, seed=5, n=2, logprobs=1)
    cases = [("The old house", GREEDY), ([7, 8, 9], params), ({"prompt": "Once"}, None)]
    plain = [llm.generate(prompt, p)[0] for prompt, p in cases[:2]]

    async def collect(served, prompt, params, request_id):
        return [output async for output in served.generate(prompt, params, request_id)]

    async def main():
        async with AsyncLLM(llm) as served:
            return await asyncio.gather(
                *(collect(served, *case, f"r{i}") for i, case in enumerate(cases))
            )

    found = run(main())
    for i, outputs in enumerate(found):
        assert {o.request_id for o in outputs} == {f"r{i}"}
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            for a, b in zip(before.outputs, after.outputs, strict=True):
                assert b.token_ids[: len(a.token_ids)] == a.token_ids
                assert b.text.startswith(a.text)
            assert sum(len(o.token_ids) for o in before.outputs) < sum(
                len(o.token_ids) for o in after.outputs
            )
    for outputs, whole in zip(found, plain, strict=False):
        assert outputs[-1].outputs == whole.outputs
        assert outputs[-1].prompt == whole.prompt
        assert outputs[-1].prompt_token_ids == whole.prompt_token_ids
    assert len(found[0]) > 1  # as they come, not at the end

    async def pieces():
        async with AsyncLLM(llm) as served:
            return [o async for o in served.generate([7, 8, 9], params, delta=True)]

    parts = [output.outputs for output in run(pieces())]
    for i, whole in enumerate(plain[1].outputs):
        mine = [part[i] for part in parts]
        assert "".join(piece.text for piece in mine) == whole.text
        assert [token for piece in mine for token in piece.token_ids] == whole.token_ids
        assert [entry for piece in mine for entry in piece.logprobs] == whole.logprobs
    assert found[2][-1].prompt == "Once"


def test_many_tasks_and_cancellations(llm):
    prompts = [[10 + i] * (1 + 17 * (i % 5)) for i in range(20)]
    plain = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]

    async def leave_the_loop(served, prompt):
        async for output in served.generate(prompt, LONG):
            if len(output.outputs[0].token_ids) > 3:
                break

    async def aborted(served, prompt, i):
        async for output in served.generate(prompt, LONG, f"abort {i}"):
            if not output.finished:
                await served.abort(f"abort {i}")
        return output

    async def main():
        async with AsyncLLM(llm) as served:
            kept, ended = {}, []
            for i, prompt in enumerate(prompts):
                match i % 4:
                    case 0 | 1:
                        kept[i] = asyncio.create_task(last(served.generate(prompt, GREEDY)))
                    case 2:
                        ended.append(asyncio.create_task(leave_the_loop(served, prompt)))
                    case _:
                        ended.append(asyncio.create_task(aborted(served, prompt, i)))
            victims = [asyncio.create_task(last(served.generate(p, LONG))) for p in prompts[:8]]
            for i, task in enumerate(victims):
                await asyncio.sleep(0.003 * i)
                task.cancel()
            results = await asyncio.gather(*kept.values(), *ended, *victims, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results[-8:])
            outputs = dict(zip(kept, results, strict=False))
            await nothing_runs(served)
            assert not served._engine.streams
            return outputs, results[len(kept) : -8]

    outputs, ended = run(main())
    assert {i: o.outputs[0].token_ids for i, o in outputs.items()} == {i: plain[i] for i in outputs}
    reasons = [o.outputs[0].finish_reason for o in ended if o is not None]
    assert reasons == ["abort"] * 5


def test_a_cancelled_request_is_gone_at_the_next_step(llm):
    async def main():
        async with AsyncLLM(llm) as served:
            stream = served.generate([5] * 70, LONG, "long")
            await anext(stream)
            assert await used(served) > 1
            await stream.aclose()
            assert await used(served) == 0
            # The step that was dispatched for it is read before the engine sleeps.
            assert await served._engine.call(lambda: llm.engine.idle)
            # The id is free again, and ids that nobody has are not an error.
            await served.abort("long")
            await last(served.generate([5], GREEDY, "long"))
            # Before its prompt is encoded, and in the queue behind others.
            waiting = asyncio.create_task(last(served.generate([5], LONG, "early")))
            await asyncio.sleep(0)
            await served.abort("early")
            assert (await waiting).outputs[0].finish_reason == "abort"

    run(main())


def test_what_an_async_request_may_not_be(llm, expected):
    refused = [
        (([5], {"max_tokens": 3}), {}, "sampling_params must be SamplingParams"),
        (([5], GREEDY, 7), {}, "request_id must be a string"),
        (([5], GREEDY, "good"), {}, "'good' is in use"),
        (([5], GREEDY), {"priority": "high"}, "priority must be"),
        (([5], GREEDY), {"session_id": 3}, "session_id must be"),
        (([5], SamplingParams(n=2)), {"session_id": "s"}, "a session continues one"),
        ((5, GREEDY), {}, "text or a list of token ids"),
    ]

    async def fails(served, arguments, options, message):
        with pytest.raises(UserError, match=message):
            await last(served.generate(*arguments, **options))

    async def main():
        async with AsyncLLM(llm) as served:
            good = asyncio.create_task(last(served.generate([7, 8, 9], GREEDY, "good")))
            await asyncio.sleep(0)
            await asyncio.gather(*(fails(served, *case) for case in refused))
            with pytest.raises(UserError, match="no session"):
                await served.end_session("s")
            return await good

    assert run(main()).outputs[0] == expected


def test_a_failing_step_reaches_everybody(llm, expected, monkeypatch):
    began, go = threading.Event(), threading.Event()

    def fail(*args, **kwargs):
        began.set()
        assert go.wait(60)
        raise RuntimeError("out of memory")

    async def main():
        async with AsyncLLM(llm) as served:
            tasks = [asyncio.create_task(last(served.generate([5 + i], LONG))) for i in range(6)]
            await anext(served.generate([3], LONG))
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.runner, "decode", fail)
                await asyncio.to_thread(began.wait)
                # Those that come while it fails.
                tasks += [
                    asyncio.create_task(served.stats()),
                    asyncio.create_task(last(served.generate([5], LONG))),
                ]
                await asyncio.sleep(0.05)
                await served.check_health()
                go.set()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                assert isinstance(result, EngineDeadError)
                assert isinstance(result.__cause__, RuntimeError)
            for later in (served.stats(), last(served.generate([5], GREEDY))):
                with pytest.raises(EngineDeadError, match=r"failed \(RuntimeError: out of memory"):
                    await later

    run(main())
    # Given back, it works: a failed step costs its own requests.
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0] == expected


def test_a_step_that_hangs_is_said_to_everybody(llm, expected, monkeypatch):
    go = threading.Event()

    async def main():
        served = AsyncLLM(llm)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "decode", lambda *_, **__: go.wait(60) and 1 / 0)
            patch.setattr(interrupt, "LOOK_S", 0.01)
            patch.setattr(interrupt, "STEP_S", 0.2)
            waiting = [last(served.generate([5], LONG)), served.stats(), served.stats()]
            for found in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(found, dict | EngineDeadError)
            with pytest.raises(EngineDeadError, match="a step of the engine has not ended for"):
                await served.check_health()
            patch.setattr(async_llm, "_CLOSE_S", 0.1)
            with pytest.raises(EngineDeadError, match="has not ended"):
                await served.close()
        go.set()
        await served.close()

    run(main())
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0] == expected


def test_closing_while_requests_run(llm, expected):
    async def main():
        served = AsyncLLM(llm)
        tasks = [asyncio.create_task(last(served.generate([5 + i], LONG))) for i in range(6)]
        await anext(served.generate([3], LONG))
        encoding = asyncio.create_task(last(served.generate("The old house", LONG)))
        await asyncio.sleep(0)
        await asyncio.gather(served.close(), served.close())
        for result in await asyncio.gather(*tasks, encoding, return_exceptions=True):
            assert isinstance(result, UserError) and "this AsyncLLM is closed" in str(result)
        for later in (served.stats(), last(served.generate([5], GREEDY)), served.end_session("s")):
            with pytest.raises(UserError, match="this AsyncLLM is closed"):
                await later
        await served.abort("nobody")
        await served.close()

    run(main())
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0] == expected


def test_one_event_loop_after_the_other(llm, expected):
    served = AsyncLLM(llm)
    for _ in range(2):
        output = run(last(served.generate([7, 8, 9], GREEDY)))
        assert output.outputs[0] == expected
    # One that is closed under its tasks leaves nothing behind.
    loop = asyncio.new_event_loop()
    stream = served.generate([5], LONG, "orphan")
    loop.run_until_complete(anext(stream))
    loop.close()

    run(nothing_runs(served))
    decoded = run(served.stats())["generated_tokens"]
    output = run(last(served.generate([7, 8, 9], GREEDY, "orphan")))
    assert output.outputs[0] == expected
    assert run(served.stats())["generated_tokens"] == decoded + 12
    run(served.close())


def test_a_slow_reader_gets_the_newest_and_holds_nobody_up(llm):
    async def main():
        async with AsyncLLM(llm) as served:
            slow = served.generate([5], LONG)
            await anext(slow)
            before = (await served.stats())["generated_tokens"]
            loop = asyncio.get_running_loop()
            counted = mock.Mock(wraps=loop.call_soon_threadsafe)
            with mock.patch.object(loop, "call_soon_threadsafe", counted):
                time.sleep(0.1)  # the whole event loop
            assert counted.call_count <= 2
            assert (await served.stats())["generated_tokens"] > before + 2
            await last(served.generate([6], LONG))  # ends after the slow one
            rest = [output async for output in slow]
            # One that was made when it last waited, and the end.
            assert len(rest) <= 2 and rest[-1].finished
            assert len(rest[-1].outputs[0].token_ids) == LONG.max_tokens

    run(main())


def test_an_llm_has_one_user_at_a_time(llm, monkeypatch):
    served = AsyncLLM(llm)
    uses = (llm.stats, llm.close, lambda: llm.generate([5], GREEDY), lambda: AsyncLLM(llm))
    for use in uses:
        with pytest.raises(UserError, match="belongs to an AsyncLLM"):
            use()
    run(served.close())
    assert llm.stats()["kv"]["pages"]["running"] == 0
    with pytest.raises(UserError, match="max_num_seqs: this LLM was already started"):
        AsyncLLM(llm, max_num_seqs=4)
    stream = llm.stream("The old house", LONG)
    next(stream)
    with pytest.raises(UserError, match="requests run in this LLM"):
        AsyncLLM(llm)
    stream.close()
    monkeypatch.setattr(llm, "_closed", True)
    with pytest.raises(UserError, match="this LLM is closed"):
        AsyncLLM(llm)


PROGRAM = f"""
import asyncio, os, signal
from moejax import AsyncLLM, SamplingParams

async def interrupted():
    async for output in llm.generate([7, 8, 9], params):
        os.kill(os.getpid(), signal.SIGINT)

llm = AsyncLLM("demo", progress=False, **{LIMITS})
params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
try:
    asyncio.run(interrupted())
except KeyboardInterrupt:
    print("interrupted")
loop = asyncio.new_event_loop()
stream = llm.generate([7, 8, 9], params)
print(len(loop.run_until_complete(anext(stream)).outputs[0].token_ids) > 0)
"""


@pytest.mark.slow
def test_a_program_may_be_interrupted_and_end_while_requests_run():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nTrue\n", "")


# ---- what takes long, and forks


@pytest.fixture
def looping(llm, monkeypatch):
    """A chat template that never ends."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", loop)
    return {"messages": [{"role": "user", "content": "x"}]}


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
