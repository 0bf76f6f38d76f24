"""The command that measures WiSP's claim, at its smallest size."""

import pytest

from scripts.transfers import claim
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.runs import json_lines, refusal


@pytest.mark.slow
@pytest.mark.nightly  # test_grid.py runs grids; this one has a link beside
@NATIVE
def test_a_line_for_each_cell_with_both_ratios(tmp_path, capsys):
    given = ["--links", "1GB/s", "--batch", "1,2", "--budgets", "25%", "--repeats", "1"]
    small = ["--output-tokens", "4", "--measured-only", "--json"]
    lines = json_lines(capsys, claim.main, str(tmp_path / "out"), *given, *small)
    assert [(line["link"], line["batch"]) for line in lines] == [("1GB/s", 1), ("1GB/s", 2)]
    assert all(float(line["tokens_per_s"]) > 0 and line["off"] > 0 for line in lines)
    assert all(float(line["looks_ttft_s"]) > 0 and line["misses"] <= 1.5 for line in lines)
    assert (tmp_path / "out" / "claim.md").exists()


def test_a_rate_that_is_none_is_refused(tmp_path, capsys):
    assert "is not a rate" in refusal(capsys, claim.main, str(tmp_path), "--links", "fast")
