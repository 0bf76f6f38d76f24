"""Codecs on a timeline."""

import pytest

from scripts.bench import decoders
from tests.scripts.runs import json_lines, refusal


@pytest.mark.slow
def test_both_codecs_have_a_row(capsys):
    rows = json_lines(capsys, decoders.main)
    assert [row["codec"] for row in rows] == ["huffman", "lossless12"]
    for row in rows:
        assert 0.6 < row["kappa"] < 0.8
        # One expert crosses the link, and seven are decoded meanwhile.
        assert row["link_ms"] == pytest.approx(7.05, abs=0.01)
        assert row["decode_ms"] == pytest.approx(6.17, abs=0.01)
        assert row["beside_ms"] == pytest.approx(32 * row["link_ms"])
        assert row["series_ms"] == pytest.approx(32 * (row["decode_ms"] + 5.0))
        assert row["hidden"] == pytest.approx(1.0)
    assert rows[0]["kappa"] < rows[1]["kappa"] and rows[0]["gib"] < rows[1]["gib"]
    slow = json_lines(capsys, decoders.main, "--decoder-rate", "100GB/s")
    assert [row["decode_ms"] for row in slow] == pytest.approx([2 * r["decode_ms"] for r in rows])
    assert "a layer has 8 experts, not 9" in refusal(capsys, decoders.main, "--host", "9")
    assert "--slows from 0" in refusal(capsys, decoders.main, "--slows", "1")
