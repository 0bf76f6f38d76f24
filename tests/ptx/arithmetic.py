"""Instructions that compute from registers to registers, each lane for itself."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.parse import Fault, Instruction, Number, Operand, Register, Symbol, Vector

Array = Any
"""numpy array of a value per lane, or one for all."""

Step = Callable[[Any, Array], None]
"""(machine, active lanes or None for all) → None."""

KINDS = {
    **{f"{k}{b}": np.dtype(f"u{b // 8}") for k in "ub" for b in (8, 16, 32, 64)},
    **{f"s{b}": np.dtype(f"i{b // 8}") for b in (8, 16, 32, 64)},
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),
    "pred": np.dtype(bool),
}
"""How values of a type are held here; bf16 as its bits."""


def kind(ins: Instruction, name: str) -> np.dtype:
    if name not in KINDS:
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    return KINDS[name]


def source(operand: Operand, dtype: np.dtype) -> Callable[[Any, Array], Array]:
    """(machine, lanes) → the operand's values as this dtype."""
    if isinstance(operand, Register):
        name = operand.name
        return lambda m, idx: m.get(name, dtype, idx)
    if isinstance(operand, Number):
        bits = operand.value & ((1 << (8 * dtype.itemsize)) - 1)
        constant = np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]
        if dtype.kind == "b":
            constant = np.bool_(operand.value != 0)
        return lambda m, idx: constant
    if isinstance(operand, Symbol):
        return lambda m, idx: dtype.type(m.symbol(operand.name))
    raise Fault(f"an operand {operand}")


def target(operand: Operand) -> Callable[[Any, Array, Array], None]:
    """(machine, values, lanes): writes a register."""
    if not isinstance(operand, Register):
        if operand == Symbol("_"):
            return lambda m, values, idx: None
        raise Fault(f"a result {operand}")
    name = operand.name
    return lambda m, values, idx: m.put(name, values, idx)


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """To nearest, ties to even; NaN becomes 0x7fff, as on the device."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _flushed(values: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def _canonical(values: Array) -> Array:
    """With the one NaN that the device's float32 arithmetic makes."""
    nan = np.isnan(values)
    return np.where(nan, CANONICAL, values) if nan.any() else values


def _shift(a: Array, count: Array, left: bool) -> Array:
    bits = 8 * a.dtype.itemsize
    small = np.minimum(count, bits - 1).astype(a.dtype)
    if left:
        return np.where(count < bits, a << small, a.dtype.type(0))
    if a.dtype.kind == "i":
        return a >> small
    return np.where(count < bits, a >> small, a.dtype.type(0))


CANONICAL = np.uint32(0x7FFFFFFF).view(np.float32)

FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.fmin,
    "max": np.fmax,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "fma": lambda a, b, c: _fma(a, b, c),
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda a: np.reciprocal(np.sqrt(a)),
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
}
INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "popc": np.bitwise_count,
    "div": lambda a, b: _quotient(a, b),
    "rem": lambda a, b: a - _quotient(a, b) * b,
}
ROUNDINGS = {"rn", "ftz", "approx", "full", "rm", "NaN"}
"""Parts of an opcode between its name and its type that are known."""


def _fma(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32, but rounded to 53 bits before it is to 24, which differs in ties of ties."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _add_towards_zero(a: Array, b: Array) -> Array:
    """add.rz.f32, but rounded to 53 bits before it is to 24."""
    exact = np.float64(a) + np.float64(b)
    near = exact.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(exact)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def _quotient(a: Array, b: Array) -> Array:
    """Towards zero."""
    with np.errstate(all="ignore"):
        q = np.abs(a.astype(np.int64)) // np.abs(
            np.int64(b) if np.ndim(b) == 0 else b.astype(np.int64)
        )
    return np.where((a < 0) != (b < 0), -q, q).astype(a.dtype)


def bind(ins: Instruction) -> Step | None:
    """The step of an instruction; None where it is none of these."""
    name = ins.parts[0]
    special = SPECIAL.get(name)
    if special is not None:
        return special(ins)
    if name in FLOAT or name in INTEGER:
        return _plain(ins)
    return None


