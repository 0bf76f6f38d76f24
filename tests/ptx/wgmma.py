"""Products of a warpgroup (four warps), whose operands lie in shared memory as descriptors say.

The sums are made at once, but their registers count as unset until the group was waited for, and
the operands must be the same then.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from tests.ptx.arithmetic import KINDS, Step, bf16_to_f32, source, target
from tests.ptx.matrix import warps_of
from tests.ptx.parse import Fault, Instruction, Number, Register, Vector

SWIZZLES = {1: 128, 2: 64, 3: 32}
"""Bits 62 and 63 of a descriptor → bytes of a swizzled row."""


@dataclasses.dataclass
class Pending:
    """A product that was not waited for, of some warpgroups."""

    lanes: np.ndarray
    """[warpgroups, 128]."""
    groups: np.ndarray
    """[warpgroups]: the group that it is of."""
    places: np.ndarray
    """[warpgroups, n]: the 16 bytes that are read there."""
    seen: np.ndarray
    names: list[str]
    """Registers that it writes."""


class Products:
    """The wgmma of some programs: groups are counted for each lane."""

    def __init__(self, lanes: int):
        self.groups = np.zeros(lanes, np.int64)
        self.pending: list[Pending] = []

    def wait(self, m, lanes: np.ndarray, keep: int) -> None:
        """Completes all but the last `keep` groups of these lanes."""
        limit = np.full(self.groups.size, -1)
        limit[lanes] = self.groups[lanes] - keep
        left = []
        for one in self.pending:
            done = one.groups < limit[one.lanes[:, 0]]
            if done.any():
                self._complete(m, self._part(one, done))
            if not done.all():
                left.append(self._part(one, ~done))
        self.pending = left

    def _part(self, one: Pending, which: np.ndarray) -> Pending:
        parts = one.lanes[which], one.groups[which], one.places[which], one.seen[which]
        return Pending(*parts, one.names)

    def _complete(self, m, one: Pending) -> None:
        if not np.array_equal(read(m, one.lanes, one.places, "end_read"), one.seen):
            raise Fault("shared memory changed while a product read it")
        for name in one.names:
            if name in m.unset:
                m.unset[name][one.lanes] = False
                if not m.unset[name].any():
                    del m.unset[name]


def read(m, lanes: np.ndarray, places: np.ndarray, how: str) -> np.ndarray:
    """uint8[warpgroups, n, 16], in the name of the first lane of each of a warpgroup's warps; how:
    begin_read or end_read."""
    for warp in range(0, 128, 32) if m.clocks is not None else (0,):
        stamps = np.broadcast_to(m.stamps[lanes[:, warp : warp + 1]], places.shape)
        data = getattr(m.shared, how)(places.ravel(), 16, stamps.ravel())
    return data.reshape(*places.shape, 16)


def bind(ins: Instruction) -> Step | None:
    """The step of an instruction; None where it is none of these."""
    if ins.parts[0] != "wgmma":
        return None
    if ins.opcode == "wgmma.fence.sync.aligned":
        return lambda m, idx: None
    if ins.opcode == "wgmma.commit_group.sync.aligned":

        def commit(m, idx):
            m.products.groups[m.lanes(idx)] += 1

        return commit
    if ins.opcode == "wgmma.wait_group.sync.aligned":
        (keep,) = ins.operands
        assert isinstance(keep, Number)
        return lambda m, idx: m.products.wait(m, m.lanes(idx), keep.value)
    return _product(ins)


def _places(m, rows, descriptors, count: int, transposed: bool) -> np.ndarray:
    """Places [groups, 16-byte parts] of an operand of `count` rows and 16 of depth.

    Rows of S bytes lie one after the other, eight to an atom; bits 4 to 6 of an address are
    exchanged by the row's number in it (PTX ISA, "Shared memory matrix layout")."""
    if not (descriptors == descriptors[:, :1]).all():
        raise Fault("lanes of a warpgroup have different descriptors")
    fields = descriptors[:, 0].astype(np.uint64)
    out = np.empty((len(rows), 2 * count), np.int64)
    for layout in np.unique(fields >> np.uint64(16)):
        alike = np.flatnonzero(fields >> np.uint64(16) == layout)
        linear, swizzle = _layout(int(layout), count, transposed)
        address = ((fields[alike] & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)[:, None]
        address = address + linear
        address ^= address >> 3 & (swizzle - 1) & 0x70
        programs = np.repeat(m.program[rows[alike, 0]], linear.size)
        places = m.shared.places(address.reshape(-1), 16, programs, "multiplies")
        out[alike] = places.reshape(address.shape)
    return out


@functools.cache
def _layout(bits: int, count: int, transposed: bool) -> tuple[np.ndarray, int]:
    """(where the 16-byte parts lie without a swizzle, bytes of a swizzled row) by a descriptor's
    bits from the 16th on."""
    lbo, sbo = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16))
    if bits >> 46 not in SWIZZLES or bits >> 33 & 7:
        raise Fault(f"a descriptor {bits << 16:#x} without a swizzle, or with an offset")
    swizzle = SWIZZLES[bits >> 46]
    if transposed:  # rows of the summed axis, in parts of eight of the other
        k, part = np.meshgrid(np.arange(16), np.arange(count // 8), indexing="ij")
        byte = 16 * part
        linear = byte % swizzle + byte // swizzle * lbo + k % 8 * swizzle + k // 8 * sbo
    else:
        row, part = np.meshgrid(np.arange(count), np.arange(2), indexing="ij")
        linear = row % 8 * swizzle + row // 8 * sbo + 16 * part
    return linear.reshape(-1), swizzle


def _matrix(data: np.ndarray, count: int, transposed: bool, kind: str) -> np.ndarray:
    """float32[groups, count, 16] of 16-byte parts."""
    half = np.ascontiguousarray(data).view(np.uint16)
    shape = (-1, 16, count) if transposed else (-1, count, 16)
    half = half.reshape(shape)
    values = bf16_to_f32(half) if kind == "bf16" else half.view(np.float16).astype(np.float32)
    return values.swapaxes(1, 2) if transposed else values


def _product(ins: Instruction) -> Step:
    shape = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", ins.opcode
    )
    if shape is None:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    columns, kind = int(shape[1]), shape[2]
    results, a, b, add, *scales = ins.operands
    in_registers = isinstance(a, Vector)
    signs = [s.value for s in scales]  # type: ignore[union-attr]
    if signs[:2] != [1, 1] or len(signs) != (3 if in_registers else 4):
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    of_a = [source(o, KINDS["u32" if in_registers else "u64"]) for o in getattr(a, "items", (a,))]
    of_b, added = source(b, KINDS["u64"]), source(add, KINDS["pred"])
    names = [r.name for r in results.items]  # type: ignore[union-attr]
    puts = [target(Register(name)) for name in names]

    def step(m, idx):
        rows = warps_of(m, idx).reshape(-1, 128)
        if (rows[:, 0] % 128).any():
            raise Fault("wgmma without all lanes of the warpgroup")
        groups = len(rows)

        def operand(descriptor, count, transposed):
            value = np.broadcast_to(descriptor(m, idx), (rows.size,)).reshape(rows.shape)
            places = _places(m, rows, value, count, transposed)
            data = read(m, rows, places, "begin_read")
            return _matrix(data, count, transposed, kind), places, data

        second, *reads = operand(of_b, columns, bool(signs[-1]))
        reads = [reads]
        if in_registers:
            parts = np.stack([np.broadcast_to(r(m, idx), (rows.size,)) for r in of_a])
            half = np.ascontiguousarray(parts).view(np.uint16).reshape(2, 2, groups, 4, 8, 4, 2)
            half = half.transpose(2, 3, 1, 4, 0, 5, 6).reshape(groups, 64, 16)
            half = np.ascontiguousarray(half)
            first = bf16_to_f32(half) if kind == "bf16" else half.view("f2").astype("f4")
        else:
            first, *more = operand(of_a[0], 64, bool(signs[2]))
            reads.append(more)
        total = np.matmul(first, second.swapaxes(1, 2))
        # Row 16w + 8i + g, column 8c + 2q + h is register 4c + 2i + h of lane 4g + q of warp w.
        out = total.reshape(groups, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        out = out.reshape(len(names), -1)
        before = np.broadcast_to(added(m, idx), (rows.size,))
        adding = rows.ravel()[before]
        made = _being_made(m, names) if adding.size else None
        for name, put, values in zip(names, puts, out, strict=True):
            if made is not None:
                old = _accumulator(m, name, adding, made, idx)
                values = np.where(before, old + values, values)
            put(m, np.ascontiguousarray(values, np.float32), idx)
            m.take_back(name, m.lanes(idx))
        places, seen = (np.concatenate(parts, 1) for parts in zip(*reads, strict=True))
        counts = m.products.groups[rows[:, 0]]
        m.products.pending.append(Pending(rows, counts, places, seen, names))

    return step


def _being_made(m, names: list[str]) -> np.ndarray:
    """Lanes that have an earlier product of the same registers, not waited for."""
    lanes = np.zeros(m.all.size, bool)
    for one in m.products.pending:
        if one.names == names:
            lanes[one.lanes] = True
    return lanes


def _accumulator(m, name: str, lanes: np.ndarray, made: np.ndarray, idx) -> np.ndarray:
    """The register before a product, which an earlier one of these lanes may still make (`made`):
    products follow each other."""
    unset = m.unset.get(name)
    if name not in m.registers or (unset is not None and (unset[lanes] & ~made[lanes]).any()):
        raise Fault(f"adds to {name}, which nothing has written")
    return m.registers[name][m.lanes(idx)].view(np.float32)
