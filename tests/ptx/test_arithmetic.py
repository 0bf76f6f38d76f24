"""Instructions of compute capability 10.0 and higher, in kernels written here."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import machine
from tests.ptx.arithmetic import bf16_to_f32, f32_to_bf16
from tests.ptx.machine import Launch
from tests.ptx.memory import Buffer
from tests.ptx.parse import Fault, parse

MODULE = """
.version 9.0
.target sm_80
.visible .entry one(
    .param .u64 .ptr .align 32 one_param_0,
    .param .u64 .ptr .align 32 one_param_1
)
.reqntid 32, 1, 1
{
    .reg .b16 %rs<4>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd1, [one_param_0];
    ld.param.b64 %rd2, [one_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1];
    BODY
    st.global.v4.b32 [%rd2], {%r2, %r3, %r4, %r5};
    ret;
}
"""

GIVEN = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
A, B, C, D = GIVEN.T


def run(body: str) -> np.ndarray:
    """float32[32, 4]: what the lanes' four registers are after these instructions."""
    out = np.zeros(512, np.uint8)
    buffers = [Buffer("given", GIVEN.reshape(-1).view(np.uint8), False), Buffer("out", out)]
    machine.run(parse(MODULE.replace("BODY", body)), buffers, Launch((1, 1, 1)))
    return out.view(np.float32).reshape(32, 4)


def test_max_and_min_of_three():
    got = run("max.f32 %r6, %r2, %r3, %r4; min.NaN.f32 %r7, %r2, %r3, %r5; mov.b32 %r2, %r6;")
    np.testing.assert_array_equal(got[:, 0], np.maximum(np.maximum(A, B), C))
    np.testing.assert_array_equal(got[:, 1:], GIVEN[:, 1:])  # operands stay what they are


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_pairs(name):
    move = "mov.b64 %rd4, {%r2, %r3}; mov.b64 %rd5, {%r4, %r5};"
    got = run(f"{move} {name}.rn.f32x2 %rd6, %rd4, %rd5; mov.b64 {{%r2, %r3}}, %rd6;")
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    np.testing.assert_array_equal(got[:, 0], function(A, C))
    np.testing.assert_array_equal(got[:, 1], function(B, D))


def test_a_product_of_pairs_of_16_bits():
    got = run("mul.rn.bf16x2 %r2, %r2, %r3; mul.rn.f16x2 %r3, %r4, %r5;").view(np.uint16)
    bits = GIVEN.view(np.uint16).reshape(32, 4, 2)
    a, b = (bf16_to_f32(bits[:, i]) for i in (0, 1))
    c, d = (bits[:, i].view(np.float16) for i in (2, 3))
    with np.errstate(all="ignore"):  # any bits: numpy says of some processors that they overflow
        first, second = f32_to_bf16(a * b), c * d
    np.testing.assert_array_equal(got.reshape(32, 4, 2)[:, 0], first)
    np.testing.assert_array_equal(got.reshape(32, 4, 2)[:, 1].view(np.float16), second)


def test_the_first_operand_of_16_bits():
    got = run("mov.b32 {%rs1, %rs2}, %r2; add.rn.f32.bf16 %r2, %rs2, %r3;")
    high = (A.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(got[:, 0], high + B)


@pytest.mark.parametrize(("side", "by"), [("l", 5), ("r", 5), ("l", 31), ("r", 0)])
def test_a_funnel_shift_by_a_constant_is_one_by_a_register(side, by):
    given = f"mov.b32 %r6, {by}; shf.{side}.wrap.b32 %r2, %r4, %r5, %r6;"
    got = run(given + f"shf.{side}.wrap.b32 %r3, %r4, %r5, {by};").view(np.uint32)
    np.testing.assert_array_equal(got[:, 1], got[:, 0])
    both = C.view(np.uint32).astype(np.uint64) | D.view(np.uint32).astype(np.uint64) << np.uint64(
        32
    )
    want = both << np.uint64(by) >> np.uint64(32) if side == "l" else both >> np.uint64(by)
    np.testing.assert_array_equal(got[:, 0], want.astype(np.uint32))


@pytest.mark.parametrize(
    "instruction",
    ["add.f32 %r2, %r3, %r4, %r5", "max.s32 %r2, %r3, %r4, %r5", "neg.f32 %r2, %r3, %r4"],
)
def test_an_unknown_number_of_operands_is_refused(instruction):
    with pytest.raises(Fault, match="unknown instruction"):
        run(instruction + ";")


WIDE = "and.b64 %rd1, %rd1, {}; ld.global.nc.v8.b32 {{%r2, %r3, %r6, %r7, %r4, %r5, %r8, %r9}}, "
WIDE += "[%rd1];"


def test_a_load_of_eight():
    """Pairs of lanes read both rows: half of the first, then half of the second."""
    got = run(WIDE.format("0xffffffffffffffe0"))
    np.testing.assert_array_equal(got[:, :2], np.repeat(GIVEN[::2, :2], 2, axis=0))
    np.testing.assert_array_equal(got[:, 2:], np.repeat(GIVEN[1::2, :2], 2, axis=0))


def test_a_load_of_eight_is_aligned_to_all_of_it():
    with pytest.raises(Fault, match="reads 32 bytes misaligned"):
        run(WIDE.format("0xffffffffffffffff"))
