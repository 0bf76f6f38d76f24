import numpy as np
import pytest

from scripts.bench import drafts
from tests.scripts.runs import json_lines


@pytest.mark.slow
def test_each_cell_has_rates_of_equal_tokens(capsys):
    given = ["--tokens", "8", "--rounds", "1", "--requests", "2", "--budgets", "50%"]
    rows = json_lines(capsys, drafts.main, *given)
    assert [row["task"] for row in rows] == ["edit", "chat", "story"]
    assert all(row["plain"] > 0 and row["always"] > 0 < row["adaptive"] for row in rows)
    assert any(row["accepted"] for row in rows)


def test_rates_beside_lookup_are_of_the_same_rounds():
    times = {"llama": [2.0, 4.0], "lookup": [1.0, 2.0], "adaptive": [0.5, 4.0], "plain": [1.0, 1.0]}
    seconds = {name: np.array(values) for name, values in times.items()}
    assert drafts.peer_rates(seconds, 6) == {"llama": 2.0, "lookup": 2.0, "ours": 1.25}
    assert set(drafts.peer_rates({"plain": seconds["plain"]}, 6).values()) == {None}
