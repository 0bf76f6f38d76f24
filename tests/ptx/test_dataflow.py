"""Which changes of a kernel's text change what it computes."""

import pytest

from tests.ptx.dataflow import dataflow_digest
from tests.ptx.parse import parse

PTX = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry sums(
	.param .u64 .ptr .align 16 sums_param_0
)
.reqntid 128, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<5>;

	ld.param.b64 	%rd1, [sums_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	mov.b32 	%r2, 0;
	mov.b32 	%r3, 0;
$L__BB0_1:
	ld.global.b32 	%r4, [%rd3];
	ld.global.b32 	%r5, [%rd3+512];
	add.s32 	%r6, %r3, 5;
	sub.s32 	%r7, %r4, %r5;
	add.s32 	%r3, %r3, %r7;
	bar.sync 	0;
	add.s32 	%r2, %r2, 1;
	setp.lt.s32 	%p1, %r2, 9;
	@%p1 bra 	$L__BB0_1;
	st.global.b32 	[%rd3], %r6;
	st.global.b32 	[%rd3+512], %r3;
	ret;
}
"""

LOADS = "ld.global.b32 	%r4, [%rd3];\n", "ld.global.b32 	%r5, [%rd3+512];\n"
PURE = "add.s32 	%r6, %r3, 5;\n", "sub.s32 	%r7, %r4, %r5;\n"


def swapped(first: str, second: str) -> str:
    changed = PTX.replace(f"{first}\t{second}", f"{second}\t{first}")
    assert changed != PTX
    return changed


def replaced(old: str, new: str) -> str:
    assert old in PTX
    return PTX.replace(old, new)


def digest(text: str) -> str:
    return dataflow_digest(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        replaced("%r4", "%r8"),
        replaced("$L__BB0_1", "$L__BB0_7"),
        swapped(*PURE),
        replaced("bar.sync 	0;", "bar.sync 	0; // all have read"),
    ],
    ids=["another register", "another label", "independent arithmetic", "a comment"],
)
def test_the_same(text):
    assert digest(text) == digest(PTX)


@pytest.mark.parametrize(
    "text",
    [
        replaced("%r4, %r5;", "%r5, %r4;"),
        replaced("%r3, 5;", "%r3, 6;"),
        replaced("setp.lt", "setp.le"),
        replaced("@%p1 bra", "@!%p1 bra"),
        replaced("bra 	$L__BB0_1", "bra 	$L__BB0_2").replace("\tst.", "$L__BB0_2:\n\tst.", 1),
        replaced("[%rd3+512], %r3", "[%rd3+512], %r6"),
        replaced("mul.wide.u32 	%rd2, %r1, 4", "mul.wide.u32 	%rd2, %r2, 4"),
        swapped(*LOADS),
        # What the register holds before the loop's sum is not what it holds behind it.
        replaced(PURE[0], "").replace("%r7;\n", "%r7;\n\t" + PURE[0], 1),
        replaced("\tbar.sync 	0;\n", "").replace(LOADS[1], LOADS[1] + "\tbar.sync 	0;\n"),
        replaced("sm_90a", "sm_80"),
        replaced(".align 16 sums", ".align 8 sums"),
    ],
    ids=[
        *("operands", "a number", "a comparison", "a predicate", "a branch", "what is stored"),
        *("an address", "order of loads", "before and behind a sum", "where the barrier is"),
        *("target", "alignment"),
    ],
)
def test_another(text):
    assert digest(text) != digest(PTX)


def behind(number: int, register: str = "%r8") -> str:
    """The sum's step is set in a block that stands behind the loop's rest: LLVM does so."""
    block = f"bra 	$L__BB0_3;\n$L__BB0_2:\n\tadd.s32 	%r2, %r2, {register};\n"
    sets = f"$L__BB0_3:\n\tadd.s32 	{register}, %r4, {number};\n\tbra 	$L__BB0_2;\n"
    rest = "\tsetp.lt.s32 	%p1, %r2, 9;\n\t@%p1 bra 	$L__BB0_1;\n"
    text = replaced("bar.sync 	0;\n\tadd.s32 	%r2, %r2, 1;\n", block)
    assert rest in text
    return text.replace(rest, rest + "\tbra 	$L__BB0_4;\n" + sets + "$L__BB0_4:\n")


def test_a_block_may_stand_behind_those_that_use_it():
    assert digest(behind(1)) == digest(behind(1, "%r9"))
    assert digest(behind(1)) != digest(behind(2))
