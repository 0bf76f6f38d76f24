"""Mistakes planted in the PTX of real kernels, each of which the interpreter must find."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn import few_tokens
from pallas_kernels.expert_ffn.specs import Spec as ExpertSpec
from pallas_kernels.fill.specs import Spec as FillSpec
from pallas_kernels.fill_ffn import pallas_triton as fill_ffn
from pallas_kernels.fill_ffn.specs import SPECS as FILL_FFN
from pallas_kernels.fill_ffn.specs import Spec as FilledSpec
from pallas_kernels.linear import pallas_triton as linear_kernels
from pallas_kernels.linear.specs import Spec as LinearSpec
from pallas_kernels.paged_attention import writing
from pallas_kernels.plan.specs import Spec as PlanSpec
from pallas_kernels.rms_norm.specs import Spec as NormSpec
from pallas_kernels.route import listed
from pallas_kernels.route.specs import PlannedSpec
from pallas_kernels.truncate import pallas_triton as truncating
from pallas_kernels.truncate.specs import Spec as TruncateSpec
from tests.pallas_kernels import (
    test_combine,
    test_combined_experts,
    test_expert_ffn_versions,
    test_fill,
    test_fill_ffn,
    test_linear,
    test_norm_route_and_list,
    test_plan,
    test_rms_norm,
    test_route_and_list,
    test_route_and_plan,
    test_truncate,
    test_write_and_attend,
)
from tests.ptx import program
from tests.ptx.parse import Fault
from tests.ptx.program import patched

pytestmark = pytest.mark.aot

LINEAR = LinearSpec(3, "bfloat16", inputs=2048, outputs=72)
"""Five programs of 16 columns, the last one masked, that pipeline eight tiles of depth."""

SQUARE = LinearSpec(3, "bfloat16", inputs=64, outputs=64)

SQUARED = test_linear.SQUARES_SPECS[1]

NORMED = test_linear.NORM_PARTS_SPECS[0]

COUNTED = test_combine.COUNTED[1]

COMBINED = FilledSpec(3, hits=4, fills=0, experts=12, top_k=3, hidden=72)
"""Several programs for each token, some without one, two tiles of columns."""

CODED = ExpertSpec(3, "bfloat16", hidden=64, width=32, versions=("int8", "int4"))

HISTORY = (
    [0, 0, 1, 0, 0],
    [0, 0, 0, 1, 0, 0, -1, 0],
    [0] * 5,
    [
        ("reference", 0, frozenset({0, 1})),
        ("reference", 1, frozenset({2, 3, 5})),
        ("reference", 0, frozenset({2, 3, 4})),
        ("reference", 0, frozenset({5, 7, 6})),
    ],
)
"""As tests.pallas_kernels.test_plan.histories: fills, then evicts."""

CHECKS: dict[str, tuple] = {
    "linear": (test_linear, lambda: test_linear.check(LINEAR, "pallas")),
    "linear square": (test_linear, lambda: test_linear.check(SQUARE, "pallas")),
    "norm_linear_parts": (
        test_linear,
        lambda: test_linear.check_normed_parts(NORMED, "pallas"),
    ),
    "rms_norm": (test_rms_norm, lambda: test_rms_norm.check(NormSpec((3,), "bfloat16"), "pallas")),
    "fill": (test_fill, lambda: test_fill.check(FillSpec((12, 4)), "pallas")),
    "combine": (test_combine, lambda: test_combine.check_count(COUNTED, "pallas")),
    "combine squares": (test_combine, lambda: test_combine.check_squares(COUNTED, "pallas")),
    "linear squares": (test_linear, lambda: test_linear.check_squares(SQUARED, "pallas")),
    "norm_linear_parts by squares": (
        test_linear,
        lambda: test_linear.check_normed_parts(NORMED, "pallas", 16),
    ),
    "plan": (test_plan, lambda: test_plan.check(PlanSpec(2, 5, 8), "pallas", HISTORY)),
    "plan routed": (
        test_plan,
        lambda: test_plan.check_routed(PlanSpec(2, 5, 8), "pallas", HISTORY),
    ),
    "route_plan": (
        test_route_and_plan,
        lambda: test_route_and_plan.check(PlannedSpec(4, 60, 9, "top4-normalized"), "pallas"),
    ),
    "route_list": (
        test_route_and_list,
        lambda: test_route_and_list.check(PlannedSpec(4, 60, 9, "top4-normalized"), "pallas"),
    ),
    "expert_down_combine": (
        test_combined_experts,
        lambda: test_combined_experts.check(COMBINED, "pallas"),
    ),
    "expert_gate_up codes": (
        test_expert_ffn_versions,
        lambda: test_expert_ffn_versions.check(CODED, "pallas"),
    ),
}
"""Op → the module of its contract, and the contract for one spec."""


def replaced(pattern: str, by: str, number: int | None = 0) -> Callable[[str], str]:
    """An edit: the match of this number becomes `by`, which may name groups; None: all of them, in
    every copy of a loop, of which a spec may run one."""

    def edit(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        chosen = found if number is None else found[number : number + 1]
        if not chosen:
            raise LookupError(f"no {pattern} number {number}")
        for where in reversed(chosen):
            ptx = ptx[: where.start()] + where.expand(by) + ptx[where.end() :]
        return ptx

    return edit


def run(op: str, edit: Callable[[str], str] = lambda ptx: ptx, copies: str = "late") -> None:
    module, check = CHECKS[op]

    def edited(ptx: str) -> str:
        return edit(ptx) if f".entry {op.split()[0]}(" in ptx else ptx

    with patched(module, edit=edited, launch={"copies": copies, "most": 5_000}):
        check()


@pytest.mark.parametrize(
    ("op", "copies"),
    [*((op, "late") for op in CHECKS), ("linear", "early"), ("linear", "random")],
)
def test_the_kernels_themselves_pass(op, copies):
    run(op, copies=copies)


BARRIER, NONE = r"bar\.sync\s+0;", ""


def without_barriers_before_the_count(ptx: str) -> str:
    """Behind the stores of y, of all its copies."""
    done, count, rest = ptx.partition("atom.global.gpu.acq_rel.or")
    written = done.rindex("st.global")
    return done[:written] + re.sub(BARRIER, NONE, done[written:]) + count + rest


MUTATIONS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "the next byte of int8 codes": (
        *("expert_gate_up codes", replaced("0x47000000, 0x7404;", "0x47000000, 0x7414;", None)),
        "wrong values",
    ),
    "the codes of the register's other half": (
        *("expert_gate_up codes", replaced("0x47000000, 0x7424;", "0x47000000, 0x7404;", None)),
        "wrong values",
    ),
    "the other four bits of int4 codes": (
        *("expert_gate_up codes", replaced("0xf0f0f0f;", "0xf0f0f0f0;", None)),
        "wrong values",
    ),
    "an exponent less above int4 codes": (
        *("expert_gate_up codes", replaced("0x45000000,", "0x44800000,", None)),
        "wrong values",
    ),
    "no barrier before a tile is read": (
        *("linear", replaced(BARRIER, NONE, 2), "reads what another thread wrote"),
    ),
    "no barrier before a tile is overwritten": (
        *("linear", replaced(BARRIER, NONE, 3), "writes what another thread reads"),
    ),
    "no barrier before the tiles' memory is used again": (
        *("linear", replaced(BARRIER, NONE, 4), "writes what another thread wrote"),
    ),
    "no barrier before the result is read": (
        *("linear", replaced(BARRIER, NONE, 5), "reads what another thread wrote"),
    ),
    "wait_group too weak by one": (
        *("linear", replaced(r"wait_group\s+4;", "wait_group 5;"), "that was not waited for"),
    ),
    "a load's mask too wide": (
        *("linear", replaced(r"(setp\.lt\.u32\s+%p\d+, %r\d+,) 72;", r"\1 80;"), "out of bounds"),
    ),
    "a store without its mask": (
        *("linear", replaced(r"@%p\d+ (st\.global)", r"\1"), "out of bounds|race"),
    ),
    "a wrong swizzle of a read": (
        *("linear", replaced(r"(xor\.b32\s+%r\d+, %r\d+,) 64;", r"\1 32;"), "wrong values"),
    ),
    "a wrong swizzle of a copy": (
        *("linear", replaced(r"(xor\.b64\s+%rd\d+, %rd\d+,) 64;", r"\1 32;"), "race|wrong values"),
    ),
    "a tile of columns further": (
        "linear",
        replaced(r"(mov\.u32\s+(%r\d+), %ctaid\.y;)", r"\1 add.s32 \2, \2, 1;"),
        "wrong values",
    ),
    "a tile of depth less": (
        *(
            "linear",
            replaced(r"(setp\.ne\.b32\s+%p\d+, %r\d+,) 4096;", r"\1 3072;"),
            "wrong values",
        ),
    ),
    "a loop that does not end": (
        *(
            "linear",
            replaced(r"(setp\.ne\.b32\s+%p\d+, %r\d+,) 4096;", r"\1 3840;"),
            "does not end",
        ),
    ),
    "an accumulator that is not initialised": (
        "linear",
        replaced(r"mov\.b32\s+%r\d+, 0f00000000;", NONE),
        "which nothing has written",
    ),
    "two programs of one tile": (
        *("linear", replaced(r"%ctaid\.y;", "%ctaid.x;"), "several programs write it|race"),
    ),
    "a program that reads what another writes": (
        # The result in place of x, of which every program reads all columns.
        *("linear square", replaced(r"\[linear_param_2\]", "[linear_param_4]"), "another.*race"),
    ),
    "every tile of columns writes what is normalised": (
        *("norm_linear_parts", lambda ptx: re.sub(r"@%p\d+ (st\.global)", r"\1", ptx)),
        "several programs write it|race|out of bounds",
    ),
    "squares of warps added up before they are there": (
        *("combine squares", lambda ptx: re.sub(BARRIER, NONE, ptx)),
        "reads what another thread wrote|nobody wrote",
    ),
    "squares of another tile of columns": (
        # All tiles' sums in the first one's place.
        *("linear squares", replaced(r"%ctaid\.y;", "%ctaid.x;")),
        "several programs write it|race",
    ),
    "rows in place of their squares": (
        "norm_linear_parts by squares",
        replaced(r"\[norm_linear_parts_param_5\]", "[norm_linear_parts_param_2]"),
        "out of bounds|wrong values",
    ),
    "shared memory that nobody wrote": (
        *("linear", replaced(r"cp\.async\.cg[^;]*;", NONE), "that nobody wrote"),
    ),
    "an operand written": (
        *("rms_norm", replaced(r"\[rms_norm_param_3\]", "[rms_norm_param_1]"), "no result"),
    ),
    "misaligned": (
        *("fill", replaced(r"(ld\.global\.v4\.b32 .*?) \+ 0", r"\1 + 4"), "misaligned"),
    ),
    "global memory before griddepcontrol.wait": (
        *("plan", replaced(r"griddepcontrol\.wait;", NONE), "before griddepcontrol.wait"),
    ),
    "stores of tables before all threads have read": (
        *("plan", lambda ptx: re.sub(BARRIER, NONE, ptx), "race|nobody wrote"),
    ),
    "the mask of active experts read before it is whole": (
        *("plan routed", replaced(BARRIER, NONE, 1), "race"),
    ),
    "its ones written beside its zeros": ("plan routed", replaced(BARRIER, NONE), "race"),
    "a row's reduction read before it is whole": ("route_plan", replaced(BARRIER, NONE), "race"),
    "the list made of rows that are not whole": (*("route_list", replaced(BARRIER, NONE), "race"),),
    "the layer counted while threads read it": (
        *("combine", lambda ptx: re.sub(BARRIER, NONE, ptx), "writes what another thread reads"),
    ),
    "rows counted before all threads have written them": (
        *("expert_down_combine", without_barriers_before_the_count, "race|nobody wrote"),
    ),
    "counts that order nothing": (
        *("expert_down_combine", replaced("acq_rel", "relaxed"), "unknown instruction atom"),
    ),
    "an instruction that is not known": (
        *("fill", replaced(r"add\.s32", "sad.s32"), r"unknown instruction sad\.s32"),
    ),
}
"""Name → op, edit, what is said of it."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_finds(name):
    op, edit, said = MUTATIONS[name]
    message = ""
    try:
        run(op, edit)
    except Fault as fault:
        message = str(fault)
    except AssertionError as error:
        message = f"wrong values: {error}"
    assert re.search(said, message), f"{name}: {message or 'nothing was found'}"


