"""What a kernel computes, whatever its registers are called and in whatever order independent
arithmetic stands: LLVM changes both where nothing that matters changed."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator

from tests.ptx.parse import Address, Instruction, Kernel, Operand, Register, Symbol, Vector

ARITHMETIC = (
    *("mov", "cvt", "cvta", "add", "sub", "mul", "mad", "fma", "neg", "abs", "min", "max", "div"),
    *("rem", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "setp", "selp", "and"),
    *("or", "xor", "not", "shl", "shr", "shf", "lop3", "prmt", "bfe", "bfi", "popc", "clz", "brev"),
)
"""Gives the same result wherever it stands with the same operands."""


def dataflow_digest(kernel: Kernel) -> str:
    """Of the instructions that are not arithmetic, in their order, and of the expression that each
    of their operands is. Equal: the kernels make the same of the same, access by access."""
    return _Values(kernel).digest()


class _Values:
    """Names for what registers hold. A register that one arithmetic instruction sets, and no other,
    is its expression; any other is the place in the code that sets it first and, since it may
    change, the block and how often it was set there before."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.sets = collections.Counter(name for i in kernel.code for name in _set_by(i))
        self.expressions: dict[str, str] = {}
        self.places: dict[str, int] = {}
        self.block, self.set_here = 0, collections.Counter[str]()
        self.labels = {
            name: f"label {i}"
            for i, name in enumerate(sorted(kernel.labels, key=kernel.labels.__getitem__))
        }

    def digest(self) -> str:
        fixed = [not self._is_expression(i) for i in self.kernel.code]
        for instruction, stays in zip(self.kernel.code, fixed, strict=True):
            for name in _set_by(instruction) if stays else ():
                self.places.setdefault(name, len(self.places))
        starts = collections.Counter(self.kernel.labels.values())
        lines = [repr((self.kernel.target, self.kernel.threads, self.kernel.parameters))]
        lines.append(repr((self.kernel.shared, self.kernel.local)))
        for at, (instruction, stays) in enumerate(zip(self.kernel.code, fixed, strict=True)):
            if starts[at]:
                lines += ["label"] * starts[at]
                self._next_block()
            if not stays:
                self._name(instruction)
                continue
            lines.append(self._text(instruction, instruction.operands))
            self.set_here.update(_set_by(instruction))
            if instruction.parts[0] == "bra":
                self._next_block()
        lines += ["label"] * starts[len(self.kernel.code)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def _next_block(self) -> None:
        self.block += 1
        self.set_here.clear()

    def _is_expression(self, instruction: Instruction) -> bool:
        return (
            instruction.parts[0] in ARITHMETIC
            and instruction.predicate is None
            and all(self.sets[name] == 1 for name in _set_by(instruction))
        )

    def _name(self, instruction: Instruction) -> None:
        of = self._text(instruction, instruction.operands[1:])
        short = hashlib.sha256(of.encode()).hexdigest()
        for i, name in enumerate(_set_by(instruction)):
            self.expressions[name] = f"{short}.{i}"

    def _text(self, instruction: Instruction, operands: tuple[Operand, ...]) -> str:
        predicate = instruction.predicate and self._value(Register(instruction.predicate))
        values = ", ".join(map(self._value, operands))
        return f"{predicate} {instruction.negated} {instruction.opcode} {values}"

    def _value(self, operand: Operand) -> str:
        match operand:
            case Vector(items):
                return "{" + ", ".join(map(self._value, items)) + "}"
            case Address(base, offset):
                return f"[{self._value(base)} + {offset}]"
            case Symbol(name):
                return self.labels.get(name, name)
            case Register(name) if name in self.places:
                known = f"place {self.places[name]}"
                if self.sets[name] == 1:
                    return known
                return f"{known} block {self.block} set {self.set_here[name]}"
            case Register(name) if name in self.sets:
                return self.expressions[name]
        return repr(operand)  # numbers, and what the machine sets


def _set_by(instruction: Instruction) -> Iterator[str]:
    """The registers that the first operand names, unless the instruction has no result."""
    if instruction.parts[0] in ("st", "bra", "red", "stmatrix") or not instruction.operands:
        return
    first = instruction.operands[0]
    for item in first.items if isinstance(first, Vector) else (first,):
        if isinstance(item, Register):
            yield item.name