def _plain(ins: Instruction) -> Step:
    """add, min, and, …: all operands and the result of one type."""
    name, *modes, last = ins.parts
    if name in ("add", "sub", "fma") and modes == ["rn", "f32"] and last in ("bf16", "f16"):
        return _widening(ins)
    count = len(ins.operands) - 1
    three = name == "fma" or (count == 3 and (name, last) in (("min", "f32"), ("max", "f32")))
    one = name in ("neg", "abs", "not", "popc", "ex2", "lg2", "rsqrt", "sqrt", "rcp")
    if count != (3 if three else 1 if one else 2):
        _refuse(ins)
    towards_zero = (name, *modes, last) == ("add", "rz", "f32")
    if (set(modes) - ROUNDINGS and not towards_zero) or (name, last) == ("fma", "f64"):
        raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")
    if last in ("f16x2", "bf16x2"):
        return _packed(ins, last.removesuffix("x2"))
    if last == "f32x2":
        return _pairs(ins)
    dtype = kind(ins, last)
    operands = [source(o, dtype) for o in ins.operands[1:]]
    put = target(ins.operands[0])
    floating = dtype.kind == "f" or last == "bf16"
    table = FLOAT if floating else INTEGER
    function: Callable = table.get(name) or _refuse(ins)
    if floating and {"min", "max"} & {name} and "NaN" in modes:
        function = np.minimum if name == "min" else np.maximum
    if three and name != "fma":
        function = _of_three(function)
    if last == "bf16":
        function = _in_float32(function, bf16_to_f32, f32_to_bf16)
    elif last == "f16":
        function = _in_float32(function, lambda a: a.astype("f4"), lambda a: a.astype("f2"))
    elif name == "fma" and "rm" in modes:
        function = _fma_down
    elif towards_zero:
        function = _add_towards_zero
    if "ftz" in modes:
        function = _in_float32(function, _flushed, _flushed)
    if last == "f32" and name not in ("neg", "abs"):
        return lambda m, idx: put(m, _canonical(function(*(o(m, idx) for o in operands))), idx)
    return lambda m, idx: put(m, function(*(o(m, idx) for o in operands)), idx)


def _packed(ins: Instruction, last: str) -> Step:
    """add, sub, mul, fma of both halves of registers."""
    if ins.parts[0] not in ("add", "sub", "mul", "fma") or ins.parts[1:-1] not in ((), ("rn",)):
        _refuse(ins)
    if last == "bf16":
        function = _in_float32(FLOAT[ins.parts[0]], bf16_to_f32, f32_to_bf16)
    else:
        widened = _in_float32(
            FLOAT[ins.parts[0]], lambda a: a.view("f2").astype("f4"), lambda a: a.astype("f2")
        )
        function = lambda *values: widened(*values).view("u2")  # noqa: E731
    operands = [source(o, KINDS["b32"]) for o in ins.operands[1:]]
    put = target(ins.operands[0])

    def step(m, idx):
        values = [np.asarray(o(m, idx)) for o in operands]
        low, high = (
            function(*((v >> np.uint32(shift)).astype(np.uint16) for v in values)).astype(np.uint32)
            for shift in (0, 16)
        )
        put(m, low | high << np.uint32(16), idx)

    return step


def _of_three(function: Callable) -> Callable:
    """min, max of three operands (compute capability 10.0)."""
    return lambda a, b, c: function(function(a, b), c)


def _widening(ins: Instruction) -> Step:
    """add, sub, fma of float32, whose first operands are of 16 bits (compute capability 10.0)."""
    name, last = ins.parts[0], ins.parts[-1]
    *narrow, wide = ins.operands[1:]
    if len(narrow) != (2 if name == "fma" else 1):
        _refuse(ins)
    halves, value = [source(o, KINDS["b16"]) for o in narrow], source(wide, KINDS["f32"])
    put = target(ins.operands[0])

    def step(m, idx):
        bits = [np.asarray(o(m, idx)) for o in halves]
        given = [bf16_to_f32(b) if last == "bf16" else b.view("f2").astype("f4") for b in bits]
        put(m, _canonical(FLOAT[name](*given, value(m, idx))), idx)

    return step