def test_early_copies_too_must_be_waited_for():
    """Values are right, so that only the rules tell."""
    edit = replaced(r"wait_group\s+4;", "wait_group 5;")
    with pytest.raises(Fault, match="that was not waited for"):
        run("linear", edit, copies="early")


def both_parts_late(fmt, late):
    """up arrives in the second launch, beside the programs that multiply by it."""
    rows = fmt.parts["up"][0]
    return (rows, fmt.rows - rows) if late else (0, rows)


OVERLAP: dict[str, tuple[str, Callable, str]] = {
    "a missing expert computed as it arrives": (
        *("_is_filled", lambda expert, moves: expert < 0),
        "expert_gate_up_hits.*race",
    ),
    "up copied too late": ("_part", both_parts_late, "expert_gate_up_filled.*race"),
    "programs that copy the same": (
        *("_turns", lambda items, first, programs: items - first),
        "race|out of bounds",
    ),
    "the place of another expert in h": (
        *("_slot", lambda expert, active, count: expert * 0),
        "race|wrong values",
    ),
}
"""What fill_ffn has to keep apart: name → function of its kernels, the mistake, what is said."""


@pytest.mark.parametrize("name", OVERLAP)
def test_finds_what_overlaps(name, monkeypatch):
    part, mistake, said = OVERLAP[name]
    monkeypatch.setattr(fill_ffn, part, mistake)
    finds(said, monkeypatch, test_fill_ffn, lambda: test_fill_ffn.check(FILL_FFN[0], "pallas"))


