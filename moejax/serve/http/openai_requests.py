"""Reads bodies of HTTP requests: OpenAI's JSON to a GenerationRequest, or to a typed refusal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from moejax.errors import UserError, shown
from moejax.requests.request import GenerationRequest
from moejax.serve.batch.lines import read_json_object, read_request
from moejax.serve.batch.openai_fields import CHAT, rename_fields
from moejax.serve.http.tools import Tools, read_tools


class Refusal(Exception):
    """A refused request, in the form of OpenAI's error body."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclasses.dataclass(frozen=True)
class Asked:
    """The request in a body."""

    url: str
    request: GenerationRequest
    stream: bool
    include_usage: bool
    """Whether the stream ends with the counts of tokens."""
    tools: Tools
    raw: bool
    """Whether the text is the answer as it is: special tokens or a grammar were asked for."""

    @property
    def chat(self) -> bool:
        return self.url == CHAT


def read_asked(
    url: str,
    raw: bytes,
    model: str,
    translate: Callable[[dict[str, Any]], dict[str, Any]],
    usual: Mapping[str, Any],
) -> Asked:
    """Reads the request in a body.

    - `url`: of chats or of completions.
    - `model`: the name that is served.
    - `translate`: the body's fields → those of that url.
    - `usual`: fields of SamplingParams for bodies without their own.

    Raises Refusal with status 404 for another model, and 400 for everything else that is wrong.
    """
    fields: dict[str, Any] = {}
    try:
        fields = translate(read_json_object(raw))
        return _read(url, {k: v for k, v in fields.items() if v is not None}, model, usual)
    except ValueError as error:  # most are UserError; Python has one for enormous integers
        words = re.findall(r"\w+", str(error))
        param = next((word for word in words if word in fields), None)
        raise Refusal(400, str(error), param) from None


def _read(url: str, body: dict[str, Any], model: str, usual: Mapping[str, Any]) -> Asked:
    named = body.pop("model", model)
    if not isinstance(named, str):
        raise UserError(f"model must be a string, got {shown(named)}")
    if named != model:
        raise Refusal(
            *(404, f"the model {shown(named)} is not here; this server has {model!r}"),
            *("model", "model_not_found"),
        )
    if "session_id" in body:
        raise UserError("the field 'session_id' is not supported by the server")
    stream, options = body.pop("stream", False), body.pop("stream_options", {})
    if not isinstance(stream, bool):
        raise UserError(f"stream must be true or false, got {shown(stream)}")
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise UserError(f"stream_options is an object with include_usage, got {shown(options)}")
    if options and not stream:
        raise UserError("stream_options needs stream: true")
    include_usage = options.get("include_usage") or False
    if not isinstance(include_usage, bool):
        raise UserError(f"stream_options.include_usage must be true or false, got {include_usage}")
    tools = Tools()
    if url == CHAT:
        tools = read_tools(body.pop("tools", None), body.pop("tool_choice", None))
    if tools.forced:
        if "structured_outputs" in body or "response_format" in body:
            raise UserError("tool_choice and response_format both fix the answer; give one of them")
        body["structured_outputs"] = {"json": tools.grammar()}
    fields = rename_fields(url, body)
    # As in OpenAI's API, a chat's answer may be as long as the context allows.
    request = read_request(fields, {**usual, **({"max_tokens": None} if url == CHAT else {})})
    if tools.given and isinstance(request.prompt, dict):
        request = dataclasses.replace(request, prompt={**request.prompt, "tools": [*tools.given]})
    raw = "skip_special_tokens" in fields or "structured_outputs" in fields
    if stream and request.sampling_params.prompt_logprobs is not None:
        raise UserError("prompt_logprobs are not part of a stream; leave out stream")
    return Asked(url, request, stream, include_usage, tools, raw)
