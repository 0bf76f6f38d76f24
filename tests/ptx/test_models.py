"""Kernels at the sizes of real models (tests.ptx.models)."""

from __future__ import annotations

import pytest

from pallas_kernels.verification import Check
from tests.ptx.models import (
    Kept,
    Outcome,
    compare,
    configurations,
    configurations_of,
    interpret_check,
    of_decode,
    outcome,
    page,
    run,
)

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
    passed = Outcome("A", "h200", "linear", 2e-5, 1e-5, None, 10, 1.0, "x", "h200")
    wrong = Outcome("A", "h200", "route", 2e-5, 1e-3, None, 10, 1.0, "x", "h200")
    fault = Outcome("A", "h200", "plan", 0.0, None, "a race", 0, 1.0, "x", "a100")
    assert [each.passed for each in (passed, wrong, fault)] == [True, False, False]
    starts = {("A", "h200"): ["linear", "route", "plan", "fill"], ("A", "a100"): ["fill"]}
    lines = page([passed, wrong, fault], starts).splitlines()
    assert lines[2].startswith("| A | h200 | 3 of 4 | 1 | 1 | 0.50 | ")
    assert lines[4:] == [
        "A, h200, route: error 0.001, tolerance 2e-05",
        "",
        "A, h200, plan: a race",
        "",
        "Not run, A, h200, a100: fill.",
    ]


def test_what_decode_runs():
    keys = [check.key for check in configurations("DeepSeek-V2-Lite", "h200")]
    left = {key for key in keys if not of_decode(key)}
    assert len(left) == 9 + 2 + 1 + 1  # linear, head_linear, experts, attention
    assert any(key.startswith("paged_attention decode") for key in keys if of_decode(key))


@pytest.mark.slow
def test_equal_ptx_is_run_once_and_other_ptx_is_told(tmp_path):
    """For an H200 and an RTX 5060 Ti the router's choice is the same text, an A100's does not wait
    for the kernel before."""
    cards = ("h200", "rtx5060ti", "a100")
    path = tmp_path / "kept.jsonl"
    every = configurations_of("OLMoE-1B-7B", cards, wide=False)
    todo = [of_cards for of_cards in every if of_cards["h200"].op == "route"]
    run(Kept(path), "OLMoE-1B-7B", cards, todo)
    kept = Kept(path)
    ran_for = {each.card: each.ran_for for each in kept.found.values()}
    assert ran_for == {"h200": "h200", "rtx5060ti": "h200", "a100": "a100"}
    assert all(each.passed for each in kept.found.values())
    run(kept, "OLMoE-1B-7B", cards, todo)
    assert len(path.read_text().splitlines()) == 3  # what has passed is not run again
    assert compare(kept) == "0 of 3 kept entries are of other PTX than these kernels'"
    lines = path.read_text().replace(
        kept.found["OLMoE-1B-7B", "a100", todo[0]["a100"].key].digest, "0"
    )
    path.write_text(lines)
    told = compare(Kept(path)).splitlines()
    assert told[0] == "1 of 3 kept entries are of other PTX than these kernels'"
    assert told[1].startswith("  OLMoE-1B-7B, a100, route ")


@pytest.mark.nightly
def test_olmoe():
    """Every configuration but the head's, whose weights are 200 MB."""
    checks = [c for c in configurations("OLMoE-1B-7B", "h200") if "50304x2048" not in c.key]
    done = [outcome("OLMoE-1B-7B", "h200", check) for check in checks]
    assert all(each.passed for each in done), page(done)
