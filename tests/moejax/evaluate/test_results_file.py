"""Results of `moejax eval` in a file: whole lines, of one run's options; others are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moejax.errors import UserError
from moejax.evaluate.results_file import open_lines, read_lines, require_same_weights

ASKED = {"task": "perplexity", "window": 64, "data": ["ab"], "options": {}}


def line(step):
    return {"step": step, "asked": ASKED, "units": []}


@pytest.fixture
def path(tmp_path):
    with open_lines(str(tmp_path / "r.jsonl"), ASKED, resume=True) as lines:
        for step in (3, 7):
            lines.append(line(step))
    return tmp_path / "r.jsonl"


def test_lines_are_read_as_they_were_written(path):
    assert read_lines(str(path)) == [line(3), line(7)]
    with open_lines(str(path), ASKED, resume=True) as lines:
        assert lines.lines == [line(3), line(7)]


@pytest.mark.parametrize("kept", [1, 9, 20])
def test_a_torn_last_line_is_cut_off(path, kept):
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert read_lines(str(path)) == [line(3), line(7)]
    with open_lines(str(path), ASKED, resume=True) as lines:
        lines.append(line(9))
    assert path.read_bytes().startswith(whole)
    assert read_lines(str(path)) == [line(3), line(7), line(9)]


def test_a_torn_first_line_is_cut_off(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"st')
    with open_lines(str(path), ASKED, resume=True) as lines:
        assert lines.lines == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"window": 32}, "has results of another window: 64, and this run has 32; give the same"),
        ({"data": ["cd"]}, "has results of another data"),
        ({"options": {"dtype": "float32"}}, r"another options: \{\}, and this run has .*dtype"),
        ({"stride": 8}, "has results of another stride: None, and this run has 8"),
    ],
)
def test_a_resume_with_another_option_says_which(path, other, message):
    before = path.read_bytes()
    with (
        pytest.raises(UserError, match=message),
        open_lines(str(path), ASKED | other, resume=True),
    ):
        pass
    assert path.read_bytes() == before


def test_results_are_not_written_over(path):
    with (
        pytest.raises(UserError, match="has results already; choose another --output"),
        open_lines(str(path), ASKED, resume=False),
    ):
        pass


def test_a_file_that_another_writes_is_refused(path):
    with (
        open_lines(str(path), ASKED, resume=True),
        pytest.raises(UserError, match="another process is writing"),
        open_lines(str(path), ASKED, resume=True),
    ):
        pass


@pytest.mark.parametrize("data", [b"hello\n", b'{"step": 1}\n', b"[1]\n", b"my notes", b"\xff\n"])
def test_other_files_are_left_alone(tmp_path, data):
    path = tmp_path / "notes"
    path.write_bytes(data)
    with (
        pytest.raises(UserError, match=r"no (result|file of results)"),
        open_lines(str(path), ASKED, resume=True),
    ):
        pass
    assert path.read_bytes() == data


def test_files_that_cannot_be_opened_are_refused(tmp_path):
    with (
        pytest.raises(UserError, match=r"cannot open .* for writing: No such file"),
        open_lines(str(tmp_path / "no" / "r"), ASKED, resume=True),
    ):
        pass
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_lines(str(tmp_path / "r"))
    (tmp_path / "r").touch()
    with pytest.raises(UserError, match="has no results; moejax eval --output writes them"):
        read_lines(str(tmp_path / "r"))


def test_a_full_disk_is_said(path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with open_lines(str(path), ASKED, resume=True) as lines:
        monkeypatch.setattr("moejax.evaluate.json_lines.os.write", full)
        with pytest.raises(UserError, match=r"cannot write to .*: No space left on device"):
            lines.append(line(9))


def removed(path):
    path.unlink()


def replaced(path):
    path.unlink()
    path.write_text("others'\n")


def moved(path):
    path.rename(path.with_name("old"))


def shortened(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("interfere", "message"),
    [
        (removed, r"removed or replaced while .* its 3 lines are in (\S+): move that"),
        (replaced, r"removed or replaced while .* its 3 lines are in (\S+): move that"),
        (moved, r"was moved to (\S+) while it was written; its 3 lines are there"),
        (shortened, r"has \d+ bytes and not the \d+ that were written: another program"),
    ],
)
def test_a_file_that_others_take_away_is_no_success(path, interfere, message):
    whole = path.read_bytes()
    with open_lines(str(path), ASKED, resume=True) as lines:
        interfere(path)
        with pytest.raises(UserError, match=message) as error:
            lines.append(line(9))
    if interfere is not shortened:
        found = re.search(message, str(error.value))
        assert [one["step"] for one in read_lines(found[1])] == [3, 7, 9]
        assert Path(found[1]).read_bytes().startswith(whole)


def test_a_step_that_was_written_anew_is_noticed():
    require_same_weights("r", {"step": 3, "weights": "a"}, "a")
    with pytest.raises(UserError, match="results of step 3 with other weights than it has now"):
        require_same_weights("r", {"step": 3, "weights": "a"}, "b")
