"""Several threads on one LLM, and many tasks on one AsyncLLM."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from moejax import AsyncLLM, RequestOutput, SamplingParams, UserError
from moejax.requests.request import GenerationRequest
from scripts.attacks.engine import PROMPTS, check_answer, move_budget
from scripts.attacks.requests import WRONG_TYPE, hostile_prompt
from scripts.attacks.scene import Scene, described, limit_s
from scripts.attacks.values import attacked, pick

# ---- threads


def attack_threads(scene: Scene) -> None:
    """Each thread is refused by name, or gets what it would alone."""
    rng, faults, lock = scene.rng, scene.faults, threading.Lock()
    count = pick(rng, (2, 2, 4, 8))
    seeds = [rng.randrange(2**31) for _ in range(count)]
    scene.began(f"{count} threads")

    def work(seed: int) -> None:
        own = Scene(scene.llm, scene.known, random.Random(seed), scene.directory)
        for _ in range(own.rng.randrange(1, 4)):
            pick(own.rng, THREADS)(own)
        with lock:
            faults.extend(own.faults)

    # Daemons: one that hangs must not hold the process.
    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in seeds]
    for thread in threads:
        thread.start()
    deadline = time.perf_counter() + limit_s()
    for thread in threads:
        thread.join(max(0.0, deadline - time.perf_counter()))
    alive = sum(thread.is_alive() for thread in threads)
    if alive:
        scene.fault("hung", f"{alive} of {count} threads have not ended")


def _generate(scene: Scene) -> None:
    known, which = scene.known, scene.known.sample(scene.rng, scene.rng.randrange(1, 5))
    prompts, params = [known.prompts[i] for i in which], [known.params[i] for i in which]
    outputs = scene.call("generate in a thread", lambda: scene.llm.generate(prompts, params))
    for i, output in zip(which, outputs if isinstance(outputs, list) else (), strict=False):
        check_answer(scene, i, output, "generate in a thread")


def _each(scene: Scene) -> None:
    known = scene.known
    asked = [
        GenerationRequest(known.prompts[i], known.params[i], tag=i)
        for i in known.sample(scene.rng, 3)
    ]
    found = scene.call("generate_each in a thread", lambda: list(scene.llm.generate_each(asked)))
    for request, output in found if isinstance(found, list) else ():
        if not isinstance(output, UserError):
            check_answer(scene, request.tag, output, "generate_each in a thread")


def _stream(scene: Scene) -> None:
    known, i = scene.known, scene.known.sample(scene.rng, 1)[0]

    def run() -> str:
        return "".join(scene.llm.stream(known.prompts[i], known.params[i]))

    text = scene.call("stream in a thread", run)
    if isinstance(text, str) and text != known.texts[i]:
        scene.fault("bits", f"stream in a thread: {text!r:.100} instead of {known.texts[i]!r:.100}")


def _score(scene: Scene) -> None:
    ids = [scene.rng.randrange(1, 4000) for _ in range(30)]
    scene.call("score in a thread", lambda: scene.llm.score(ids))


def _budget(scene: Scene) -> None:
    arena = scene.llm.engine.scheduler.arena
    if scene.llm.engine.control is None:
        cells, slots = [0] * arena.cell_row.shape[0], arena.slots // 2
        # ValueError: requests are running.
        move = partial(scene.llm.engine.set_budget, cells, slots)
        scene.call("set_budget in a thread", move, (ValueError,))


def _look(scene: Scene) -> None:
    scene.call("stats in a thread", scene.llm.stats)
    scene.call("explain in a thread", lambda: str(scene.llm.explain()))


THREADS: tuple[Callable[[Scene], None], ...] = (
    *(_generate, _generate, _each, _stream, _score, _look, _budget),
)

# ---- tasks


def attack_async(scene: Scene) -> None:
    """Known requests give what they give alone, in time, whatever others ask, cancel and abort; and
    the AsyncLLM closes in time."""
    move_budget(scene)
    scene.began("AsyncLLM")
    try:
        asyncio.run(_crowd(scene))
    except BaseException as error:
        scene.fault("raised", f"AsyncLLM: {described(error)}")


async def _crowd(scene: Scene) -> None:
    rng = scene.rng
    llm = AsyncLLM(scene.llm)
    try:
        tasks = [asyncio.ensure_future(_victim(scene, llm)) for _ in range(rng.randrange(2, 5))]
        for _ in range(rng.randrange(2, 7)):
            await asyncio.sleep(rng.random() * 0.02)
            tasks.append(asyncio.ensure_future(pick(rng, CLIENTS)(scene, llm)))
        tasks.append(asyncio.ensure_future(_victim(scene, llm)))
        _, pending = await asyncio.wait(tasks, timeout=limit_s())
        if pending:
            scene.fault("hung", f"{len(pending)} of {len(tasks)} clients have not ended")
        for task in pending:
            task.cancel()
    finally:
        begin = time.perf_counter()
        scene.began("AsyncLLM.close")
        await llm.close()
        scene.ended("AsyncLLM.close", begin)


async def _last(llm: AsyncLLM, prompt: Any, params: Any, **given: Any) -> RequestOutput | None:
    last = None
    async for output in llm.generate(prompt, params, **given):
        last = output
    return last


async def _victim(scene: Scene, llm: AsyncLLM) -> None:
    known, i = scene.known, scene.known.sample(scene.rng, 1)[0]
    begin = time.perf_counter()
    try:
        output = await _last(llm, known.prompts[i], known.params[i])
    except Exception as error:
        scene.fault("raised", f"a known request: {described(error)}")
        return
    check_answer(scene, i, output, "AsyncLLM")
    scene.ended("a small request of an AsyncLLM beside others", begin)


async def _client(scene: Scene, llm: AsyncLLM, prompt: Any, params: Any, **given: Any) -> None:
    """A request of anybody, which may be refused."""
    begin = time.perf_counter()
    try:
        await asyncio.wait_for(_last(llm, prompt, params, **given), scene.rng.uniform(0.01, 3))
    except (TimeoutError, asyncio.CancelledError, *WRONG_TYPE):
        pass
    except BaseException as error:
        scene.fault("raised", f"a request: {described(error)}")
    scene.ended("a request of an AsyncLLM that gives up after 3 s", begin)


async def _hostile_params(scene: Scene, llm: AsyncLLM) -> None:
    try:
        params = SamplingParams(**attacked(scene.rng))
    except Exception:
        return  # attack_params looks at what is refused
    await _client(scene, llm, pick(scene.rng, PROMPTS), params)


async def _hostile_prompt(scene: Scene, llm: AsyncLLM) -> None:
    await _client(scene, llm, hostile_prompt(scene.rng), SamplingParams(max_tokens=3))


async def _same_session(scene: Scene, llm: AsyncLLM) -> None:
    params, rng = SamplingParams(max_tokens=30, seed=1), scene.rng
    turns = [
        _client(scene, llm, pick(rng, PROMPTS), params, session_id="s", priority=rng.randrange(3))
        for _ in range(3)
    ]
    await asyncio.gather(*turns)


async def _same_id(scene: Scene, llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=50, seed=1)
    prompts = (pick(scene.rng, PROMPTS), "The")
    clients = [_client(scene, llm, prompt, params, request_id="r") for prompt in prompts]
    await asyncio.gather(*clients, _aborted(scene, llm))


async def _aborted(scene: Scene, llm: AsyncLLM) -> None:
    await asyncio.sleep(scene.rng.random() * 0.2)
    try:
        await llm.abort(pick(scene.rng, ("r", ["r", "r"], "nobody")))
    except Exception as error:
        scene.fault("raised", f"abort: {described(error)}")


async def _looks(scene: Scene, llm: AsyncLLM) -> None:
    try:
        await llm.stats()
        await llm.end_session(pick(scene.rng, ("s", "nobody")))
    except UserError:
        pass
    except Exception as error:
        scene.fault("raised", f"stats: {described(error)}")


async def _closed_early(scene: Scene, llm: AsyncLLM) -> None:
    stream = llm.generate("The old house", SamplingParams(max_tokens=100, seed=1, n=3))
    try:
        async for _ in stream:
            if scene.rng.random() < 0.3:
                break
        await stream.aclose()
    except Exception as error:
        scene.fault("raised", f"a stream closed early: {described(error)}")


CLIENTS = (
    *(_hostile_params, _hostile_params, _hostile_prompt, _hostile_prompt),
    *(_same_session, _same_id, _looks, _closed_early),
)
