"""Mistakes planted in the PTX of real kernels, each of which the interpreter must find."""

import re
import sys
from collections.abc import Callable

import pytest

from pallas_kernels.fill.specs import Spec as FillSpec
from pallas_kernels.fill_ffn import pallas_triton as fill_ffn_kernels
from pallas_kernels.fill_ffn.specs import SPECS as FILL_FFN
from pallas_kernels.fill_ffn.specs import Spec as FilledSpec
from pallas_kernels.linear.specs import Spec as LinearSpec
from pallas_kernels.plan.specs import Spec as PlanSpec
from pallas_kernels.rms_norm.specs import Spec as NormSpec
from pallas_kernels.route.specs import PlannedSpec
from pallas_kernels.truncate.specs import Spec as TruncateSpec
from tests.pallas_kernels.ops import (
    combine,
    combined_experts,
    fill,
    fill_ffn,
    linear,
    norms,
    plan,
    routed,
    truncate,
)
from tests.ptx import program
from tests.ptx.parse import Fault
from tests.ptx.program import patched

pytestmark = [pytest.mark.aot, pytest.mark.nightly]  # a test of the tests

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
"""Of plan's contract: fills, then evicts."""

TABLES = PlanSpec(2, 5, 8)
ROUTED = PlannedSpec(4, 60, 9, "top4-normalized")

CHECKS: dict[str, tuple] = {
    # Five programs of 16 columns, the last one masked, that pipeline eight tiles of depth.
    "linear": (linear.check, LinearSpec(3, "bfloat16", inputs=2048, outputs=72)),
    "linear square": (linear.check, LinearSpec(3, "bfloat16", inputs=64, outputs=64)),
    "rms_norm": (norms.check, NormSpec((3,), "bfloat16")),
    "fill": (fill.check, FillSpec((12, 4))),
    "combine": (combine.check_count, combine.COUNTED[1]),
    "plan": (plan.check, TABLES, HISTORY),
    "route_plan": (routed.check_planned, ROUTED),
    # Three programs of a row, of which the last one adds up what all made (triton.is_last).
    "truncate_by_count": (truncate.check, TruncateSpec(2, 4099)),
    # Several programs for each token, some without one, two tiles of columns.
    "expert_down_combine": (
        combined_experts.check,
        FilledSpec(3, hits=4, fills=0, experts=12, top_k=3, hidden=72),
    ),
}
"""Kernel → a contract that runs it, its spec, and a history."""


def replaced(pattern: str, by: str, number: int = 0) -> Callable[[str], str]:
    """An edit: the match of this number becomes `by`, which may name groups."""

    def edit(ptx: str) -> str:
        where = list(re.finditer(pattern, ptx))[number]
        return ptx[: where.start()] + where.expand(by) + ptx[where.end() :]

    return edit


def said_of(contract: Callable, *given, **options) -> str:
    """What the interpreter says of a contract of (spec, "pallas", history)."""
    spec, *history = given
    try:
        with patched(MODULES[contract], **options):
            contract(spec, "pallas", *history)
    except Fault as fault:
        return str(fault)
    except AssertionError as error:
        return f"wrong values: {error}"
    return ""


MODULES = {check: sys.modules[check.__module__] for check, *_ in CHECKS.values()}
MODULES[fill_ffn.check] = fill_ffn


def run(op: str, edit: Callable[[str], str] = lambda ptx: ptx) -> str:
    def edited(ptx: str) -> str:
        return edit(ptx) if f".entry {op.split()[0]}(" in ptx else ptx

    return said_of(*CHECKS[op], edit=edited, launch={"most": 5_000})


@pytest.mark.parametrize("op", CHECKS)
def test_the_kernels_themselves_pass(op):
    assert run(op) == ""


BARRIER, NONE = r"bar\.sync\s+0;", ""
COUNT = r"atom\.global\.gpu\.acq_rel\.add"


def without_barriers_before_the_count(ptx: str) -> str:
    """Behind the stores of y, of all its copies."""
    done, count, rest = ptx.partition("atom.global.gpu.acq_rel.or")
    written = done.rindex("st.global")
    return done[:written] + re.sub(BARRIER, NONE, done[written:]) + count + rest


MUTATIONS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "no barrier before a tile is read": (
        *("linear", replaced(BARRIER, NONE, 2), "reads what another thread wrote"),
    ),
    "no barrier before a tile is overwritten": (
        *("linear", replaced(BARRIER, NONE, 3), "writes what another thread reads"),
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
    "a row's reduction read before it is whole": ("route_plan", replaced(BARRIER, NONE), "race"),
    "the layer counted while threads read it": (
        *("combine", lambda ptx: re.sub(BARRIER, NONE, ptx), "writes what another thread reads"),
    ),
    "sums stored behind the count of them": (
        *(
            "truncate_by_count",
            replaced(rf"(?s)(@%p\d+ st\.global[^;]*;)(.*?{COUNT}.*?{BARRIER})", r"\2 \1"),
            "reads what another thread wrote.*race",
        ),
    ),
    "what was counted read before it is there": (
        *("truncate_by_count", replaced(rf"(?s)({COUNT}.*?){BARRIER}", r"\1"), "race|nobody wrote"),
    ),
    "sums added up one program too early": (
        *(
            "truncate_by_count",
            replaced(rf"(?s)({COUNT}.*?setp\.ne\.b32\s+%p\d+, %r\d+,) 2;", r"\1 1;"),
            "race",
        ),
    ),
    "rows counted before all threads have written them": (
        *("expert_down_combine", without_barriers_before_the_count, "race|nobody wrote"),
    ),
    "counts that order nothing": (
        *("expert_down_combine", replaced("acq_rel", "relaxed"), "unknown instruction atom"),
    ),
}
"""Name → op, edit, what is said of it."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_finds(name):
    op, edit, said = MUTATIONS[name]
    message = run(op, edit)
    assert re.search(said, message), f"{name}: {message or 'nothing was found'}"


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
}
"""What fill_ffn has to keep apart: name → function of its kernels, the mistake, what is said."""


@pytest.mark.parametrize("name", OVERLAP)
def test_finds_what_overlaps(name, monkeypatch):
    part, mistake, said = OVERLAP[name]
    monkeypatch.setattr(fill_ffn_kernels, part, mistake)
    monkeypatch.setattr(program, "_compiled", {})
    message = said_of(fill_ffn.check, FILL_FFN[0], launch={"most": 20_000})
    assert re.search(said, message), f"{name}: {message or 'nothing was found'}"
