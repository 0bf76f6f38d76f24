"""The grid on the timeline: its arithmetic, orderings that must hold, and what it refuses."""

from __future__ import annotations

import json

import pytest

from scripts.transfers.stream_grid import crossovers, main
from scripts.transfers.streaming.cells import (
    HERE,
    QWEN3_30B,
    Cell,
    arm_seconds,
    compute_seconds,
)

pytestmark = pytest.mark.slow


def cell(batch: int, ratio: float, share: float = 0.0) -> Cell:
    compute = compute_seconds(HERE, QWEN3_30B, batch, 1024)
    rate = QWEN3_30B.experts * QWEN3_30B.record_bytes / (ratio * compute)
    return Cell(HERE, QWEN3_30B, batch, 1024, rate, share * QWEN3_30B.experts)


def test_a_layer_streams_in_the_longer_of_computing_and_loading():
    for ratio in (0.25, 4.0):
        seconds = arm_seconds(cell(256, ratio))
        assert seconds["stream"] == pytest.approx(seconds["resident"] * max(1, ratio), rel=0.05)


def test_small_batches_page_and_wide_ones_stream():
    """Few experts are used by a small batch, and nearly all by a wide one, where paging waits for
    what streaming brings ahead."""
    assert QWEN3_30B.used(1) == pytest.approx(8) and QWEN3_30B.used(256) > 127.9
    narrow, wide = arm_seconds(cell(8, 2.0)), arm_seconds(cell(256, 2.0))
    assert narrow["paging"] < narrow["stream"] and wide["stream"] < wide["paging"]


def test_packed_residents_and_an_even_split_load_faster_at_equal_memory():
    seconds = arm_seconds(cell(256, 4.0, 0.5))
    assert seconds["flux"] < seconds["stream"] < seconds["paging"]
    # Whole layers: the last ones' loads have nothing to overlap with.
    assert seconds["flux"] < seconds["flux-h"] and seconds["stream"] < seconds["vllm-o"]


def test_it_prints_cells_and_where_they_cross(capsys):
    sizes = "--batch 8,256 --context 1024 --ratios 2 --residents 0"
    assert main(sizes.split()) == 0
    first, second, crossing = capsys.readouterr().out.splitlines()
    assert first.startswith("batch   8") and "tokens/s" in second
    assert "from batch 256; there paging moves" in crossing
    assert main([*sizes.split(), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[0]["stream_mb"] == pytest.approx(48 * 128 * QWEN3_30B.record_bytes / 1e6)
    assert "never" in crossovers(found[:1])[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "fast"], "'fast' is not numbers with commas"),
        (["--ratios", "0"], "--ratios are positive"),
        (["--residents", "1"], "--residents shares below 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
