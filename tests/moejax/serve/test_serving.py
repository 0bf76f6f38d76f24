"""What holds however requests come in: by generate, as a stream, one by one, to an AsyncLLM, or as
lines of a file. Workers on Ray run generate_each: cluster/test_scale_out.py."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from moejax import AsyncLLM, SamplingParams, UserError
from moejax.errors import OutOfKV
from moejax.requests.request import GenerationRequest
from moejax.requests.tokenizer import Detokenizer
from moejax.serve.batch.job import Job, open_job

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("engine_is_free")


# ---- ways to ask: the text of each prompt, or what was refused


def refusal(call):
    try:
        return call()
    except UserError as error:
        return error


def by_generate(llm, prompts, tmp_path):
    return [
        refusal(lambda p=p: llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].text)
        for p in prompts
    ]


def by_stream(llm, prompts, tmp_path):
    return [refusal(lambda p=p: "".join(llm.stream(p, GREEDY))) for p in prompts]


def one_by_one(llm, prompts, tmp_path):
    asked = [GenerationRequest(p, GREEDY, tag=i) for i, p in enumerate(prompts)]
    found = {request.tag: output for request, output in llm.generate_each(asked)}
    return [
        found[i] if isinstance(found[i], UserError) else found[i].outputs[0].text
        for i in range(len(prompts))
    ]


def by_async(llm, prompts, tmp_path):
    async def last(served, prompt):
        return [output async for output in served.generate(prompt, GREEDY)][-1].outputs[0].text

    async def main():
        async with AsyncLLM(llm) as served:
            calls = (last(served, prompt) for prompt in prompts)
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)

    return asyncio.run(main())


def by_file(llm, prompts, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    field = {str: "prompt", list: "prompt_token_ids"}
    lines = [{"id": str(i), field[type(p)]: p} for i, p in enumerate(prompts)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with open_job(Job(str(source), str(output), sampling=sampling, on_error="skip")) as job:
        job.run(llm)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    found = {
        r["id"]: UserError(r["error"]["message"]) if r["error"] else r["text"] for r in records
    }
    return [found[str(i)] for i in range(len(prompts))]


WAYS = [by_generate, by_stream, one_by_one, by_async, by_file]
GOOD = [7, 8, 9]
BAD = [9, 10, 11]


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate([GOOD], GREEDY)[0].outputs[0].text


def only_refusal(found: list[Any], expected: str) -> str:
    """What the second of three prompts was refused with; the others are as ever."""
    first, refused, last = found
    assert first == last == expected
    assert isinstance(refused, UserError), refused
    return str(refused)


# ---- what holds for all of them


@pytest.mark.parametrize("ask", WAYS)
def test_every_way_gives_the_same_text(llm, tmp_path, ask):
    prompts = ["The old house", [5] * 100, GOOD, "Once upon a time"]
    outputs = llm.generate(prompts, GREEDY)
    assert ask(llm, prompts, tmp_path) == [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        ("", "the prompt is empty"),
        ([5, 4096], "token id 4096 is outside of the vocabulary of 4096"),
        ([-1], "outside of the vocabulary"),
        ([1] * 250, "max_model_len is 256"),
        ("x" * 100_000, "100000 characters; with a max_model_len of 256 tokens"),
    ],
    ids=["empty", "no text", "too large", "negative", "too long", "a book"],
)
def test_what_is_wrong_with_one_request_is_its_own(llm, tmp_path, expected, ask, prompt, message):
    found = ask(llm, [GOOD, prompt, GOOD], tmp_path)
    assert message in only_refusal(found, expected)


class PanicException(BaseException):
    """As pyo3's: no Exception."""


@pytest.mark.parametrize("ask", WAYS)
def test_a_bug_in_one_request_fails_that_one(llm, tmp_path, expected, monkeypatch, ask):
    """Reading its third token panics."""
    append = llm.engine._append

    def fails(request, *arguments):
        if request.prompt == BAD and len(request.output) == 2:
            raise PanicException("a bug")
        append(request, *arguments)

    monkeypatch.setattr(llm.engine, "_append", fails)
    said = only_refusal(ask(llm, [GOOD, BAD, GOOD], tmp_path), expected)
    assert "this request failed" in said and "PanicException: a bug" in said


def test_a_failed_submission_leaves_nothing(llm, monkeypatch):
    add, calls = llm.engine.add, iter(range(100))

    def fails(*arguments, **options):
        if next(calls) == 2:
            raise PanicException("in the middle")
        return add(*arguments, **options)

    monkeypatch.setattr(llm.engine, "add", fails)
    with pytest.raises(UserError, match="PanicException"):
        llm.generate([[5]], SamplingParams(n=4, max_tokens=2))


@pytest.mark.parametrize("ask", [by_generate, by_async])
def test_a_tokenizer_that_panics_fails_one_request(llm, tmp_path, expected, monkeypatch, ask):
    def decode(self, token_ids, decode=Detokenizer._decode):
        if 11 in self._context[-8:]:
            raise PanicException("index out of bounds")
        return decode(self, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", decode)
    found = ask(llm, [GOOD, BAD, GOOD], tmp_path)
    assert "PanicException: index out of bounds" in only_refusal(found, expected)


@pytest.mark.parametrize("ask", [one_by_one, by_async, by_file])
def test_requests_that_wait_for_kv_for_ever_fail_and_others_run(llm, tmp_path, monkeypatch, ask):
    step, calls = llm.engine.step, itertools.count()

    def stuck():
        if next(calls) == 3:
            raise OutOfKV("requests wait for KV pages and none can be freed")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", stuck)
        found = ask(llm, [GOOD, BAD], tmp_path)
    assert any(isinstance(one, UserError) and "wait for KV pages" in str(one) for one in found)
    (tmp_path / "again").mkdir()
    assert all(isinstance(one, str) for one in ask(llm, [GOOD, BAD], tmp_path / "again"))
