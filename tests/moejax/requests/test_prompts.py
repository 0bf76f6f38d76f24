"""Prompts to token ids: the same as the tokenizer's own, within bounds of time and memory."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

import moejax
from moejax import UserError
from moejax.models.config import load_config
from moejax.requests import bounded_process
from moejax.requests.prompts import QUICK_TEXT, PromptEncoder
from moejax.requests.tokenizer import (
    check_vocabulary,
    is_plain,
    load_tokenizer,
)

DEMO = Path(moejax.__path__[0]) / "demo"

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

MESSAGES = {"messages": [{"role": "user", "content": "The old house, é 你好"}]}


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture
def encode(tokenizer):
    encoder = PromptEncoder(tokenizer, "demo", 200_000)
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def shared():
    """One whose process stands already."""
    encoder = PromptEncoder(load_tokenizer(DEMO), "demo", 200_000)
    assert encoder._tokenizer is not None
    yield encoder
    encoder.close()


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio"])
def test_images_are_refused_by_name(encode, kind):
    """A template would write a placeholder for them."""
    parts = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(UserError, match=f"a part of type '{kind}'; moejax runs text models"):
        encode({"messages": [{"role": "user", "content": parts}]})


def test_messages_and_texts_of_any_length_have_the_tokenizers_own_ids(shared):
    tokenizer = shared._tokenizer
    tokenizer.whole().chat_template = TEMPLATE
    own = tokenizer.whole().apply_chat_template(
        MESSAGES["messages"],
        chat_template=TEMPLATE,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert shared(MESSAGES)[1] == own
    for text in ("", "The old house, é 你", "x  y\n" * QUICK_TEXT):
        assert shared(text) == (text, tokenizer.encode(text))
    process = shared._bounded._process
    shared(MESSAGES)
    assert shared._bounded._process is process


def test_a_prompt_right_after_an_interrupt_gets_a_new_process(shared, monkeypatch):
    expected = shared(MESSAGES)
    process = shared._bounded._process
    monkeypatch.setattr(process, "poll", lambda: None)  # its end is not seen yet
    shared.interrupt()
    assert shared(MESSAGES) == expected
    assert shared._bounded._process is not process


HARMONY = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages if m.role == 'system' %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}
{%- endfor %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ raise_exception('no role ' + m.role) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""
"""What gpt-oss' published template does with these messages, which is longer."""


def test_harmony_by_the_tokenizers_own_template(tmp_path):
    """Its markers are one token each, and the checkpoint's template gets what it asks for."""
    marks = [f"<|{name}|>" for name in ("start", "message", "channel", "end", "return", "call")]
    whole = load_tokenizer(DEMO).whole()
    whole.add_special_tokens({"additional_special_tokens": marks})
    whole.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(HARMONY)
    tokenizer = load_tokenizer(tmp_path)
    encode = PromptEncoder(tokenizer, "gpt-oss", 1000)
    turns = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")
    messages = [{"role": role, "content": text} for role, text in turns]
    text, ids = encode({"messages": messages})
    encode.close()
    own = tokenizer.whole().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == own and ids == tokenizer.encode(own, add_special_tokens=False)
    one = [tokenizer.get_vocab()[mark] for mark in marks]
    assert [ids.count(i) for i in one] == [6, 5, 1, 5, 0, 0]
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user" in text
    assert text.endswith("<|message|>Why?<|end|><|start|>assistant")


BOMBS = {
    "power": "{{ 10**(10**9) }}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "repeated": "{{ 'a' * 10**11 }}",
}


