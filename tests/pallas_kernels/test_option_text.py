"""The grammar of options that are text: what is read, and one kind of message for each mistake."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.option_text import (
    number,
    one_of,
    parse_option,
    parse_pairs,
    seconds,
    share,
    unknown,
    whole,
    words,
    yes,
)

SETTINGS = {
    "steady": {},
    "timed": {"rate": seconds, "part": share, "cells": whole(1), "by": one_of("layers", "experts")},
}

WORDS = st.text("abcdefghij-_/.0123456789", min_size=1)


def read(text):
    return parse_option("speed", text, SETTINGS, paths=("steady",), known=("recorded=TRACE",))


def test_a_name_alone_has_no_path_and_no_settings():
    assert read("steady") == ("steady", None, {})


def test_a_path_may_hold_equal_signs_and_commas():
    assert read("steady=a/b=c,d=e.npz") == ("steady", "a/b=c,d=e.npz", {})


def test_spaces_around_words_are_no_part_of_them():
    found = read(" timed , rate = 20us ,part=25%,cells=3,by=layers")
    assert found == ("timed", None, {"rate": 20e-6, "part": 0.25, "cells": 3, "by": "layers"})


@given(st.dictionaries(WORDS, WORDS, min_size=1))
def test_pairs_are_read_as_they_were_written(pairs):
    text = ",".join(f"{key}={value}" for key, value in pairs.items())
    assert parse_pairs("it", text, dict.fromkeys(pairs, str)) == pairs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stedy", "unknown speed 'stedy', did you mean 'steady'?; known: steady, timed, recorded="),
        ("x", "unknown speed 'x'; known: steady, timed, recorded=TRACE"),
        ("timed=FILE", "speed 'timed' takes no file; leave out =FILE"),
        ("timed,rat=1s", "'timed' has no setting 'rat=1s', did you mean 'rate'?; known: rate=…"),
        ("timed,rate", "speed 'timed': rate needs a value; write rate=…"),
        ("steady,rate=1s", "speed 'steady' has no setting 'rate=1s'; known: none"),
        ("timed,rate=1s,rate=2s", "speed 'timed': rate is given twice; leave one of them out"),
        ("timed,rate=fast", "rate='fast' is not a time; write 20us, 1.5ms or 0.002s"),
        ("timed,part=2", "part='2' is not a share from 0 to 1 or in %"),
        ("timed,cells=0", "cells='0' is not a whole number, 1 or more"),
        ("timed,by=layer", "by='layer' is not one of layers, experts, did you mean 'layers'?"),
    ],
)
def test_each_mistake_has_its_message(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(text)


def test_readers():
    times = [seconds(text) for text in ("20us", "1.5ms", "2s", "3ns", "0.5")]
    assert times == [20e-6, 1.5e-3, 2.0, 3e-9, 0.5] and seconds("20 µs") == 20e-6
    assert words("probs + embedding") == ("probs", "embedding")
    assert (share("0.25"), share("25%"), number("1e-3")) == (0.25, 0.25, 1e-3)
    assert (yes("true"), yes("false"), whole()("0")) == (True, False, 0)
    for reader, text in ((yes, "1"), (number, "x"), (whole(), "-1"), (seconds, "1h"), (share, "x")):
        with pytest.raises(ValueError, match=r"a (time|number|whole number|share)|true or false"):
            reader(text)


def test_no_word_is_offered_where_none_is_near():
    assert unknown("op", "attention", ["linear", "plan"]) == (
        "unknown op 'attention'; known: linear, plan"
    )
