"""From the text of an answer to reasoning, content and calls of tools, by model family.

A chat template shows which format its model writes. Sources: the templates of Qwen3, Qwen3-Coder,
GLM-4.5, DeepSeek-V3 and V3.1, Kimi-K2 and gpt-oss (harmony) on the Hugging Face hub, and vLLM's
parsers, whose names these are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moejax.errors import UserError

Types = Mapping[str, Mapping[str, Any]]
"""Tool → its parameters' JSON schemas."""


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


class Answer(NamedTuple):
    """The parts of an answer so far."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    """Calls that are whole."""


NOTHING = Answer("", "", ())


class AnswerFormat(NamedTuple):
    """How a family writes its answers."""

    name: str
    begins: tuple[str, ...]
    """Texts of which each begins calls of tools."""
    read_calls: Callable[[str, Types], Iterator[Call]]
    """Yields the whole calls of the text that begins so."""
    sign: str
    """A text that the chat templates of the family have."""


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """Yields the texts between two marks. Takes time linear in the text, which a user can fill with
    marks; a regular expression would look for `end` from every `begin`."""
    at = text.find(begin)
    while at >= 0 and (stop := text.find(end, at + len(begin))) >= 0:
        yield text[at + len(begin) : stop]
        at = text.find(begin, stop)


_NO_JSON = (ValueError, RecursionError)


def _json_call(text: str, name: str, arguments: str) -> Iterator[Call]:
    try:
        found = json.loads(text)
    except _NO_JSON:
        return
    if isinstance(found, dict) and isinstance(found.get(name), str):
        yield Call(found[name], json.dumps(found.get(arguments, {}), ensure_ascii=False))


def _hermes(text: str, types: Types) -> Iterator[Call]:
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        yield from _json_call(inner, "name", "arguments")


def _typed(value: str, schema: Any) -> Any:
    """Returns a parameter that was written without quotes."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except _NO_JSON:
        return value


def _call(name: str, pairs: Sequence[tuple[str, str]], types: Types) -> Call:
    schemas = types.get(name, {})
    values = {key: _typed(value, schemas.get(key)) for key, value in pairs}
    return Call(name, json.dumps(values, ensure_ascii=False))


def _qwen3_coder(text: str, types: Types) -> Iterator[Call]:
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        for function in _between(inner, "<function=", "</function>"):
            name, mark, body = function.partition(">")
            parameters = (p.partition(">") for p in _between(body, "<parameter=", "</parameter>"))
            pairs = [(k, v.removeprefix("\n").removesuffix("\n")) for k, _, v in parameters]
            if name and mark:
                yield _call(name, pairs, types)


def _glm45(text: str, types: Types) -> Iterator[Call]:
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        name = inner.partition("<arg_key>")[0].strip()
        arguments = (
            each.partition("</arg_key>") for each in _between(inner, "<arg_key>", "</arg_value>")
        )
        pairs = [(key, rest.partition("<arg_value>")[2]) for key, _, rest in arguments]
        if name:
            yield _call(name, pairs, types)


def _deepseek(text: str, types: Types) -> Iterator[Call]:
    for inner in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        first, _, second = inner.partition("<｜tool▁sep｜>")
        if first.strip() == "function":  # V3: the name, then the arguments in a code block
            first, _, second = second.partition("\n")
            second = second.strip().removeprefix("```json").removesuffix("```")
        yield from _plain(first.strip(), second)


