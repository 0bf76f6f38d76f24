"""Tokenizers of GGUF files give the token ids of those that the files were made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

import moejax
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.requests.gguf_tokenizer import MOST_ADDED
from moejax.requests.tokenizer import load_tokenizer
from tests.moejax.gguf_models import gguf_model

DEMO = Path(moejax.__path__[0]) / "demo"
TEXTS = [
    *("", " ", "a", "  a  model\n\n of\t", "don't 1234 !!\r\n", "a" * 50, "x ▁y"),
    *("héllo 世界 🙂 e\u0301", "\x00\x7f\ufffd ſ İ", " the mixture of the experts", "<|user"),
    *("<|user|>hi<|end|>  <|endoftext|>", "<s>hi</s>  the <unk>", "\u3000 \u00a0\u2028x"),
]
MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "世界"}]

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write(path, edit, architecture="qwen3moe"):
    writer = gguf.GGUFWriter(path, architecture)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(writer):
    """The demo's tokenizer, as llama.cpp's converter writes it."""
    table = json.loads((DEMO / "tokenizer.json").read_text())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    vocabulary = table["model"]["vocab"]
    tokens, added = sorted(vocabulary, key=vocabulary.get), {t["id"] for t in table["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in added else NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in table["model"]["merges"]])
    writer.add_eos_token_id(vocabulary[config["eos_token"]])
    writer.add_pad_token_id(vocabulary[config["pad_token"]])
    writer.add_chat_template(config["chat_template"])


def test_a_byte_level_vocabulary_gives_the_ids_and_texts_of_its_tokenizer(tmp_path):
    found, wanted = load_tokenizer(write(tmp_path / "m.gguf", byte_level)), load_tokenizer(DEMO)
    assert found.get_vocab() == wanted.get_vocab()
    assert dict(found.special_tokens) == dict(wanted.special_tokens)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert found.encode(text) == ids, text
        for skip in (False, True):
            assert found.decode(ids, skip) == wanted.decode(ids, skip), text
    assert found.chat_template == wanted.chat_template
    for prompt in (False, True):
        mine, other = (
            each.whole().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
            for each in (found, wanted)
        )
        assert mine == other and "<|user|> hi <|end|>" in mine


PIECES = [
    *("▁t", "he", "▁the", "▁m", "▁a", "od", "el", "▁mod", "▁model", "▁o", "▁of", "er", "ex"),
    *("▁▁", "▁▁▁▁", "pert", "pe", "rt", "expert", "▁ex", "▁expert", "ts", "ix", "ur", "ure"),
]


def sentencepiece(prefix: bool):
    """What writes a vocabulary with scores, and the tokenizer of Llama 2's form that it is of."""
    letters = sorted({letter for piece in PIECES for letter in piece} | {*"abcdehilstuxyz18!'"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES, *letters]
    ids = {token: i for i, token in enumerate(tokens)}
    assert len(ids) == len(tokens)
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in PIECES
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    unknown = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Backend(models.BPE(vocab=ids, merges=pairs, **unknown))
    spaces = normalizers.Replace(" ", "▁")
    both = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.normalizer = both if prefix else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)][: 3 + prefix])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])

    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)])
        types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        writer.add_token_types([*types, *[NORMAL] * (len(tokens) - len(types))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if not prefix:
            writer.add_add_space_prefix(False)
        writer.add_chat_template(
            "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        )

    return edit, tokenizer


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_gives_the_ids_and_texts_of_its_tokenizer(prefix, tmp_path):
    edit, wanted = sentencepiece(prefix)
    found = load_tokenizer(write(tmp_path / "m.gguf", edit, "llama"))
    assert found.get_vocab() == wanted.get_vocab()
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert found.encode(text) == [1, *ids], text  # llama.cpp begins with bos by default
        assert found.encode(text, add_special_tokens=False) == ids, text
        for skip in (False, True):
            assert found.decode([1, *ids], skip) == wanted.decode([1, *ids], skip), text
    said = found.whole().apply_chat_template(MESSAGES, tokenize=False)
    assert said == "<s>[ hi ][世界]"


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_tokens_are_added_around_a_text_as_the_file_says(bos, eos, tmp_path):
    def edit(writer):
        byte_level(writer)
        writer.add_bos_token_id(3)
        writer.add_add_bos_token(bos)
        writer.add_add_eos_token(eos)

    found = load_tokenizer(write(tmp_path / "m.gguf", edit))
    plain = load_tokenizer(DEMO).encode("a model")
    assert found.encode("a model") == [3] * bos + plain + [0] * eos
    assert found.encode("a model", add_special_tokens=False) == plain


def around(writer):
    """A byte-level vocabulary with bos and eos around each text."""
    byte_level(writer)
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "edit"),
    [
        ("Qwen3Moe", byte_level),
        ("Qwen3Moe", around),
        ("Mixtral", sentencepiece(True)[0]),
        ("Mixtral", sentencepiece(False)[0]),
    ],
    ids=["bytes", "around", "pieces", "pieces without prefix"],
)
def test_convert_keeps_tokenizer_and_chat_template(family, edit, tmp_path):
    path, converted = tmp_path / "m.gguf", tmp_path / "converted"
    tokens = len(load_tokenizer(write(path, edit, "llama")).get_vocab())
    gguf_model(path, family, edit=edit, vocab_size=tokens)
    assert main(["convert", str(path), str(converted)]) == 0
    path = path.rename(tmp_path / "elsewhere.gguf")  # the directory is enough
    found, wanted = load_tokenizer(converted), load_tokenizer(path)
    assert found.get_vocab() == wanted.get_vocab()
    assert dict(found.special_tokens) == dict(wanted.special_tokens)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert found.encode(text) == ids, text
        plain = [each.encode(text, add_special_tokens=False) for each in (found, wanted)]
        assert plain[0] == plain[1], text
        for skip in (False, True):
            assert found.decode(ids, skip) == wanted.decode(ids, skip), text
    assert found.chat_template == wanted.chat_template
    said, other = (
        each.whole().apply_chat_template(MESSAGES, tokenize=False) for each in (found, wanted)
    )
    assert said == other and "世界" in said
    assert load_config(converted).eos_token_ids == load_config(path).eos_token_ids


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_llama_3s_vocabularies_take_whole_words_and_begin_with_bos(pre, tmp_path):
    def edit(writer):
        byte_level(writer)
        tokens = writer.kv_data[0].pop("tokenizer.ggml.tokens").value
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_token_list([*tokens, "zqzq"])  # which no merges make
        writer.add_tokenizer_pre(pre)
        writer.add_bos_token_id(3)

    found = load_tokenizer(write(tmp_path / "m.gguf", edit)).encode("zqzq 1")
    z, q = (load_tokenizer(DEMO).encode(letter)[0] for letter in "zq")
    rest = load_tokenizer(DEMO).encode(" 1")
    # llama.cpp's own ids (llama-cpp-python 0.3.36)
    assert found == ([3, 4096] if pre == "llama-bpe" else [z, q, z, q]) + rest


def test_a_file_without_tokens_has_no_tokenizer(tmp_path):
    assert load_tokenizer(write(tmp_path / "m.gguf", lambda writer: None)) is None


def given(key, value, kind=None):
    """Sets a value of the metadata, which the file may have."""
    return lambda writer: (
        writer.kv_data[0].pop(f"tokenizer.{key}", None),
        writer.add_key_value(f"tokenizer.{key}", value, kind or gguf.GGUFValueType.get_type(value)),
    )


REFUSED = {
    "tokens": (given("ggml.tokens", [1, 2]), r"ggml\.tokens must be a list of texts"),
    "text": (given("ggml.tokens", "abc"), r"ggml\.tokens must be a list of texts"),
    "merges": (given("ggml.merges", [1]), r"ggml\.merges has values of another type"),
    "scores": (given("ggml.scores", ["a"]), r"ggml\.scores has values of another type"),
    "few scores": (given("ggml.scores", [1.0]), r"ggml\.scores has 1 values for 4096 tokens"),
    "types": (given("ggml.token_type", [1.5]), r"ggml\.token_type has values of another type"),
    "few types": (given("ggml.token_type", [1, 3]), r"token_type has 2 values for 4096 tokens"),
    "eos": (given("ggml.eos_token_id", 4096), r"ggml\.eos_token_id is 4096 of 4096 tokens"),
    "bos": (given("ggml.bos_token_id", -1), r"ggml\.bos_token_id is -1 of 4096 tokens"),
    "unk": (given("ggml.unknown_token_id", "a"), r"ggml\.unknown_token_id is 'a' of 4096 tokens"),
    "pad": (given("ggml.padding_token_id", 1.5), r"ggml\.padding_token_id is 1.5 of 4096 tokens"),
    "add_bos": (given("ggml.add_bos_token", "no"), r"add_bos_token is 'no', neither true nor"),
    "add_eos": (given("ggml.add_eos_token", 1), r"add_eos_token is 1, neither true nor false"),
    "prefix": (given("ggml.add_space_prefix", 0), r"add_space_prefix is 0, neither true nor"),
    "model": (given("ggml.model", "bert"), r"ggml\.model is 'bert', which is not supported"),
    "pre": (given("ggml.pre", "viking"), r"ggml\.pre is 'viking', a way to split words that is"),
    "no bos": (given("ggml.add_bos_token", True), r"ggml\.bos_token_id is missing, and texts have"),
    "merge": (given("ggml.merges", ["a"]), r"its tokenizer cannot be made \("),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_tokenizer_can_be_made_of_is_refused_by_name(case, tmp_path):
    edit, message = REFUSED[case]
    path = write(tmp_path / "m.gguf", lambda writer: (byte_level(writer), edit(writer)))
    with pytest.raises(UserError, match=rf"m\.gguf: .*{message}.*--tokenizer"):
        load_tokenizer(path)


def test_control_tokens_without_end_are_refused(tmp_path):
    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([str(i) for i in range(MOST_ADDED + 1)])
        writer.add_token_types([CONTROL] * (MOST_ADDED + 1))

    with pytest.raises(UserError, match=rf"token_type has {MOST_ADDED + 1} added tokens; at most"):
        load_tokenizer(write(tmp_path / "m.gguf", edit))
