"""An LLM for programs with an event loop: requests from many tasks, results as they come."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from moejax.errors import UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import EncodedPrompt
from moejax.requests.request import GenerationRequest, Prompt, require_type
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.engine_thread import EngineDeadError, EngineThread, TokenStream
from moejax.serve.llm import LLM
from moejax.start.options import Config

T = TypeVar("T")

_EXIT_S, _CLOSE_S = 30.0, 60.0
"""Seconds that the interpreter's exit and `close` wait for the running step."""


class AsyncLLM:
    """An LLM for asyncio, in the manner of vLLM's AsyncLLM.

        async with AsyncLLM("demo", expert_budget="25%") as llm:
            async for output in llm.generate("The old house", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    - `model`: as in LLM, with its options as keywords, or a Config; starting blocks, and closing
      frees the model. Or an LLM that was started; it belongs to the AsyncLLM until `close` and
      refuses other callers.

    A thread of its own runs the engine and sleeps when idle. Any number of tasks may call, from any
    event loop. Raises UserError as LLM does, for options given with an LLM, and for an LLM that is
    closed, runs requests or belongs to another AsyncLLM.
    """

    def __init__(self, model: str | os.PathLike[str] | Config | LLM, **options: Any):
        if isinstance(model, LLM) and options:
            raise UserError(
                f"{', '.join(options)}: this LLM was already started with its own options; "
                "give them to LLM(...), or give AsyncLLM the model's name"
            )
        self._owns = not isinstance(model, LLM)
        if not isinstance(model, LLM):
            config = model if isinstance(model, Config) else Config.of(model, **options)
            model = LLM.from_config(config)
        self._llm = model
        self._shutting, self._closing, self._shut = threading.Lock(), False, False
        # One thread each, so that prompts reach the engine in order. What may take long (messages,
        # long texts) does not keep short prompts waiting; turns of sessions keep their order.
        self._quick = ThreadPoolExecutor(1, "moejax-encode")
        self._slow = ThreadPoolExecutor(1, "moejax-encode-long")
        self._engine = EngineThread(self._llm.engine, self._llm.engine.tokenizer)
        self._llm.lend(self._engine.thread)
        self._engine.thread.start()
        # Before jax's own exit, which takes the device away from the running step.
        atexit.register(self._shut_down, _EXIT_S)

    # ---- what users call

    def get_default_sampling_params(self) -> SamplingParams:
        """`LLM.get_default_sampling_params`."""
        return self._llm.get_default_sampling_params()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
        last_only: bool = False,
        delta: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates for one prompt; yields all text so far as tokens come, the last time with
        finished=True.

        - `prompt`, `sampling_params`, `session_id`, `priority`: as in `LLM.generate`.
        - `request_id`: repeated in the outputs, and used by `abort`. Default: a new one.
        - `last_only`: yield once, at the end; no time goes into the other outputs.
        - `delta`: yield only the text, tokens and log-probabilities that are new, as vLLM does with
          RequestOutputKind.DELTA.

        A reader that is slower than the engine gets the newest output and misses the ones before.
        Cancelling the task, closing the generator, or leaving an `async for` over it cancels the
        request. `abort` cancels it too; then the last output has finish_reason "abort".

        Raises UserError for a request that could never run, for the id of another running request,
        and when the AsyncLLM is closed or gets closed. Raises EngineDeadError when a step fails.
        """
        default = self.get_default_sampling_params()
        params = default if sampling_params is None else sampling_params
        asked = GenerationRequest(prompt, params, session_id, priority)
        require_type("request_id", request_id, str | None, "a string or None")
        engine, loop = self._engine, asyncio.get_running_loop()
        name = uuid.uuid4().hex if request_id is None else request_id
        stream = TokenStream(name, loop, last_only, wanted=not last_only)
        if engine.streams.setdefault(stream.request_id, stream) is not stream:
            raise UserError(f"request_id {request_id!r} is in use by a request that has not ended")
        # Made before the interpreter may end, which empties this module.
        finished, drop = False, partial(engine.drop, stream)
        before: RequestOutput | None = None
        try:
            quick = session_id is None and self._llm.encoder.quick(prompt)
            quick = quick and params.structured_outputs is None
            with engine.open():
                executor = self._quick if quick else self._slow
                encoding = loop.run_in_executor(executor, self._encode, asked)
            encoded = await encoding
            await engine.call(partial(engine.submit, stream, encoded, asked))
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output.since(before) if delta else output
                before = output
        finally:
            engine.streams.pop(stream.request_id, None)
            if not finished:
                engine.tell(drop)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Cancels a request, or several.

        - `request_id`: one id or several. Ids without a request are ignored.

        When this returns, the request's row and pages are free, and the reader gets a last output
        with finish_reason "abort".
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._engine.streams.get(each)) is not None:
                await self._engine.call(partial(self._engine.cancel, stream))

    async def end_session(self, session_id: str) -> None:
        """`LLM.end_session`."""
        await self._engine.call(partial(self._llm.end_session, session_id))

    async def stats(self) -> dict[str, Any]:
        """`LLM.stats`, between two steps."""
        return await self._engine.call(self._llm.stats)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread between two steps. Returns its result, or raises
        what it raises."""
        return await self._engine.call(function)

    def tell(self, function: Callable[[], Any]) -> None:
        """Runs a function on the engine's thread between two steps, later. It must not raise. Does
        nothing after the end."""
        self._engine.tell(function)

    async def check_health(self) -> None:
        """Raises EngineDeadError when a step failed or has run for half an hour, UserError when the
        AsyncLLM is closed."""
        with self._engine.open():
            pass

    async def close(self) -> None:
        """Ends all requests and, after the running step, the engine's thread; then frees the model,
        or gives the LLM back. Readers get a UserError. Idempotent. Raises like LLM.close, and
        EngineDeadError if the step takes longer than a minute; the next call waits again."""
        self._begin_end()
        ended = asyncio.wrap_future(self._engine.ended)
        if not (await asyncio.wait([ended], timeout=_CLOSE_S))[0]:
            running = self._llm.engine.running
            raise EngineDeadError(running.hangs(0.0) or "the engine's thread does not end")
        await asyncio.to_thread(self._shut_down)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    def _encode(self, asked: GenerationRequest) -> EncodedPrompt:
        if self._closing:
            raise UserError("this AsyncLLM is closed; make another one")
        # A grammar may take seconds to compile, which no step waits for.
        self._llm.engine.rules.prepare(asked.sampling_params)
        return self._llm.encoder(asked.prompt)

    def _begin_end(self) -> None:
        self._closing = True
        self._llm.encoder.interrupt()
        self._engine.stop(0.0)

    def _shut_down(self, timeout_s: float | None = None) -> None:
        self._begin_end()
        with self._shutting:
            if not self._engine.stop(timeout_s) or self._shut:
                return
            self._shut = True
            atexit.unregister(self._shut_down)
            for executor in (self._quick, self._slow):
                executor.shutdown()
            self._llm.lend(None)
            if self._owns:
                self._llm.close()
