"""Table 2: both arms have the same bytes, and what is predicted beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.step.parts import Routing
from scripts.budgets import table2
from scripts.budgets.table2_predicted import PUBLISHED, whole_curve, whole_model


def test_static_offload_has_the_bytes_of_the_paged_arm():
    splits = table2.splits_of([16, 32, 128], 48, 128)
    assert splits["all"] == [128] * 48 and splits["static 128"] == splits["all"]
    for cells in (16, 32, 128):
        assert sum(splits[f"static {cells}"]) == sum(splits[f"paged {cells}"])
    assert splits["static 16"][:7] == [128] * 6 + [0]
    assert table2.splits_of([3], 2, 8)["static 3"] == [6, 0]


def test_a_part_has_its_share_of_the_vocabulary():
    """Or the head would be most of a step of two layers."""

    def vocab(*argv: str) -> int:
        return table2.part_of(table2._parser().parse_args(argv)).vocab_size

    assert vocab() == vocab("--layers", "48") == 151936
    assert vocab("--layers", "2") == -(-151936 * 2 // 48)
    assert vocab("--layers", "2", "--vocab", "151936") == 151936
    with pytest.raises(UserError, match=r"--vocab must be in 2…151936, got 1"):
        vocab("--vocab", "1")


def test_active_sets_are_of_the_rows_that_run():
    ids = np.array([[[0, 1], [4, 5], [1, 2]]], np.int32)
    routing = Routing(ids, np.zeros(ids.shape, np.float32))
    assert np.flatnonzero(table2.active_set(6, routing, [0, 2])[0]).tolist() == [0, 1, 2]


def test_the_whole_model_is_predicted_near_what_is_published(monkeypatch):
    """At 50 GB/s, with nothing fitted but the step with everything resident: paging within a
    fifth of the paper's WiSP, and its offload is the reading of active experts, not of layers."""
    monkeypatch.setattr("scripts.budgets.table2_predicted.PREDICTED_STEPS", 128)
    found = {cells: predicted(cells) for cells in PUBLISHED}
    for cells, row in found.items():
        offload, wisp = PUBLISHED[cells]
        assert row["paged_tokens_per_s"] == pytest.approx(wisp, rel=0.2)
        assert row["static_tokens_per_s"] == pytest.approx(offload, rel=0.15)
        assert row["streamed_tokens_per_s"] <= row["static_tokens_per_s"]
        assert row["static_tokens_per_s"] <= row["paged_tokens_per_s"]
    assert found[128]["misses"] == 0
    assert found[128]["paged_tokens_per_s"] == pytest.approx(PUBLISHED[128][1])
    assert found[16]["streamed_tokens_per_s"] < PUBLISHED[16][0] / 5
    # By hand: 36 layers are not resident at 32 cells, each step reads 8 of 9 MiB of each.
    by_hand = 1 / (1 / 26.79 + 36 * 8 * (9 << 20) / 50e9)
    assert found[32]["static_tokens_per_s"] == pytest.approx(by_hand)


def predicted(cells: int, **changed) -> dict:
    told = dict(shape_name="qwen3-30b-a3b", batch=1, routing="qwen3-like", link_gb_per_s=50, seed=0)
    row = whole_model(cells, **(told | changed))
    assert row is not None
    return row


@pytest.mark.parametrize(
    "changed", [{"shape_name": "demo"}, {"batch": 2}, {"routing": "real"}, {"cells": 17}]
)
def test_nothing_is_predicted_beside_what_is_not_published(changed):
    told = dict(shape_name="qwen3-30b-a3b", batch=1, routing="qwen3-like", link_gb_per_s=50, seed=0)
    assert whole_model(**({"cells": 16} | told | changed)) is None


def test_the_curve_is_of_the_seed_and_falls():
    whole_curve.cache_clear()
    one, other = whole_curve("zipf", 2, 16, 4, 0), whole_curve("zipf", 2, 16, 4, 1)
    assert (np.diff(one) <= 0).all() and one[0] == 2 * 4 and one[-1] == 0
    assert not np.array_equal(one, other)


@pytest.mark.nightly
def test_table2_of_a_part(capsys):
    small = ("--shape", "demo", "--layers", "2", "--cells", "4,16", "--steps", "4", "--warmup", "2")
    assert table2.main([*small, "--repeats", "2", "--json"]) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["cells"] == 4 and last["paged_misses"] == last["static_misses"] == 0
    assert first["streamed_experts"] == 2 * 16 - 8 and first["whole_model"] is None
    # As many cells as a step has experts: the curve is what the engine does.
    assert first["paged_predicted_misses"] == first["paged_misses"] > 0


def test_table2_refuses(capsys):
    assert table2.main(["--cells", "0"]) == 2
    assert table2.main(["--layers", "2", "--routing", "other"]) == 2
    assert "routing 'other' is unknown" in capsys.readouterr().err
    assert table2.main(["--predict-link", "0"]) == 2
    assert table2.main(["--steps", "0"]) == 2
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


def test_the_predicted_table_alone(capsys, monkeypatch):
    """Nothing is run; what the paper has no row for is left out, or refused."""
    monkeypatch.setattr(table2, "run", lambda args: pytest.fail("it ran"))
    assert table2.main(["--predicted", "--cells", "16,20,128", "--predict-link", "25"]) == 0
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert "PREDICTED for a link of 25 GB/s, routing qwen3-like" in title
    assert [row.split()[0] for row in rows] == ["16", "128"]
    found = dict(zip(heads.split(), rows[0].split(), strict=False))
    misses = float(found["misses"])
    assert rows[0].split()[2] == f"{25e9 / (misses * 9 * 2**20):.1f}"
    assert rows[1].split()[1:4] == ["0.0", "–", "26.79"]
    assert table2.main(["--predicted", "--cells", "20"]) == 2
    assert "16, 32, 64, 128 cells only" in capsys.readouterr().err
    assert table2.main(["--predicted", "--predict-link", "0"]) == 2
    assert "--predict-link must be above 0" in capsys.readouterr().err
