"""What instructions do, in kernels written here."""

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
    .reg .pred %p<2>;
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
U, V, W, X = GIVEN.T.view(np.uint32).astype(np.uint64)
HIGH, LOW = (V << np.uint64(32) | U) >> np.uint64(5), (V << np.uint64(32) | U) << np.uint64(5)


def run(body: str) -> np.ndarray:
    """float32[32, 4]: what the lanes' four registers are after these instructions."""
    out = np.zeros(512, np.uint8)
    buffers = [Buffer("given", GIVEN.reshape(-1).view(np.uint8), False), Buffer("out", out)]
    machine.run(parse(MODULE.replace("BODY", body)), buffers, Launch((1, 1, 1)))
    return out.view(np.float32).reshape(32, 4)


def low(values) -> np.ndarray:
    """The low halves of registers, as bits."""
    return (values & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)


def high_half(values) -> np.ndarray:
    """bfloat16 in the upper bits, as float32."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def towards_zero(a, b) -> np.ndarray:
    exact = a.astype(np.float64) + b
    nearest = exact.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, 0 * a), nearest)


PAIRS = "mov.b64 %rd4, {%r2, %r3}; mov.b64 %rd5, {%r4, %r5};"
TABLE = {
    "fma.rn.f32 %r2, %r3, %r4, %r5;": (np.float64(B) * C + D).astype(np.float32),
    "add.rz.f32 %r2, %r2, %r3; sub.rn.f32 %r2, %r2, %r3;": towards_zero(A, B) - B,
    "max.f32 %r2, %r2, %r3, %r4;": np.maximum(np.maximum(A, B), C),
    "min.NaN.f32 %r2, %r2, %r3, %r5;": np.minimum(np.minimum(A, B), D),
    PAIRS + "add.rn.f32x2 %rd6, %rd4, %rd5; mov.b64 {%r2, %r3}, %rd6;": A + C,
    PAIRS + "sub.rn.f32x2 %rd6, %rd4, %rd5; mov.b64 {%r2, %r3}, %rd6;": A - C,
    PAIRS + "mul.rn.f32x2 %rd6, %rd4, %rd5; mov.b64 {%r3, %r2}, %rd6;": B * D,
    "mov.b32 {%rs1, %rs2}, %r2; add.rn.f32.bf16 %r2, %rs2, %r3;": high_half(A) + B,
    "mul.rn.bf16x2 %r2, %r2, %r3; and.b32 %r2, %r2, 0xffff0000;": bf16_to_f32(
        f32_to_bf16(high_half(A) * high_half(B))
    ),
    "mov.b32 %r6, 5; shf.l.wrap.b32 %r2, %r2, %r3, %r6;": low(LOW >> np.uint64(32)),
    "shf.l.wrap.b32 %r2, %r2, %r3, 5;": low(LOW >> np.uint64(32)),
    "shf.r.wrap.b32 %r2, %r2, %r3, 5;": low(HIGH),
    "mad.lo.s32 %r2, %r2, %r3, %r4;": low(U * V + W),
    "mul.hi.u32 %r2, %r2, %r3;": low(U * V >> np.uint64(32)),
    "prmt.b32 %r2, %r2, %r3, 0x5410;": low(U & np.uint64(0xFFFF) | V << np.uint64(16)),
    "lop3.b32 %r2, %r2, %r3, %r4, 0xe8;": low(U & V | U & W | V & W),
    "setp.lt.f32 %p1, %r2, %r3; selp.b32 %r2, %r4, %r5, %p1;": np.where(A < B, C, D),
    "cvt.rzi.s32.f32 %r2, %r2; cvt.rn.f32.s32 %r2, %r2;": np.trunc(A),
    "shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;": A.reshape(16, 2)[:, ::-1].ravel(),
}
"""Instructions → what is in the first register."""


@pytest.mark.parametrize("body", TABLE)
def test_what_an_instruction_does(body):
    np.testing.assert_array_equal(run(body)[:, 0], TABLE[body])


@pytest.mark.parametrize(
    "instruction",
    [
        *("add.f32 %r2, %r3, %r4, %r5", "max.s32 %r2, %r3, %r4, %r5", "neg.f32 %r2, %r3, %r4"),
        *("sad.s32 %r2, %r3, %r4, %r5", "add.rp.f32 %r2, %r3, %r4", "cvt.rz.f16.f32 %rs1, %r2"),
    ],
)
def test_what_is_not_known_is_refused(instruction):
    with pytest.raises(Fault, match="unknown instruction"):
        run(instruction + ";")


WIDE = "and.b64 %rd1, %rd1, {}; ld.global.nc.v8.b32 {{%r2, %r3, %r6, %r7, %r4, %r5, %r8, %r9}}, "
WIDE += "[%rd1];"


def test_a_load_of_eight():
    """Pairs of lanes read both rows: half of the first, then half of the second."""
    got = run(WIDE.format("0xffffffffffffffe0"))
    np.testing.assert_array_equal(got[:, :2], np.repeat(GIVEN[::2, :2], 2, axis=0))
    np.testing.assert_array_equal(got[:, 2:], np.repeat(GIVEN[1::2, :2], 2, axis=0))
    with pytest.raises(Fault, match="reads 32 bytes misaligned"):
        run(WIDE.format("0xffffffffffffffff"))
