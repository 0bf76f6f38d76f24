"""Runs a kernel: all lanes of some of its programs in lockstep, batch after batch."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.ptx import arithmetic, bulk, matrix, wgmma
from tests.ptx.arithmetic import KINDS, Step, source, target
from tests.ptx.clocks import Clocks
from tests.ptx.host import host_launch
from tests.ptx.memory import (
    REGION,
    AsyncCopies,
    Buffer,
    GlobalMemory,
    LocalMemory,
    SharedMemory,
)
from tests.ptx.parse import (
    DYNAMIC,
    Address,
    Fault,
    Instruction,
    Kernel,
    Number,
    Register,
    Symbol,
    Vector,
)
from tests.ptx.tracker import EPOCH, FIRST_LANE, WARP_CLOCK

LANES = 1 << 15
"""Of a batch, at most, if it has more than one program."""
SHARED = 64 << 20
"""Bytes of shared memory of a batch, likewise."""
BY_VALUE = 1 << 62
"""Where parameters that are bytes lie."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is run."""

    grid: tuple[int, int, int]
    dynamic_shared: int = 0
    most: int = 1_000_000
    """Instructions of a batch: a loop that does not end."""
    host: str = ""
    """The LLVM IR of the host's function that passes buffers on (host.py); grid and dynamic_shared
    are its own. Empty: each parameter is a buffer."""
    overlaps: bool = True
    """It may begin before the kernel before it has ended, where the target can do that: it must
    wait itself (griddepcontrol.wait) before it touches global memory."""


