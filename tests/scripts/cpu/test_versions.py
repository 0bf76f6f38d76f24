"""The bench of versions beside dense weights runs, and refuses what cannot be."""

import json

import pytest

from scripts.cpu import versions
from tests.pallas_kernels.contract import NATIVE

SMALL = ("--hidden", "128", "--width", "32", "--experts", "4", "--repeats", "2")


@NATIVE
@pytest.mark.slow
def test_it_measures_every_version(capsys):
    assert versions.main([*SMALL, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ("dense", "int8", "int4", "lossless12")
    assert [x["op"] for x in lines] == [f"expert_ffn {name}, 1 rows" for name in names]
    assert lines[0]["of_dense"] == lines[0]["processor"] == 1
    assert all(min(x["ms"], x["rate"], x["share"], x["of_dense"]) > 0 for x in lines)


def test_it_refuses_what_cannot_be(capsys, monkeypatch):
    assert versions.main([*SMALL, "--repeats", "0"]) == 2
    assert "numbers are positive" in capsys.readouterr().err
    monkeypatch.setattr(versions, "why_not_cpu", lambda: "they are not built")
    assert versions.main([*SMALL]) == 2
    assert "they are not built" in capsys.readouterr().err
