"""moejax serve: OpenAI's API over sockets."""

from __future__ import annotations

import asyncio
import collections
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import uvicorn

from moejax import AsyncLLM, SamplingParams
from moejax.commands import serve as command
from moejax.commands.main import main
from moejax.serve.http import app as http_app
from moejax.serve.http import limits
from moejax.serve.http.access import LOCAL, limit_access
from moejax.serve.http.live import LiveView
from tests.conftest import REPOSITORY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{{ messages[0]['content'] }}{% if loud %}{{ '!' * loud }}{% endif %}"
MESSAGES = [{"role": "user", "content": "What is 3 times 14?"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"seed": 5, "n": 2, "max_tokens": 12, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "stop": ["the"], "max_tokens": 40}
PLAIN = [GREEDY, SAMPLED, GREEDY | PENALTIES]
LONG = {"prompt": "The old house", "temperature": 0, "max_tokens": 230, "ignore_eos": True}
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer secret"}


HARNESS_TASK = """\
task: made
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


class Served:
    """The server of this file, and what LLM.generate said before it began."""

    def __init__(self, llm, key: str | None = "secret"):
        params = [SamplingParams(**each) for each in PLAIN]
        self.texts = [
            [c.text for c in llm.generate("The old house", each)[0].outputs] for each in params
        ]
        room = llm.engine.scheduler.max_model_len - len(llm.encoder({"messages": MESSAGES})[1])
        self.answer = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=room))[0]
        self.llm, self.served = llm, AsyncLLM(llm)
        app = http_app.make_app(llm, self.served, "tiny")
        self.listen(limit_access(app, key, ["127.0.0.1", "localhost"], ["https://chat.example"]))

    def listen(self, app) -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        self.port = bound.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
        self.thread = threading.Thread(target=self.server.run, args=([bound],))
        self.thread.start()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def close(self) -> None:
        self.end()
        asyncio.run(self.served.close())

    def open(self, method: str, url: str, body: object = None, headers=HEADERS):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, url, raw, headers)
        return connection, connection.getresponse()

    def ask(self, url: str, body: object = None, method: str = "POST", headers=HEADERS):
        """(status, what was answered)."""
        connection, response = self.open(method, url, body, headers)
        raw = response.read()
        connection.close()
        return response.status, json.loads(raw) if raw else None

    def events(self, url: str, body: dict) -> list[dict]:
        connection, response = self.open("POST", url, body | {"stream": True})
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, last = response.read().decode().split("\n\n")[:-1]
        connection.close()
        assert last == "data: [DONE]" and all(line.startswith("data: {") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def wait_until_free(self) -> None:
        """Until no request has rows or pages."""
        until = time.monotonic() + 20
        free = self.llm.engine.scheduler.free_rows
        while asyncio.run(self.served.stats())["kv"]["pages"]["running"] or len(free) < 4:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.fixture(scope="module")
def server(llm):
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template, before = TEMPLATE, tokenizer.chat_template
    server = Served(llm)
    yield server
    server.close()
    tokenizer.chat_template = before


@pytest.fixture(autouse=True)
def everything_is_free(server):
    yield
    server.wait_until_free()
    assert sorted(server.llm.engine.scheduler.free_rows) == [0, 1, 2, 3]


def joined(events: list[dict], take) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + take(choice)
    return [texts[i] for i in sorted(texts)]


@pytest.mark.parametrize(("number", "sampling"), [*enumerate(PLAIN)])
def test_the_text_of_generate_whole_and_streamed(server, number, sampling):
    body = {"prompt": "The old house", "logprobs": 2, **sampling}
    status, whole = server.ask(COMPLETIONS, body)
    assert (status, whole["object"], whole["model"]) == (200, "text_completion", "tiny")
    assert [choice["text"] for choice in whole["choices"]] == server.texts[number]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    options = {"stream_options": {"include_usage": True}}
    *events, last = server.events(COMPLETIONS, body | options)
    assert joined(events, lambda choice: choice["text"]) == server.texts[number]
    assert last["choices"] == [] and all(event["usage"] is None for event in events)
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert [v for part in parts for v in part["logprobs"][name]] == values
        ends = [part["finish_reason"] for part in parts]
        assert ends == [None] * (len(parts) - 1) + [choice["finish_reason"]]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


PERSON = {"type": "function", "function": {"name": "person", "parameters": SCHEMA}}


@pytest.mark.parametrize("choice", ["required", PERSON])
def test_a_tool_that_must_be_called(server, choice):
    import openai  # two seconds

    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 90, "tools": [PERSON]}
    body |= {"model": "tiny", "tool_choice": choice}
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="secret") as client:
        (found,) = client.chat.completions.create(**body).choices
        chunks = [*client.chat.completions.create(stream=True, **body)]
    assert found.finish_reason == "tool_calls" and found.message.content is None
    (call,) = found.message.tool_calls
    assert call.function.name == "person"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    (streamed,) = (call for delta in deltas for call in delta.tool_calls or ())
    assert streamed.function.arguments == call.function.arguments
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_model_without_a_chat_template_completes(server, monkeypatch):
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", None)
    second = Served.__new__(Served)
    second.llm, second.served = server.llm, server.served
    second.listen(http_app.make_app(server.llm, server.served, "tiny"))
    status, found = second.ask(COMPLETIONS, {"prompt": "The old house", **GREEDY})
    refused = second.ask(CHAT, {"messages": MESSAGES})
    second.end()
    assert status == 200 and [c["text"] for c in found["choices"]] == server.texts[0]
    assert refused[0] == 400 and "no chat template" in refused[1]["error"]["message"]


def test_reasoning_is_apart_from_the_answer(server, monkeypatch):
    template = "{{ messages[0]['content'] }}{% if tools %}{{ tools | tojson }}{% endif %}<think>"
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", template)
    second = Served.__new__(Served)
    second.llm, second.served = server.llm, server.served
    second.listen(http_app.make_app(server.llm, server.served, "tiny"))
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "tools": [PERSON]}
    (choice,) = second.ask(CHAT, body)[1]["choices"]
    streamed = second.events(CHAT, body)
    # This model does not end its thought.
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"]
    pieces = joined(streamed, lambda c: c["delta"].get("reasoning_content") or "")
    assert pieces == [choice["message"]["reasoning_content"]]
    assert "person" in server.llm.encoder._render({"messages": MESSAGES, "tools": [PERSON]})
    second.end()


def snapshots(server: Served, count: int) -> list[tuple[str, dict]]:
    connection, response = server.open("GET", "/live")
    assert response.status == 200
    found = []
    while len(found) < count:
        name = response.readline().decode().strip().removeprefix("event: ")
        data = response.readline().decode().strip().removeprefix("data: ")
        assert response.readline() == b"\n"
        found.append((name, json.loads(data)))
    connection.close()
    return found


def test_snapshots_follow_the_engine(server):
    (kind, about), (_, first) = snapshots(server, 2)
    assert kind == "model" and about["model"] == "tiny" and about["chat"] and about["movable"]
    layers, experts = about["layers"], about["experts"]
    assert len(first["slots"]) == about["slots"] and len(first["chosen"]) == layers * experts
    ahead = threading.Thread(target=server.ask, args=(COMPLETIONS, LONG))
    ahead.start()
    states = [state for _, state in snapshots(server, 6)[1:]]
    ahead.join()
    for state in states:
        held = {slot for slot in state["slots"] if slot >= 0}
        assert held == {i for i, kind in enumerate(state["resident"]) if kind}
        assert len(held) <= sum(state["cells_per_layer"])
        assert 0 <= state["device_seconds"] <= state["seconds"] + 1
    assert states[-1]["device_seconds"] > 0 < states[-1]["time"] - first["time"]
    config = server.llm.engine.runner.config
    counts = np.reshape(states[-1]["chosen"], (layers, experts)).sum(axis=1)
    assert (counts == counts[0]).all() and counts[0] % config.num_experts_per_tok == 0


def test_the_budget_moves_while_text_comes(server):
    (_, about), (_, before) = snapshots(server, 2)
    cells = sum(before["cells_per_layer"])
    expected = server.ask(COMPLETIONS, LONG)[1]["choices"][0]["text"]
    found = []
    asking = threading.Thread(target=lambda: found.append(server.ask(COMPLETIONS, LONG)))
    asking.start()
    most = about["slots"] - about["least_kv_slots"]
    for wanted in (about["layers"], most, cells):
        assert server.ask("/live/budget", {"expert_slots": wanted})[0] == 202
        until = time.monotonic() + 20
        while sum(server.llm.engine.scheduler.arena.cell_row.flat >= 0) != wanted:
            assert time.monotonic() < until
            time.sleep(0.02)
    asking.join()
    assert found[0][1]["choices"][0]["text"] == expected
    for wrong in (-1, most + 1, "5", None, True):
        status, body = server.ask("/live/budget", {"expert_slots": wrong})
        assert status == 400 and "expert_slots must be an integer" in body["error"]["message"]


def test_too_many_pages_are_refused(server, monkeypatch):
    monkeypatch.setattr("moejax.serve.http.live.MOST_VIEWERS", 0)
    status, body = server.ask("/live", method="GET")
    assert status == 503 and "pages are open" in body["error"]["message"]


def test_what_no_page_looks_at_is_not_counted(server):
    snapshots(server, 3)
    until = time.monotonic() + 20
    while server.llm.engine.listener is not None:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_pages_share_a_snapshot(server):
    live = LiveView(server.llm, server.served, "tiny", lambda: False)

    async def both():
        return await asyncio.gather(*(server.served.between_steps(live._take) for _ in "ab"))

    first, second = asyncio.run(both())
    server.served.tell(live._rest)
    assert first is second


def test_of_two_budgets_at_once_one_wins(server, monkeypatch):
    engine, moves = server.llm.engine, collections.deque(maxlen=100)

    def move(cells, kv_slots) -> bool:
        moves.append(kv_slots)
        return False  # never there

    monkeypatch.setattr(engine, "move_budget", move)
    monkeypatch.setattr("moejax.serve.http.live.TICK_S", 0.01)
    live = LiveView(server.llm, server.served, "tiny", lambda: False)

    async def both() -> None:
        await asyncio.gather(live.move_budget(5), live.move_budget(6))
        await asyncio.sleep(0.1)
        moves.clear()
        await asyncio.sleep(0.2)
        live._moving.cancel()

    asyncio.run(both())
    assert len({*moves}) == 1


def test_an_open_page_does_not_keep_a_server_that_ends(server):
    second = Served.__new__(Served)
    ending = lambda: second.server.should_exit  # noqa: E731
    second.listen(http_app.make_app(server.llm, server.served, "tiny", "auto", ending))
    connection, response = second.open("GET", "/live")
    assert response.readline() == b"event: model\n"
    second.server.should_exit = True
    second.thread.join(20)
    ended = not second.thread.is_alive()
    connection.close()
    assert ended


def test_metrics_count_requests_under_vllms_names(server):
    def read() -> dict[str, float]:
        connection, response = server.open("GET", "/metrics")
        lines = response.read().decode().splitlines()
        connection.close()
        found: dict[str, float] = collections.defaultdict(float)
        for line in lines:
            if line[0] != "#":
                found[line.split("{")[0]] += float(line.split()[-1])
        return found

    before = read()
    server.ask(COMPLETIONS, {"prompt": "The old house", **GREEDY})
    half = read()
    server.events(COMPLETIONS, {"prompt": "The old house", **GREEDY})
    after = read()
    # An answer that is not streamed also has a first token, before its last one.
    first, whole = (
        half[name] - before[name]
        for name in (
            "vllm:time_to_first_token_seconds_sum",
            "vllm:e2e_request_latency_seconds_sum",
        )
    )
    assert 0 < first < 0.8 * whole
    for name, more in (
        ("vllm:generation_tokens_total", 24),
        ("vllm:time_to_first_token_seconds_count", 2),
        ("vllm:e2e_request_latency_seconds_count", 2),
        ("vllm:request_success_total", 2),
    ):
        assert after[name] - before[name] == more
    assert after["vllm:num_requests_running"] == 0 and after["moejax:expert_slots"] > 0


@pytest.mark.parametrize("given", [{"prompt": "The old house"}, {"messages": MESSAGES}])
def test_tokenize(server, given):
    status, found = server.ask("/tokenize", {"model": "tiny", **given})
    ids = server.llm.encoder(given.get("prompt") or given)[1]
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert server.ask("/tokenize", {"text": "a"})[0] == 400


def test_the_page_needs_no_key_and_names_nothing_outside(server):
    for url, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "javascript")):
        connection, response = server.open("GET", url, headers={})
        text = response.read().decode()
        connection.close()
        assert response.status == 200 and kind in response.headers["content-type"]
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "://" not in text
    assert server.ask("/live", method="GET", headers={})[0] == 401


def test_an_answer_by_a_schema(server):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "response_format": form}
    (choice,) = server.ask(CHAT, body)[1]["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert set(found) == {"name", "age"} and found["age"] in (1, 2)
    streamed = joined(server.events(CHAT, body), lambda c: c["delta"].get("content") or "")
    assert streamed == [choice["message"]["content"]]


def test_a_chat_ends_with_the_context_unless_a_number_is_given(server):
    body = {"messages": MESSAGES, "temperature": 0}
    found = server.ask(CHAT, body | {"logprobs": True, "top_logprobs": 2})[1]
    (choice,) = found["choices"]
    expected = server.answer.outputs[0]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert len(choice["logprobs"]["content"]) == len(expected.token_ids)
    assert found["usage"]["prompt_tokens"] == len(server.answer.prompt_token_ids)
    events = server.events(CHAT, body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(events, lambda choice: choice["delta"]["content"]) == [expected.text]

    endless = body | {"ignore_eos": True}
    most = server.ask(CHAT, endless)[1]["usage"]
    assert most["total_tokens"] == server.llm.engine.scheduler.max_model_len
    short = server.ask(CHAT, endless | {"max_completion_tokens": 3})[1]["usage"]
    assert short["completion_tokens"] == 3


def test_names_reach_the_chat_template(server):
    body = {"messages": MESSAGES, **GREEDY}
    plain = server.ask(CHAT, body)[1]["usage"]["prompt_tokens"]
    loud = server.ask(CHAT, body | {"chat_template_kwargs": {"loud": 50}})[1]
    assert loud["usage"]["prompt_tokens"] > plain


def test_cached_tokens_are_counted(server):
    body = {"prompt": list(range(20, 148)), **GREEDY}
    first, second = (server.ask(COMPLETIONS, body)[1]["usage"] for _ in range(2))
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert cached[0] == 0 < cached[1] < 128


def test_the_openai_client(server):
    import openai

    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        ask = client.chat.completions.create
        whole = ask(model="tiny", messages=MESSAGES, temperature=0)
        text = server.answer.outputs[0].text
        assert whole.choices[0].message.content == text
        with ask(model="tiny", messages=MESSAGES, temperature=0, stream=True) as stream:
            pieces = [chunk.choices[0].delta.content for chunk in stream]
        assert "".join(pieces) == text
        more = client.completions.create(
            model="tiny", prompt="The old house", temperature=0, max_tokens=12,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert [more.choices[0].text] == server.texts[0]
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            ask(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature must be in"):
            ask(model="tiny", messages=MESSAGES, temperature=9)


DEEP = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
REFUSED = [
    (COMPLETIONS, b"{", 400, None, "not JSON"),
    (COMPLETIONS, b"[]", 400, None, "not a JSON object"),
    (COMPLETIONS, b"\xff", 400, None, "not UTF-8"),
    (COMPLETIONS, b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, None, "integer string conversion"),
    ("/tokenize", b'{"prompt": ' + b"9" * 5000 + b"}", 400, None, "integer string conversion"),
    (
        *(CHAT, {"messages": [{"role": "assistant", "tool_calls": DEEP}], "max_tokens": 0}),
        *(400, "max_tokens", "at least 1"),
    ),
    (COMPLETIONS, {}, 400, None, "one of prompt"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt", "several prompts need a request each"),
    (COMPLETIONS, {"prompt": "x", "model": "gpt-4"}, 404, "model", "this server has 'tiny'"),
    (COMPLETIONS, {"prompt": "x", "model": 4}, 400, "model", "model must be a string"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 9999}, 400, None, "max_model_len"),
    (COMPLETIONS, {"prompt": "x " * 5000}, 400, None, "max_model_len"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 9999, "stream": True}, 400, None, "max_model_len"),
    (COMPLETIONS, {"prompt": "x", "stream": 1}, 400, "stream", "true or false"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, None, "needs"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"a": 1}}, 400, None, "usage"),
    (
        *(COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}),
        *(400, None, "true or false"),
    ),
    (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, None, "of a stream"),
    (COMPLETIONS, {"prompt": "x", "echo": True}, 400, "echo", "not supported"),
    (COMPLETIONS, {"prompt": "x", "session_id": "s"}, 400, "session_id", "not supported"),
    (COMPLETIONS, {"prompt": "x", "chat_template_kwargs": {}}, 400, None, "needs messages"),
    (COMPLETIONS, {"messages": MESSAGES}, 400, "messages", "is not one of /v1/completions"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools", "each of tools"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "jsn"}}, 400, "response_format", "t"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"regex": "("}}, 400, None, "unclosed"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}, 400, "reasoning_effort", "not supp"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": 5}, 400, None, "maps names"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, 400, None, "'tools'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "text"),
    ("/v1/embeddings", {"input": "x"}, 404, None, "Not Found"),
    ("/v1/models", {}, 405, None, "Method Not Allowed"),
    (COMPLETIONS, b" " * (limits.MOST_BODY + 1), 413, None, "longer than"),
]


@pytest.mark.parametrize(("url", "body", "status", "param", "message"), REFUSED)
def test_a_mistake_is_refused_as_openai_does(server, url, body, status, param, message):
    found, answer = server.ask(url, body)
    assert found == status and set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


@pytest.mark.parametrize("key", [None, "Bearer wrong", "secret", "Bearer "])
def test_a_wrong_key_is_refused_and_health_needs_none(server, key):
    headers = {"Content-Type": "application/json"} | ({"Authorization": key} if key else {})
    for url, method in (("/v1/models", "GET"), (CHAT, "POST"), ("/nowhere", "GET")):
        status, answer = server.ask(url, {} if method == "POST" else None, method, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert server.ask("/health", method="GET", headers=headers) == (200, None)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("LOCALHOST", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1]:{port}", 403),
    ],
)
def test_a_name_that_is_not_this_machine_is_refused(server, host, status):
    """A page whose own name leads here could read answers: DNS rebinding."""
    host = host.format(port=server.port)
    for url in ("/", "/v1/models"):
        connection, response = server.open("GET", url, headers=HEADERS | {"Host": host})
        text = response.read().decode()
        connection.close()
        assert response.status == status
        assert status == 200 or "this server answers to 127.0.0.1, localhost" in text


def test_pages_of_named_sites_may_read_answers(server):
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
        for method, headers in (("OPTIONS", asks), ("GET", HEADERS)):
            url = CHAT if method == "OPTIONS" else "/v1/models"
            connection, response = server.open(method, url, headers=headers | {"Origin": origin})
            response.read()
            connection.close()
            allowed = response.headers.get("access-control-allow-origin")
            assert response.status == (status if method == "OPTIONS" else 200)
            assert allowed == (origin if status == 200 else None)


def test_hosts_and_origins_of_the_command(monkeypatch):
    def given(**options):
        return SimpleNamespace(**{"host": "127.0.0.1", "allowed_hosts": None, **options})

    assert sorted(command._hosts(given()) or ()) == sorted([*LOCAL, "127.0.0.1"])
    assert command._hosts(given(host="0.0.0.0")) is None
    assert command._hosts(given(allowed_hosts="*")) is None
    assert command._hosts(given(allowed_hosts="Chat.example"))[-1] == "chat.example"
    assert command._names('["*"]') == command._names("*") == ["*"]
    assert command._names("https://a, https://b") == ["https://a", "https://b"]


def ask_by_harness(monkeypatch, folder: Path, port: int, url: str, key: str) -> dict[str, str]:
    """What `lm_eval --model local-chat-completions` (or local-completions, by the url) is answered
    by a server on this machine: question -> text."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setenv("OPENAI_API_KEY", key)
    questions = ["The old house", "It was a cold evening", "Anna said"]
    file = folder / "made.jsonl"
    file.write_text("".join(json.dumps({"q": each, "a": "x"}) + "\n" for each in questions))
    (folder / "made.yaml").write_text(HARNESS_TASK.format(file=file))
    base = f"http://127.0.0.1:{port}{url}"
    plain = ",tokenizer_backend=None,tokenized_requests=False" if url == COMPLETIONS else ""
    found = simple_evaluate(
        model="local-completions" if plain else "local-chat-completions",
        model_args=f"base_url={base},model=tiny,num_concurrent=2,max_retries=1{plain}",
        tasks=["made"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=not plain,
        log_samples=True,
    )
    answers = [sample["resps"][0][0] for sample in found["samples"]["made"]]
    return dict(zip(questions, answers, strict=True))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_the_harness_as_a_client(server, tmp_path, monkeypatch, url):
    found = ask_by_harness(monkeypatch, tmp_path, server.port, url, "secret")
    for question, text in found.items():
        asked = {"messages": [{"role": "user", "content": question}]}
        asked = asked if url == CHAT else {"prompt": question}
        _, answer = server.ask(
            url, asked | {"temperature": 0, "max_tokens": 12, "stop": ["."], "seed": 1}
        )
        choice = answer["choices"][0]
        assert (choice["message"]["content"] if url == CHAT else choice["text"]) == text


def test_other_types_of_body_are_refused(server):
    """A page of another site may send them from a browser without asking."""
    headers = HEADERS | {"Content-Type": "text/plain"}
    assert server.ask(COMPLETIONS, {"prompt": "x"}, headers=headers)[0] == 415
    headers = HEADERS | {"Sec-Fetch-Site": "cross-site"}
    assert server.ask("/live", method="GET", headers=headers)[0] == 403


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(server, stream):
    before = asyncio.run(server.served.stats())["generated_tokens"]
    # 64 sequences in 4 rows would take long.
    raw = json.dumps(LONG | {"n": 64, "temperature": 1, "stream": stream}).encode()
    head = "".join(f"{k}: {v}\r\n" for k, v in (HEADERS | {"Content-Length": len(raw)}).items())
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + raw
        )
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        while asyncio.run(server.served.stats())["generated_tokens"] < before + 3:
            time.sleep(0.001)
    server.wait_until_free()
    assert asyncio.run(server.served.stats())["generated_tokens"] < before + 32 * LONG["max_tokens"]


def test_malformed_requests_change_nothing_for_others(server):
    rng = random.Random(7)
    good = json.dumps({"prompt": "The old house", "stream": True, **GREEDY}).encode()
    bodies = [REFUSED[i % 29][1] for i in range(20)]
    for _ in range(30):  # bytes that are changed, or an end that is missing
        raw = bytearray(good)
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        bodies.append(bytes(raw[: rng.randrange(1, len(raw))]))
    found = []
    other = threading.Thread(target=lambda: found.append(server.ask(COMPLETIONS, LONG)))
    other.start()
    statuses = {server.ask(rng.choice((CHAT, COMPLETIONS)), body)[0] for body in bodies}
    other.join()
    assert statuses <= {400, 404}
    status, answer = found[0]
    alone = server.ask(COMPLETIONS, LONG)[1]
    assert status == 200 and answer["choices"] == alone["choices"]


def test_a_failure_of_the_server_is_no_mistake_of_the_client(server, monkeypatch):
    def fail(*args):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(http_app, "read_asked", fail)
    status, answer = server.ask(COMPLETIONS, {"prompt": "x"})
    assert status == 500 and answer["error"]["type"] == "server_error"
    assert "fire" not in json.dumps(answer)


def test_what_the_command_needs_is_said_before_the_model_is_read(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "(Address already in use); choose another --host or --port" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve"]) == 2
    assert "needs starlette, which is not installed here: pip install" in capsys.readouterr().err


def test_too_many_requests_and_one_that_takes_too_long(server, monkeypatch):
    second = Served.__new__(Served)
    few = limits.Limits(requests=64, seconds=0.5)
    second.listen(http_app.make_app(server.llm, server.served, "tiny", limits=few))
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    try:
        events = []
        body = LONG | {"n": 64, "temperature": 1, "stream": True}  # 64 sequences in 4 rows
        connection, response = second.open("POST", COMPLETIONS, body)
        assert second.ask(COMPLETIONS, {"prompt": "x"})[0] == 503
        assert second.ask(COMPLETIONS, {"prompt": "x", "n": 65})[0] == 400
        events = [e for e in response.read().decode().split("\n\n") if '"error"' in e]
        assert len(events) == 1 and "the answer took more than 0.5 s" in events[0]
        connection.close()
        assert second.ask(COMPLETIONS, body | {"stream": False})[0] == 504
        with socket.create_connection(("127.0.0.1", second.port)) as slow:
            head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
            slow.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        server.wait_until_free()
        assert second.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200
    finally:
        second.end()


def test_a_time_out_within_an_answer_is_not_the_limits():
    async def answer(wait):
        await asyncio.sleep(wait)
        raise TimeoutError("of its own")
        yield

    async def read(seconds, wait):
        return [each async for each in limits.Limits(seconds=seconds).within(answer(wait))]

    for seconds in (None, 60.0):
        with pytest.raises(TimeoutError, match="of its own"):
            asyncio.run(read(seconds, 0))
    with pytest.raises(limits.Refusal, match=r"more than 0\.01 s"):
        asyncio.run(read(0.01, 5))


def test_a_body_without_them_has_the_models_sampling_defaults(server, monkeypatch):
    monkeypatch.setattr(server.llm, "_sampling", SamplingParams(top_k=1))
    body = {"prompt": "The old house", "max_tokens": 12, "ignore_eos": True}
    assert server.ask(COMPLETIONS, body)[1]["choices"][0]["text"] == server.texts[0][0]


@pytest.mark.slow
def test_sigterm_lets_running_requests_end_and_keeps_their_kv(tmp_path):
    command = [sys.executable, "-m", "moejax", "serve", "--port", "0", "--quiet"]
    command += ["--kv-dir", str(tmp_path)]
    asked = {"prompt": "The old house on the hill. " * 8, "max_tokens": 8, "temperature": 0}
    found = []
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as again:
            assert again.stderr is not None
            port = int(again.stderr.readline().rpartition(":")[2].partition("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", COMPLETIONS, json.dumps(asked), HEADERS)
            found.append(json.loads(connection.getresponse().read()))
            connection.close()
            again.send_signal(signal.SIGTERM)
            assert again.wait(60) == 0
    first, second = found
    assert second["choices"] == first["choices"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached[0] == 0 and cached[1] >= first["usage"]["prompt_tokens"] // 16 * 16 - 16 > 0
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("moejax: demo answers at http://127.0.0.1:")
        port = int(line.split(":")[3].partition("/")[0])
        assert line.endswith(f":{port}/\n")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = LONG | {"max_tokens": 900, "stream": True, "stream_options": {"include_usage": True}}
        connection.request("POST", COMPLETIONS, json.dumps(body), HEADERS)
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(ConnectionError):  # no others from now on
            socket.create_connection(("127.0.0.1", port))
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n") and '"completion_tokens": 900' in rest
        connection.close()
        assert process.wait(60) == 0
