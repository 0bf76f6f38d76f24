"""A server under many streams, malformed requests and random JSON schemas.

python -m scripts.check server [--streams 100] [--malformed 10000] [--schemas 500] [--seed 0]

Streams: requests at once, a third of which go away at a random moment; the finished texts must be
those of LLM.generate, and at the end every row and page must be free. Malformed: random changes of
bytes, lengths, headers and encodings of valid requests, and slow senders; no answer may be a server
error, and a good request among them must get its own text. Schemas: answers at temperature 1 must
be valid by jsonschema if they ended by themselves. Exit status 1 where something is not so.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx2 as httpx
import jsonschema
import uvicorn

from moejax import LLM, AsyncLLM, SamplingParams
from moejax.serve.http.app import make_app
from scripts.parts.commands import new_parser, refusing

COMPLETIONS = "/v1/completions"
PROMPTS = ("The old house", "Once upon a time", "A fox", "Tell me", "What is 3 times 14?")
_URLS = (
    *(COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/tokenize", "/live/budget", "/none"),
)
_FIELDS = (
    *("prompt", "max_tokens", "temperature", "n", "stop", "seed", "logprobs", "stream", "tools"),
    *("response_format", "structured_outputs", "messages", "input", "zz", "logit_bias"),
)


class Fault(Exception):
    """Something that must not be."""


@contextmanager
def served(model: str) -> Iterator[tuple[LLM, int]]:
    """Yields a model and the port at which it is served."""
    with LLM(model, expert_budget="25%", progress=False, max_model_len=512, max_num_seqs=16) as llm:
        engine = AsyncLLM(llm)
        bound = socket.create_server(("127.0.0.1", 0), backlog=512)
        config = uvicorn.Config(make_app(llm, engine, "m"), log_level="critical", access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield llm, bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            asyncio.run(engine.close())


def body_of(chance: random.Random) -> dict[str, Any]:
    sampling = {"temperature": chance.choice((0, 0.7, 1.0)), "seed": chance.randrange(1000)}
    return {
        "prompt": chance.choice(PROMPTS),
        "max_tokens": chance.randrange(1, 120),
        **sampling,
        "ignore_eos": chance.random() < 0.5,
    }


def texts_of(llm: LLM, bodies: Sequence[dict[str, Any]]) -> list[str]:
    params = [SamplingParams(**{k: v for k, v in b.items() if k != "prompt"}) for b in bodies]
    outputs = llm.generate([b["prompt"] for b in bodies], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


# ---- many streams


async def stream_all(
    port: int, bodies: Sequence[dict[str, Any]], texts: Sequence[str], chance: random.Random
) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    leaves = [chance.random() if chance.random() < 1 / 3 else None for _ in bodies]

    async def one(client: httpx.AsyncClient, i: int) -> None:
        text, length = "", max(len(texts[i]), 1)
        async with client.stream("POST", COMPLETIONS, json=bodies[i] | {"stream": True}) as answer:
            if answer.status_code != 200:
                raise Fault(f"a stream was answered with {answer.status_code}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                leave = leaves[i]
                if leave is not None and len(text) >= leave * length:
                    counts["cancelled"] += 1
                    return
        if text != texts[i]:
            raise Fault(f"stream {i} has another text than generate: {bodies[i]}")
        counts["finished"] += 1

    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(len(bodies))))
    return counts


def check_free(llm: LLM, seconds: float = 60) -> None:
    """Raises Fault if rows or pages are still held after that time."""
    scheduler, until = llm.engine.scheduler, time.monotonic() + seconds
    while scheduler.running or scheduler.cache.available != scheduler.arena.pages:
        if time.monotonic() > until:
            raise Fault(f"{len(scheduler.running)} requests still hold rows or pages")
        time.sleep(0.05)


# ---- malformed requests


def malformed(chance: random.Random) -> tuple[bytes, bool]:
    """Returns the bytes of a request that is wrong somewhere, and whether to send it slowly."""
    url = chance.choice(_URLS)
    fields: dict[str, Any] = {"prompt": "A fox", "max_tokens": 3, "model": "m"}
    strange = (None, -1, 10**400, [], {}, "x" * 5000, "\ud800", True, [[[]]], float("1e308"), "🦊")
    for _ in range(chance.randrange(3)):
        name = chance.choice(_FIELDS)
        fields[name] = chance.choice(strange)
    body = json.dumps(fields).encode("utf-8", "surrogatepass")
    kind = chance.randrange(9)
    if kind == 0:
        body = body[: chance.randrange(len(body))]
    elif kind == 1:
        changed = bytearray(body)
        for _ in range(chance.randrange(1, 9)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        body = bytes(changed)
    elif kind == 2:
        body = b"[" * chance.randrange(1, 100_000)
    elif kind == 3:
        body = bytes(chance.randrange(256) for _ in range(chance.randrange(300)))
    elif kind == 4:
        body = body.decode().encode(chance.choice(("utf-16", "utf-32", "latin-1")), "replace")
    length = len(body)
    if kind == 5:
        length = chance.choice((0, length - 1, length + 50, -5, 10**15))
    headers = [
        f"{chance.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'X' * 50))} {url} HTTP/1.1",
        "Host: a",
        f"Content-Type: {chance.choice(('application/json',) * 5 + ('text/plain', ''))}",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    if kind == 6:
        headers.append(f"{chance.choice(('Expect', 'X', 'Transfer-Encoding'))}: chunked")
    if kind == 7:
        headers.append("A: " + "b" * chance.randrange(100_000))
    raw = "\r\n".join(headers).encode() + b"\r\n\r\n" + body
    return raw, kind == 8 and chance.random() < 0.02


def send(port: int, raw: bytes, slowly: bool) -> str:
    """Sends bytes. Returns the status, or how the connection ended."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with suppress(OSError):
            if slowly:
                for i in range(0, min(len(raw), 200), 20):
                    connection.sendall(raw[i : i + 20])
                    time.sleep(0.05)
            else:
                connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        try:
            head = connection.recv(64)
        except ConnectionError:
            return "reset"
        except TimeoutError:
            raise Fault(f"no answer within 20 seconds to {raw[:200]!r}") from None
    return head.split()[1].decode() if head.startswith(b"HTTP/") else "closed"