def _pairs(ins: Instruction) -> Step:
    """add, sub, mul, fma of the two float32 of 64-bit registers (compute capability 10.0)."""
    if ins.parts[0] not in ("add", "sub", "mul", "fma") or ins.parts[1:-1] not in ((), ("rn",)):
        _refuse(ins)
    function = FLOAT[ins.parts[0]]
    operands = [source(o, KINDS["b64"]) for o in ins.operands[1:]]
    put = target(ins.operands[0])

    def step(m, idx):
        values = [np.ascontiguousarray(np.atleast_1d(o(m, idx))) for o in operands]
        pairs = (v.view(np.float32).reshape(-1, 2) for v in values)
        put(m, np.ascontiguousarray(_canonical(function(*pairs))).view(np.uint64)[:, 0], idx)

    return step


def _in_float32(function: Callable, before: Callable, after: Callable) -> Callable:
    """The function between two conversions."""
    return lambda *values: after(function(*(before(np.asarray(v)) for v in values)))


def _fma_down(a: Array, b: Array, c: Array) -> Array:
    """fma.rm.f32."""
    exact = np.float64(a) * np.float64(b) + np.float64(c)
    near = exact.astype(np.float32)
    down = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > exact, down, near)


def _refuse(ins: Instruction):
    raise Fault(f"unknown instruction {ins.opcode}: {ins.text}")


def _multiply(ins: Instruction) -> Step:
    """mul.lo, .hi, .wide of integers; of floats as the others."""
    if ins.parts[-1] in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"):
        return _plain(ins)
    mode, last = ins.parts[1], ins.parts[-1]
    dtype = kind(ins, last)
    a, b = (source(o, dtype) for o in ins.operands[1:3])
    put, bits = target(ins.operands[0]), 8 * dtype.itemsize
    if mode == "lo":
        return lambda m, idx: put(m, a(m, idx) * b(m, idx), idx)
    if bits > 32 or mode not in ("hi", "wide"):
        _refuse(ins)
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")

    def step(m, idx):
        product = np.asarray(a(m, idx)).astype(wide) * np.asarray(b(m, idx)).astype(wide)
        put(m, product if mode == "wide" else (product >> wide.type(bits)).astype(dtype), idx)

    return step


def _multiply_add(ins: Instruction) -> Step:
    """mad.lo, mad.wide, and the halves of a longer product with a carry."""
    name, *modes, last = ins.parts
    dtype = kind(ins, last)
    put, (a, b) = target(ins.operands[0]), (source(o, dtype) for o in ins.operands[1:3])
    if modes == ["lo"] and name == "mad":
        c = source(ins.operands[3], dtype)
        return lambda m, idx: put(m, a(m, idx) * b(m, idx) + c(m, idx), idx)
    if modes == ["wide"] and name == "mad" and dtype.itemsize <= 4:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        c = source(ins.operands[3], wide)

        def widened(m, idx):
            product = np.asarray(a(m, idx)).astype(wide) * np.asarray(b(m, idx)).astype(wide)
            put(m, product + c(m, idx), idx)

        return widened
    if last != "u32" or modes[0] not in ("lo", "hi") or set(modes[1:]) - {"cc"}:
        _refuse(ins)
    c = source(ins.operands[3], dtype)

    def step(m, idx):
        product = np.asarray(a(m, idx)).astype(np.uint64) * np.asarray(b(m, idx)).astype(np.uint64)
        half = product >> np.uint64(32) if modes[0] == "hi" else product & np.uint64(0xFFFFFFFF)
        total = half + np.asarray(c(m, idx)).astype(np.uint64)
        if name == "madc":
            total = total + m.get("carry", np.dtype("u8"), idx)
        if "cc" in modes:
            m.put("carry", total >> np.uint64(32), idx)
        put(m, total.astype(np.uint32), idx)

    return step


