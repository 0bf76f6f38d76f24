"""Kernels at the sizes of real models (tests.ptx.models)."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from pallas_kernels.verification import Check
from tests.ptx.machine import slices
from tests.ptx.models import (
    Kept,
    Outcome,
    case_of,
    compare,
    compiled_check,
    configurations,
    configurations_of,
    interpret_check,
    interpret_part,
    lowered,
    of_decode,
    outcome,
    page,
    run,
)
from tests.ptx.parse import Fault
from tests.ptx.program import kernels_digest, lowered_digest

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
    check, found = named("OLMoE-1B-7B", "route 64"), []

    def smallest(ptx: str) -> str:
        found.append(ptx.count("max.f32"))
        return ptx.replace("max.f32", "min.f32")

    error, _ = interpret_check(check, "h200", edit=smallest)
    assert max(found) > 1 and error > check.tolerance


def test_kernels_are_known_whatever_is_around_them():
    check, other = (named(model, "combine") for model in ("OLMoE-1B-7B", "DeepSeek-V2-Lite"))

    def twice(name, *operands):
        return jax.tree.map(lambda result: 2 * result, check.run(name, *operands))

    around = dataclasses.replace(check, run=twice)
    none = dataclasses.replace(check, run=lambda _, *operands: check.run("xla", *operands))
    first, *others = (lowered(each, "h200") for each in (check, around, other, none))
    assert all(lowered_digest(each) != lowered_digest(first) for each in others)
    same = [kernels_digest(each) == kernels_digest(first) for each in others]
    assert same == [True, False, False]


def test_a_fault_is_told():
    passed = Outcome("A", "h200", "linear", 2e-5, 1e-5, None, 10, 1.0, "x", "h200")
    wrong = Outcome("A", "h200", "route", 2e-5, 1e-3, None, 10, 1.0, "x", "h200")
    fault = Outcome("A", "h200", "plan", 0.0, None, "a race", 0, 1.0, "x", "a100")
    assert [each.passed for each in (passed, wrong, fault)] == [True, False, False]
    starts = {("A", "h200"): ["linear", "route", "plan", "fill"], ("A", "a100"): ["fill"]}
    starts["A", "h200"] += ["linear rows 64"]
    part = dataclasses.replace(passed, check="linear int4", programs="3 of 9")
    lines = page([passed, wrong, fault, part], starts).splitlines()
    assert lines[2].startswith("| A | h200 | 3 of 4 | 0 of 1 | 1 | 1 | 0.50 | ")
    assert lines[3].startswith("| A | a100 | 0 of 1 | 0 of 0 | 0 | 0 | 0.00 | ")
    assert lines[5:] == [
        "A, h200, route: error 0.001, tolerance 2e-05",
        "",
        "A, h200, plan: a race",
        "",
        "In part, A, h200: linear int4, 3 of 9 programs.",
        "",
        "Experts of other versions, passed, A, h200: linear int4.",
        "",
        "Not run, A, a100, h200: fill.",
        "",
        "Not run, A, h200: linear rows 64.",
    ]


def test_a_part_of_the_programs():
    check = named("OLMoE-1B-7B", "linear 6144x2048 rows 16")
    case, compiled = case_of(check), compiled_check(check, "h200")
    error, _, programs = interpret_part(check, case, compiled, 20)
    assert error <= check.tolerance
    ran, total = map(int, programs.split(" of "))
    assert 0 < ran < total
    first, *others = case.want
    wrong = dataclasses.replace(case, want=[first + 1, *others])
    assert interpret_part(check, wrong, compiled, 20)[0] > check.tolerance
    assert interpret_part(check, case, compiled, 10_000)[2] == ""


def test_slices_of_a_grid():
    assert slices((2, 5, 1), 10) is None
    assert slices((2, 3, 1), 4) == [0, 1, 4, 5]
    chosen = slices((1, 7, 9), 21)
    assert chosen is not None and len(chosen) == 21
    assert {0, 8} < {program // 7 for program in chosen}


@pytest.mark.slow
def test_what_was_left_out_is_not_read(monkeypatch):
    """Down's programs of experts of which gate and up were left out."""
    check = named("OLMoE-1B-7B", "expert_ffn 3072x2048 silu top 8 tokens 16")
    given = iter([slices((1, 16, 8), 40), slices((1, 16, 8), 40), None, None])
    monkeypatch.setattr("tests.ptx.machine.slices", lambda grid, most: next(given))
    case, compiled = case_of(check), compiled_check(check, "h200")
    with pytest.raises(Fault, match="left out"):
        interpret_part(check, case, compiled, 40)


def test_versions_of_experts():
    dense = [check.key for check in configurations("OLMoE-1B-7B", "h200")]
    both = [check.key for check in configurations("OLMoE-1B-7B", "h200", versions=("int4",))]
    assert both[: len(dense)] == dense
    added = both[len(dense) :]
    assert added and all(" int4" in key for key in added)


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
    todo = [of_cards for of_cards in every if of_cards["h200"].key.startswith("route 64")]
    run(Kept(path), "OLMoE-1B-7B", cards, todo)
    kept = Kept(path)
    ran_for = {each.card: each.ran_for for each in kept.found.values()}
    assert ran_for == {"h200": "h200", "rtx5060ti": "h200", "a100": "a100"}
    assert all(each.passed for each in kept.found.values())
    run(kept, "OLMoE-1B-7B", cards, todo)
    assert len(path.read_text().splitlines()) == 3  # what has passed is not run again
    assert compare(kept) == "0 of 3 kept entries are of other PTX than these kernels'"
    old = kept.found["OLMoE-1B-7B", "a100", todo[0]["a100"].key]
    # Where only what is around the kernels has changed, that is told.
    lines = path.read_text().replace(old.source, "1")
    path.write_text(lines)
    told = compare(Kept(path)).splitlines()
    assert told[0].startswith("0 of 3 ") and told[1].startswith("3 of 3 are of these kernels, but ")
    # Of another jax the same kernels may be other PTX.
    path.write_text(lines.replace(old.versions, "jax 0"))
    assert len(compare(Kept(path)).splitlines()) == 1
    # Where kernels may have, the PTX is made and compared.
    lines = lines.replace(old.kernels, "1")
    path.write_text(lines)
    assert compare(Kept(path)).startswith("0 of 3 ")
    # Other PTX of the same dataflow is the same; of another it is told.
    path.write_text(lines.replace(old.digest, "0"))
    assert compare(Kept(path)).startswith("0 of 3 ")
    path.write_text(lines.replace(old.digest, "0").replace(old.dataflow, "0"))
    told = compare(Kept(path)).splitlines()
    assert told[0] == "1 of 3 kept entries are of other PTX than these kernels'"
    assert told[1].startswith("  OLMoE-1B-7B, a100, route ")


@pytest.mark.nightly
def test_olmoe():
    """Every configuration of a start on an H200 with arrays below 4 GiB."""
    checks = list(configurations("OLMoE-1B-7B", "h200"))
    done = [outcome("OLMoE-1B-7B", "h200", check) for check in checks]
    starts = {("OLMoE-1B-7B", "h200"): [check.key for check in checks]}
    assert all(each.passed for each in done), page(done, starts)
