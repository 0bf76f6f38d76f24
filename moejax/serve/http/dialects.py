"""Other HTTP APIs in terms of chat completions: OpenAI's Responses and Anthropic's Messages.

A dialect turns its body into that of a chat completion, and the completion, whole or as chunks,
into its own answer. Sources: https://platform.openai.com/docs/api-reference/responses and
https://docs.anthropic.com/en/api/messages, as far as they speak of text and functions.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Protocol

from moejax.errors import UserError, shown

Fields = dict[str, Any]


class Dialect(Protocol):
    """One request of another API."""

    def chat_body(self, body: Fields) -> Fields:
        """Returns the body of a chat completion. Raises UserError for what it cannot say."""
        ...

    def whole(self, chat: Fields) -> Fields:
        """Returns the answer, from a chat completion."""
        ...

    def events(self, chunks: AsyncIterator[Fields]) -> AsyncGenerator[str, None]:
        """Yields server-sent events, from the chunks of a chat completion; the last one has the
        usage. A chunk may be an error instead, and is then the last."""
        ...


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _event(name: str, data: Fields) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data}, ensure_ascii=False)}\n\n"


def _take(body: Fields, **names: str) -> Fields:
    """Returns the fields under the names of chat completions.

    - `names`: field of the dialect → name.
    """
    return {new: body.pop(old) for old, new in names.items() if body.get(old) is not None}


def _objects(name: str, value: Any) -> list[Fields]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UserError(f"{name} must be a list of objects, got {shown(value)}")
    return value


def _texts(name: str, content: Any, kinds: tuple[str, ...]) -> str:
    """Returns the text of a content: text, or parts of these types."""
    if isinstance(content, str):
        return content
    parts = _objects(name, content)
    for part in parts:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise UserError(f"{name} must be text; parts of type {shown(part.get('type'))} are not")
    return "\n".join(part["text"] for part in parts)


def _call(id: Any, name: Any, arguments: Any) -> Fields:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


# ---- OpenAI's Responses


class Responses:
    """A request of /v1/responses. Nothing is stored, so there is no previous response."""

    def chat_body(self, body: Fields) -> Fields:
        body = dict(body)
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if body.pop(name, None):
                raise UserError(f"the field {name!r} is not supported: no response is stored")
        for name in ("store", "include", "truncation", "reasoning", "parallel_tool_calls"):
            body.pop(name, None)  # they change nothing here
        messages: list[Fields] = []
        if (instructions := body.pop("instructions", None)) is not None:
            messages.append({"role": "system", "content": instructions})
        given = body.pop("input", None)
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        for item in _objects("input", given):
            messages += self._messages(item)
        chat = _take(body, max_output_tokens="max_tokens") | {"messages": messages}
        if isinstance(text := body.pop("text", None), dict) and (form := text.get("format")):
            chat["response_format"] = _response_format(form)
        if tools := body.pop("tools", None):
            chat["tools"] = [_nested(tool) for tool in _objects("tools", tools)]
        if isinstance(choice := body.pop("tool_choice", None), dict):
            choice = _nested(choice)
        if choice is not None:
            chat["tool_choice"] = choice
        return body | chat

    def _messages(self, item: Fields) -> Iterator[Fields]:
        kind = item.get("type", "message")
        if kind == "message":
            kinds = ("input_text", "output_text", "text")
            content = _texts("the content of input", item.get("content"), kinds)
            yield {"role": item.get("role"), "content": content}
        elif kind == "function_call":
            yield _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        elif kind == "function_call_output":
            said = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            yield {"role": "tool", **said}
        elif kind != "reasoning":
            raise UserError(f"input has an item of type {shown(kind)}, which is not supported")

    def whole(self, chat: Fields) -> Fields:
        (choice,) = chat["choices"]
        message = choice["message"]
        items = []
        if reasoning := message.get("reasoning_content"):
            items.append(self._item("reasoning", reasoning))
        if message.get("content"):
            items.append(self._item("message", message["content"]))
        items += [self._item("function_call", call) for call in message.get("tool_calls", ())]
        return self._response(chat, items, choice["finish_reason"], chat["usage"])

    def _item(self, kind: str, value: Any, id: str | None = None, done: bool = True) -> Fields:
        item: Fields = {"type": kind, "id": id or _id(kind[:3])}
        item["status"] = "completed" if done else "in_progress"
        if kind == "reasoning":
            return item | {"summary": [], "content": [{"type": "reasoning_text", "text": value}]}
        if kind == "message":
            return item | {"role": "assistant", "content": [self._part(value)] if done else []}
        return item | {"call_id": value["id"], **value["function"]}

    def _part(self, text: str) -> Fields:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _response(self, chat: Fields, items: list, finish: str | None, usage: Any) -> Fields:
        cut = finish == "length"
        counts = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        return {
            "id": f"resp_{chat['id'].partition('-')[2]}",
            "object": "response",
            "created_at": chat["created"],
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": chat["model"],
            "output": items,
            "usage": counts,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    async def events(self, chunks: AsyncIterator[Fields]) -> AsyncGenerator[str, None]:
        number, items, text, finish, usage = 0, [], "", None, None
        open_: Fields | None = None
        head: Fields | None = None

        def event(name: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return _event(f"response.{name}", {"sequence_number": number - 1, **data})

        def place() -> Fields:
            assert open_ is not None
            return {"item_id": open_["id"], "output_index": len(items), "content_index": 0}

        def close() -> Iterator[str]:
            nonlocal open_
            if open_ is None:
                return
            whole = self._item(open_["type"], text, open_["id"])
            name = "output_text" if open_["type"] == "message" else "reasoning_text"
            yield event(f"{name}.done", **place(), text=text)
            if open_["type"] == "message":
                yield event("content_part.done", **place(), part=self._part(text))
            yield event("output_item.done", output_index=len(items), item=whole)
            items.append(whole)
            open_ = None

        async for chunk in chunks:
            if "error" in chunk:
                yield event("failed", response={"status": "failed", "error": chunk["error"]})
                return
            if head is None:
                head = chunk
                for name in ("created", "in_progress"):
                    yield event(name, response=self._response(chunk, [], None, None))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                finish, delta = choice["finish_reason"] or finish, choice["delta"]
                for kind, field in (("reasoning", "reasoning_content"), ("message", "content")):
                    if not (piece := delta.get(field)):
                        continue
                    if open_ is None or open_["type"] != kind:
                        for each in close():
                            yield each
                        open_, text = self._item(kind, "", done=False), ""
                        yield event("output_item.added", output_index=len(items), item=open_)
                        if kind == "message":
                            yield event("content_part.added", **place(), part=self._part(""))
                    text += piece
                    name = "output_text" if kind == "message" else "reasoning_text"
                    yield event(f"{name}.delta", **place(), delta=piece)
                for call in delta.get("tool_calls") or ():
                    for each in close():
                        yield each
                    item = self._item("function_call", call)
                    where = {"output_index": len(items)}
                    begun = item | {"arguments": "", "status": "in_progress"}
                    yield event("output_item.added", **where, item=begun)
                    arguments, where_in = item["arguments"], {**where, "item_id": item["id"]}
                    yield event("function_call_arguments.delta", **where_in, delta=arguments)
                    yield event("function_call_arguments.done", **where_in, arguments=arguments)
                    yield event("output_item.done", **where, item=item)
                    items.append(item)
        for each in close():
            yield each
        assert head is not None
        response = self._response(head, items, finish or "stop", usage)
        yield event(response["status"], response=response)


def _nested(tool: Fields) -> Fields:
    """Returns a function as chat completions have it, within an object of its own."""
    if tool.get("type") != "function":
        return tool
    function = {k: v for k, v in tool.items() if k in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _response_format(form: Any) -> Any:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return form


# ---- Anthropic's Messages

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """A request of /v1/messages."""

    def __init__(self) -> None:
        self._stops: Any = ()

    def chat_body(self, body: Fields) -> Fields:
        body = dict(body)
        if body.get("max_tokens") is None:
            raise UserError("max_tokens is needed")
        for name in ("metadata", "thinking", "cache_control"):
            body.pop(name, None)  # they change nothing here
        messages: list[Fields] = []
        if (system := body.pop("system", None)) is not None:
            messages.append({"role": "system", "content": _texts("system", system, ("text",))})
        for message in _objects("messages", body.pop("messages", None)):
            messages += self._messages(message)
        chat = _take(body, stop_sequences="stop") | {"messages": messages}
        self._stops = chat.get("stop") or ()
        if tools := body.pop("tools", None):
            chat["tools"] = [self._tool(tool) for tool in _objects("tools", tools)]
        if isinstance(choice := body.pop("tool_choice", None), dict):
            named = {"type": "function", "function": {"name": choice.get("name")}}
            kinds: Fields = {"any": "required", "tool": named}
            chat["tool_choice"] = kinds.get(str(choice.get("type")), choice.get("type"))
        return body | chat

    def _tool(self, tool: Fields) -> Fields:
        function = {k: v for k, v in tool.items() if k in ("name", "description")}
        return {"type": "function", "function": function | _take(tool, input_schema="parameters")}

    def _messages(self, message: Fields) -> Iterator[Fields]:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
            return
        for part in _objects("the content of a message", content):
            kind = part.get("type")
            if kind == "text":
                yield {"role": role, "content": part.get("text")}
            elif kind == "tool_use":
                yield _call(part.get("id"), part.get("name"), part.get("input"))
            elif kind == "tool_result":
                said = _texts("the content of a tool_result", part.get("content") or "", ("text",))
                yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": said}
            elif kind not in ("thinking", "redacted_thinking"):
                raise UserError(f"content has a part of type {shown(kind)}, which is not supported")

    def whole(self, chat: Fields) -> Fields:
        (choice,) = chat["choices"]
        said, parts = choice["message"], []
        if reasoning := said.get("reasoning_content"):
            parts.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if said.get("content"):
            parts.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            parts.append(self._tool_use(call) | {"input": given})
        return self._message(chat, parts, choice) | {"usage": self._usage(chat["usage"])}

    def _tool_use(self, call: Fields) -> Fields:
        name = call["function"]["name"]
        return {"type": "tool_use", "id": call["id"], "name": name, "input": {}}

    def _message(self, chat: Fields, parts: list, choice: Fields | None) -> Fields:
        return {
            "id": f"msg_{chat['id'].partition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": chat["model"],
            "content": parts,
            **self._end(choice),
        }

    def _end(self, choice: Fields | None) -> Fields:
        """Returns why it ended; None: it has not."""
        if choice is None:
            return {"stop_reason": None, "stop_sequence": None}
        stopped = choice.get("stop_reason") in self._stops
        reason = "stop_sequence" if stopped else _STOPS[choice["finish_reason"]]
        return {"stop_reason": reason, "stop_sequence": choice["stop_reason"] if stopped else None}

    def _usage(self, usage: Fields) -> Fields:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    async def events(self, chunks: AsyncIterator[Fields]) -> AsyncGenerator[str, None]:
        index, kind, last, usage, begun = -1, None, None, None, False
        begin = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
        }
        async for chunk in chunks:
            if "error" in chunk:
                error = {"type": "api_error", "message": chunk["error"]["message"]}
                yield _event("error", {"error": error})
                return
            if not begun:
                begun, none = True, {"input_tokens": 0, "output_tokens": 0}
                message = self._message(chunk, [], None) | {"usage": none}
                yield _event("message_start", {"message": message})
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["finish_reason"]:
                    last = choice
                delta = choice["delta"]
                for new, field in (("thinking", "reasoning_content"), ("text", "content")):
                    if not (piece := delta.get(field)):
                        continue
                    if kind != new:
                        if kind is not None:
                            yield _event("content_block_stop", {"index": index})
                        kind, index = new, index + 1
                        block = {"index": index, "content_block": begin[new]}
                        yield _event("content_block_start", block)
                    said = {"type": f"{new}_delta", new: piece}
                    yield _event("content_block_delta", {"index": index, "delta": said})
                for call in delta.get("tool_calls") or ():
                    if kind is not None:
                        yield _event("content_block_stop", {"index": index})
                    kind, index = None, index + 1
                    block = {"index": index, "content_block": self._tool_use(call)}
                    yield _event("content_block_start", block)
                    given = call["function"]["arguments"]
                    said = {"type": "input_json_delta", "partial_json": given}
                    yield _event("content_block_delta", {"index": index, "delta": said})
                    yield _event("content_block_stop", {"index": index})
        if kind is not None:
            yield _event("content_block_stop", {"index": index})
        assert last is not None and usage is not None
        yield _event("message_delta", {"delta": self._end(last), "usage": self._usage(usage)})
        yield _event("message_stop", {})