def _move(ins: Instruction) -> Step:
    """mov, also into and out of parts of a register."""
    to, of = ins.operands
    dtype = kind(ins, ins.parts[-1])
    if isinstance(to, Vector) or isinstance(of, Vector):
        items = (to if isinstance(to, Vector) else of).items
        part = np.dtype(f"u{dtype.itemsize // len(items)}")
        if isinstance(to, Vector):
            whole, puts = source(of, dtype), [target(item) for item in items]

            def unpack(m, idx):
                value = np.asarray(whole(m, idx))
                for i, put in enumerate(puts):
                    put(m, (value >> dtype.type(8 * part.itemsize * i)).astype(part), idx)

            return unpack
        put, parts = target(to), [source(item, part) for item in items]

        def pack(m, idx):
            value = dtype.type(0)
            for i, item in enumerate(parts):
                one = np.asarray(item(m, idx)).astype(dtype)
                value = value | (one << dtype.type(8 * part.itemsize * i))
            put(m, value, idx)

        return pack
    put, value = target(to), source(of, dtype)
    return lambda m, idx: put(m, value(m, idx), idx)


def _shift_left(ins: Instruction) -> Step:
    dtype, left = kind(ins, ins.parts[-1]), ins.parts[0] == "shl"
    put, a = target(ins.operands[0]), source(ins.operands[1], dtype)
    count = source(ins.operands[2], KINDS["u32"])
    return lambda m, idx: put(m, _shift(np.asarray(a(m, idx)), count(m, idx), left), idx)


def _funnel(ins: Instruction) -> Step:
    """shf.l/.r.wrap/.clamp: 32 of the 64 bits b:a."""
    side, mode, last = ins.parts[1:]
    if last != "b32" or mode not in ("wrap", "clamp"):
        _refuse(ins)
    put = target(ins.operands[0])
    a, b, count = (source(o, KINDS["u32"]) for o in ins.operands[1:])
    known = ins.operands[3]
    if isinstance(known, Number) and 0 < known.value < 32:  # XLA's random bits: thousands of these
        right = np.uint32(32 - known.value if side == "l" else known.value)
        left = np.uint32(32) - right
        return lambda m, idx: put(m, (b(m, idx) << left) | (a(m, idx) >> right), idx)

    def step(m, idx):
        by = np.asarray(count(m, idx))
        by = (by & np.uint32(31) if mode == "wrap" else np.minimum(by, 32)).astype(np.uint64)
        both = np.asarray(b(m, idx)).astype(np.uint64) << np.uint64(32)
        both = both | np.asarray(a(m, idx)).astype(np.uint64)
        value = (both << by) >> np.uint64(32) if side == "l" else both >> by
        put(m, value.astype(np.uint32), idx)

    return step


def _bit_field(ins: Instruction) -> Step:
    """bfe: a field, its sign or zeros above it. Positions are immediates in our kernels."""
    dtype = kind(ins, ins.parts[-1])
    first, length = ins.operands[2:]
    bits = 8 * dtype.itemsize
    if not (isinstance(first, Number) and isinstance(length, Number)):
        _refuse(ins)
    left = bits - first.value - length.value
    if left < 0 or not length.value:
        _refuse(ins)
    put, a = target(ins.operands[0]), source(ins.operands[1], np.dtype(f"u{dtype.itemsize}"))
    unsigned = np.dtype(f"u{dtype.itemsize}").type

    def step(m, idx):
        up = np.asarray(a(m, idx) << unsigned(left)).view(dtype)
        put(m, up >> dtype.type(bits - length.value), idx)

    return step


