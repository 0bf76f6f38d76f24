"""Tokenizers: what is loaded of a directory, what is refused, and text piece by piece."""

import base64
import json
import os
import pathlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax
import moejax.requests.tokenizer as tokenizer_module
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.requests.tokenizer import Detokenizer, Tokenizer, check_vocabulary, load_tokenizer

DEMO = Path(moejax.__path__[0]) / "demo"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer is not None
    return tokenizer


def _stream(tokenizer, chunks, prompt_ids=()):
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.finish()]


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    assert load_tokenizer(tmp_path) is None


def test_another_format_is_refused_by_name(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match=r"has vocab.json, merges.txt but no tokenizer.json; write"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "BPE"}}', "\x00"])
def test_a_damaged_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer files in .* cannot be read \(.+\); copy"):
        load_tokenizer(tmp_path)


def _chunks(draw, ids):
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=20)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_make_the_whole(tokenizer, data):
    # Single bytes, so broken characters, and special tokens are as likely as words. 4200 > V.
    token = st.integers(0, 4200) | st.integers(0, 256)
    ids = data.draw(st.lists(token, max_size=60))
    pieces = _stream(tokenizer, _chunks(data.draw, ids))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_held(tokenizer):
    ids = tokenizer.encode("a🏚b")
    assert len(ids) > 3
    pieces = _stream(tokenizer, [[token] for token in ids])
    assert [piece for piece in pieces if piece] == ["a", "🏚", "b"]
    assert pieces[-1] == ""


def test_the_prompt_is_context_and_not_output(tokenizer):
    prompt, ids = tokenizer.encode("The old 🏚"), tokenizer.encode(" stood é🏚")
    pieces = _stream(tokenizer, [[token] for token in ids], prompt)
    assert "".join(pieces) == " stood é🏚"


def test_the_space_after_the_prompt_is_kept_where_decoding_strips_the_first():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"▁The": 0, "▁old": 1, "▁house": 2}
    backend = Backend(models.WordLevel(words, unk_token="▁The"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.decode([1, 2]) == "old house"
    assert _stream(tokenizer, [[1], [2]], prompt_ids=[0]) == [" old", " house", ""]


def tokenizer_directory(tmp_path, **settings):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return tmp_path


def test_tokenizer_runs_no_code_and_reads_no_other_file(tmp_path):
    """Neither auto_map nor a file named elsewhere counts."""
    other = tmp_path / "tokenizer.1.0.json"
    other.write_text((DEMO / "tokenizer.json").read_text().replace("house", "mouse"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    tokenizer_directory(
        tmp_path,
        auto_map={"AutoTokenizer": ["evil.Slow", "evil.Fast"]},
        tokenizer_class="Evil",
        trust_remote_code=True,
        fast_tokenizer_files=[other.name],
        tokenizer_file=str(other),
        vocab_file="/etc/hostname",
    )
    tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(DEMO)
    assert tokenizer is not None and plain is not None
    assert tokenizer.get_vocab() == plain.get_vocab()
    assert not (tmp_path / "ran").exists()


def tiktoken_directory(path, *lines, **special):
    """Of all bytes, and lines: (token, id)."""
    tokens = [(bytes([i]), i) for i in range(256)] + list(lines)
    table = "\n".join(f"{base64.b64encode(token).decode()} {i}" for token, i in tokens)
    (path / "tiktoken.model").write_text(table)
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": special}
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_tiktoken_file_is_read_without_the_checkpoints_code(tmp_path):
    """Chinese characters are not joined with letters, and special tokens have their ids."""
    lines = [(b"ab", 256), (b"b\xe4", 257), (b" a", 258), (b"12", 259), (b"A\xcc", 260)]
    end = {"262": {"content": "<|im_end|>", "special": True}}
    tokenizer = load_tokenizer(tiktoken_directory(tmp_path, *lines, **end))
    assert tokenizer is not None
    text = "ab你 ab12345A\u0301<|im_end|><|reserved_token_261|>"
    ids = [256, *"你".encode(), 32, 256, 259, *b"345", 260, 0x81, 262, 261]
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    assert len(tokenizer.get_vocab()) == 261 + 256


@pytest.mark.parametrize(
    ("lines", "message"),
    [([(b"ab", 300)], "ids of tokens must be 0, 1, 2"), ([(b"", 256)], "cannot be read")],
)
def test_a_damaged_tiktoken_file_is_refused(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(tiktoken_directory(tmp_path, *lines))


def test_a_kept_tokenizer_is_the_same_without_transformers(tmp_path, monkeypatch):
    """Settings of tokenizer_config.json count; a changed or damaged file is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer_directory(directory, chat_template="{{ bos_token }}!", add_bos_token=True)
    text = "The old house<|endoftext|> é🏚"

    def facts(tokenizer):
        ids = tokenizer.encode(text)
        known = [*tokenizer.special_tokens.items()], tokenizer.chat_template
        return ids, tokenizer.decode(ids), tokenizer.decode(ids, True), tokenizer.get_vocab(), known

    first = load_tokenizer(directory)
    whole = first.whole()
    assert first.encode(text) == whole(text)["input_ids"]
    assert first.decode(range(300)) == whole.decode(range(300), clean_up_tokenization_spaces=False)
    (kept,) = (tmp_path / "cache" / "moejax" / "tokenizers").iterdir()
    content = kept.read_bytes()
    with monkeypatch.context() as without:
        without.setattr(tokenizer_module, "_load_whole", lambda _: pytest.fail("loaded"))
        second = load_tokenizer(directory)
        assert facts(second) == facts(first) and second.chat_template == "{{ bos_token }}!"
    second = load_tokenizer(directory)
    assert second.whole()(text)["input_ids"] == second.encode(text)
    kept.write_bytes(content[:50] + b"x" + content[51:])
    assert facts(load_tokenizer(directory)) == facts(first)
    assert kept.read_bytes() == content
    tokenizer_directory(directory, chat_template="other")
    assert load_tokenizer(directory).chat_template == "other"


def test_tokenizer_of_another_model():
    tokenizer, config = load_tokenizer(DEMO), load_config(DEMO)
    assert tokenizer is not None
    assert check_vocabulary(tokenizer, config, DEMO) is tokenizer
    assert check_vocabulary(None, config, DEMO) is None
    tokenizer.backend.add_tokens(["<more>"])
    grown = max(tokenizer.get_vocab().values())
    assert grown >= config.vocab_size
    with pytest.raises(UserError, match=f"token '<more>' with id {grown}, but config.json has voc"):
        check_vocabulary(tokenizer, config, DEMO)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("tokenizer.json", lambda p: p.symlink_to(DEMO / p.name), "a link out"),
        ("tokenizer_config.json", lambda p: p.symlink_to(DEMO / p.name), "a link out"),
        ("tokenizer.json", os.mkfifo, "a pipe"),
        ("special_tokens_map.json", pathlib.Path.mkdir, "a directory"),
    ],
)
def test_tokenizer_files_that_are_refused(tmp_path, name, edit, message):
    path = tokenizer_directory(tmp_path) / name
    path.unlink(missing_ok=True)
    edit(path)
    with pytest.raises(UserError, match=f"{name}: {message}"):
        load_tokenizer(tmp_path)
