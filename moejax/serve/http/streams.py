"""Answers piece by piece, as events."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moejax.errors import UserError
from moejax.requests.outputs import CompletionOutput, RequestOutput
from moejax.serve.batch.result_lines import choice_of, usage_of
from moejax.serve.engine_thread import EngineDeadError
from moejax.serve.http.answer_formats import NOTHING, Answer
from moejax.serve.http.errors import error_body
from moejax.serve.http.openai_requests import Asked, Refusal

Parts = Callable[[CompletionOutput], Answer]
"""Takes the text so far apart."""

READ_AGAIN = 1024
"""A text that is taken apart is read again when it has grown by this part of its length, so that
reading all of it takes time linear in it: 128 characters of 131,072."""

T = TypeVar("T")


class EventStream(StreamingResponse):
    """A response of events as they come.

    - `source`: what the events are made of. It is closed when the client goes away, which cancels a
      request.
    """

    def __init__(self, source: AsyncGenerator[Any, None], events: AsyncGenerator[str, None]):
        self._source = source
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not as starlette does: some releases of uvicorn promise errors of `send`, and raise none.
        async with aclosing(self._source):
            with suppress(ClientDisconnect):
                await unless_gone(Request(scope, receive), self.stream_response(send))


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client goes away, cancels `work` and raises
    ClientDisconnect."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.create_task(wait_for_end())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def count_of(output: RequestOutput) -> dict[str, Any]:
    usage = usage_of(output)
    cached = output.metrics.cached_tokens
    return {
        **usage,
        "total_tokens": sum(usage.values()),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def chunks_of(
    asked: Asked,
    head: dict[str, Any],
    outputs: AsyncGenerator[RequestOutput, None],
    first: RequestOutput,
    ended: Callable[[RequestOutput], None],
    parts: Parts | None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the chunks of an answer, or an error as the last of them."""
    count = {"usage": None} if asked.include_usage else {}

    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**head, "choices": choices, **count, **more}

    top = asked.request.sampling_params.logprobs or 0
    pieces = [_Pieces(asked.chat, top, parts) for _ in first.outputs]
    try:
        if asked.chat:
            for each in first.outputs:
                delta = {"role": "assistant", "content": ""}
                choice = {"logprobs": None, "finish_reason": None}
                yield chunk([{"index": each.index, "delta": delta, **choice}])
        output = first
        while True:
            for piece, completion in zip(pieces, output.outputs, strict=True):
                if (choice := piece.next(completion)) is not None:
                    yield chunk([choice])
            if output.finished:
                break
            output = await anext(outputs)
        ended(output)
        if asked.include_usage:
            yield chunk([], usage=count_of(output))
    except (UserError, EngineDeadError, Refusal) as error:
        yield error_body(error)


@dataclasses.dataclass
class _Pieces:
    """The text of one sequence, piece by piece."""

    chat: bool
    top: int
    parts: Parts | None
    answer: Answer = NOTHING
    """What came of the answer, if it is taken apart."""
    text: int = 0
    tokens: int = 0
    token_text: int = 0
    """Characters of the tokens' texts so far, as logprobs of completions count them."""
    ended: bool = False

    def next(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Returns the choice with what is new, or None if nothing is."""
        logprobs = completion.logprobs
        # The text is read from its beginning, so it is read again only when it has grown enough.
        grown, whole = len(completion.text) - self.text, completion.finished()
        if self.parts is not None and not whole and grown < len(completion.text) // READ_AGAIN:
            return None
        piece = dataclasses.replace(
            completion,
            text=completion.text[self.text :],
            token_ids=completion.token_ids[self.tokens :],
            logprobs=None if logprobs is None else logprobs[self.tokens :],
        )
        if self.ended or not (piece.text or piece.finished() or piece.logprobs):
            return None
        self.text, self.tokens = len(completion.text), len(completion.token_ids)
        self.ended = piece.finished()
        choice = choice_of(piece, self.chat, self.top)
        if self.chat:
            choice["delta"] = {"content": choice.pop("message")["content"]}
            if self.parts is not None:
                before, self.answer = self.answer, self.parts(completion)
                put_parts(choice, "delta", self.answer, before)
        elif (found := choice["logprobs"]) is not None:
            found["text_offset"] = [self.token_text + offset for offset in found["text_offset"]]
            self.token_text += sum(map(len, found["tokens"]))
        return choice


def put_parts(choice: dict[str, Any], name: str, answer: Answer, before: Answer) -> None:
    """Puts what is new in the parts of an answer into its choice.

    - `name`: "message" or "delta".
    - `before`: what was sent before.
    """
    said = choice[name]
    said["content"] = answer.content[len(before.content) :]
    if reasoning := answer.reasoning[len(before.reasoning) :]:
        said["reasoning_content"] = reasoning
    if new := answer.calls[len(before.calls) :]:
        said["tool_calls"] = [
            {
                **({"index": i} if name == "delta" else {}),
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": call._asdict(),
            }
            for i, call in enumerate(new, len(before.calls))
        ]
        said["content"] = said["content"] or None
    if answer.calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"
