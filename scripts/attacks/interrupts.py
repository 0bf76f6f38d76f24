"""Ctrl-C at a random moment of every call that runs the engine, and callbacks that raise."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from host_offload.control.interface import Decision, Moment, Observation, Spec
from moejax import LLM, AsyncLLM, SamplingParams, UserError
from moejax.requests.request import GenerationRequest
from moejax.serve.batch.job import Job, open_job
from scripts.attacks.engine import PROMPTS, check_answer, move_budget, other_budget, start
from scripts.attacks.lines import check_results, known_line
from scripts.attacks.scene import Scene
from scripts.attacks.values import pick


def interrupted(function: Callable[[], Any], moments: list[float]) -> Any:
    """What the function returns when SIGINT arrives so many seconds after its start, once for each;
    the KeyboardInterrupt where it went through. Raises RuntimeError where another handler is left
    behind. For the main thread."""
    begun, done = threading.Event(), threading.Event()

    def attacked() -> Any:
        begun.set()
        return function()

    def handler(number: int, interrupted: types.FrameType | None) -> None:
        # One that comes late harms nobody: not even the cleaning up below. Where it was held back,
        # the frame that it came in may be gone; what counts is the stack now.
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is attacked.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def send() -> None:
        begun.wait()  # one that comes before would interrupt nothing
        begin = time.perf_counter()
        for moment in sorted(moments):
            if done.wait(max(0.0, begin + moment - time.perf_counter())):
                return
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send, name="attack-interrupt")
    before = signal.signal(signal.SIGINT, handler)
    sender.start()
    try:
        result = attacked()
    except KeyboardInterrupt as error:
        result = error
    finally:
        done.set()
        sender.join()
        left = signal.signal(signal.SIGINT, before)
    if left is not handler:
        raise RuntimeError(f"another handler of SIGINT is left: {left}")
    return result


def attack_interrupts(scene: Scene) -> None:
    """Then the engine is idle, budgets may be moved, and an AsyncLLM may have it."""
    rng, llm = scene.rng, scene.llm
    what, function, count, afterwards = pick(rng, WAYS)(scene)
    moments = [10 ** rng.uniform(-4, -0.3) for _ in range(rng.randrange(1, count + 1))]
    what = f"{what}, interrupted after {', '.join(f'{m:.4f}' for m in sorted(moments))} s"
    scene.call(what, lambda: interrupted(function, moments))
    if not llm.engine.idle:
        left = len(llm.engine.scheduler.waiting) + len(llm.engine.scheduler.running)
        scene.fault("engine", f"{what}: not idle, {left} requests are left")
        return
    scene.call(f"after {what}", afterwards)
    move_budget(scene)
    scene.call("lend after an interrupt", lambda: _lent(llm))


def _lent(llm: LLM) -> None:
    llm.lend(threading.current_thread())
    llm.lend(None)


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(max_tokens=rng.randrange(1, 20), seed=1, n=pick(rng, (1, 1, 3)))


Way = tuple[str, Callable[[], Any], int, Callable[[], None]]
"""What it is, the call, how many interrupts it may get, and what comes after them."""


def nothing() -> None:
    pass


def _generate(scene: Scene) -> Way:
    rng, llm = scene.rng, scene.llm
    count = pick(rng, (1, 10, 300, 3000))
    prompts = [pick(rng, PROMPTS)] * count
    params = _params(rng)
    return f"generate of {count}", lambda: llm.generate(prompts, params), 3, nothing


def _each(scene: Scene) -> Way:
    rng, llm = scene.rng, scene.llm
    params, most = _params(rng), pick(rng, (None, 1, 100))
    asked = [GenerationRequest(pick(rng, PROMPTS), params, tag=i) for i in range(200)]
    return "generate_each", lambda: list(llm.generate_each(asked, max_in_flight=most)), 3, nothing


def _stream(scene: Scene) -> Way:
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    return "stream", lambda: list(scene.llm.stream(pick(scene.rng, PROMPTS), params)), 3, nothing


def _score(scene: Scene) -> Way:
    sequences = [[scene.rng.randrange(1, 4000) for _ in range(60)] for _ in range(100)]
    return "score_batch", lambda: scene.llm.score_batch(sequences), 3, nothing


def _budget(scene: Scene) -> Way:
    def move() -> None:
        for _ in range(20):
            other_budget(scene)()

    return "set_budget", move, 3, nothing


def _job(scene: Scene) -> Way:
    """An interrupted job goes on to its whole results."""
    known, directory = scene.known, scene.directory
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    which = {f"known-{i}": w for i, w in enumerate(known.sample(scene.rng, 30))}
    lines = [known_line(known, w, name) for name, w in which.items()]
    source.write_bytes(b"\n".join([*lines, b""]))

    def run() -> None:
        with open_job(Job(str(source), str(output))) as work:
            work.run(scene.llm)

    def whole() -> None:
        run()
        check_results(scene, output, len(lines), which)

    return "a job", run, 2, whole


def _async(scene: Scene) -> Way:
    rng, params = scene.rng, _params(scene.rng)

    async def several() -> None:
        async with AsyncLLM(scene.llm) as llm:

            async def one(prompt: str) -> None:
                async for _ in llm.generate(prompt, params):
                    pass

            await asyncio.gather(*(one(pick(rng, PROMPTS)) for _ in range(20)))

    def run() -> None:
        # Only with Python's own handler does asyncio cancel the task: any other one leaves the loop
        # where it is, a client's `async with` included.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            asyncio.run(several())
        finally:
            signal.signal(signal.SIGINT, before)

    return "AsyncLLM", run, 1, nothing


WAYS = (_generate, _generate, _generate, _each, _stream, _score, _budget, _job, _async)


# ---- callbacks


class CallbackError(Exception):
    """What a callback of the caller raises."""


@dataclasses.dataclass
class Raising:
    """A callback, of which one call raises."""

    left: int = -1
    """Calls until then; negative: never."""

    def __call__(self, *given: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise CallbackError("by the attack")


@dataclasses.dataclass(frozen=True)
class RaisingPolicy:
    """A policy that does nothing, and raises with the others."""

    raising: Raising
    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN, Moment.STEP_END})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> int:
        return 0

    def decide(self, state: int, observation: Observation) -> tuple[int, Decision]:
        self.raising()
        return state, Decision()


def attack_callbacks(scene: Scene) -> None:
    """What a callback raises reaches the caller, and ends nothing else."""
    raising, known = Raising(), scene.known
    ways: tuple[dict[str, Any], ...] = (
        {"policies": (RaisingPolicy(raising),)},
        {"driver": "host", "policies": (RaisingPolicy(raising, frozenset({Moment.ROUTED})),)},
    )
    options = pick(scene.rng, ways)
    llm = scene.call(f"LLM with {'/'.join(options)}", lambda: start(options))
    if not isinstance(llm, LLM):
        return
    with llm:
        for _ in range(3):
            raising.left = scene.rng.randrange(1, 40)
            moment = f"{'/'.join(options)} that raises at call {raising.left}"
            refusals = (CallbackError, UserError)
            prompts, params = list(known.prompts), list(known.params)
            scene.call(moment, partial(llm.generate, prompts, params), refusals)
            raising.left = -1
            if not llm.engine.idle:
                scene.fault("engine", f"{moment}: not idle")
                return
            outputs = scene.call(f"after {moment}", partial(llm.generate, prompts, params))
            for i, output in enumerate(outputs if isinstance(outputs, list) else ()):
                check_answer(scene, i, output, f"after {moment}")
