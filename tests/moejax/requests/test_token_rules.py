"""Which tokens may come next, alone and in an engine."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from moejax import LLM, SamplingParams, StructuredOutputsParams, UserError
from moejax.models.hub import model_directory
from moejax.requests.token_rules import RuleBook
from moejax.requests.tokenizer import load_tokenizer
from moejax.step.sampler import allow
from tests.moejax.engine.scenes import open_llm

PROMPT = "Once upon a time"
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    with open_llm(expert_budget="25%") as llm:
        yield llm


def texts(llm: LLM, *params: SamplingParams) -> list[tuple[str, str | None]]:
    outputs = llm.generate([PROMPT] * len(params), [*params], use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def wanted(temperature: float = 1.0, **what: object) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=80, structured_outputs=what)


def test_the_bits_of_words_are_those_of_tokens():
    logits = np.random.default_rng(0).standard_normal((2, 70)).astype(np.float32)
    words = np.array([[-1, -1, -1], [1 << 3, -(2**31), 1 << 5]], np.int32)
    found = np.asarray(allow(logits, words))
    assert np.array_equal(found[0], logits[0])
    assert np.flatnonzero(np.isfinite(found[1])).tolist() == [3, 63, 69]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_text_fits(llm, temperature):
    lark = 'start: "go" (" " WORD){2}\nWORD: /[a-z]{3}/'
    found = texts(
        llm,
        wanted(temperature, json=OBJECT),
        wanted(temperature, regex="[0-9]{3}-[a-z]+x"),
        wanted(temperature, choice=["yes", 'no "never"']),
        wanted(temperature, grammar=lark),
        SamplingParams(temperature=temperature, seed=7, max_tokens=20),
    )
    assert [reason for _, reason in found[2:4]] == ["stop", "stop"]
    value = json.loads(found[0][0])
    assert set(value) == {"a", "b"} and value["b"] in ("x", "y")
    assert re.match("[0-9]{3}-[a-z]+", found[1][0])
    assert found[2][0] in ("yes", 'no "never"')
    assert re.fullmatch("go [a-z]{3} [a-z]{3}", found[3][0])
    # The request beside them has the tokens that it has alone.
    assert found[4:] == texts(llm, SamplingParams(temperature=temperature, seed=7, max_tokens=20))


def test_the_same_bits_at_every_budget(llm):
    params = [wanted(json=OBJECT), wanted(regex="[a-z ]{20,40}[.]")]
    with open_llm() as full:
        assert texts(full, *params) == texts(llm, *params)


def test_the_last_token_needs_no_next_one(llm):
    # Nothing can follow one character, and max_tokens ends it first.
    params = SamplingParams(
        max_tokens=1, structured_outputs={"regex": "[ab]{3}"}, bad_words=["aa", "ab", "ba", "bb"]
    )
    (text, reason) = texts(llm, params)[0]
    assert {*text} <= {"a", "b"} and reason == "length"


def test_bad_words_and_allowed_tokens(llm):
    usual = texts(llm, SamplingParams(temperature=0, max_tokens=30))[0][0]
    bad = usual.split()[:3]
    assert all(bad)
    found = texts(llm, SamplingParams(temperature=0, max_tokens=30, bad_words=bad))[0][0]
    assert not {*bad} & {*found.split()}
    ids = [20, 21, 22]
    params = SamplingParams(max_tokens=9, seed=1, allowed_token_ids=ids)
    assert {*llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids} <= {*ids}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({}, "exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"jsn": "a"}, "has no 'jsn', did you mean 'json'"),
        ({"json_object": False}, "json_object must be true"),
        ({"json": {"type": {1}}}, "no JSON schema"),
        ({"regex": 3}, "regex must be a string"),
        ({"regex": "a" * (1 << 18 | 1)}, "more than 262144 characters"),
        ({"choice": []}, "strings that are not empty"),
        ({"choice": "yes"}, "strings that are not empty"),
        (3, "must be StructuredOutputsParams"),
    ],
)
def test_refused_values(what, words):
    with pytest.raises(UserError, match=words):
        SamplingParams(structured_outputs=what)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs: "),
        (
            {"structured_outputs": {"regex": "(a" + "b" * 5000}},
            r"(?s)\Astructured_outputs: .{99,900}\Z",
        ),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "Invalid type"),
        ({"structured_outputs": {"grammar": "start: x"}}, "unknown name"),
        ({"structured_outputs": {"regex": "yes"}, "allowed_token_ids": [20]}, "leave none"),
        ({"allowed_token_ids": [1 << 20]}, "outside of the vocabulary"),
    ],
)
def test_refused_by_the_engine(llm, params, words):
    with pytest.raises(UserError, match=words):
        llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)


def test_a_request_that_min_tokens_leaves_no_token_fails_alone(llm):
    ends = {"allowed_token_ids": [20], "stop_token_ids": [20]}
    stuck = SamplingParams(**ends, min_tokens=4, max_tokens=8)
    good = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate(PROMPT, good, use_tqdm=False)[0].outputs[0].token_ids
    requests = [llm.engine.add(llm.encoder(PROMPT)[1], params) for params in (stuck, good)]
    while not llm.engine.idle:
        llm.engine.step()
    assert "leave none" in str(requests[0].error) and requests[1].output == expected


def test_every_character_can_be_a_choice():
    book = RuleBook(load_tokenizer(model_directory("demo")), 4096, [0])
    choice = ['a"', "\\", "\n", "\x00", "\x1b", "\x7f", "/", "é", "\u2028", "😀"]
    params = SamplingParams(structured_outputs={"choice": choice})
    book.prepare(params)
    assert book.rules(params) is not None


def test_the_sequences_of_a_request_share_what_is_read(monkeypatch):
    book = RuleBook(load_tokenizer(model_directory("demo")), 4096, [0])
    params = [SamplingParams(bad_words=["fox", "owl"], seed=i) for i in range(3)]
    read = []
    monkeypatch.setattr(book, "_bad", lambda params: read.append(params) or [])
    assert all(book.rules(each) for each in params) and len(read) == 1
    with pytest.raises(UserError, match="more than 65536 characters"):
        SamplingParams(bad_words=["a" * 65537])


@pytest.mark.parametrize("params", [{"allowed_token_ids": []}, {"bad_words": [""]}])
def test_refused_by_sampling_params(params):
    with pytest.raises(UserError, match="empty"):
        SamplingParams(**params)


def test_rules_need_a_tokenizer():
    book = RuleBook(None, 64, [0])
    for params in ({"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}}):
        with pytest.raises(UserError, match="need a tokenizer"):
            book.rules(SamplingParams(**params))
    assert book.rules(SamplingParams()) is None


def test_a_grammar_is_compiled_once():
    book = RuleBook(load_tokenizer(model_directory("demo")), 4096, [0])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]c"))
    first, second = book.rules(params), book.rules(params)
    assert first is not None and second is not None and len(book._compiled) == 1
    token = int(np.flatnonzero(np.unpackbits(first.words.view(np.uint8), bitorder="little"))[0])
    before = second.words.copy()
    first.push(token, [token])
    assert np.array_equal(second.words, before) and not np.array_equal(first.words, before)