def _permute(ins: Instruction) -> Step:
    """prmt.b32: four of the eight bytes of b:a."""
    if ins.opcode != "prmt.b32":
        _refuse(ins)
    put = target(ins.operands[0])
    a, b, which = (source(o, KINDS["u32"]) for o in ins.operands[1:])

    def step(m, idx):
        both = np.asarray(a(m, idx)).astype(np.uint64)
        both = both | (np.asarray(b(m, idx)).astype(np.uint64) << np.uint64(32))
        select, value = np.asarray(which(m, idx)).astype(np.uint64), np.uint64(0)
        for i in range(4):
            field = (select >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> (np.uint64(8) * (field & np.uint64(7)))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(field & np.uint64(8), sign, byte)
            value = value | (byte << np.uint64(8 * i))
        put(m, value.astype(np.uint32), idx)

    return step


def _logic(ins: Instruction) -> Step:
    """lop3.b32: any function of three bits, by its table."""
    if ins.opcode != "lop3.b32" or not isinstance(ins.operands[4], Number):
        _refuse(ins)
    put, table = target(ins.operands[0]), ins.operands[4].value
    values = [source(o, KINDS["u32"]) for o in ins.operands[1:4]]

    def step(m, idx):
        a, b, c = (v(m, idx) for v in values)
        out = np.uint32(0)
        for i in range(8):
            if table >> i & 1:
                term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
                out = out | term
        put(m, out, idx)

    return step


def _select(ins: Instruction) -> Step:
    dtype = kind(ins, ins.parts[-1])
    put, a, b = target(ins.operands[0]), *(source(o, dtype) for o in ins.operands[1:3])
    chosen = source(ins.operands[3], KINDS["pred"])
    return lambda m, idx: put(m, np.where(chosen(m, idx), a(m, idx), b(m, idx)), idx)


COMPARISONS: dict[str, Callable] = {
    "eq": operator.eq,
    "ne": lambda a, b: (a < b) | (a > b) if np.asarray(a).dtype.kind == "f" else a != b,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": operator.ne,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
COMBINED = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _compare(ins: Instruction) -> Step:
    """setp, also with another predicate."""
    name, *modes, last = ins.parts[1:]
    dtype = kind(ins, last)
    if name not in COMPARISONS or last in ("bf16", "f16") or set(modes) - {*COMBINED, "ftz"}:
        _refuse(ins)
    compare, put = COMPARISONS[name], target(ins.operands[0])
    a, b = (source(o, dtype) for o in ins.operands[1:3])
    combined = [COMBINED[mode] for mode in modes if mode in COMBINED]
    if not combined:
        return lambda m, idx: put(m, compare(a(m, idx), b(m, idx)), idx)
    other = source(ins.operands[3], KINDS["pred"])
    return lambda m, idx: put(m, combined[0](compare(a(m, idx), b(m, idx)), other(m, idx)), idx)


ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_integer(values: Array, dtype: np.dtype) -> Array:
    """The nearest that there is; NaN becomes 0."""
    limits = np.iinfo(dtype)
    kept = np.clip(np.nan_to_num(values.astype(np.float64)), limits.min, limits.max)
    return kept.astype(dtype)


def _saturated(values: Array) -> Array:
    return np.clip(np.nan_to_num(values, nan=0.0), np.float32(0), np.float32(1))


def _convert(ins: Instruction) -> Step:
    *modes, to, of = ins.parts[1:]
    put = target(ins.operands[0])
    if to in ("bf16x2", "f16x2") and of == "f32" and modes == ["rn"]:
        halves = [source(o, KINDS["f32"]) for o in ins.operands[1:]]
        rounded = f32_to_bf16 if to == "bf16x2" else lambda x: np.asarray(x).astype("f2").view("u2")

        def pair(m, idx):
            high, low = (np.asarray(rounded(h(m, idx))).astype(np.uint32) for h in halves)
            put(m, (high << np.uint32(16)) | low, idx)

        return pair
    before, after = kind(ins, of), kind(ins, to)
    value = source(ins.operands[1], before)
    mode = modes[0] if modes else ""
    if set(modes) - {"rn", "rni", "rzi", "rmi", "rpi", "sat", "ftz"} or len(modes) > 1:
        _refuse(ins)
    function: Callable
    if of == "bf16" and to == "f32":
        function = bf16_to_f32
    elif to == "bf16" and of == "f32" and mode == "rn":
        function = f32_to_bf16
    elif "bf16" in (of, to):
        _refuse(ins)
    elif mode == "sat" and of == to == "f32":
        function = _saturated
    elif mode in ROUNDED and before.kind == "f":
        whole = ROUNDED[mode]
        function = whole if after.kind == "f" else lambda x: _to_integer(whole(x), after)
    elif mode in ("rn", "") and (after.kind == "f") == (mode == "rn" or before.kind == "f"):
        function = operator.methodcaller("astype", after)
    else:
        _refuse(ins)

    def step(m, idx):
        put(m, function(np.asarray(value(m, idx))), idx)

    return step


SPECIAL: dict[str, Callable[[Instruction], Step]] = {
    "mul": _multiply,
    "mad": _multiply_add,
    "madc": _multiply_add,
    "mov": _move,
    "shl": _shift_left,
    "shr": _shift_left,
    "shf": _funnel,
    "bfe": _bit_field,
    "prmt": _permute,
    "lop3": _logic,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
}
