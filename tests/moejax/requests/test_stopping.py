"""Where a sequence ends, and what of its text is shown before it has."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax
from moejax import SamplingParams
from moejax.errors import UserError
from moejax.requests.stopping import Ending, Finish
from moejax.requests.tokenizer import load_tokenizer

EOS = 0  # <|endoftext|>


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(moejax.__path__[0]) / "demo")


def _run(tokenizer, ids, **params):
    """(finish, text, tokens read, pieces): pushes until the end, streaming after every token."""
    ending = Ending(SamplingParams(**{"max_tokens": 1000, **params}), {EOS}, tokenizer)
    pieces, finish, read = [], None, 0
    for token in ids:
        read += 1
        finish = ending.push(token)
        pieces.append(ending.stream())
        if finish is not None:
            break
    ending.close()
    pieces.append(ending.stream())
    return finish, ending.text, read, pieces


def _letters(tokenizer, text):
    """Token ids that cut the text into single characters."""
    ids = [token for character in text for token in tokenizer.encode(character)]
    assert tokenizer.decode(ids) == text
    return ids


def test_end_of_sequence_and_max_tokens(tokenizer):
    ids = [*tokenizer.encode("old"), EOS, *tokenizer.encode(" house")]
    assert _run(tokenizer, ids)[:2] == (Finish("stop", None), "old")
    finish, text, read, _ = _run(tokenizer, ids, ignore_eos=True, max_tokens=len(ids))
    assert (finish, text, read) == (Finish("length", None), "old house", len(ids))
    assert _run(None, ids)[:2] == (Finish("stop", None), "")


def test_a_stop_token_is_not_text_unless_asked_for(tokenizer):
    ids = _letters(tokenizer, "abc")
    params = dict(stop_token_ids=[ids[1]])
    assert _run(tokenizer, ids, **params)[:3] == (Finish("stop", ids[1]), "a", 2)
    included = _run(tokenizer, ids, **params, include_stop_str_in_output=True)
    assert included[:2] == (Finish("stop", ids[1]), "ab")
    # The model's own end comes first, unless it is ignored.
    eos = dict(stop_token_ids=[EOS])
    assert _run(tokenizer, [EOS], **eos)[0] == Finish("stop", None)
    assert _run(tokenizer, [EOS], **eos, ignore_eos=True)[0] == Finish("stop", EOS)


def test_nothing_stops_before_min_tokens(tokenizer):
    ids = _letters(tokenizer, "abababab")
    params = dict(stop="ab", min_tokens=3)
    # The string's first character may be older than that, its last may not.
    assert _run(tokenizer, ids, **params)[:3] == (Finish("stop", "ab"), "ab", 4)
    # Nor is it looked for after exactly so many tokens (vLLM's rule).
    assert _run(tokenizer, ids, stop="ab", min_tokens=4)[:3] == (Finish("stop", "ab"), "abab", 6)
    by_token = dict(stop_token_ids=[ids[0]], min_tokens=2)
    assert _run(tokenizer, ids, **by_token)[2] == 3


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(UserError, match="stop strings need a tokenizer, and the model has none"):
        Ending(SamplingParams(stop="x"), {EOS}, None)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_text_and_shows_no_part_of_a_stop_string(tokenizer, data):
    # Few letters, so that stop strings occur, overlap and fail; single bytes and special tokens.
    letters = [tokenizer.encode(c)[0] for c in "ab "] + tokenizer.encode("é🏚")
    words = [t for w in ("aba", " bab", "é", " the") for t in tokenizer.encode(w)]
    ids = data.draw(st.lists(st.sampled_from([*letters, *words, EOS]), max_size=30))
    stop = data.draw(st.lists(st.text("ab é🏚\ufffd", min_size=1, max_size=4), max_size=3))
    include = data.draw(st.booleans())
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 4]))
    params = dict(
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        ignore_eos=data.draw(st.booleans()),
        max_tokens=data.draw(st.integers(4, 40)),
    )
    finish, text, read, pieces = _run(tokenizer, ids, **params)
    assert "".join(pieces) == text
    everything = tokenizer.decode(ids[:read], skip_special_tokens=True)
    assert everything.startswith(text)
    if finish is not None and finish.stop_reason is not None:
        reason = str(finish.stop_reason)
        assert text.endswith(reason) if include else everything[len(text) :].startswith(reason)
    else:
        assert text == everything
        # Broken bytes become text at the end, and a cancelled sequence no longer stops.
        assert min_tokens or finish is None or not any(s in text for s in stop)
    # What a stream without stop strings shows at once, one with them shows a few characters later.
    late = max(map(len, stop), default=1) - 1 if not include else 0
    plain = _run(tokenizer, ids[:read], ignore_eos=True)[3]
    for i in range(len(pieces) - 2):
        assert len("".join(pieces[: i + 1])) == max(len("".join(plain[: i + 1])) - late, 0)
