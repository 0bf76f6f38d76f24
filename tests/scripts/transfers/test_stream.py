"""The bench of streaming: its arithmetic, what it refuses, and that it runs."""

from __future__ import annotations

import json

import pytest

from scripts.transfers.stream import Block, line, main
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.slow


def test_ratios_are_medians_of_the_rounds_own():
    rounds = [
        {
            "compute": Block(compute, 0.0, 0.0),
            "stream": Block(2.0 * compute, 4e6, 0.5),
            "paging": Block(6.0 * compute, 1e6, 0.25),
        }
        for compute in (1e-3, 2e-3, 4e-3)
    ]
    found = line(rounds, 8e-3)
    assert found["compute_ms"] == pytest.approx([2.0, 1.5, 3.0])
    assert found["paging / stream"] == pytest.approx([3.0] * 3)
    # Of the longer of both: 2/8, 4/8, 8/8.
    assert found["stream / max(compute, link)"] == pytest.approx([0.5, 0.375, 0.75])
    assert found["stream_compute_busy"] == pytest.approx([0.5] * 3)
    assert found["stream_mb"][0] == 4.0 and found["paging_link_busy"][0] == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "fast"], "--ratios takes numbers with commas, not 'fast'"),
        (["--ratios", "0"], "are positive"),
        (["--layers", "2"], "--layers 3"),
        (["--batch", "0"], "--batch must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@NATIVE
@pytest.mark.nightly
def test_it_runs_small(capsys):
    sizes = "--shape demo --layers 3 --batch 2 --context 32 --steps 2 --rounds 1 --ratios 1 --json"
    assert main(sizes.split()) == 0
    (text,) = capsys.readouterr().out.splitlines()
    found = json.loads(text)
    assert found["stream_mb"][0] == pytest.approx(3 * 16 * 98304 / 1e6, rel=0.5)
    assert found["paging_mb"][0] < found["stream_mb"][0]
    assert found["handles / plain"][0] > 0 and 0 < found["stream_link_busy"][0] <= 1.1
