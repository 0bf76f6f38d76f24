"""The report of measured cells: its arithmetic, beside a timeline that it shares with the grid."""

from __future__ import annotations

import json

import pytest

from scripts.transfers.stream_report import concordance, crossovers, main, predicted, read

pytestmark = pytest.mark.slow


def rows(
    batch: int, stream: float, paging: float, compute: float = 0.4, began: int = 1
) -> list[dict]:
    common = {"shape": "qwen3-30b-a3b", "layers": 4, "batch": batch, "context": 1024}
    common |= {"residents": 0, "rate": 4e9, "began": began}
    of_link = {"link_mb": 4831.8, "link_busy": 0.9, "waited": 0.5}
    return [
        {**common, "name": "all", "arm": "compute", "seconds": [compute] * 3},
        {**common, "name": "g", "arm": "stream", "seconds": [stream, 9.0, stream / 2], **of_link},
        {**common, "name": "g", "arm": "paging-48", "seconds": [paging] * 3, **of_link},
    ]


def written(path, found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_medians_ratios_and_predictions_of_a_place(tmp_path):
    (place,) = read([written(tmp_path / "a", rows(64, 1.3, 1.25))])
    assert place.seconds == {"stream": 1.3, "paging-48": 1.25}
    assert place.link == pytest.approx(4831.8e6 / 4e9) and place.compute == 0.4
    guess = predicted(place, 5e9)
    # All experts of four layers at 4 GB/s, which hides a compute of a third of it.
    assert guess["stream"] == pytest.approx(4 * 128 * 6 * 2048 * 768 / 4e9, rel=0.01)
    # Nearly all of them on demand, in turn with what comes before the experts.
    assert 0.9 < guess["paging-48"] / guess["stream"] < 1.4


def test_pairs_that_overlap_are_not_counted(tmp_path):
    places = read([written(tmp_path / "a", rows(64, 1.3, 1.0) + rows(8, 1.3, 12.0))])
    tau, pairs = concordance(places, [{"stream": 2, "paging-48": 1}, {"stream": 2, "paging-48": 1}])
    assert pairs == 1 and tau == -1.0  # steps of batch 64 lie around paging's


def test_the_report_says_where_they_cross(tmp_path, capsys):
    path = written(tmp_path / "a", rows(8, 1.3, 0.4) + rows(256, 1.4, 1.7, compute=0.9))
    assert main([str(path)]) == 0
    *_, summary, crossing = capsys.readouterr().out.splitlines()
    assert "2 places, 4 arms" in summary
    assert "stream before paging-48: from batch 256, predicted from batch 256" in crossing
    assert main([str(path), "--json"]) == 0
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert lines[1]["compute / stream"] == pytest.approx(0.9 / 1.4)
    assert "never" in crossovers(lines[:1], "paging-48")[0]


def test_a_row_without_compute_is_refused(tmp_path, capsys):
    path = written(tmp_path / "a", rows(8, 1.3, 0.4)[1:])
    assert main([str(path)]) == 2
    assert "no row of stream, or of compute in the same run" in capsys.readouterr().err


def test_compute_is_that_of_the_same_run(tmp_path):
    other = rows(8, 1.3, 0.4, compute=0.9, began=2)
    (place,) = read([written(tmp_path / "a", rows(8, 1.3, 0.4) + other[:1])])
    assert place.compute == 0.4
