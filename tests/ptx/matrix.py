"""Instructions in which the lanes of a warp act together: shuffles, reductions, matrices."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.ptx.arithmetic import KINDS, Step, bf16_to_f32, source, target
from tests.ptx.parse import Address, Fault, Instruction, Number, Vector

U32 = KINDS["u32"]

ABSENT = np.uint32(0x7FEDBEEF)
"""What a shuffle gets from a lane that does not take part: anything; a NaN."""


def bind(ins: Instruction) -> Step | None:
    """The step of an instruction; None where it is none of these."""
    binder = BINDERS.get(ins.parts[0])
    return binder(ins) if binder else None


def warps_of(m, idx) -> np.ndarray:
    """The active lanes as [warps, 32]; a Fault where a warp is not whole."""
    lanes = m.lanes(idx)
    whole = lanes.size % 32 == 0
    if whole:
        rows = lanes.reshape(-1, 32)
        whole = (rows[:, 0] % 32 == 0).all() and (rows[:, 31] - rows[:, 0] == 31).all()
    if not whole:
        raise Fault("a .sync instruction without all lanes of the warp")
    return rows


def _of_warps(value, rows: np.ndarray) -> np.ndarray:
    return np.broadcast_to(value, (rows.size,)).reshape(rows.shape)


def _shuffle(ins: Instruction) -> Step:
    mode, last = ins.parts[2:]
    clamp = ins.operands[3]
    usual = Number(0 if mode == "up" else 31)
    if ins.parts[1] != "sync" or last != "b32" or clamp != usual:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    put = target(ins.operands[0])
    value, other = (source(o, U32) for o in ins.operands[1:3])

    def step(m, idx):
        a, by = value(m, idx), np.asarray(other(m, idx)).astype(np.int64)
        lanes = m.lanes(idx)
        lane = m.registers["%laneid"][lanes].astype(np.int64)
        if mode == "bfly":
            of = lane ^ by
        elif mode == "idx":
            of = by & 31
        elif mode == "up":
            of = np.where(lane >= by, lane - by, lane)
        else:
            of = np.where(lane + by < 32, lane + by, lane)
        if m.kernel.threads % 32 == 0:
            rows = warps_of(m, idx)
            put(m, np.take_along_axis(_of_warps(a, rows), _of_warps(of, rows), 1).ravel(), idx)
            return
        # XLA's reductions: the last warp of a program is not whole, and what its lanes get from
        # those that do not exist must not matter.
        table = np.full((m.all.size + 64, 32), ABSENT)
        first = lanes - lane
        table[first, lane] = a
        put(m, table[first, np.broadcast_to(of, lane.shape)], idx)

    return step


REDUCTIONS: dict[str, Callable] = {
    "add": lambda a: a.sum(1, dtype=a.dtype),
    "min": lambda a: a.min(1),
    "max": lambda a: a.max(1),
    "and": lambda a: np.bitwise_and.reduce(a, 1),
    "or": lambda a: np.bitwise_or.reduce(a, 1),
    "xor": lambda a: np.bitwise_xor.reduce(a, 1),
}


def _reduce(ins: Instruction) -> Step:
    if ins.parts[1] != "sync" or ins.parts[2] not in REDUCTIONS or ins.parts[3] not in KINDS:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    reduction, put = REDUCTIONS[ins.parts[2]], target(ins.operands[0])
    value = source(ins.operands[1], KINDS[ins.parts[3]])

    def step(m, idx):
        rows = warps_of(m, idx)
        put(m, np.repeat(reduction(_of_warps(value(m, idx), rows)), 32), idx)

    return step


def _move_matrices(ins: Instruction) -> Step:
    """ldmatrix and stmatrix: 8 rows of 16 bytes at the addresses of lanes 8i to 8i + 7 are matrix
    i, of which lane t has two values of row t / 4."""
    shape = re.fullmatch(
        r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16", ins.opcode
    )
    if shape is None:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    loads, count, transposed = shape[1] == "ld", int(shape[2]), bool(shape[3])
    address, registers = ins.operands[::-1] if loads else ins.operands
    assert isinstance(address, Address)
    items = registers.items if isinstance(registers, Vector) else (registers,)
    puts = [target(item) if loads else None for item in items]
    values = [None if loads else source(item, U32) for item in items]

    def step(m, idx):
        rows = warps_of(m, idx)
        addresses = _of_warps(m.address(address, idx), rows)[:, : 8 * count].reshape(-1)
        lanes = rows[:, : 8 * count].reshape(-1)
        shape = (len(rows), count, 8, 8)
        if loads:
            data = m.load_shared(lanes, addresses, 16).view(np.uint16).reshape(shape)
            if transposed:
                data = data.swapaxes(2, 3)
            for i, put in enumerate(puts):
                put(m, np.ascontiguousarray(data[:, i]).view(np.uint32).reshape(-1), idx)
            return
        parts = [_of_warps(v(m, idx), rows) for v in values]
        data = np.stack(parts, 1).reshape(len(rows), count, 8, 4).view(np.uint16)
        if transposed:
            data = data.swapaxes(2, 3)
        bits = np.ascontiguousarray(data).view(np.uint8).reshape(-1, 16)
        m.store_shared(lanes, addresses, bits)

    return step


def _halves(bits: np.ndarray, kind: str) -> np.ndarray:
    """uint32[…, n], contiguous, as float32[…, 2n]."""
    half = bits.view(np.uint16)
    return bf16_to_f32(half) if kind == "bf16" else half.view(np.float16).astype(np.float32)


def _multiply(ins: Instruction) -> Step:
    """mma.sync m16n8k16: of lane t, row g = t / 4 and columns 2(t % 4) of the 8 × 8 parts."""
    shape = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", ins.opcode
    )
    if shape is None:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    kind = shape[1]
    results, *operands = (o.items for o in ins.operands)  # type: ignore[union-attr]
    puts = [target(r) for r in results]
    of_a, of_b = ([source(o, U32) for o in items] for items in operands[:2])
    of_c = [source(o, KINDS["f32"]) for o in operands[2]]

    def step(m, idx):
        rows = warps_of(m, idx)
        w = len(rows)
        a, b = np.empty((w, 2, 8, 2, 4), np.uint32), np.empty((w, 8, 2, 4), np.uint32)
        for i, item in enumerate(of_a):  # row half i % 2, column half i / 2
            a[:, i % 2, :, i // 2] = _of_warps(item(m, idx), rows).reshape(w, 8, 4)
        for i, item in enumerate(of_b):
            b[:, :, i] = _of_warps(item(m, idx), rows).reshape(w, 8, 4)
        of_k = np.ascontiguousarray(_halves(b, kind).reshape(w, 8, 16).swapaxes(1, 2))
        total = np.matmul(_halves(a, kind).reshape(w, 16, 16), of_k)
        # Row half, row, column pair, column → a register's lanes together.
        out = total.reshape(w, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for item, values in zip(of_c, out, strict=True):
            values += item(m, idx)
        for put, values in zip(puts, out, strict=True):
            put(m, values, idx)

    return step


BINDERS: dict[str, Callable[[Instruction], Step]] = {
    "shfl": _shuffle,
    "redux": _reduce,
    "ldmatrix": _move_matrices,
    "stmatrix": _move_matrices,
    "mma": _multiply,
}
