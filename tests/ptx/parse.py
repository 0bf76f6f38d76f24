"""The text of a PTX module as instructions with operands."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np


class Fault(Exception):
    """What a kernel must not do, or what the interpreter does not know."""


@dataclasses.dataclass(frozen=True)
class Register:
    name: str


@dataclasses.dataclass(frozen=True)
class Number:
    """An immediate: its bits are taken at the width of the instruction."""

    value: int


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A label, a parameter, or an array in shared or local memory."""

    name: str


@dataclasses.dataclass(frozen=True)
class Address:
    base: Register | Symbol | Number
    offset: int


@dataclasses.dataclass(frozen=True)
class Vector:
    items: tuple


@dataclasses.dataclass(frozen=True)
class Tile:
    """Of a tensor map: where the map is, and the first element, the last axis first."""

    map: Address
    first: Vector


Operand = Register | Number | Symbol | Address | Vector | Tile


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    parts: tuple[str, ...]
    """The opcode at its dots."""
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One entry function."""

    name: str
    target: str
    """As sm_90a."""
    parameters: dict[str, int]
    """Name → alignment in bytes that XLA promises."""
    blocks: dict[str, int]
    """Those that are bytes by value → how many."""
    threads: int
    registers: dict[str, np.dtype]
    """Prefix, such as %rd → how its registers are kept."""
    shared: dict[str, int]
    """Arrays in shared memory of known size: name → first byte."""
    shared_bytes: int
    """Of those arrays; what is dynamic comes behind them."""
    local: dict[str, int]
    local_bytes: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]


WIDTHS = {"pred": np.dtype(bool), "16": np.dtype("u2"), "32": np.dtype("u4"), "64": np.dtype("u8")}
"""By the end of a register's type."""

_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s[^,]*?\.align\s+(\d+)\s+(?:\.b8\s+)?(\w+)(?:\[(\d+)\])?")
_ARRAY = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.[bsuf](\d+)\s+([\w$]+)(?:\[(\d+)\])?;")
DYNAMIC = "__dynamic_shmem__"
"""What Mosaic calls shared memory whose size the launch says."""


@functools.lru_cache(maxsize=256)
def parse(module: str) -> Kernel:
    """The one kernel of a module, as XLA dumps it. Raises Fault for what is no such text."""
    text = re.sub(r"//[^\n]*", "", module)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*(.*?)\n\{(.*)\n\}", text, re.DOTALL)
    target = re.search(r"\.target\s+(\w+)", text)
    if entry is None or target is None:
        raise Fault("no .entry or no .target in this text")
    name, parameters, directives, body = entry.groups()
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", directives)
    if threads is None:
        raise Fault(f"{name} has no .reqntid")
    body = _with_unique_names(body)
    given = _PARAMETER.findall(parameters)
    arrays = {"shared": {}, "local": {}}
    sizes = {"shared": 0, "local": 0}
    for space, align, bits, array, count in _ARRAY.findall(text[: entry.start()] + body):
        if array.startswith(DYNAMIC):
            continue
        first = -(-sizes[space] // int(align)) * int(align)
        arrays[space][array], sizes[space] = first, first + int(bits) // 8 * int(count or 1)
    code, labels = _code(body)
    return Kernel(
        name,
        target[1],
        {parameter: int(alignment) for alignment, parameter, _ in given},
        {parameter: int(size) for _, parameter, size in given if size},
        int(threads[1]),
        _registers(body),
        arrays["shared"],
        sizes["shared"],
        arrays["local"],
        sizes["local"],
        tuple(code),
        labels,
    )


def _with_unique_names(body: str) -> str:
    """Blocks of inline assembly have registers and labels of their own: each gets a name that is
    no other's."""
    for number, block in enumerate(re.findall(r"\{((?:[^{}]|\{[^{};]*\})*;[^{}]*)\}", body)):
        renamed = block
        declared = re.findall(r"\.reg\s+\.\w+\s+([^;]+);", block)
        for name in re.findall(r"(?<![%\w])[A-Za-z]\w*", " ".join(declared)):
            renamed = re.sub(rf"(?<![%\w.]){name}\b", f"%own{number}_{name}", renamed)
        for name in re.findall(r"^\s*([A-Za-z]\w*):", block, re.M):
            renamed = re.sub(rf"(?<![%\w.]){name}\b", f"$own{number}_{name}", renamed)
        body = body.replace("{" + block + "}", "{" + renamed + "}", 1)
    return body


def _registers(body: str) -> dict[str, np.dtype]:
    kinds = {}
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
        width = kind if kind == "pred" else kind[1:]
        if width not in WIDTHS:
            raise Fault(f"registers of type .{kind}")
        for name in names.split(","):
            kinds[re.sub(r"<\d+>", "", name.strip())] = WIDTHS[width]
    return kinds


def _code(body: str) -> tuple[list[Instruction], dict[str, int]]:
    code, labels = [], {}
    body = re.sub(r"^\s*\.(reg|local|shared|pragma|loc|file|loc)\b[^;\n]*;?", "", body, flags=re.M)
    body = re.sub(r"(\$[\w$]+):", r"\1:;", body)
    for piece in body.split(";"):
        statement = piece.strip()
        if re.match(r"\.reg\b", statement.lstrip("{} \n\t")):
            continue  # inside of inline assembly; its names are unique
        while statement[:1] in ("{", "}"):  # blocks of inline assembly
            statement = statement[1:].strip()
        if not statement:
            continue
        if statement.endswith(":"):
            labels[statement[:-1]] = len(code)
            continue
        found = _STATEMENT.match(statement)
        if found is None:
            raise Fault(f"no instruction: {statement}")
        negated, predicate, opcode, operands = found.groups()
        code.append(
            Instruction(
                opcode,
                tuple(opcode.split(".")),
                tuple(_operand(o) for o in _split(operands)),
                predicate,
                bool(negated),
                " ".join(statement.split()),
            )
        )
    return code, labels


def _split(text: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    return [o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if o.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_operand(o) for o in _split(text[1:-1])))
    if text.startswith("[") and "{" in text:
        at, first = _split(text[1:-1])
        return Tile(_operand(f"[{at}]"), _operand(first))  # type: ignore[arg-type]
    if text.startswith("["):
        found = re.fullmatch(r"([%$\w.]+)\s*(?:\+\s*(-?\w+))?", text[1:-1].strip())
        if found is None:
            raise Fault(f"no address: {text}")
        return Address(_operand(found[1]), int(found[2] or "0", 0))
    if text.startswith("%"):
        return Register(text)
    if found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
        return Number(int(found[1], 16))
    if re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)U?", text):
        return Number(int(text.rstrip("U"), 0))
    return Symbol(text)
