"""The bench of native CPU ops runs, and refuses what cannot be."""

import json

import pytest

from scripts.cpu import ops
from tests.pallas_kernels.contract import NATIVE

SMALL = ("--hidden", "128", "--width", "32", "--experts", "4", "--context", "64", "--repeats", "1")


@pytest.mark.nightly
@NATIVE
@pytest.mark.slow
def test_it_measures_every_op(capsys):
    assert ops.main([*SMALL, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["op"].split(",")[0] for x in lines] == [
        *["linear bfloat16"] * 4,
        "linear float32",
        *["expert_ffn dense"] * 2,
        *(f"expert_ffn {version}" for version in ("int8", "int4", "lossless12")),
        *["decode_attention"] * 2,
    ]
    assert all(min(x["xla_ms"], x["cpu_ms"], x["speedup"], x["rate"], x["mb"]) > 0 for x in lines)
    assert ops.main([*SMALL, "--only", "attention"]) == 0
    assert "of memory" in capsys.readouterr().out


def test_it_refuses_what_cannot_be(capsys, monkeypatch):
    for wrong in (("--only", "plan"), ("--repeats", "0"), ("--hidden", "100"), ("--context", "3")):
        assert ops.main([*SMALL, *wrong]) == 2
        assert "cases are linear, experts, attention" in capsys.readouterr().err
    monkeypatch.setattr(ops, "why_not_cpu", lambda: "they are not built")
    assert ops.main([*SMALL]) == 2
    assert "they are not built" in capsys.readouterr().err


@NATIVE
@pytest.mark.slow
def test_two_checkouts_take_turns(capsys, repository, tmp_path):
    small = (*SMALL, "--only", "attention", "--repeats", "2")
    assert ops.main([*small, "--against", str(repository), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bits"] for line in lines] == ["same", "same"]
    assert all(0 < x["low"] <= x["ratio"] <= x["high"] and x["our_ms"] > 0 for x in lines)
    assert ops.main([*small, "--against", str(tmp_path)]) == 2
    assert "no checkout" in capsys.readouterr().err
    cases = tmp_path / "scripts" / "cpu" / "cases.py"  # ends at once, since it has no cases
    cases.parent.mkdir(parents=True)
    cases.write_text("")
    assert ops.main([*small, "--against", str(tmp_path)]) == 2
    assert "ended early" in capsys.readouterr().err
