"""A kernel at the size of a real model, as `python -m tests.ptx` runs it."""

import pytest

from tests.aot.cards import named, start_checks
from tests.ptx.__main__ import interpret_check

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def test_a_router_of_qwen3():
    name = "linear 128x2048 rows 16 bias False out float32"
    check = named(start_checks("h200", "Qwen3-30B-A3B"), name)
    error, issued = interpret_check(check, "h200")
    assert 0 < error < check.tolerance  # another order of sums than the reference's
    assert issued > 1000


def test_a_wrong_kernel_is_found():
    check = named(start_checks("h200", "OLMoE-1B-7B"), "route 64 .* normalize False")
    edit = {"edit": lambda ptx: ptx.replace("max.f32", "min.f32")}
    assert interpret_check(check, "h200", **edit)[0] > check.tolerance