def finds(said, monkeypatch, module, contract) -> None:
    """Asserts that of a contract with a mistake in it so much is said. module: the contract's."""
    monkeypatch.setattr(program, "_compiled", {})
    message = ""
    try:
        with patched(module, launch={"most": 20_000}):
            contract()
    except Fault as fault:
        message = str(fault)
    except AssertionError as error:
        message = f"wrong values: {error}"
    assert re.search(said, message), f"{said}: {message or 'nothing was found'}"


def at_once(index):
    index[0] = index[0] + 1


class Eager(few_tokens._Layer):
    """Reads the index where it is made."""

    def __init__(self, index, first_layer):
        self._layer = index[0] + first_layer

    def __getitem__(self, at):
        return self._layer


def counting(barrier: bool = True, early: int = 0) -> Callable:
    """are_last without barriers of its own, or as if some bits were set from the beginning."""

    def are_last(flags, at, bits, every, mask):
        if barrier:
            plgpu.debug_barrier()
        found = plgpu.atomic_or(flags, (at,), bits, mask=mask)
        last = mask & ((found | bits | early) == every)
        plgpu.store(flags.at[at], jnp.zeros_like(bits), mask=last)
        if barrier:
            plgpu.debug_barrier()
        return last

    return are_last


def one_early(is_last: Callable) -> Callable:
    return lambda counters, at, programs: is_last(counters, at, programs - 1)


