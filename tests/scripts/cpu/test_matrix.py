"""The bench beside torch's products runs, and refuses what cannot be."""

import json

import pytest

from scripts.cpu import matrix
from tests.pallas_kernels.contract import NATIVE

SMALL = ("--tokens", "16", "--hidden", "64", "--width", "32", "--experts", "4", "--repeats", "1")


@NATIVE
@pytest.mark.slow
@pytest.mark.skipif(matrix.torch is None, reason="no torch")
def test_it_measures_each_product(capsys):
    assert matrix.main([*SMALL, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["op"] for x in lines] == ["linear", "expert_ffn, 16 rows an expert"]
    names = ("cpu", "bfloat16", "float32", "of_bfloat16", "of_float32")
    assert all(x[name] > 0 for x in lines for name in names)
    assert matrix.main([*SMALL]) == 0
    assert "cpu / torch bfloat16" in capsys.readouterr().out


def test_the_verdict_is_the_least_ratio_s():
    assert "60% of torch's float32 rate: met (least 60%)" in matrix.verdict("float32", [0.9, 0.6])
    assert "missed (least 59%)" in matrix.verdict("bfloat16", [0.59, 7.0])


def test_it_refuses_what_cannot_be(capsys, monkeypatch):
    assert matrix.main([*SMALL, "--repeats", "0"]) == 2
    assert "--repeats must be at least 1" in capsys.readouterr().err
    monkeypatch.setattr(matrix, "why_not_cpu", lambda: "they are not built")
    assert matrix.main([*SMALL]) == 2
    assert "they are not built" in capsys.readouterr().err
    monkeypatch.setattr(matrix, "why_not_cpu", lambda: None)
    monkeypatch.setattr(matrix, "torch", None)
    assert matrix.main([*SMALL]) == 2
    assert "no torch here" in capsys.readouterr().err
