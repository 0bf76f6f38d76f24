"""One thread that owns the engine: it takes commands of other threads and gives outputs to event
loops."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from moejax.engine.loop import Engine
from moejax.errors import OutOfKV, UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import EncodedPrompt
from moejax.requests.request import GenerationRequest, Request
from moejax.requests.submission import Submission
from moejax.serve.generation import require_owner, submit

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer

log = logging.getLogger("moejax")

Command = tuple[Future | None, Callable[[], Any]]
"""A function for the engine's thread, with the future of its result; None: nothing waits for the
result."""

News = RequestOutput | Exception
"""An output, or the error that ends a stream."""


class EngineDeadError(RuntimeError):
    """A step failed or hangs, and every request of this AsyncLLM with it. The name is vLLM's; the
    failure itself is the `__cause__`."""


@dataclasses.dataclass(eq=False)
class TokenStream:
    """One request between the engine's thread and the event loop that waits for it.

    The engine makes an output only while the reader waits for one, so a slow reader holds at most
    the newest one.
    """

    request_id: str
    loop: asyncio.AbstractEventLoop
    last_only: bool = False
    """Whether the reader wants only the last output."""
    wanted: bool = False
    """Whether the reader waits. The event loop sets it. The engine clears it with the output that
    it sends, and the loop sets it again only after it has read that output, so the two never write
    at once."""

    # Of the engine's thread:
    submission: Submission | None = None
    sent: RequestOutput | None = None
    """The newest output that was made."""
    cancelled: bool = False
    """Whether the request was cancelled by its id before it was in the engine."""

    # Of the event loop:
    newest: News | None = None
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def next(self) -> RequestOutput:
        self.wanted = not self.last_only
        await self.news.wait()
        self.news.clear()
        newest, self.newest = self.newest, None
        if isinstance(newest, Exception):
            raise newest
        assert newest is not None
        return newest


class EngineThread:
    """Runs the engine from one thread, which sleeps while there is nothing to do.

    `call` and `tell` carry out a function between two steps; `submit`, `cancel` and `drop` are such
    functions. After the end every use raises, and every waiting caller has been told.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None):
        self.thread = threading.Thread(target=self._run, name="moejax-engine", daemon=True)
        self.streams: dict[str, TokenStream] = {}
        """The stream of each request id, while the stream has a reader. The readers
        maintain this."""
        self._engine, self._tokenizer, self._process = engine, tokenizer, os.getpid()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Lock for putting something into the queue and for ending the queue, so that nothing is
        put in too late."""
        self._closed = False
        self._failure: BaseException | None = None

        # Of the thread:
        self._live: dict[TokenStream, None] = {}
        self._stream_of: dict[Request, TokenStream] = {}
        self._unseen: dict[
            TokenStream, None
        ] = {}  # streams with tokens that their reader has not seen
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, News]]] = {}
        self._stopping = False

        self.ended: Future[None] = Future()
        """Done when the thread has ended."""
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it

    # ---- for all threads

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keeps the thread from ending inside a block. Raises UserError if it is closed or this is
        a fork of its process, EngineDeadError if a step failed."""
        require_owner(self._process)
        with self._gate:
            if self._ended:
                raise self._end()
            yield

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the thread; returns or raises what the function does. Raises like
        `open`."""
        future: Future = Future()
        with self.open():
            self._commands.put((future, function))
        return await asyncio.wrap_future(future)

    def tell(self, function: Callable[[], Any]) -> None:
        """Runs a function on the thread without waiting for a result. An error of the function ends
        the engine. Does nothing after the end."""
        with self._gate:
            if not self._ended:
                self._commands.put((None, function))

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends all requests and, after the running step, the thread. Returns whether the thread has
        ended in that time. Idempotent; must not be called from the thread itself."""
        with self._gate:
            if not self._ended:
                self._commands.put((None, self._stop))
            self._closed = True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    @property
    def _ended(self) -> bool:
        return self._closed or self._failure is not None

    def _end(self) -> Exception:
        """Returns why nothing runs any more, as a new exception for each reader."""
        if self._failure is None:
            return UserError("this AsyncLLM is closed; make another one")
        error = EngineDeadError(
            f"a step of the engine failed ({type(self._failure).__name__}: {self._failure}) and "
            "all its requests have ended; close this AsyncLLM and start another one"
        )
        error.__cause__ = self._failure
        return error

    # ---- functions for call and tell

    def submit(self, stream: TokenStream, encoded: EncodedPrompt, asked: GenerationRequest) -> None:
        stream.submission = submit(self._engine, encoded, asked)
        self._live[stream] = None
        self._stream_of.update((request, stream) for request in stream.submission.requests)
        if stream.cancelled:
            self.cancel(stream)

    def cancel(self, stream: TokenStream) -> None:
        if stream.submission is None:
            stream.cancelled = True
        elif stream in self._live:
            self._engine.abort(stream.submission.requests)
            self._post_output(stream)

    def drop(self, stream: TokenStream) -> None:
        """Forgets a stream that has ended or lost its reader."""
        if stream.submission is not None and stream in self._live:
            self._engine.abort(stream.submission.requests)
            del self._live[stream]
            self._unseen.pop(stream, None)
            for request in stream.submission.requests:
                del self._stream_of[request]

    # ---- on the thread

    def _run(self) -> None:
        self._engine.running.tell = self._give_up
        try:
            while not (self._stopping or self._failure):
                self._obey()
                self._send()
                if self._live and not self._stopping:
                    self._step()
                self._send()
        except BaseException as error:
            log.exception("a step of the engine failed; all its requests ended")
            with self._gate:
                self._failure = self._failure or error
        try:
            self._end_all()
        finally:
            self._engine.running.tell = None
            self.ended.set_result(None)

    def _give_up(self, message: str) -> None:
        """Ends what waits for a step that hangs. Runs on the thread that watches steps."""
        log.error(message)
        with self._gate:
            self._failure = TimeoutError(message)
        self._end_commands()
        for stream in tuple(self.streams.values()):
            with suppress(RuntimeError):  # its loop is closed
                stream.loop.call_soon_threadsafe(_deliver, [(stream, self._end())])

    def _obey(self) -> None:
        """Carries out the waiting commands; sleeps while there is nothing else to do."""
        if not self._live:
            self._engine.drain()
            _carry_out(*self._commands.get())
        # Only the commands that wait now, so that new arrivals never delay the next step.
        for _ in range(self._commands.qsize()):
            if self._stopping:
                return
            _carry_out(*self._commands.get())

    def _step(self) -> None:
        try:
            touched = self._engine.step()
        except OutOfKV as error:
            for stream in tuple(self._live):
                self._post(stream, UserError(str(error)))
                self.drop(stream)
            return
        self._unseen.update((self._stream_of[request], None) for request in touched)
        for stream in tuple(self._unseen):
            assert stream.submission is not None
            if stream.wanted or stream.submission.finished:
                self._post_output(stream)

    def _post_output(self, stream: TokenStream) -> None:
        assert stream.submission is not None
        try:
            output = stream.submission.output(self._tokenizer, stream.sent)
        except UserError as error:  # of this request alone
            self._post(stream, error)
            self.drop(stream)
            return
        stream.wanted, stream.sent = False, output
        self._unseen.pop(stream, None)
        self._post(stream, dataclasses.replace(output, request_id=stream.request_id))
        if output.finished:
            self.drop(stream)

    def _post(self, stream: TokenStream, news: News) -> None:
        self._outbox.setdefault(stream.loop, []).append((stream, news))

    def _send(self) -> None:
        """Wakes the readers, each event loop once."""
        outbox, self._outbox = self._outbox, {}
        for loop, news in outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, news)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                # The loop was closed while its tasks ran: their requests have no reader.
                for stream, _ in news:
                    self.streams.pop(stream.request_id, None)
                    self.drop(stream)

    def _stop(self) -> None:
        self._stopping = True

    def _end_all(self) -> None:
        """Ends all waiting commands and streams, and takes all requests out of the engine."""
        self._end_commands()
        live = tuple(self._live)
        for stream in live:
            self._post(stream, self._end())
        self._send()
        try:
            for stream in live:
                self.drop(stream)
            self._engine.drain()
        except Exception:
            log.exception("clearing the engine failed as well")

    def _end_commands(self) -> None:
        while True:
            try:
                future, _ = self._commands.get_nowait()
            except queue.Empty:
                return
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(self._end())


def _carry_out(future: Future | None, function: Callable[[], Any]) -> None:
    if future is None:
        function()
        return
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def _deliver(news: Sequence[tuple[TokenStream, News]]) -> None:
    for stream, newest in news:
        stream.newest = newest
        stream.news.set()
