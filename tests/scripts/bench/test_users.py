"""What a user's routing tells: by hand, and of the embedded model."""

import numpy as np
import pytest

from scripts.bench import users
from tests.scripts.runs import json_lines, refusal

ABOUT = {"experts": 8, "top_k": 2, "slot_bytes": 100, "page_bytes": 40, "page_tokens": 16}


def session(user: int, tokens: int = 40) -> np.ndarray:
    """int16[N, 2, 2]: both users use experts 0 to 3 first; then each has its own of the others."""
    rng = np.random.default_rng((user, tokens))
    first = np.sort(rng.permuted(np.tile(np.arange(4), (tokens, 1)), axis=1)[:, :2], axis=1)
    second = np.tile([4 + 2 * user, 5 + 2 * user], (tokens, 1))
    return np.stack([first, second], axis=1).astype(np.int16)


@pytest.mark.slow
def test_a_users_own_counts_predict_what_those_of_all_do_not():
    """A user has all of its routing in one session: six of eight experts, of two layers."""
    given = {name: [session(user)] * 4 for user, name in enumerate("ab")}
    rows = users.compare(given, ABOUT, 0.01)
    assert [(row["user"], row["sessions"]) for row in rows] == [
        (name, known) for name in "ab" for known in (1, 2)
    ]
    for row in rows:
        assert row["personal"] == 1.0
        assert row["burst"] == row["footprint"] == 6 / 16 and row["overlap"] == 1.0
        assert row["covered"] == 1.0 and row["cells"] == row["of_all"] == 4
        assert row["kv_tokens"] == 0
    assert np.mean([row["population"] for row in rows]) < 0.7
    # A session unlike the others is left out in one turn of four, and learned from in another.
    odd = given | {"a": [*given["a"][:3], session(1)]}
    means = users.by_turns(odd, ABOUT, 0.01)
    assert means[0]["personal"] == pytest.approx(0.5) and means[2]["personal"] == 1.0
    assert means[0]["ahead_low"] < means[0]["ahead"] < means[0]["ahead_high"]
    # Four sessions of all for one of the user: those of b, which are longer, decide.
    longer = users.compare(given | {"b": [session(1, 80)] * 4}, ABOUT, 0.01)
    assert [row["population"] for row in longer] == [0.0, 0.0, 1.0, 1.0]
    # In the layer with the most: without the first one a user needs two cells, and all need four.
    alone = {"a": [session(0)[:, ::-1]] * 4, "b": [session(1)[:, ::-1]] * 4}
    for each in alone.values():
        each[:] = [np.repeat(one[:, :1], 2, axis=1) for one in each]
    for row in users.compare(alone, ABOUT, 0.01):
        assert (row["cells"], row["of_all"]) == (2, 4)
        assert row["kv_tokens"] == 2 * 2 * 100 // 40 * 16


@pytest.mark.slow
def test_users_of_a_model(capsys):
    rows = json_lines(capsys, users.main, "--sessions", "2", "--prompt", "8", "--tokens", "8")
    assert len(rows) == 6
    for row in rows:
        assert 0 < row["personal"] <= 1 and 0 < row["burst"] <= row["footprint"] + 0.2
        assert 1 <= row["cells"] <= 32
    said = refusal(capsys, users.main, "--epsilon", "1")
    assert "from 0 to below 1, got 1.0" in said
