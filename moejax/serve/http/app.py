"""OpenAI's HTTP API over an AsyncLLM: routes and answers.

Source: https://platform.openai.com/docs/api-reference, "Chat Completions" and "Completions".
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moejax.errors import UserError
from moejax.requests.outputs import CompletionOutput, RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.batch.lines import read_json_object, read_request
from moejax.serve.batch.openai_fields import CHAT, COMPLETIONS
from moejax.serve.batch.result_lines import choice_of, prompt_logprobs_of, usage_of
from moejax.serve.engine_thread import EngineDeadError
from moejax.serve.http.answer_formats import NOTHING, Answer, AnswerReader
from moejax.serve.http.dialects import Dialect, Messages, Responses
from moejax.serve.http.live import MOST_VIEWERS, LiveView
from moejax.serve.http.metrics import Metrics
from moejax.serve.http.openai_requests import Asked, Refusal, read_asked
from moejax.serve.llm import LLM

Parts = Callable[[CompletionOutput], Answer]
"""Takes the text so far apart."""

MOST_BODY = 8 * 2**20
"""Most bytes of a request's body. It is read on the event loop, which all requests share."""

T = TypeVar("T")


def make_app(
    llm: LLM,
    served: AsyncLLM,
    model: str,
    api_key: str | None = None,
    tool_call_parser: str = "auto",
    ending: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Returns the app with the server's routes.

    - `served`: runs `llm`.
    - `model`: the name that clients use.
    - `api_key`: what clients must send as `Authorization: Bearer KEY`, except to /health and for
      the page.
    - `tool_call_parser`: how the model writes calls of tools and reasoning, see AnswerReader.
    - `ending`: whether the server ends; then streams to pages end, which would keep it.
    """
    tokenizer = llm.engine.tokenizer
    template = tokenizer.chat_template if tokenizer else None
    reader = AnswerReader(template, tool_call_parser)
    began, longest = int(time.time()), llm.engine.scheduler.max_model_len
    live, counted = LiveView(llm, served, model, ending), Metrics(llm, model)

    async def health(request: Request) -> Response:
        await served.check_health()
        return Response()

    async def models(request: Request) -> Response:
        card = {"id": model, "object": "model", "created": began, "owned_by": "moejax"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": longest}]})

    async def metrics(request: Request) -> Response:
        text = await served.between_steps(counted.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def tokenize(request: Request) -> Response:
        fields = read_json_object(await _read_body(request))
        fields.pop("model", None)
        _, ids = await asyncio.to_thread(llm.encoder, read_request(fields, {}).prompt)
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def look(request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refusal(403, "a page of another site may not watch this server")
        if live.full:
            raise Refusal(503, f"{MOST_VIEWERS} pages are open, the most that are served")
        events = live.events()
        return _EventStream(events, events)

    async def move_budget(request: Request) -> Response:
        fields = read_json_object(await _read_body(request))
        await live.move_budget(fields.get("expert_slots"))
        return Response(status_code=202)

    async def page(request: Request) -> Response:
        name = request.url.path.removeprefix("/") or "index.html"  # the routes name each file
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

    async def answer(url: str, of: Callable[[], Dialect] | None, request: Request) -> Response:
        came = time.perf_counter()  # the engine's clock
        dialect = None if of is None else of()
        translate = dict if dialect is None else dialect.chat_body
        asked = read_asked(url, await _read_body(request), model, translate)
        if dialect is not None:
            asked = dataclasses.replace(asked, include_usage=True)
        if asked.chat and not (asked.raw or reader.plain):
            # Marks may be special tokens.
            params = dataclasses.replace(asked.request.sampling_params, skip_special_tokens=False)
            asked = dataclasses.replace(
                asked, request=dataclasses.replace(asked.request, sampling_params=params)
            )

        async def begin() -> tuple[AsyncGenerator[RequestOutput, None], RequestOutput]:
            fitted = await asyncio.to_thread(_fit, llm, asked.request) if asked.fits else None
            one = fitted or asked.request
            outputs = served.generate(
                *(one.prompt, one.sampling_params),
                priority=one.priority,
                last_only=not asked.stream,
            )
            return outputs, await anext(outputs)

        # The first output shows that the request can run.
        outputs, first = await _unless_gone(request, begin())
        ended = partial(counted.observe, came)
        kind = "chat.completion" if asked.chat else "text_completion"
        head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        if asked.stream:
            chunks = _chunks(asked, head, outputs, first, ended, parts(asked, first))
            return _EventStream(outputs, (dialect or _OpenAI()).events(chunks))
        await outputs.aclose()
        ended(first)
        top = asked.request.sampling_params.logprobs or 0
        choices = [choice_of(completion, asked.chat, top) for completion in first.outputs]
        if (read := parts(asked, first)) is not None:
            for choice, completion in zip(choices, first.outputs, strict=True):
                put_parts(choice, "message", read(completion), NOTHING)
        whole = head | {"choices": choices, **prompt_logprobs_of(first), "usage": _count(first)}
        return JSONResponse(whole if dialect is None else dialect.whole(whole))

    def parts(asked: Asked, first: RequestOutput) -> Parts | None:
        """Returns how the texts of a request are taken apart; None: they are the answers."""
        if asked.tools.forced:
            return lambda c: asked.tools.read(c.text) if c.finished() else NOTHING
        if not asked.chat or asked.raw or reader.plain:
            return None
        assert tokenizer is not None
        end = str(tokenizer.decode([*(first.prompt_token_ids or ())][-4:])).rstrip()
        thinking, types = end.endswith("<think>"), asked.tools.types()
        return lambda c: reader.read(c.text, c.finished(), thinking, types)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/live", look),
            Route("/live/budget", move_budget, methods=["POST"]),
            Route("/", page),
            *(Route(f"/{name}", page) for name in _PAGE_FILES),
            *(
                Route(path, partial(answer, url, dialect), methods=["POST"])
                for path, url, dialect in _APIS
            ),
        ],
        exception_handlers=dict.fromkeys(_ERRORS, _answer_error)
        | {ClientDisconnect: _answer_nobody},
    )
    return app if api_key is None else _require_key(app, api_key)


# ---- the page

_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = ("page.css", "page.js")
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_OPEN_PATHS = frozenset(("/health", "/", *(f"/{name}" for name in _PAGE_FILES)))
"""Paths that need no key: they tell nothing of the model or of requests."""


# ---- requests


async def _read_body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages of other sites may make a browser send other types, without asking first.
        raise Refusal(415, "the header Content-Type must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY:
            raise Refusal(413, f"the body is longer than {MOST_BODY} bytes, the most that is read")
        parts.append(part)
    return b"".join(parts)


def _fit(llm: LLM, asked: GenerationRequest) -> GenerationRequest:
    """Returns the request with its prompt as tokens and max_tokens set to the room that the context
    leaves."""
    _, ids = llm.encoder(asked.prompt)
    room = max(1, llm.engine.scheduler.max_model_len - len(ids))
    params = dataclasses.replace(asked.sampling_params, max_tokens=room)
    return dataclasses.replace(asked, prompt=ids, sampling_params=params)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
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


def _require_key(app: ASGIApp, key: str) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b""))
            if not secrets.compare_digest(given, b"Bearer " + key.encode()):
                refusal = Refusal(401, "the API key is missing or wrong", None, "invalid_api_key")
                await _error_response(refusal)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


# ---- answers


def _count(output: RequestOutput) -> dict[str, Any]:
    usage = usage_of(output)
    cached = 0 if output.metrics is None else output.metrics.cached_tokens
    return {
        **usage,
        "total_tokens": sum(usage.values()),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _EventStream(StreamingResponse):
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
                await _unless_gone(Request(scope, receive), self.stream_response(send))


class _OpenAI:
    """The events of chat completions and completions: their chunks, then [DONE]."""

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False)}\n\n"
        yield "data: [DONE]\n\n"


_APIS: tuple[tuple[str, str, Callable[[], Dialect] | None], ...] = (
    (CHAT, CHAT, None),
    (COMPLETIONS, COMPLETIONS, None),
    ("/v1/responses", CHAT, Responses),
    ("/v1/messages", CHAT, Messages),
)
"""Path, the url whose body it is turned into, and its dialect."""


async def _chunks(
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
            yield chunk([], usage=_count(output))
    except (UserError, EngineDeadError) as error:
        yield _error_body(error)


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


# ---- errors

_ERRORS = (Refusal, UserError, EngineDeadError, HTTPException, Exception)


def _status(error: Exception) -> int:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, EngineDeadError):
        return 503
    return 400 if isinstance(error, UserError) else 500


def _error_body(error: Exception) -> dict[str, Any]:
    status = _status(error)
    said = {
        "message": "the server failed; its log says why" if status == 500 else str(error),
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return {"error": said}


def _error_response(error: Exception) -> Response:
    return JSONResponse(_error_body(error), _status(error))


async def _answer_error(request: Request, error: Exception) -> Response:
    return _error_response(error)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
