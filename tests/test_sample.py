"""Which slow cases `--sample` leaves out."""

import types

import pytest

from tests.conftest import left_out


def item(nodeid: str, case: str | None, *marks: str):
    spec = {} if case is None else {"callspec": types.SimpleNamespace(id=case)}
    name = nodeid if case is None else f"{nodeid}[{case}]"
    return types.SimpleNamespace(nodeid=name, get_closest_marker=lambda m: m in marks, **spec)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_sample_has_a_case_of_each_test(share):
    cases = [str(n) for n in range(100)]
    first, second = ([item(f"a.py::{test}", c, "slow") for c in cases] for test in "xy")
    few, kept = item("b.py::x", "7", "slow"), [item("a.py::q", "0"), item("a.py::z", None, "slow")]
    every = [*first, *second, few, *kept]
    samples = {}
    for seed in ("1", "2"):
        gone = left_out(every, share, seed)
        samples[seed] = [c for c, one in zip(cases, first, strict=True) if one.nodeid not in gone]
        same = [c for c, one in zip(cases, second, strict=True) if one.nodeid not in gone]
        assert same == samples[seed]  # so that they share their fixtures
        assert not gone & {one.nodeid for one in (few, *kept)}
        assert abs(len(samples[seed]) - max(1, 100 * share)) < 20
    assert (samples["1"] == samples["2"]) == (share == 1)
