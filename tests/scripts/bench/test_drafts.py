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
