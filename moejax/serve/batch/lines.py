"""Reads the input lines of a file job: JSON to requests, or to what is wrong with them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moejax.errors import UserError, shown
from moejax.models.json_values import is_integer
from moejax.requests.request import GenerationRequest
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.batch.openai_fields import completion_request
from pallas_kernels.option_text import nearest

MOST_LINE = 16 * 2**20
"""Most bytes of a line: enough for a prompt of millions of tokens, and at most a few hundred MB of
objects while it is read."""

EXAMPLE = '{"prompt": "The old house", "max_tokens": 16}'
"""An example line, for messages."""

IGNORED_FIELDS = frozenset(
    ("metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
)
"""Fields that do not change a result. OpenAI results echo `model`."""

_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams) if f.init)
_TEMPLATE_FIELDS = frozenset(
    ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
)
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
LINE_FIELDS = (
    _SAMPLING_FIELDS
    | IGNORED_FIELDS
    | {
        *_PROMPT_FIELDS,
        *("id", "session_id", "priority"),
        *_TEMPLATE_FIELDS,
    }
)
"""Fields that a plain line may have."""
_GIVEN_ID = re.compile(r"line-[0-9]+")


@dataclasses.dataclass(frozen=True)
class Line:
    """One input line that is not blank."""

    number: int
    """Its number, counted from 1, blank lines included."""
    id: str | int
    """The line's `id` or `custom_id`, which the result echoes; `line-<number>` if the line has none
    that can be used."""
    request_id: str
    """Digest of the line's bytes and the job's options. Equal digests mean equal requests."""
    url: str | None = None
    """The endpoint of an OpenAI line."""
    openai: bool = False
    """Whether the result has OpenAI's form. A line too broken to have a form takes the form of the
    line before it."""
    model: str | None = None
    request: GenerationRequest | None = None
    error: str | None = None
    """What is wrong with the line, which then has no request."""

    @property
    def key(self) -> bytes:
        return result_key(self.id, self.request_id)


def result_key(id: str | int, request_id: str) -> bytes:
    """Returns 16 bytes that tell results apart."""
    return _digest(json.dumps([id, request_id]).encode(), 16)


def derived_seed(seed: int, id: str | int) -> int:
    """Returns the seed of a line that has none. It does not depend on the line's place or on when
    the line runs. It lies in [0, 2^31), so that seed + index of n sequences stays a legal seed."""
    return int.from_bytes(_digest(json.dumps([seed, id]).encode(), 4), "big") >> 1


def read_lines(
    stream: Iterable[bytes], *, sampling: Mapping[str, Any], seed: int, made_with: Iterable[str]
) -> Iterator[Line]:
    """Yields each line of the stream that is not blank. It keeps 16 bytes and a set's entry for
    every id and session.

    - `sampling`: SamplingParams fields for lines that do not state them.
    - `made_with`: what else decides results (the model, the dtype).
    """
    options = json.dumps([dict(sampling), seed, *made_with], sort_keys=True).encode()
    job = _digest(options, 16)
    seen: set[bytes] = set()
    sessions: dict[str, bytes] = {}
    openai = False
    for number, raw in enumerate(stream, 1):
        if raw.strip():
            digest = _digest(job + raw.strip(), 16)
            line = Line(number, f"line-{number}", f"req_{digest.hex()}", openai=openai)
            line = _read(line, raw, seen, sampling, seed)
            openai = line.openai
            session = None if line.request is None else line.request.session_id
            if session is not None:
                # A turn continues from the KV of earlier turns, so its result depends on them too.
                sessions[session] = _digest(sessions.get(session, b"") + job + raw.strip(), 16)
                request_id = f"req_{sessions[session].hex()}"
                line = dataclasses.replace(line, request_id=request_id)
            yield line


def _read(line: Line, raw: bytes, seen: set[bytes], sampling: Mapping[str, Any], seed: int) -> Line:
    """Returns the line with its request, or with what is wrong with it.

    - `seen`: digests of the ids of earlier lines; the line's own is added.
    """
    try:
        if len(raw) > MOST_LINE:
            raise UserError(f"the line is longer than {MOST_LINE} bytes, the most that is read")
        fields = read_json_object(raw, "utf-8-sig" if line.number == 1 else "utf-8")
        line = dataclasses.replace(line, openai="custom_id" in fields or "body" in fields)
        id = _id(fields, line)
        digest = _digest(json.dumps(id).encode(), 16)
        if digest in seen:
            raise UserError(f"the id {id!r} is also that of an earlier line; ids must be unique")
        seen.add(digest)
        line = dataclasses.replace(line, id=id)
        if line.openai:
            url, fields = completion_request(fields)
            line = dataclasses.replace(line, url=url, model=_string(fields, "model"))
        request = read_request(fields, sampling)
        if request.sampling_params.seed is None:
            params = dataclasses.replace(request.sampling_params, seed=derived_seed(seed, id))
            request = dataclasses.replace(request, sampling_params=params)
        return dataclasses.replace(line, request=request)
    # Any error of a line stays that line's error.
    except Exception as error:
        return dataclasses.replace(line, error=str(error) or type(error).__name__)


def read_json_object(raw: bytes, encoding: str = "utf-8") -> dict[str, Any]:
    """Reads a JSON object whose text a tokenizer accepts. Raises UserError for anything else."""

    def refuse_constant(constant: str):
        raise UserError(f"{constant} is not JSON")

    try:
        text = raw.decode(encoding)
        fields = json.loads(text.rstrip(), parse_constant=refuse_constant)
        if "\\ud" in text.lower():
            # Half of a surrogate pair is JSON but no text; no tokenizer takes it.
            json.dumps(fields, ensure_ascii=False).encode()
    except UserError:
        raise
    except UnicodeError as error:
        raise UserError(f"not UTF-8 text ({error})") from None
    except RecursionError:
        raise UserError("not JSON that can be read: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg}, at character {error.pos + 1}"
        plain = "" if text.lstrip().startswith("{") else f"; a request is an object, like {EXAMPLE}"
        raise UserError(f"{what}{plain}") from None
    except ValueError as error:  # of an integer with thousands of digits
        raise UserError(f"not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"not a JSON object but {_kind(fields)}; one is like {EXAMPLE}")
    return fields


def _id(fields: Mapping[str, Any], line: Line) -> str | int:
    name = "custom_id" if line.openai else "id"
    id = fields.get(name)
    if id is None and not line.openai:
        return line.id
    if isinstance(id, str) and id:
        if _GIVEN_ID.fullmatch(id) and id != line.id:
            raise UserError(f"{name} {id!r} is reserved for line {id[5:]}; choose another")
        return id
    if is_integer(id) and not line.openai:
        return id
    kinds = "a string" if line.openai else "a string or an integer"
    raise UserError(f"{name} must be {kinds} that is not empty, got {json.dumps(id)}")


def read_request(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> GenerationRequest:
    """Returns the request of a plain line's fields.

    - `sampling`: SamplingParams fields that the line does not state.

    Raises UserError for unknown fields, impossible values, and anything but one prompt.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in fields:
        if name not in LINE_FIELDS:
            hint = nearest(name, LINE_FIELDS)
            raise UserError(f"the field {shown(name)} is not supported{hint}")
    prompts = [name for name in _PROMPT_FIELDS if name in fields]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none"
        raise UserError(f"one of {', '.join(_PROMPT_FIELDS)} is needed, found {found}")
    given = dict(sampling) | {n: v for n, v in fields.items() if n in _SAMPLING_FIELDS}
    if isinstance(biases := given.get("logit_bias"), dict):
        given["logit_bias"] = _token_keys(biases)
    prompt = _prompt(prompts[0], fields[prompts[0]])
    for name in _TEMPLATE_FIELDS & fields.keys():
        if not isinstance(prompt, dict):
            raise UserError(f"{name} needs messages")
        prompt[name] = fields[name]
    return GenerationRequest(
        prompt=prompt,
        sampling_params=SamplingParams(**given),
        session_id=_string(fields, "session_id"),
        priority=fields.get("priority", 0),
    )


