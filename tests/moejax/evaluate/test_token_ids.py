"""Token ids in files of every kind."""

from __future__ import annotations

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.evaluate.token_ids import read_token_ids

IDS = [3, 700, 65535, 4]


def saved(path, array):
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda d: (saved(d / "a.npy", np.asarray(IDS, np.int32)), "uint16"),
        lambda d: (saved(d / "a.npy", np.asarray([IDS], np.uint16)), "uint16"),
        lambda d: (written(d / "a.bin", np.asarray(IDS, "<u2").tobytes()), "uint16"),
        lambda d: (written(d / "a.bin", np.asarray(IDS, "<u4").tobytes()), "uint32"),
        lambda d: (written(d / "a.jsonl", b"[3, 700, 65535, 4]\n\n"), "uint16"),
        lambda d: (written(d / "a.jsonl", b'{"input_ids": [3, 700, 65535, 4], "x": 1}'), "uint16"),
    ],
)
def test_every_format_gives_the_same_ids(tmp_path, make):
    (document,) = read_token_ids(*make(tmp_path)).documents
    assert document.dtype == np.int64 and document.tolist() == IDS


def written(path, data):
    path.write_bytes(data)
    return path


def test_rows_and_lines_are_documents(tmp_path):
    rows = read_token_ids(saved(tmp_path / "a.npy", np.arange(6).reshape(2, 3))).documents
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    lines = read_token_ids(written(tmp_path / "a.jsonl", b'[1, 2]\n{"tokens": [3]}\n')).documents
    assert [line.tolist() for line in lines] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("name", "data", "dtype", "message"),
    [
        ("a.txt", b"1 2", "uint16", r"token ids are read from a \.npy array"),
        ("a.bin", b"", "uint16", "is empty; there is nothing to score"),
        ("a.bin", b"abc", "uint16", "has 3 bytes, no multiple of the 2 of uint16"),
        ("a.bin", b"ab", "float32", "token_dtype must be one of uint16, .*, not 'float32'"),
        ("a.npy", b"abc", "uint16", r"is no \.npy file"),
        ("a.jsonl", b"[1]\nhello", "uint16", r'line 2, is no JSON; .*\{"input_ids": \[17, 4'),
        ("a.jsonl", b'{"text": "x"}', "uint16", "line 1, is no list of token ids but"),
        ("a.jsonl", b"[true, 2]", "uint16", "line 1, is no list of token ids but"),
        ("a.jsonl", b"[9223372036854775808]", "uint16", "line 1, is no list of token ids but"),
        ("a.jsonl", b"[]", "uint16", "is empty; there is nothing to score"),
        (None, b"", "uint16", "cannot be read: No such file"),
    ],
)
def test_what_holds_no_token_ids_is_refused(tmp_path, name, data, dtype, message):
    path = tmp_path / "missing.npy" if name is None else written(tmp_path / name, data)
    with pytest.raises(UserError, match=message):
        read_token_ids(path, dtype)


@pytest.mark.parametrize("array", [np.ones(3), np.ones((1, 1, 1), int), np.array(["a"])])
def test_arrays_of_something_else_are_refused(tmp_path, array):
    with pytest.raises(UserError, match=r"holds .*; token ids are a \.npy array of integers"):
        read_token_ids(saved(tmp_path / "a.npy", array))


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(UserError, match=r"is no \.npy file"):
        read_token_ids(tmp_path / "a.npy")