COUNTING: dict[str, tuple[Any, str, Callable, str]] = {
    "a token combined before its last expert": (
        *(few_tokens, "are_last", counting(early=1 << COMBINED.top_k - 1)),
        "expert_down_combine.*race|wrong values",
    ),
    "the index moved on while threads read it": (
        *(few_tokens, "move_on", at_once),
        "expert_down_combine.*writes what another thread reads",
    ),
    "the index read by programs without rows": (
        *(few_tokens, "_Layer", Eager),
        "expert_down_combine.*writes what another thread reads",
    ),
    "experts listed before the last rows are routed": (
        *(listed, "is_last", one_early(listed.is_last)),
        "route_list_last.*race|nobody wrote|wrong values",
    ),
    "rows routed before the last part is there": (
        *(linear_kernels, "is_last", one_early(linear_kernels.is_last)),
        "norm_route_list.*race|nobody wrote|wrong values",
    ),
    "splits merged before the last one": (
        *(writing, "is_last", one_early(writing.is_last)),
        "decode_attention_write_merge.*race|nobody wrote|wrong values",
    ),
    "a pass decided before the last tile": (
        *(truncating, "is_last", one_early(truncating.is_last)),
        "truncate_by_count.*race|nobody wrote|wrong values",
    ),
}
"""What programs that go on with what all made have to keep apart, as OVERLAP."""


@pytest.mark.parametrize("name", COUNTING)
def test_finds_what_counts_wrong(name, monkeypatch):
    module, part, mistake, said = COUNTING[name]
    monkeypatch.setattr(module, part, mistake)
    if module is listed:
        contract, spec = test_route_and_list, PlannedSpec(17, 16, 5, "top4")
    elif module is linear_kernels:
        contract, spec = test_norm_route_and_list, test_norm_route_and_list.SPECS[0]
    elif module is writing:
        contract, spec = test_write_and_attend, test_write_and_attend.WRITING_SPECS[-1]
    elif module is truncating:
        contract, spec = test_truncate, TruncateSpec(2, 4100)
    else:
        contract, spec = test_combined_experts, COMBINED
    finds(said, monkeypatch, contract, lambda: contract.check(spec, "pallas"))
