"""Paging raced with static layers."""

import argparse
import contextlib

import numpy as np
import pytest

from scripts.bench import layers
from tests.scripts.runs import json_lines, refusal


@pytest.mark.slow
def test_both_arms_have_the_same_bytes(capsys, monkeypatch):
    """Whole layers at the end, or as many cells in each; with all of them whole, no tables. The
    clock is ours. Two engines are real."""
    real, seen = layers.start, []

    def decoded(args, cells):
        seen.append(cells)
        return 1.0 if cells is None else 2.0 / len(set(cells)), 0.5 if cells is None else 0.25

    with monkeypatch.context() as patch:
        patch.setattr(layers, "start", lambda args, cells: contextlib.nullcontext(cells))
        patch.setattr(layers, "decode", decoded)
        patch.setattr(layers, "instructions", lambda cells: len(cells or ()))
        rows = json_lines(capsys, layers.main, "--rounds", "2")
        (row,) = json_lines(capsys, layers.main, "--rounds", "7", "--whole", "2")
    assert row["whole"] == 2 and row["low"] == row["high"] == 2.0
    del seen[-14:]
    count = len(seen[0])
    assert [row["whole"] for row in rows] == [*range(1, count + 1)]
    # The second round turns them.
    assert seen[-4] is None and seen[-3] == [seen[-3][0]] * count
    for static, paged in zip(seen[:-4:4], seen[1:-4:4], strict=True):
        assert len(set(paged)) == 1 and static == sorted(static)
        assert 0 <= sum(static) - sum(paged) < count
    assert [row["ratio"] for row in rows] == [2.0] * count
    assert rows[-1]["cpu"] == 0.5 and rows[-1]["instructions"] == f"{count} / 0"
    assert layers.ends(np.array([3.0, 1.0, 2.0])) == (1.0, 3.0)
    assert layers.ends(np.arange(15.0)) == (3.0, 11.0)
    assert "has 4 layers, not 5" in refusal(capsys, layers.main, "--whole", "5")
    args = argparse.Namespace(model="demo", link_rate="2GB/s", tokens=9, runs=1)
    with real(args, [4] * count) as paged, real(args, None) as static:
        assert min(*layers.decode(args, paged), *layers.decode(args, static)) > 0
        assert layers.instructions(paged) > layers.instructions(static) > 100
