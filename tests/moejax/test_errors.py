"""Messages are short and readable, whatever they quote."""

from __future__ import annotations

import json
import pickle

import pytest

from moejax.checkpoints.shards import SINGLE, read_header
from moejax.errors import MOST_LINE, MOST_LINES, OutOfKV, UserError, shown
from tests.moejax.checkpoints.conversions import refuses


@pytest.mark.parametrize("name", ["x" * 8_000_000, "ä" * 100_000], ids=["long", "wide"])
def test_a_message_is_short_whatever_it_quotes(name, tmp_path):
    table = {name: {"dtype": "F8_E5M2", "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(table).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text)
    message = "or in bfloat16$"
    refuses(message, read_header, tmp_path / SINGLE)


def test_messages_are_cut_in_the_middle():
    assert str(UserError("short\nlines")) == "short\nlines"
    long = str(UserError("begin " + "x" * 10**6 + " end"))
    assert len(long) == MOST_LINE and long.startswith("begin x") and long.endswith("x end")
    lines = str(UserError("\n".join(map(str, range(1000))))).split("\n")
    assert len(lines) == MOST_LINES + 1 and lines[0] == "0" and lines[-1] == "999"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("a\n", r"'a\n'"),
        (1 << 40_000, "an enormous number"),
        ("x" * 99, "'" + "x" * 76 + "..."),
    ],
    ids=["number", "text", "enormous", "long"],
)
def test_values_in_messages(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("text", ["short", "x" * 3000, "\n".join(map(str, range(99))), ""])
def test_an_error_is_the_same_after_pickling(text):
    for kind in (UserError, OutOfKV):
        error = kind(text)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and again.args == error.args
