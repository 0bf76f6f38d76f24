"""The bench of formats has a line for each, dense first, and refuses unknown ones."""

from scripts.bench import formats
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.runs import refusal

pytestmark = NATIVE

TINY = ("--rounds", "1", "--experts", "3", "--hidden", "64", "--width", "16", "--top-k", "2")


def test_each_format_has_a_line(capsys):
    assert formats.main(["q4_0", "fp4-32-e8m0", "--tokens", "2", *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["dense", "q4_0", "fp4-32-e8m0"]
    assert lines[2].endswith("100%")


def test_an_unknown_format_is_refused(capsys):
    assert "no record format is named 'q9'" in refusal(capsys, formats.main, "q9")
