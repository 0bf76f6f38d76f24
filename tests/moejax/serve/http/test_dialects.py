"""OpenAI's Responses and Anthropic's Messages, by their own clients."""

from __future__ import annotations

import json

import pytest

from moejax import UserError
from moejax.serve.http.dialects import Messages, Responses
from tests.moejax.serve.http.test_http import CHAT, MESSAGES, SCHEMA, server  # noqa: F401

QUESTION = MESSAGES[0]["content"]
GREEDILY = {"extra_body": {"temperature": 0}}  # newer clients have no such argument
FUNCTION = {"name": "person", "description": "A person."}


@pytest.fixture
def client(server):  # noqa: F811
    import openai  # two seconds

    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="secret") as client:
        yield client


@pytest.fixture
def anthropics(server):  # noqa: F811
    import anthropic  # ten seconds, so its tests are slow

    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key="secret") as client:
        yield client


@pytest.fixture
def answer(server):  # noqa: F811
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    return server.ask(CHAT, body)[1]


def test_responses_whole_and_streamed(client, answer):
    asked = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    found = client.responses.create(**asked)
    text = answer["choices"][0]["message"]["content"]
    assert found.output_text == text and found.usage.output_tokens == 12
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(**asked) as stream:
        events = [*stream]
    kinds, final = [event.type for event in events], events[-1].response
    assert final.output_text == text and final.usage.output_tokens == 12
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds


def test_a_message(server, answer):  # noqa: F811
    text = answer["choices"][0]["message"]["content"]
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    _, found = server.ask("/v1/messages", asked)
    assert found["content"] == [{"type": "text", "text": text}]
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 12)
    tool = {**FUNCTION, "input_schema": SCHEMA}
    asked |= {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 90}
    _, found = server.ask("/v1/messages", asked)
    assert found["stop_reason"] == "tool_use"
    assert set(found["content"][0]["input"]) == {"name", "age"}


@pytest.mark.slow
def test_messages_whole_and_streamed(anthropics, answer):
    client = anthropics
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, **GREEDILY}
    found = client.messages.create(**asked)
    text = answer["choices"][0]["message"]["content"]
    assert [part.text for part in found.content] == [text] and found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 12
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    stops = client.messages.create(**asked, stop_sequences=[text[3:6]])
    assert (stops.stop_reason, stops.stop_sequence) == ("stop_sequence", text[3:6])


def test_functions_that_must_be_called(client):
    tool = {"type": "function", **FUNCTION, "parameters": SCHEMA}
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 90, "temperature": 0}
    named = {"type": "function", "name": "person"}
    for choice in (named, "required"):
        (call,) = client.responses.create(**asked, tools=[tool], tool_choice=choice).output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"name", "age"}
    with client.responses.stream(**asked, tools=[tool], tool_choice="required") as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


@pytest.mark.slow
def test_tools_that_must_be_used(anthropics):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 90, **GREEDILY}
    asked |= {"tools": [{**FUNCTION, "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    found = anthropics.messages.create(**asked)
    assert found.stop_reason == "tool_use" and set(found.content[0].input) == {"name", "age"}
    with anthropics.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].input == found.content[0].input


def test_what_a_conversation_becomes():
    chat = Responses().chat_body(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "b"},
            ],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        }
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    assert chat["messages"] == turns
    assert chat["response_format"]["json_schema"] == {"schema": SCHEMA}
    theirs = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
    ]
    body = {"system": [{"type": "text", "text": "Be brief."}], "messages": theirs, "max_tokens": 5}
    assert Messages().chat_body(body)["messages"] == turns


@pytest.mark.parametrize(
    ("dialect", "body", "words"),
    [
        (Responses, {"input": "a", "previous_response_id": "b"}, "no response is stored"),
        (Responses, {"input": 3}, "must be a list of objects"),
        (Responses, {"input": [{"type": "image"}]}, "an item of type 'image'"),
        (Responses, {"input": [{"content": [{"type": "input_image"}]}]}, "type 'input_image'"),
        (Messages, {"messages": []}, "max_tokens is needed"),
        (Messages, {"max_tokens": 1}, "messages must be a list"),
        (Messages, {"max_tokens": 1, "messages": [{"content": [{"type": "image"}]}]}, "'image'"),
    ],
)
def test_refused(dialect, body, words):
    with pytest.raises(UserError, match=words):
        dialect().chat_body(body)


@pytest.mark.parametrize("url", ["/v1/responses", "/v1/messages"])
def test_a_mistake_is_refused(server, url):  # noqa: F811
    status, body = server.ask(url, {"model": "tiny", "messages": 3, "input": 3, "max_tokens": 5})
    assert status == 400 and "must be a list of objects" in body["error"]["message"]