def _token_keys(value: Mapping[str, Any]) -> dict[int, Any]:
    """Converts the keys of an object to token ids, since JSON has no integer keys."""
    try:
        return {int(key): each for key, each in value.items()}
    except ValueError:
        raise UserError(f"token ids are integers, got the keys {shown(list(value))}") from None


def _prompt(name: str, value: Any) -> str | list[int] | dict[str, Any]:
    if name == "messages":
        return {"messages": [_message(message) for message in _list(name, value)]}
    if name == "prompt" and isinstance(value, str):
        return value
    ids = _list(name, value)
    if not all(map(is_integer, ids)):
        kinds = "text or token ids" if name == "prompt" else "token ids, which are integers"
        raise UserError(f"{name} must be {kinds}; several prompts need a request each")
    return ids


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError('each of messages must be an object with a "role"')
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise UserError("the content of a message must be text; other parts are refused")
        # vLLM joins text parts so for templates that take plain content.
        content = "\n".join(str(part.get("text", "")) for part in content)
    elif not isinstance(content, str | None):
        raise UserError(f"the content of a message must be text, got {_kind(content)}")
    message = {**message, "content": content}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _tool_call(call: Any) -> Any:
    """Returns a call with its arguments as an object, which chat templates expect; OpenAI's API has
    them as text."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call  # the template decides
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _list(name: str, value: Any) -> list:
    if not isinstance(value, list):
        kinds = "text or a list" if name == "prompt" else "a list"
        raise UserError(f"{name} must be {kinds}, got {_kind(value)}")
    if not value:
        raise UserError(f"{name} is empty")
    return value


def _string(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise UserError(f"{name} must be a string that is not empty, got {json.dumps(value)}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return kinds.get(type(value), json.dumps(value))


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()
