import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax
from moejax.errors import UserError
from moejax.requests.tokenizer import Detokenizer, load_tokenizer

DEMO = Path(moejax.__path__[0]) / "demo"
SPECIAL = 0  # <|endoftext|>


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer is not None
    return tokenizer


def _stream(tokenizer, chunks, prompt_ids=()):
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.finish()]


def test_load_reads_the_special_tokens(tokenizer):
    assert tokenizer.eos_token_id == SPECIAL
    assert tokenizer.decode(tokenizer.encode("The old house")) == "The old house"


def test_a_long_prompt_is_not_the_tokenizers_business(tokenizer, capfd):
    assert len(tokenizer.encode("word " * 3000)) >= 3000
    assert capfd.readouterr().err == ""


def test_nothing_is_imported_before_a_tokenizer_is_loaded():
    code = "import moejax.requests.tokenizer, sys; print('transformers' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


@pytest.mark.nightly
@pytest.mark.slow
def test_loading_prints_nothing_and_needs_no_network():
    code = f"from moejax.requests.tokenizer import load_tokenizer; load_tokenizer({str(DEMO)!r})"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert (result.stdout, result.stderr) == ("", "")


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


def test_a_truncated_tokenizer_or_config_is_refused(tmp_path):
    text = (DEMO / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ')
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def _chunks(draw, ids):
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=20)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=st.text(max_size=60))
def test_pieces_of_any_text_make_the_whole(tokenizer, data, text):
    ids = tokenizer.encode(text)
    pieces = _stream(tokenizer, _chunks(data.draw, ids))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
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


def test_finish_gives_what_stayed_broken(tokenizer):
    ids = tokenizer.encode("a🏚")[:-1]
    pieces = _stream(tokenizer, [[token] for token in ids])
    assert "".join(pieces[:-1]) == "a" and pieces[-1] == "\ufffd"


def test_special_tokens_are_not_text(tokenizer):
    ids = [SPECIAL, *tokenizer.encode("old"), SPECIAL, *tokenizer.encode(" house"), SPECIAL]
    assert "".join(_stream(tokenizer, [[token] for token in ids])) == "old house"


def test_the_prompt_is_context_and_not_output(tokenizer):
    prompt, ids = tokenizer.encode("The old 🏚"), tokenizer.encode(" stood é🏚")
    pieces = _stream(tokenizer, [[token] for token in ids], prompt)
    assert "".join(pieces) == " stood é🏚"


def test_the_space_after_the_prompt_is_kept_where_decoding_strips_the_first():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"▁The": 0, "▁old": 1, "▁house": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="▁The"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1, 2]) == "old house"
    assert _stream(tokenizer, [[1], [2]], prompt_ids=[0]) == [" old", " house", ""]
