"""Kernels at the sizes of real models (tests.ptx.models)."""

from __future__ import annotations

import pytest

from pallas_kernels.verification import Check
from tests.ptx.models import Outcome, configurations, interpret_check, outcome, page

pytestmark = pytest.mark.aot


def named(model: str, name: str) -> Check:
    (check,) = (each for each in configurations(model, "h200") if each.key.startswith(name))
    return check


def test_a_router_of_qwen3():
    done = outcome("Qwen3-30B-A3B", "h200", named("Qwen3-30B-A3B", "linear 128x2048 rows 16"))
    assert done.passed, done
    assert (
        done.error is not None and 0 < done.error < done.tolerance
    )  # another order of sums than the reference's
    assert done.instructions > 1000


def test_a_wrong_kernel_is_found():
    check = named("OLMoE-1B-7B", "route")

    def smallest(ptx: str) -> str:
        assert ptx.count("max.f32") > 1
        return ptx.replace("max.f32", "min.f32")

    error, _ = interpret_check(check, "h200", edit=smallest)
    assert error > check.tolerance


def test_a_fault_is_told():
    passed = Outcome("A", "h200", "linear", 2e-5, 1e-5, None, 10, 1.0)
    wrong = Outcome("A", "h200", "route", 2e-5, 1e-3, None, 10, 1.0)
    fault = Outcome("A", "h200", "plan", 0.0, None, "a race", 0, 1.0)
    assert [each.passed for each in (passed, wrong, fault)] == [True, False, False]
    lines = page([passed, wrong, fault]).splitlines()
    assert lines[2] == "| A | h200 | 3 | 1 | 0.50 | 3 |"
    assert lines[4:] == [
        "A, h200, route: error 0.001, tolerance 2e-05",
        "",
        "A, h200, plan: a race",
    ]


@pytest.mark.nightly
def test_olmoe():
    """Every configuration but the head's, whose weights are 200 MB."""
    checks = [c for c in configurations("OLMoE-1B-7B", "h200") if "50304x2048" not in c.key]
    done = [outcome("OLMoE-1B-7B", "h200", check) for check in checks]
    assert all(each.passed for each in done), page(done)
