"""What a kernel computes, whatever its registers are called and in whatever order independent
arithmetic stands: LLVM changes both where nothing that matters changed."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator, Mapping

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
        self.setters: dict[str, int] = {}
        """The instruction whose expression a register is."""
        self.places: dict[str, int] = {}
        for at, instruction in enumerate(kernel.code):
            for name in _set_by(instruction):
                if self._is_expression(instruction):
                    self.setters[name] = at
                else:
                    self.places.setdefault(name, len(self.places))
        self.expressions: dict[str, str] = {}
        self.labels = {
            name: f"label {i}"
            for i, name in enumerate(sorted(kernel.labels, key=kernel.labels.__getitem__))
        }
        self.before = list(self._changing())
        """Of each instruction: the block, and how often each register was set there before."""

    def digest(self) -> str:
        starts = collections.Counter(self.kernel.labels.values())
        lines = [repr((self.kernel.target, self.kernel.threads, self.kernel.parameters))]
        lines.append(repr((self.kernel.shared, self.kernel.local)))
        for at, instruction in enumerate(self.kernel.code):
            lines += ["label"] * starts[at]
            if not self._is_expression(instruction):
                lines.append(self._text(at, instruction.operands))
                continue
            for name in _set_by(instruction):  # in their order: what is named is not looked for
                self._expression(name)
        lines += ["label"] * starts[len(self.kernel.code)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def _changing(self) -> Iterator[tuple[int, Mapping[str, int]]]:
        block, set_here, starts = 0, dict[str, int](), set(self.kernel.labels.values())
        for at, instruction in enumerate(self.kernel.code):
            if at in starts:
                block, set_here = block + 1, {}
            yield block, set_here
            if not self._is_expression(instruction):
                counts = {name: set_here.get(name, 0) + 1 for name in _set_by(instruction)}
                set_here = set_here | counts if counts else set_here
            if instruction.parts[0] == "bra":
                block, set_here = block + 1, {}

    def _is_expression(self, instruction: Instruction) -> bool:
        return (
            instruction.parts[0] in ARITHMETIC
            and instruction.predicate is None
            and all(self.sets[name] == 1 for name in _set_by(instruction))
        )

    def _expression(self, name: str) -> str:
        """Also of a register whose block stands behind those that it dominates."""
        if name not in self.expressions:
            at = self.setters[name]
            self.expressions[name] = "itself"  # undefined: no value of LLVM's is its own operand
            instruction = self.kernel.code[at]
            of = self._text(at, instruction.operands[1:])
            short = hashlib.sha256(of.encode()).hexdigest()
            for i, each in enumerate(_set_by(instruction)):
                self.expressions[each] = f"{short}.{i}"
        return self.expressions[name]

    def _text(self, at: int, operands: tuple[Operand, ...]) -> str:
        instruction = self.kernel.code[at]
        predicate = instruction.predicate and self._value(at, Register(instruction.predicate))
        values = ", ".join(self._value(at, each) for each in operands)
        return f"{predicate} {instruction.negated} {instruction.opcode} {values}"

    def _value(self, at: int, operand: Operand) -> str:
        match operand:
            case Vector(items):
                return "{" + ", ".join(self._value(at, each) for each in items) + "}"
            case Address(base, offset):
                return f"[{self._value(at, base)} + {offset}]"
            case Symbol(name):
                return self.labels.get(name, name)
            case Register(name) if name in self.places:
                known = f"place {self.places[name]}"
                if self.sets[name] == 1:
                    return known
                block, set_before = self.before[at]
                return f"{known} block {block} set {set_before.get(name, 0)}"
            case Register(name) if name in self.setters:
                return self._expression(name)
        return repr(operand)  # numbers, and what the machine sets


def _set_by(instruction: Instruction) -> Iterator[str]:
    """The registers that the first operand names, unless the instruction has no result."""
    if instruction.parts[0] in ("st", "bra", "red", "stmatrix") or not instruction.operands:
        return
    first = instruction.operands[0]
    for item in first.items if isinstance(first, Vector) else (first,):
        if isinstance(item, Register):
            yield item.name
