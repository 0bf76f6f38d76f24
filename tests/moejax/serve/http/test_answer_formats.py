"""Reasoning and calls of tools in the texts of several families."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from moejax import CompletionOutput, UserError
from moejax.serve.http.answer_formats import FORMATS, NOTHING, Answer, AnswerReader, Call
from moejax.serve.http.streams import READ_AGAIN, _Pieces
from moejax.serve.http.tools import read_tools

TYPES = {"f": {"x": {"type": "integer"}, "s": {"type": "string"}}}
ARGUMENTS = '{"x": 1, "s": "2"}'
JSON = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
CODE = (
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
PAIRS = (
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
DEEP = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
DEEP3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sure."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    f"{ARGUMENTS}"
)
THOUGHT = "<think>\nHm.\n</think>\n\nSure.\n"
HARMONY_ROLE = HARMONY.replace(
    "assistant<|channel|>commentary to=functions.f ",
    "assistant to=functions.f<|channel|>commentary ",
)
CASES = [
    ("hermes", THOUGHT + JSON),
    ("qwen3_coder", THOUGHT + CODE),
    ("glm45", THOUGHT + PAIRS),
    ("deepseek_v3", THOUGHT + DEEP),
    ("deepseek_v3", THOUGHT + DEEP3),
    ("kimi_k2", THOUGHT + KIMI),
    ("openai", HARMONY),
    ("openai", HARMONY_ROLE),
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_the_parts_of_an_answer(name, text):
    # The sign of its format is in the template of a family, which thinks.
    sign = next(each.sign for each in FORMATS if each.name == name)
    reader = AnswerReader(f"{{{{ '<think>' }}}} {sign}")
    assert reader.format is not None and reader.format.name == name
    whole = reader.read(text, True, False, TYPES)
    assert whole == Answer("Hm.", "Sure.", (Call("f", ARGUMENTS),))
    # Streamed in any pieces, parts only grow.
    before = NOTHING
    for length in range(len(text) + 1):
        now = reader.read(text[:length], length == len(text), False, TYPES)
        assert now.reasoning.startswith(before.reasoning) and now.content.startswith(before.content)
        assert now.calls[: len(before.calls)] == before.calls
        before = now
    assert before == whole


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("Hm.\n</think>\nYes.", True, Answer("Hm.", "Yes.", ())),
        ("Hm.", True, Answer("Hm.", "", ())),
        ("Yes <b.", False, Answer("", "Yes <b.", ())),
        ("<tool_call>no JSON</tool_call>", False, Answer("", "<tool_call>no JSON</tool_call>", ())),
    ],
)
def test_texts_without_calls(text, thinking, answer):
    reader = AnswerReader("<think> <tool_call>")
    assert reader.read(text, True, thinking, TYPES) == answer


def test_an_operator_is_no_mark_of_harmony():
    text = "<|channel|>final<|message|>let x = f <| 1\n<|return|>"
    reader = AnswerReader("", "openai")
    assert reader.read(text, True, False, TYPES).content == "let x = f <| 1\n"
    contents = [reader.read(text[:n], False, False, TYPES).content for n in range(len(text))]
    assert all(b.startswith(a) for a, b in itertools.pairwise(contents))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("openai", "<|channel|>" * 50_000),
        ("openai", "<|channel|> to=functions." + "a" * 500_000 + "<x<|message|>{}"),
        ("hermes", "<tool_call>" * 50_000),
        (
            "qwen3_coder",
            f"<tool_call><function=f>{'<parameter=a>' * 50_000}</function></tool_call>",
        ),
        ("glm45", f"<tool_call>f{'<arg_key>a</arg_key>' * 50_000}</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 50_000),
        ("kimi_k2", "<|tool_calls_section_begin|>" + "<|tool_call_begin|>" * 50_000),
        ("hermes", f"<tool_call>{'[' * 50_000}</tool_call>"),
    ],
)
def test_hostile_texts_are_read_in_linear_time(name, text):
    began = time.process_time()
    AnswerReader("", name).read(text, False, False, TYPES)
    assert time.process_time() - began < 3  # hundreds of seconds in quadratic time


def test_marks_mean_nothing_without_tools_or_format():
    assert AnswerReader("<tool_call>").read(JSON, True, False, {}) == Answer("", JSON, ())
    assert AnswerReader("<think> <tool_call>", "none").plain and AnswerReader(None).plain
    with pytest.raises(UserError, match="must be auto, none, openai"):
        AnswerReader(None, "herms")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def test_tools_that_must_be_called():
    named, required = read_tools([TOOL], NAMED), read_tools([TOOL], "required")
    assert named.grammar() == {"type": "object"} and named.forced
    assert named.read(ARGUMENTS) == Answer("", "", (Call("f", ARGUMENTS),))
    calls = json.dumps([{"name": "f", "parameters": {"x": 1}}])
    assert required.read(calls) == Answer("", "", (Call("f", '{"x": 1}'),))
    assert required.read("[{") == Answer("", "[{", ())
    assert named.read("[" * 100_000).content
    assert not read_tools([TOOL], "none").given and not read_tools([TOOL], None).forced


def test_references_in_the_schemas_of_tools_are_found():
    place = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    tools = [{"function": {"name": name, "parameters": schema}} for name in "fg"]
    grammar = read_tools(tools, "required").grammar()
    assert grammar["$defs"] == {"Place": place} and "$defs" in schema
    tools[1]["function"]["parameters"] = {"$defs": {"Place": {}}}
    with pytest.raises(UserError, match="two different"):
        read_tools(tools, "required").grammar()
    odd = [{"function": {"name": "f", "parameters": {"properties": [1]}}}]
    assert read_tools(odd, None).types() == {"f": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ({}, None, "must be a list"),
        ([TOOL] * 129, None, "at most 128"),
        ([TOOL, TOOL], None, "of the same name"),
        ([{"type": "web_search"}], None, "each of tools must be"),
        ([{"function": {"name": ""}}], None, "needs a name"),
        ([{"function": {"name": "f", "parameters": 3}}], None, "a JSON schema"),
        ([{"function": {"name": "f", "parameters": {"$defs": 3}}}], None, "must be an object"),
        ([TOOL], {"function": {"name": "g"}}, "none of tools"),
        ([TOOL], "sometimes", "tool_choice must be"),
        (None, "required", "needs tools"),
    ],
)
def test_refused_tools(tools, choice, words):
    with pytest.raises(UserError, match=words):
        read_tools(tools, choice)


@pytest.mark.parametrize("length", [300, 20_000])
def test_a_long_stream_is_read_in_linear_time(length):
    """Its pieces join to the parts of the whole text."""
    reader, read = AnswerReader("<think><tool_call>"), 0

    def parts(completion):
        nonlocal read
        read += len(completion.text)
        return reader.read(completion.text, completion.finished(), True, TYPES)

    text = "Hm. " * (length // 8) + "</think>\n\n" + "Sure. " * (length // 8) + JSON
    pieces, content, calls = _Pieces(chat=True, top=0, parts=parts), "", []
    for end in range(4, len(text) + 4, 4):
        reason = "stop" if end >= len(text) else None
        completion = CompletionOutput(0, text[:end], [*range(end // 4)], None, None, reason, None)
        if (choice := pieces.next(completion)) is not None:
            content += choice["delta"]["content"] or ""
            calls += choice["delta"].get("tool_calls", [])
    answer = reader.read(text, True, True, TYPES)
    assert (content, len(calls)) == (answer.content, 1)
    assert read <= (READ_AGAIN + 2) * len(text)
