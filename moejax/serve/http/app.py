"""OpenAI's HTTP API over an AsyncLLM: routes and answers.

Source: https://platform.openai.com/docs/api-reference, "Chat Completions" and "Completions".
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from moejax.requests.outputs import RequestOutput
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.batch.job import list_given_fields
from moejax.serve.batch.lines import read_json_object, read_request
from moejax.serve.batch.openai_fields import CHAT, COMPLETIONS
from moejax.serve.batch.result_lines import choice_of, prompt_logprobs_of
from moejax.serve.http.answer_formats import NOTHING, AnswerReader
from moejax.serve.http.dialects import Dialect, Messages, Responses
from moejax.serve.http.errors import ERRORS, answer_error, answer_nobody
from moejax.serve.http.limits import Limits, read_body
from moejax.serve.http.live import MOST_VIEWERS, LiveView
from moejax.serve.http.metrics import Metrics
from moejax.serve.http.openai_requests import Asked, Refusal, read_asked
from moejax.serve.http.streams import (
    EventStream,
    Parts,
    chunks_of,
    count_of,
    put_parts,
    unless_gone,
)
from moejax.serve.llm import LLM


def make_app(
    llm: LLM,
    served: AsyncLLM,
    model: str,
    tool_call_parser: str = "auto",
    ending: Callable[[], bool] = lambda: False,
    limits: Limits | None = None,
) -> Starlette:
    """Returns the app with the server's routes.

    - `served`: runs `llm`.
    - `model`: the name that clients use.
    - `tool_call_parser`: how the model writes calls of tools and reasoning, see AnswerReader.
    - `ending`: whether the server ends; then streams to pages end, which would keep it.
    - `limits`: None: those of Limits.
    """
    metrics = Metrics(llm, model)
    view = _View(llm, served, model, metrics, LiveView(llm, served, model, ending))
    reader = AnswerReader(_template(llm), tool_call_parser)
    engine = _Answers(llm, served, model, metrics, reader, limits or Limits())
    routes = [
        Route("/health", view.health),
        Route("/v1/models", view.models),
        Route("/metrics", view.metrics),
        Route("/tokenize", engine.tokenize, methods=["POST"]),
        Route("/live", view.look),
        Route("/live/budget", view.move_budget, methods=["POST"]),
        *(Route(f"/{name}", _page) for name in ("", *_PAGE_FILES)),
        *(
            Route(path, partial(engine.answer, url, dialect), methods=["POST"])
            for path, url, dialect in _APIS
        ),
    ]
    handlers = dict.fromkeys(ERRORS, answer_error) | {ClientDisconnect: answer_nobody}
    return Starlette(routes=routes, exception_handlers=handlers)


def _template(llm: LLM) -> str | None:
    return None if llm.engine.tokenizer is None else llm.engine.tokenizer.chat_template


@dataclasses.dataclass(frozen=True)
class _View:
    """What the server tells of itself."""

    llm: LLM
    served: AsyncLLM
    model: str
    counted: Metrics
    live: LiveView
    began: int = dataclasses.field(default_factory=lambda: int(time.time()))

    async def health(self, request: Request) -> Response:
        await self.served.check_health()
        return Response()

    async def models(self, request: Request) -> Response:
        card = {"id": self.model, "object": "model", "created": self.began, "owned_by": "moejax"}
        card["max_model_len"] = self.llm.engine.scheduler.max_model_len
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        text = await self.served.between_steps(self.counted.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def look(self, request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refusal(403, "a page of another site may not watch this server")
        if self.live.full:
            raise Refusal(503, f"{MOST_VIEWERS} pages are open, the most that are served")
        events = self.live.events()
        return EventStream(events, events)

    async def move_budget(self, request: Request) -> Response:
        fields = read_json_object(await read_body(request))
        await self.live.move_budget(fields.get("expert_slots"))
        return Response(status_code=202)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Runs requests."""

    llm: LLM
    served: AsyncLLM
    model: str
    counted: Metrics
    reader: AnswerReader
    limits: Limits

    async def tokenize(self, request: Request) -> Response:
        fields = read_json_object(await read_body(request))
        fields.pop("model", None)
        _, ids = await asyncio.to_thread(self.llm.encoder, read_request(fields, {}).prompt)
        longest = self.llm.engine.scheduler.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def answer(
        self, url: str, of: Callable[[], Dialect] | None, request: Request
    ) -> Response:
        """Answers one request.

        - `url`: the API of OpenAI that its body is turned into.
        - `of`: makes the dialect of the body; None: it is OpenAI's.
        """
        came = time.perf_counter()  # the engine's clock
        dialect = None if of is None else of()
        asked = self._asked(url, await read_body(request), dialect)
        # The first output shows that the request can run.
        outputs, first = await unless_gone(request, self._begin(asked))
        ended, parts = partial(self.counted.observe, came), self._parts(asked, first)
        head = self._head(asked)
        if asked.stream:
            chunks = chunks_of(asked, head, outputs, first, ended, parts)
            return EventStream(outputs, (dialect or _OpenAI()).events(chunks))
        await outputs.aclose()
        ended(first)
        top = asked.request.sampling_params.logprobs or 0
        choices = [choice_of(completion, asked.chat, top) for completion in first.outputs]
        if parts is not None:
            for choice, completion in zip(choices, first.outputs, strict=True):
                put_parts(choice, "message", parts(completion), NOTHING)
        whole = head | {"choices": choices, **prompt_logprobs_of(first), "usage": count_of(first)}
        return JSONResponse(whole if dialect is None else dialect.whole(whole))

    def _asked(self, url: str, body: bytes, dialect: Dialect | None) -> Asked:
        translate = dict if dialect is None else dialect.chat_body
        usual = list_given_fields(self.llm.get_default_sampling_params())
        asked = read_asked(url, body, self.model, translate, usual)
        if dialect is not None:
            asked = dataclasses.replace(asked, include_usage=True)
        if asked.chat and not (asked.raw or self.reader.plain):
            # Marks may be special tokens.
            params = dataclasses.replace(asked.request.sampling_params, skip_special_tokens=False)
            request = dataclasses.replace(asked.request, sampling_params=params)
            asked = dataclasses.replace(asked, request=request)
        return asked

    async def _begin(
        self, asked: Asked
    ) -> tuple[AsyncGenerator[RequestOutput, None], RequestOutput]:
        one = asked.request
        outputs = self.served.generate(
            *(one.prompt, one.sampling_params), priority=one.priority, last_only=not asked.stream
        )
        outputs = self.limits.within(outputs, one.sampling_params.n)
        return outputs, await anext(outputs)

    def _head(self, asked: Asked) -> dict[str, Any]:
        kind = "chat.completion" if asked.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _parts(self, asked: Asked, first: RequestOutput) -> Parts | None:
        """Returns how the texts of a request are taken apart; None: they are the answers."""
        if asked.tools.forced:
            return lambda c: asked.tools.read(c.text) if c.finished() else NOTHING
        if not asked.chat or asked.raw or self.reader.plain:
            return None
        tokenizer = self.llm.engine.tokenizer
        assert tokenizer is not None
        end = tokenizer.decode([*(first.prompt_token_ids or ())][-4:]).rstrip()
        thinking, types = end.endswith("<think>"), asked.tools.types()
        return lambda c: self.reader.read(c.text, c.finished(), thinking, types)


# ---- the page

_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = ("page.css", "page.js")
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def _page(request: Request) -> Response:
    name = request.url.path.removeprefix("/") or "index.html"  # the routes name each file
    return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


# ---- answers


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
