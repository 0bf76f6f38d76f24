"""The bench of transfers beside steps, at its smallest size, from memory and from a file."""

import pytest

from scripts.cpu.engines.checkpoint import OLMOE
from scripts.transfers import overlap
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.cpu.test_peers import SMALL
from tests.scripts.runs import json_lines, refusal


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("file", [False, True])
def test_every_arm_has_its_ratio(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overlap, "OLMOE", OLMOE | SMALL | {"num_experts_per_tok": 8})
    monkeypatch.setattr(overlap, "PIECE", 1 << 22)
    # Records are tiny here, and their reads must outlast the steps.
    monkeypatch.setattr(overlap, "PIECES", 20_000 if file else 800)
    given = ["--rounds", "1", "--steps", "4", "--experts", "24", "--layers", "2"]
    given += ["--file", str(tmp_path)] if file else []
    (found,) = json_lines(capsys, overlap.main, *given)
    bars = ["queue / compute", "beside / compute"]
    bars += [f"{arm} / max(copied, link)" for arm in ("ahead", "in step")]
    assert all(found[name][0] > 0 for name in bars) and ("disk" in found) == file
    assert found["moved"] == 8 * 3 * 64 * 128 * 2
    assert (tmp_path / "overlap-2-24.orbax" / "moejax.json").exists() == file


def test_it_refuses_sizes_that_have_no_steps(capsys):
    assert "--layers is 2, 4 or 8" in refusal(capsys, overlap.main, "--layers", "3")
