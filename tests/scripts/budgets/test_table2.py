"""Table 2: both arms have the same bytes, and what is predicted beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.evaluate.experiments.grid import ablate
from moejax.step.parts import Routing
from scripts.budgets import table2


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


PUBLISHED = {"12.5%": (8.96, 13.79), "25%": (10.27, 18.51), "50%": (13.21, 25.75)}
"""Budget → tokens a second of the paper's offload baseline and of WiSP."""


@pytest.mark.slow  # some seconds of simulation
def test_the_whole_model_is_predicted_near_what_is_published(repository, tmp_path):
    """At 50 GB/s, with nothing fitted but the step with everything resident: paging within a
    fifth of the paper's WiSP, and its offload is the reading of active experts, not of layers."""
    path = repository / "scripts/experiments/budgets/table2.yaml"
    small = {"prompt_tokens": 1024, "output_tokens": 128}
    found = ablate(path, tmp_path / "out", changes=small, progress=False)
    rates = {(r["policy"], r["budget"]): r["tokens_per_s"] for r in found.of_mode("predicted")}
    static = found.asked["policies"][1]
    for budget, (offload, wisp) in PUBLISHED.items():
        assert rates["lru", budget] == pytest.approx(wisp, rel=0.2)
        assert rates[static, budget] == pytest.approx(offload, rel=0.15)
        assert rates[static, budget] < rates["lru", budget]
    assert rates[static, "100%"] == pytest.approx(26.79, rel=0.01)
    # By hand: 36 layers are not resident at 32 cells, each step reads 8 of 9 MiB of each.
    by_hand = 1 / (1 / 26.79 + 36 * 8 * (9 << 20) / 50e9)
    assert rates[static, "25%"] == pytest.approx(by_hand, rel=0.01)


@pytest.mark.nightly
def test_table2_of_a_part(capsys):
    small = ("--shape", "demo", "--layers", "2", "--cells", "4,16", "--steps", "4", "--warmup", "2")
    assert table2.main([*small, "--repeats", "2", "--json"]) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["cells"] == 4 and last["paged_misses"] == last["static_misses"] == 0
    assert first["streamed_experts"] == 2 * 16 - 8
    # As many cells as a step has experts: the curve is what the engine does.
    assert first["paged_predicted_misses"] == first["paged_misses"] > 0


def test_table2_refuses(capsys):
    assert table2.main(["--cells", "0"]) == 2
    assert table2.main(["--layers", "2", "--routing", "other"]) == 2
    assert "routing 'other' is unknown" in capsys.readouterr().err
    assert table2.main(["--steps", "0"]) == 2
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