@pytest.mark.parametrize(
    "bomb",
    [
        # Long loops of the template's own and of a function of Jinja's end alike, and so do numbers
        # of any size: what is bound are a process's seconds and bytes.
        *("repeated", "doubling"),
        pytest.param("power", marks=pytest.mark.slow),
    ],
)
def test_a_template_ends_at_its_bound_and_the_next_one_works(shared, monkeypatch, bomb):
    monkeypatch.setattr(bounded_process, "WORK_S", 1.5)
    shared._tokenizer.whole().chat_template = BOMBS[bomb]
    began = time.monotonic()
    with pytest.raises(UserError, match="the chat template of demo refuses these messages"):
        shared(MESSAGES)
    assert time.monotonic() - began < 30
    monkeypatch.setattr(bounded_process, "WORK_S", 60)
    shared._tokenizer.whole().chat_template = TEMPLATE
    assert shared(MESSAGES)[1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages) }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template, shared):
    shared._tokenizer.whole().chat_template = template
    with pytest.raises(UserError, match="the chat template of demo refuses these messages"):
        shared(MESSAGES)


def test_no_text_is_encoded_that_cannot_fit(tokenizer):
    encode = PromptEncoder(tokenizer, "demo", 100)
    longest = max(map(len, tokenizer.get_vocab()))
    text = "x" * (100 * longest + 1)
    message = f"{len(text)} characters; with a max_model_len of 100 tokens, of which the longest"
    with pytest.raises(UserError, match=message):
        encode(text)
    for prompt in (["a"], "a b" * 100, [5] * 101, itertools.count(), {"messages": []}):
        with pytest.raises(UserError):
            encode(prompt)
    assert encode._bounded._process is None


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "plain"),
    [
        (None, None, True),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")]), None, True),
        (normalizers.Replace(" ", "▁"), pre_tokenizers.Metaspace(), True),
        (normalizers.Replace("a", "aa"), None, False),
        (normalizers.Replace(Regex("a*"), "b"), None, False),
        (None, pre_tokenizers.Split(Regex("(a|b)?c+"), "isolated"), True),
        (None, pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), False),
    ],
)
def test_which_tokenizers_are_plain(tokenizer, normalizer, pre_tokenizer, plain):
    if normalizer is not None:
        tokenizer.backend.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.backend.pre_tokenizer = pre_tokenizer
    assert is_plain(tokenizer) is plain


@pytest.fixture
def directory(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_sparse_file_is_refused_by_its_size(directory, name):
    with open(directory / name, "ab") as file:
        file.truncate(200 << 30)
    with pytest.raises(
        UserError, match=f"{name}: 214748364800 bytes are too many for a tokenizer; at most"
    ):
        load_tokenizer(directory)


@pytest.mark.parametrize("charsmap", ["////////", "/////w=="])
def test_a_map_of_characters_that_lies_about_its_length_is_refused(directory, charsmap):
    """tokenizers would end the process: it has no memory for the 4 GiB that four bytes promise."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    rule = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [rule]}
    for text in (json.dumps(tokenizer), json.dumps(tokenizer).replace("recomp", "r\\u0065comp")):
        path.write_text(text)
        with pytest.raises(UserError, match="its precompiled_charsmap is damaged"):
            load_tokenizer(directory)


def test_too_many_added_tokens_are_refused(directory):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokens = [{"id": 4096 + i, "content": f"a{i}", **flags} for i in range(70_000)]
    path.write_text(json.dumps(tokenizer | {"added_tokens": tokens}))
    with pytest.raises(UserError, match="70000 added tokens; at most 65536 are read"):
        load_tokenizer(directory)


def test_too_large_a_vocabulary_is_refused_before_it_is_read(directory):
    path = directory / "tokenizer.json"
    ids = ",".join(f'"{i:x}":{i}' for i in range((1 << 20) + 1))
    path.write_text(path.read_text().replace('"vocab": {', f'"vocab": {{{ids},', 1))
    with pytest.raises(UserError, match=r"tokenizer.json: more than 1048576 tokens"):
        load_tokenizer(directory)


def test_a_decoder_that_multiplies_text_is_refused(directory):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [rule] * 4}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"the decoder in tokenizer\.json makes text 6250000 times"):
        load_tokenizer(directory)


def test_a_token_that_is_a_book_is_refused(tokenizer):
    tokenizer.backend.add_tokens(["x" * 20_000])
    with pytest.raises(UserError, match="a token of 20000 characters; 10000 is the most"):
        check_vocabulary(tokenizer, load_config(DEMO), DEMO)
