"""Reads OpenAI requests: their fields under vLLM's names, and the envelope of batch lines. Source:
OpenAI's Batch API reference, "The request input object", and the request bodies of /v1/completions
and /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moejax.errors import UserError, shown

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_NEUTRAL: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Unsupported fields, each with the values that ask for nothing."""


def completion_request(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns (url, the body as a plain line's fields) of an OpenAI batch line. Raises UserError
    for another method or url, and like rename_fields."""
    if unknown := set(fields) - {"custom_id", "method", "url", "body"}:
        raise UserError(f"the field {min(unknown)!r} is not supported beside custom_id and body")
    if fields.get("method", "POST") != "POST":
        raise UserError(f"method must be POST, got {json.dumps(fields['method'])}")
    url = fields.get("url")
    if url not in (COMPLETIONS, CHAT):
        raise UserError(f"url must be {COMPLETIONS} or {CHAT}, got {json.dumps(url)}")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise UserError("body must be an object")
    return url, rename_fields(url, body)


def rename_fields(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a request as a plain line's fields, without null fields. Raises UserError
    for fields that are not supported, are of another url, or contradict each other."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        if name in body and _json(body.pop(name)) not in map(_json, neutral):
            raise UserError(f"the field {name!r} is not supported")
    if "id" in body:
        raise UserError("the field 'id' is not supported in a request's body")
    if "max_completion_tokens" in body:
        most = body.pop("max_completion_tokens")
        if body.setdefault("max_tokens", most) != most:
            raise UserError("max_tokens and max_completion_tokens differ; give one of them")
    if (wanted := body.pop("response_format", None)) is not None:
        form = _structured_outputs(wanted)
        if form is not None and body.setdefault("structured_outputs", form) != form:
            raise UserError("response_format and structured_outputs differ; give one of them")
    other = "messages" if url == COMPLETIONS else "prompt"
    if other in body or "prompt_token_ids" in body:
        wrong = other if other in body else "prompt_token_ids"
        raise UserError(f"the field {wrong!r} is not one of {url}")
    if url == CHAT:
        _chat_logprobs(body)
    return body


def _structured_outputs(wanted: Any) -> dict[str, Any] | None:
    """Returns the structured_outputs of a response_format; None: any text."""
    if isinstance(wanted, dict):
        kind, form = wanted.get("type"), wanted.get("json_schema")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"json_object": True}
        if (
            kind == "json_schema"
            and isinstance(form, dict)
            and isinstance(form.get("schema"), dict)
        ):
            return {"json": form["schema"]}
    raise UserError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": '
        f'"json_schema", "json_schema": {{"schema": {{…}}}}}}, got {shown(wanted)}'
    )


def _chat_logprobs(body: dict[str, Any]) -> None:
    """Replaces `logprobs: true` with `top_logprobs: k` by the number of likeliest tokens,
    k or 0."""
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise UserError(f"logprobs must be true or false for {CHAT}, got {json.dumps(wanted)}")
    if top is not None and not wanted:
        raise UserError("top_logprobs needs logprobs: true")
    if wanted:
        body["logprobs"] = 0 if top is None else top


def _json(value: Any) -> str:
    """Returns text that tells True from 1, which == does not."""
    return json.dumps(value, sort_keys=True)