def run(kernel: Kernel, buffers: Sequence[Buffer], launch: Launch) -> int:
    """Runs it on the buffers of its parameters, one of one memory being one object; what it writes
    is written into them. Returns how many instructions were issued. Raises Fault."""
    unique = list({id(b): b for b in buffers}.values())
    places = [next(i for i, u in enumerate(unique) if u is b) for b in buffers]
    access = min((_access(ins) for ins in kernel.code if _access(ins, "global")), default=16)
    counts = any(ins.parts[0] == "atom" for ins in kernel.code)
    alignments = _alignments(kernel, buffers, unique, launch)
    memory = GlobalMemory(unique, min(access, 16), _padded(kernel), alignments, counts)
    parameters: Sequence = [memory.address(place) for place in places]
    if launch.host:
        host = host_launch(launch.host, parameters)
        launch = dataclasses.replace(launch, grid=host.grid, dynamic_shared=host.shared)
        parameters = host.parameters
    if len(parameters) != len(kernel.parameters):
        raise Fault(f"{kernel.name} has {len(kernel.parameters)} parameters, not {len(parameters)}")
    arguments, maps = {}, {}
    for number, (name, value) in enumerate(zip(kernel.parameters, parameters, strict=True)):
        if name in kernel.blocks:
            arguments[name] = BY_VALUE + (number << REGION)
            maps.update({arguments[name] + place: one for place, one in value.items()})
        else:
            arguments[name] = value
    order = np.random.default_rng(0).permutation(int(np.prod(launch.grid)))
    size = kernel.shared_bytes + launch.dynamic_shared
    most = SHARED >> (4 * _has_clocks(kernel))
    batch = max(1, min(LANES // kernel.threads, most // max(size, 1)))
    steps = _steps(kernel)
    issued = 0
    for first in range(0, order.size, batch):
        some = np.sort(order[first : first + batch])
        issued += Machine(kernel, steps, memory, (arguments, maps), launch, some).run()
    return issued


def _alignments(kernel: Kernel, buffers, unique, launch: Launch) -> list[int]:
    """By which bytes beyond a multiple of 256 the buffers lie: no better than XLA promises."""
    if launch.host:
        return [0] * len(unique)
    if len(buffers) != len(kernel.parameters):
        raise Fault(f"{kernel.name} has {len(kernel.parameters)} parameters, not {len(buffers)}")
    promised = list(zip(buffers, kernel.parameters.values(), strict=True))
    return [min(a for b, a in promised if b is one) % 256 for one in unique]


def _has_clocks(kernel: Kernel) -> bool:
    """Whether its threads meet by more than one barrier of all."""
    return any(
        ins.parts[0] == "mbarrier" or (ins.opcode in BARRIERS and len(ins.operands) == 2)
        for ins in kernel.code
    )


@functools.cache
def _steps(kernel: Kernel) -> list[Step]:
    return [_bound(ins) for ins in kernel.code]


def _padded(kernel: Kernel) -> int:
    """Threads of a program up to whole warps."""
    return -(-kernel.threads // 32) * 32


def _bound(ins: Instruction) -> Step | None:
    for module in (arithmetic, matrix, wgmma, bulk):
        if step := module.bind(ins):
            return step
    binder = BINDERS.get(ins.parts[0])
    if binder is None:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    return binder(ins)


class Machine:
    """The state of a batch of programs."""

    def __init__(self, kernel, steps, memory, arguments, launch, programs):
        self.kernel, self.steps, self.memory = kernel, steps, memory
        self.arguments, self.maps = arguments
        threads, count = kernel.threads, len(programs)
        self.all = np.arange(count * threads)
        self.program = np.repeat(np.arange(count), threads)
        tid = np.tile(np.arange(threads, dtype=np.uint32), count)
        x, y, _ = launch.grid
        block = np.asarray(programs)
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": tid,
            "%laneid": tid % np.uint32(32),
            **{
                f"%ctaid.{axis}": numbers.astype(np.uint32)[self.program]
                for axis, numbers in zip(
                    "xyz", (block % x, block // x % y, block // (x * y)), strict=True
                )
            },
            **{f"%tid.{axis}": np.zeros_like(tid) for axis in "yz"},
            **{
                f"%nctaid.{axis}": np.full_like(tid, n)
                for axis, n in zip("xyz", launch.grid, strict=True)
            },
            **{
                f"%ntid.{a}": np.full_like(tid, n)
                for a, n in zip("xyz", (threads, 1, 1), strict=True)
            },
        }
        self.unset: dict[str, np.ndarray] = {}
        self.set_for: dict[str, np.ndarray] = {}
        """Registers with lanes in `unset` → lanes, the array itself, that are known to be set."""
        self.own: set[str] = set()
        """Registers whose array nothing else holds: written in place."""
        size = kernel.shared_bytes + launch.dynamic_shared
        granule = min((_access(i) for i in kernel.code if _access(i, "shared")), default=16)
        self.clocks = Clocks(count, threads // 32) if _has_clocks(kernel) else None
        self.shared = SharedMemory(count, size, min(granule, 16), _padded(kernel), self.clocks)
        self.local = LocalMemory(self.all.size, kernel.local_bytes)
        self.copies = AsyncCopies(self.all.size, memory, self.shared)
        self.products = wgmma.Products(self.all.size)
        self.bulk = bulk.Bulk(self)
        # In tracker's stamps: lanes of all programs of the grid have numbers of their own.
        lane = block[self.program].astype(np.int64) * _padded(kernel) + tid
        self.stamps = lane + FIRST_LANE
        """Made anew where they change: accesses keep them."""
        self.parked: list[tuple[int, np.ndarray, int, int]] = []
        """At barriers: (where they go on, lanes, barrier, threads that it waits for or 0: all)."""
        self.asleep: list[tuple[int, np.ndarray, set]] = []
        """At mbarriers: (the instruction, lanes, mbarriers)."""
        self.live = np.bincount(self.program, minlength=count)
        self.most = launch.most
        self.must_wait = launch.overlaps and int(re.sub(r"\D", "", kernel.target)) >= 90
        self.groups: dict[int, list[np.ndarray]] = {0: [self.all]}

    # Registers

    def lanes(self, idx) -> np.ndarray:
        return self.all if idx is None else idx

    def stamps_of(self, lanes) -> np.ndarray:
        return self.stamps if lanes is self.all else self.stamps[lanes]

    def get(self, name: str, dtype: np.dtype, idx) -> np.ndarray:
        values = self.registers.get(name)
        if values is None:
            raise Fault(f"reads {name}, which nothing has written")
        if name in self.unset and self.set_for.get(name) is not self.lanes(idx):
            if self.unset[name].take(self.lanes(idx)).any():
                raise Fault(f"reads {name}, which some lanes have not written")
            self.set_for[name] = self.lanes(idx)
        if idx is None:
            self.own.discard(name)
        else:
            values = values.take(idx)
        if values.dtype.itemsize != dtype.itemsize or (values.dtype.kind == "b") != (
            dtype.kind == "b"
        ):
            if values.dtype.itemsize < dtype.itemsize or "b" in (values.dtype.kind, dtype.kind):
                raise Fault(f"reads {name} as {dtype}")
            return values.astype(f"u{dtype.itemsize}").view(dtype)
        return values.view(dtype)

    def put(self, name: str, values, idx) -> None:
        kept = self.dtype(name)
        values = np.asarray(values)
        if values.dtype != kept:
            if values.dtype.itemsize == kept.itemsize and bool not in (values.dtype, kept):
                values = (
                    np.ascontiguousarray(values).view(kept)
                    if values.ndim
                    else values[()].view(kept)
                )
            else:
                values = values.astype(kept)
        if idx is None:
            shape = (self.all.size,)
            self.registers[name] = values if values.shape == shape else np.full(shape, values, kept)
            self.own.discard(name)
            self.unset.pop(name, None)
            return
        if name not in self.registers:
            self.registers[name] = np.zeros(self.all.size, kept)
            self.unset[name] = np.ones(self.all.size, bool)
        elif name not in self.own:
            self.registers[name] = self.registers[name].copy()
        self.own.add(name)
        self.registers[name][idx] = values
        if name in self.unset and self.set_for.get(name) is not idx:
            self.unset[name][idx] = False
            self.set_for[name] = idx
            if not self.unset[name].any():
                del self.unset[name]

    def take_back(self, name: str, lanes: np.ndarray) -> None:
        """A register of these lanes counts as not written."""
        self.unset.setdefault(name, np.zeros(self.all.size, bool))[lanes] = True
        self.set_for.pop(name, None)

    def dtype(self, name: str) -> np.dtype:
        if name == "carry":
            return KINDS["u64"]
        prefix = name.rstrip("0123456789")
        known = self.kernel.registers.get(prefix) or self.kernel.registers.get(name)
        if known is None:
            raise Fault(f"writes {name}, which is no register")
        return known

    def symbol(self, name: str) -> int:
        for arrays in (self.kernel.shared, self.kernel.local):
            if name in arrays:
                return arrays[name]
        if name == "global_smem" or name.startswith(DYNAMIC):  # behind the others
            return self.kernel.shared_bytes
        if name in self.kernel.blocks:
            return self.arguments[name]
        raise Fault(f"unknown name {name}")

    def address(self, operand: Address, idx) -> np.ndarray:
        base = operand.base
        if isinstance(base, Register):
            wide = self.dtype(base.name)
            return self.get(base.name, wide, idx) + wide.type(
                operand.offset % (1 << 8 * wide.itemsize)
            )
        first = base.value if isinstance(base, Number) else self.symbol(base.name)
        return np.full(self.lanes(idx).size, first + operand.offset, np.uint64)

    # Memory

    def load_shared(self, lanes, addresses, size: int) -> np.ndarray:
        places = self.shared.places(addresses, size, self.program[lanes], "reads")
        return self.shared.load(places, size, self.stamps_of(lanes))

    def store_shared(self, lanes, addresses, values: np.ndarray) -> None:
        places = self.shared.places(addresses, values.shape[1], self.program[lanes], "writes")
        self.shared.store(places, values, self.stamps_of(lanes))

    def check_waited(self) -> None:
        if self.must_wait:
            raise Fault(
                "global memory before griddepcontrol.wait: the kernel before may still write it"
            )

    # Control

    def run(self) -> int:
        issued = 0
        code, end = self.kernel.code, len(self.kernel.code)
        with np.errstate(all="ignore"):
            while self.groups:
                pc = min(self.groups)
                parts = self.groups.pop(pc)
                lanes = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
                others = min(self.groups, default=end + 1)
                idx = None if lanes.size == self.all.size else lanes
                while pc < others:
                    if pc == end:
                        raise Fault(f"{self.kernel.name} runs over its end")
                    ins = code[pc]
                    issued += 1
                    if issued > self.most:
                        raise Fault(f"{self.kernel.name} does not end: {issued} instructions")
                    try:
                        pc = self._issue(ins, pc, lanes, idx)
                    except Fault as fault:
                        raise Fault(f"{self.kernel.name}: {fault}\n  at: {ins.text}") from None
                    if pc < 0:
                        break
                    others = min(self.groups, default=end + 1)
                else:
                    self.groups.setdefault(pc, []).append(lanes)
                if not self.groups:
                    self._unblock()
        self.bulk.check_ended()
        return issued

    def _issue(self, ins: Instruction, pc: int, lanes, idx) -> int:
        """The next place of these lanes; -1 where they have been put elsewhere."""
        active, rest = lanes, None
        if ins.predicate is not None:
            chosen = self.get(ins.predicate, KINDS["pred"], idx)
            if ins.negated:
                chosen = ~chosen
            if not chosen.all():
                active, rest = lanes[chosen], lanes[~chosen]
        if active.size == 0:
            return pc + 1
        name = ins.parts[0]
        if name == "bra":
            place = self.kernel.labels[ins.operands[0].name]  # type: ignore[union-attr]
            if rest is None:
                return place
            self.groups.setdefault(place, []).append(active)
            self.groups.setdefault(pc + 1, []).append(rest)
            return -1
        if name in ("ret", "exit") or ins.opcode in BARRIERS:
            if rest is not None:
                self.groups.setdefault(pc + 1, []).append(rest)
            if name in ("ret", "exit"):
                self.live -= np.bincount(self.program[active], minlength=self.live.size)
                self._release()
            else:
                self._arrive(ins, pc + 1, active)
            return -1
        if ins.opcode.startswith("mbarrier.try_wait"):
            if rest is not None:
                self.groups.setdefault(pc + 1, []).append(rest)
            self._wait(pc, active)
            return -1
        if name == "trap":
            raise Fault("trap")
        step = self.steps[pc]
        assert step is not None
        step(self, idx if rest is None else active)
        return pc + 1

    def _arrive(self, ins: Instruction, pc: int, lanes) -> None:
        """Lanes come to a barrier of all threads that live, or of as many as it says."""
        number, *count = (
            np.broadcast_to(source(o, KINDS["u32"])(self, lanes), lanes.shape) for o in ins.operands
        )
        for of in np.unique(number).tolist():
            here = number == of
            needs = int(count[0][here][0]) if count else 0
            self.parked.append((pc, lanes[here], of, needs))
        self._release()

    def _release(self) -> None:
        """Lets programs go on of which all lanes of a barrier have come."""
        for number in sorted({number for _, _, number, _ in self.parked}):
            there = [one for one in self.parked if one[2] == number]
            waiting = np.concatenate([lanes for _, lanes, _, _ in there])
            count = np.bincount(self.program[waiting], minlength=self.live.size)
            needs = there[0][3]
            if any(one[3] != needs for one in there) or (needs and (count > needs).any()):
                raise Fault(f"threads come to barrier {number} in numbers that do not agree")
            free = (count == (needs or self.live)) & (count > 0)
            if not free.any():
                continue
            self.parked = [one for one in self.parked if one[2] != number]
            for pc, lanes, _, _ in there:
                goes = free[self.program[lanes]]
                if goes.any():
                    self.groups.setdefault(pc, []).append(lanes[goes])
                if not goes.all():
                    self.parked.append((pc, lanes[~goes], number, needs))
            self._order(waiting[free[self.program[waiting]]], needs)

    def _order(self, lanes: np.ndarray, needs: int) -> None:
        """What these lanes of some programs did comes before what they will do."""
        if self.clocks is not None:
            for program in np.unique(self.program[lanes]):
                self.clocks.meet(np.unique(lanes[self.program[lanes] == program] // 32))
        if needs in (0, self.kernel.threads):
            after = ((self.stamps >> EPOCH) + 1 << EPOCH) | (self.stamps & ((1 << WARP_CLOCK) - 1))
            met = np.zeros(self.live.size, bool)
            met[self.program[lanes]] = True
            self.stamps = np.where(met[self.program], after, self.stamps)

    def _wait(self, pc: int, lanes: np.ndarray) -> None:
        """Lanes come to mbarrier.try_wait: those whose phase is complete go on."""
        step: Any = self.steps[pc]
        ready, keys = step(self, lanes)
        if ready.any():
            self.groups.setdefault(pc + 1, []).append(lanes[ready])
        if keys:
            self.asleep.append((pc, lanes[~ready], keys))

    def _unblock(self) -> None:
        """No lane can go on: bulk copies arrive that some of them wait for."""
        if self.asleep:
            asleep, self.asleep = self.asleep, []
            self.bulk.land(set().union(*(keys for _, _, keys in asleep)))
            for pc, lanes, _ in asleep:
                self._wait(pc, lanes)
        if not self.groups and (self.asleep or self.parked):
            raise Fault(f"{self.kernel.name}: threads wait at a barrier that others never reach")


BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")


def _warp_barrier(ins: Instruction) -> Step:
    most = 2 if ins.opcode in BARRIERS else 1
    if ins.opcode not in ("bar.warp.sync", *BARRIERS) or len(ins.operands) > most:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")

    def step(m, idx):
        rows = matrix.warps_of(m, idx)
        if m.clocks is not None:
            m.clocks.join_lanes(rows[:, 0] // 32)
        m.stamps = m.stamps.copy()
        m.stamps[rows.reshape(-1)] += np.int64(1 << WARP_CLOCK)

    return step


def _grid_dependency(ins: Instruction) -> Step:
    def step(m, idx):
        if ins.opcode == "griddepcontrol.wait":
            if idx is not None:
                raise Fault("griddepcontrol.wait of some threads only")
            m.must_wait = False

    if ins.parts[1] not in ("wait", "launch_dependents"):
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    return step


def _address_space(ins: Instruction) -> Step:
    """cvta: the addresses of one space are those of all."""
    put, value = target(ins.operands[0]), source(ins.operands[1], KINDS["u64"])
    return lambda m, idx: put(m, value(m, idx), idx)


def _nothing(ins: Instruction) -> Step:
    return lambda m, idx: None


ORDERS = ("relaxed", "sys", "gpu", "cta")
"""Of a scatter of XLA's; here as any other store."""

_HINT = re.compile(r"L[12]::\w+|nc")


def _shape(ins: Instruction) -> tuple[str, int, np.dtype]:
    """(space, values, type) of a load or store."""
    *modes, last = (part for part in ins.parts[1:] if part not in ORDERS)
    spaces = [mode for mode in modes if not re.fullmatch(r"v\d", mode)]
    if not spaces:  # a generic address: in Mosaic's kernels, of global memory
        modes.insert(0, "global")
    space, count = re.sub("::(cta|entry)$", "", modes.pop(0)), 1
    for mode in modes:
        if mode in ("v2", "v4", "v8"):
            count = int(mode[1])
        elif not _HINT.fullmatch(mode):
            raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    if space not in ("global", "shared", "local", "param") or last not in KINDS:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    return space, count, KINDS[last]


def _access(ins: Instruction, space: str = "") -> int:
    """Bytes that each lane reads or writes at once, in this space; 0: none."""
    name = ins.parts[0]
    if name == "atom":
        return 4 if "global".startswith(space) else 0
    if name in ("ld", "st"):
        found, count, dtype = _shape(ins)
        return count * dtype.itemsize if found.startswith(space) else 0
    if name == "mbarrier":
        return 8 if space != "global" else 0
    if name == "cp" and "bulk" in ins.parts:
        return bulk.UNIT if "group" not in ins.parts[-1] or len(ins.operands) > 1 else 0
    if name == "cp" and len(ins.operands) > 2:
        return int(ins.operands[2].value)  # type: ignore[union-attr]
    if name in ("ldmatrix", "stmatrix"):
        return 16 if space != "global" else 0
    return 0


def _load(ins: Instruction) -> Step:
    space, count, dtype = _shape(ins)
    to, at = ins.operands
    items = to.items if isinstance(to, Vector) else (to,)
    puts = [target(item) for item in items]
    size = count * dtype.itemsize
    assert isinstance(at, Address) and len(items) == count

    def step(m, idx):
        if space == "param":
            if not isinstance(at.base, Symbol) or at.offset:
                raise Fault("a parameter at an address")
            return puts[0](m, np.uint64(m.arguments[at.base.name]), idx)
        lanes, addresses = m.lanes(idx), m.address(at, idx)
        if space == "global":
            m.check_waited()
            raw = _wide_load(m, lanes, addresses, size)
        elif space == "shared":
            raw = m.load_shared(lanes, addresses, size)
        else:
            raw = m.local.load(lanes, addresses, size)
        values = np.ascontiguousarray(raw).view(dtype)
        for i, (item, put) in enumerate(zip(items, puts, strict=True)):
            column = np.ascontiguousarray(values[:, i])
            if isinstance(item, Register) and m.dtype(item.name).itemsize > dtype.itemsize:
                column = column.astype(f"{dtype.kind}{m.dtype(item.name).itemsize}")
            put(m, column, idx)

    return step


def _wide_load(m, lanes, addresses: np.ndarray, size: int) -> np.ndarray:
    """From global memory; 32 bytes, of newer cards, in two halves."""
    if size <= 16:
        return m.memory.load(addresses, size, m.stamps_of(lanes))
    if (addresses % np.uint64(size)).any():
        raise Fault(f"reads {size} bytes misaligned")
    halves = (addresses, addresses + np.uint64(16))
    return np.hstack([m.memory.load(half, 16, m.stamps_of(lanes)) for half in halves])


def _store(ins: Instruction) -> Step:
    space, count, dtype = _shape(ins)
    at, of = ins.operands
    items = of.items if isinstance(of, Vector) else (of,)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    values = [source(item, unsigned) for item in items]
    assert isinstance(at, Address) and len(items) == count

    def step(m, idx):
        lanes, addresses = m.lanes(idx), m.address(at, idx)
        columns = [np.broadcast_to(v(m, idx), lanes.shape) for v in values]
        raw = np.stack(columns, 1).view(np.uint8)
        if space == "global":
            m.check_waited()
            m.memory.store(addresses, raw, m.stamps_of(lanes))
        elif space == "shared":
            m.store_shared(lanes, addresses, raw)
        elif space == "local":
            m.local.store(lanes, addresses, raw)
        else:
            raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")

    return step


def _atomic(ins: Instruction) -> Step:
    """A change of a 32-bit integer that orders what is around it (`GlobalMemory.atomic`)."""
    does = {"add.u32": np.add, "add.s32": np.add, "or.b32": np.bitwise_or}
    prefix, name = "atom.global.gpu.acq_rel.", ".".join(ins.parts[-2:])
    if ins.opcode != prefix + name or name not in does:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    to, at, of = ins.operands
    put, value = target(to), source(of, KINDS["u32"])
    assert isinstance(at, Address)

    def step(m, idx):
        m.check_waited()
        lanes = m.lanes(idx)
        values = np.array(np.broadcast_to(value(m, idx), lanes.shape))
        put(m, m.memory.atomic(does[name], m.address(at, idx), values, m.stamps_of(lanes)), idx)

    return step


def _copy(ins: Instruction) -> Step:
    """cp.async of 4, 8 or 16 bytes, or of zeros; its groups."""
    if ins.opcode == "cp.async.commit_group":
        return lambda m, idx: m.copies.commit(m.lanes(idx))
    if ins.opcode == "cp.async.wait_group":
        keep = ins.operands[0].value  # type: ignore[union-attr]
        return lambda m, idx: m.copies.wait(m.lanes(idx), keep, m.stamps)
    if not re.fullmatch(r"cp\.async\.c[ag]\.shared\.global(\.L2::\w+)?", ins.opcode):
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    to, of, size, *rest = ins.operands
    assert isinstance(to, Address) and isinstance(of, Address) and isinstance(size, Number)
    real = source(rest[0], KINDS["u32"]) if rest else None

    def step(m, idx):
        m.check_waited()
        lanes, addresses = m.lanes(idx), m.address(of, idx)
        places = m.shared.places(m.address(to, idx), size.value, m.program[lanes], "copies to")
        full = np.full(lanes.size, True)
        if real is not None:
            count = np.broadcast_to(real(m, idx), lanes.shape)
            full = count == size.value
            if not (full | (count == 0)).all():
                raise Fault("cp.async of a part")
        m.copies.start(lanes, places, addresses, full, size.value, m.stamps_of(lanes))

    return step


BINDERS = {
    "bar": _warp_barrier,
    "barrier": _warp_barrier,
    "griddepcontrol": _grid_dependency,
    "cvta": _address_space,
    "membar": _nothing,
    "prefetch": _nothing,
    "setmaxnreg": _nothing,
    "bra": _nothing,
    "ret": _nothing,
    "exit": _nothing,
    "trap": _nothing,
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "cp": _copy,
}
