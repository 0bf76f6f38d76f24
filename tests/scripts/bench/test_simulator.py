"""The bench of the simulator runs, and refuses what cannot be."""

import json

from scripts.bench import simulator as bench_simulator

SMALL = ("--layers", "2", "--experts", "8", "--top-k", "2", "--steps", "6", "--repeats", "1")


def test_it_counts_references(capsys):
    assert bench_simulator.main([*SMALL, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["what"] for x in lines][-2:] == ["lru, plan", "min"]
    for line in lines:
        assert line["references"] == 2 * 2 * 6 and line["cells"] == 4
        assert 0 < line["slowest"] <= line["millions"] <= line["fastest"]
    assert bench_simulator.main([*SMALL, "--cells", "1"]) == 0
    shown = capsys.readouterr().out
    assert "lfru" in shown and "min" not in shown  # a step needs two


def test_it_refuses_sizes_that_do_not_fit(capsys):
    fit = "--top-k and --cells must fit the experts"
    at_least = "--batch must be at least 1, got 0"
    for name, value, said in (("cells", 9, fit), ("top-k", 9, fit), ("batch", 0, at_least)):
        assert bench_simulator.main([*SMALL, f"--{name}", str(value)]) == 2
        assert said in capsys.readouterr().err