def attack(port: int, count: int, chance: random.Random, good: dict, text: str) -> Any:
    counts: collections.Counter = collections.Counter()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for i in range(count):
            raw, slowly = malformed(chance)
            status = send(port, raw, slowly)
            counts[status] += 1
            if status.startswith("5"):
                raise Fault(f"a server error ({status}) for {raw[:500]!r}")
            if i % 100 == 0:
                answer = client.post(COMPLETIONS, json=good)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != text:
                    raise Fault(f"a good request got {answer.status_code}: {answer.text[:300]}")
                counts["good"] += 1
    return counts


# ---- schemas


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ("string", "integer", "number", "boolean", "enum", "const", "null")
    kind = chance.choice(kinds if depth > 2 else kinds + ("object", "array", "anyOf") * 2)
    if kind == "object":
        names = chance.sample(
            ("name", "age", "tags", "id", "when", "a b", "ü"), chance.randint(1, 4)
        )
        return {
            "type": "object",
            "properties": {name: schema(chance, depth + 1) for name in names},
            "required": chance.sample(names, chance.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        least = chance.randint(0, 2)
        most = least + chance.randint(0, 2)
        items = schema(chance, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]}
    if kind == "string":
        ways = (
            {"maxLength": chance.randint(1, 12)},
            {"pattern": "^[a-z]{1,6}$"},
            {"format": "date"},
        )
        return {"type": "string", **chance.choice(ways)}
    if kind == "integer":
        least = chance.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 99)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 10}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 1, 2.5, None, True], chance.randint(1, 4))}
    return {"const": chance.choice(("x", 7, None))} if kind == "const" else {"type": kind}


def ask_schemas(port: int, count: int, chance: random.Random) -> collections.Counter:
    counts: collections.Counter = collections.Counter()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        for i in range(count):
            wanted = schema(chance)
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted}}
            body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 300, "seed": i}
            began = time.perf_counter()
            answer = client.post(COMPLETIONS, json=body | {"response_format": form})
            took = time.perf_counter() - began
            if answer.status_code == 400:
                counts["refused"] += 1
                continue
            choice = answer.json()["choices"][0]
            if choice["finish_reason"] != "stop":
                counts["cut by max_tokens"] += 1
                continue
            try:
                jsonschema.validate(json.loads(choice["text"]), wanted)
            except ValueError as error:
                raise Fault(f"{choice['text']!r} is no JSON of {wanted}: {error}") from None
            except jsonschema.ValidationError as error:
                raise Fault(f"{choice['text']!r} is not valid by {wanted}: {error}") from None
            counts["valid"] += 1
            tokens = answer.json()["usage"]["completion_tokens"]
            if tokens >= 20:
                seconds["with"].append(took / tokens)
                plain = body | {"max_tokens": tokens, "ignore_eos": True}
                began = time.perf_counter()
                client.post(COMPLETIONS, json=plain)
                seconds["without"].append((time.perf_counter() - began) / tokens)
    for name, times in seconds.items():
        if times:
            counts[f"median µs a token {name}"] = round(1e6 * sorted(times)[len(times) // 2])
    return counts


@refusing(Fault)
def main(arguments: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args(arguments)
    chance = random.Random(args.seed)
    bodies = [body_of(chance) for _ in range(args.streams)]
    good = {"prompt": "A fox", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with LLM(args.model, expert_budget="100%", progress=False, max_model_len=512) as llm:
        *texts, text = texts_of(llm, [*bodies, good])
    with served(args.model) as (llm, port):
        print("streams", dict(asyncio.run(stream_all(port, bodies, texts, chance))), flush=True)
        check_free(llm)
        print("malformed", dict(attack(port, args.malformed, chance, good, text)), flush=True)
        check_free(llm)
        print("schemas", dict(ask_schemas(port, args.schemas, chance)), flush=True)
        check_free(llm)
    return 0
