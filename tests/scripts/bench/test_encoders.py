"""The bench of the encoders runs, and refuses what cannot be."""

import json

from scripts.bench import encoders as bench_encoders

SMALL = ("--hidden", "64", "--width", "32", "--experts", "2", "--repeats", "1")


def test_it_measures_every_version(capsys):
    assert bench_encoders.main([*SMALL, "--quantizers", "rtn,mse", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["version"], x["quantizer"]) for x in lines] == [
        ("dense", "–"),
        *((version, name) for version in ("int8", "int4", "int2") for name in ("rtn", "mse")),
        ("lossless12", "–"),
    ]
    assert all(min(x["encode"], x["decode"], x["copy"]) > 0 for x in lines)
    assert bench_encoders.main([*SMALL, "--dtype", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "int2" in shown and "floor, a copy" in shown and "lossless12" not in shown


def test_it_refuses_what_cannot_be(capsys):
    for wrong, message in (
        (("--experts", "0"), "--experts must be at least 1"),
        (("--quantizers", "gptq"), "quantizers are rtn, mse"),
        (("--dtype", "int8"), "dtype must be one of"),
        (("--hidden", "63"), "a multiple of"),
    ):
        assert bench_encoders.main([*SMALL, *wrong]) == 2
        assert message in capsys.readouterr().err
