"""Which slow tests `--sample` draws."""

import types

import pytest

from tests.conftest import drawn


def item(test: str, case: str | None):
    spec = {} if case is None else {"callspec": types.SimpleNamespace(id=case)}
    return types.SimpleNamespace(nodeid=test if case is None else f"{test}[{case}]", **spec)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_sample_is_a_share_and_another_with_another_seed(share):
    def sample(seed, make):
        return [n for n in range(300) if drawn(make(n), share, seed)]

    for make in (lambda n: item("a.py::x", str(n)), lambda n: item(f"a.py::x{n}", None)):
        one, other = (sample(seed, make) for seed in "12")
        assert abs(len(one) - 300 * share) < 30
        assert (one == other) == (share in (0, 1))
    first, second = (sample("1", lambda n, t=t: item(t, str(n))) for t in ("a.py::x", "a.py::y"))
    assert first == second  # so that they share their fixtures