def _kimi(text: str, types: Types) -> Iterator[Call]:
    for inner in _between(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        name, _, arguments = inner.partition("<|tool_call_argument_begin|>")
        yield from _plain(name.strip().removeprefix("functions.").partition(":")[0], arguments)


def _harmony(text: str, types: Types) -> Iterator[Call]:
    head, _, arguments = text.partition("<|message|>")
    if name := re.search(r" to=functions\.([\w.-]+)", head):
        yield from _plain(name[1], arguments)


def _plain(name: str, arguments: str) -> Iterator[Call]:
    try:
        json.loads(arguments)
    except _NO_JSON:
        return
    yield Call(name, arguments.strip())


FORMATS = (
    AnswerFormat("openai", (), _harmony, "<|channel|>"),
    AnswerFormat("deepseek_v3", ("<｜tool▁calls▁begin｜>",), _deepseek, "<｜tool▁calls▁begin｜>"),
    AnswerFormat(
        *("kimi_k2", ("<|tool_calls_section_begin|>",), _kimi, "<|tool_calls_section_begin|>")
    ),
    AnswerFormat("glm45", ("<tool_call>",), _glm45, "<arg_key>"),
    AnswerFormat("qwen3_coder", ("<tool_call>",), _qwen3_coder, "<function="),
    AnswerFormat("hermes", ("<tool_call>",), _hermes, "<tool_call>"),
)
"""All formats; those whose signs other families' templates also have come last."""

_THINK, _THOUGHT = "<think>", "</think>"
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant([^<]*))?<\|channel\|>((?:[^<]|<(?!\|(?:channel|message)\|>))*)"
    r"<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|\Z)",
    re.DOTALL,
)
"""A message of harmony: its recipient, which may also be in the channel, its channel, its text."""
_MARKS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


class AnswerReader:
    """Reads the answers of one model.

    - `template`: its chat template.
    - `name`: a format's name; "auto": the one whose sign the template has; "none": the text is the
      answer as it is.

    Raises UserError for an unknown name.
    """

    def __init__(self, template: str | None, name: str = "auto"):
        names = [each.name for each in FORMATS]
        if name not in ("auto", "none", *names):
            raise UserError(
                f"--tool-call-parser must be auto, none, {', '.join(names)}; got {name!r}"
            )
        template = template or ""
        self.format = next(
            (f for f in FORMATS if name == f.name or (name == "auto" and f.sign in template)), None
        )
        self.thinks = name != "none" and _THINK in template

    @property
    def plain(self) -> bool:
        """Whether the text is the answer as it is."""
        return self.format is None and not self.thinks

    def read(self, text: str, whole: bool, thinking: bool, types: Types) -> Answer:
        """Takes a text apart.

        - `whole`: whether no more text comes. If not, what may be the beginning of a mark is left
          out, so that the parts only grow.
        - `thinking`: whether the prompt ended within the reasoning.
        - `types`: the tools that may be called.
        """
        if self.format is not None and self.format.name == "openai":
            return self._read_channels(text, whole, types)
        reasoning = ""
        if self.thinks and (thinking or text.lstrip().startswith(_THINK)):
            reasoning, ended, text = text.partition(_THOUGHT)
            reasoning = reasoning.lstrip().removeprefix(_THINK).lstrip("\n")
            if not ended:
                return Answer(_certain(reasoning, (_THOUGHT,), whole), "", ())
            reasoning, text = reasoning.rstrip(), text.lstrip("\n")
        elif self.thinks and not whole and _THINK.startswith(text.lstrip()):
            return NOTHING
        begins = () if self.format is None or not types else self.format.begins
        starts = [at for mark in begins if (at := text.find(mark)) >= 0]
        if not starts:
            return Answer(reasoning, _certain(text, begins, whole), ())
        assert self.format is not None
        calls = tuple(self.format.read_calls(text[min(starts) :], types))
        content = text[: min(starts)].rstrip() if calls or not whole else text
        return Answer(reasoning, content, calls)

    def _read_channels(self, text: str, whole: bool, types: Types) -> Answer:
        if not whole:  # the mark at the end may not be whole, or a call may go on
            text = _certain(text, _MARKS, False)
        reasoning, content, calls = [], [], []
        found = list(_MESSAGE.finditer(text))
        for message in found:
            recipient, channel, said = message.groups("")
            if " to=functions." in f"{recipient} {channel}":
                if whole or message is not found[-1]:
                    assert self.format is not None
                    text = f"{recipient} {channel}<|message|>{said}"
                    calls += self.format.read_calls(text, types)
            elif channel.strip().startswith("final"):
                content.append(said)
            else:
                reasoning.append(said)
        if not found and whole:
            return Answer("", text, ())
        return Answer("\n".join(reasoning), "".join(content), tuple(calls))


def _certain(text: str, marks: Sequence[str], whole: bool) -> str:
    """Returns the text without an end that may be the beginning of a mark, or space before one."""
    if whole or not marks:
        return text
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length].rstrip()
    return text.rstrip()
