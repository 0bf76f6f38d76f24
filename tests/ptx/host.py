"""What a host does to launch a kernel of Mosaic GPU: tensor maps, parameters, grid.

Mosaic compiles that to a function without branches, whose LLVM IR it prints
(MOSAIC_GPU_DUMP_HOST_LLVM). It is carried out here with the addresses of the buffers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from tests.ptx.parse import Fault

ITEM_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
"""By the number of a type in mosaic_gpu_init_tma_desc (jax's launch_context._tma_dma_type)."""
STACK, TABLE = 1 << 60, 1 << 61
"""Where the host's variables, and its table of buffers, are."""
ROOM = 1 << 16
"""Of each variable."""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What TMA knows of an array, the last axis last."""

    address: int
    item: int
    """Bytes of an element."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    box: tuple[int, ...]
    """What is copied at once."""
    swizzle: int
    """Bytes of a row that is swizzled; 16: none is."""

    def __post_init__(self):
        inner = self.box[-1] * self.item
        wrong = {
            "an address or a stride that is no multiple of 16 bytes": self.address % 16
            or any(s * self.item % 16 for s in self.strides[:-1]),
            "an inner axis that is not contiguous": self.strides[-1] != 1,
            "more than 256 elements of an axis at once": max(self.box) > 256 or min(self.box) < 1,
            "rows that are no multiple of 16 bytes": inner % 16,
            "rows longer than the swizzle": self.swizzle > 16 and inner > self.swizzle,
            "more than five axes": not 1 <= len(self.box) <= 5,
        }
        if found := [what for what, is_so in wrong.items() if is_so]:
            raise Fault(f"a tensor map with {found[0]}: {self}")


@dataclasses.dataclass(frozen=True)
class HostLaunch:
    """How a kernel is launched."""

    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: tuple[int | dict[int, TensorMap], ...]
    """Numbers; of bytes by value, the tensor maps by their first byte."""


def host_launch(function: str, buffers: Sequence[int]) -> HostLaunch:
    """The launch that a function of LLVM IR makes of buffers at these addresses."""
    return _Host(buffers).run(function)


class _Host:
    def __init__(self, buffers: Sequence[int]):
        self.memory = {TABLE + 8 * i: address for i, address in enumerate(buffers)}
        self.values: dict = {"undef": {}, "poison": {}}
        self.maps: dict[int, TensorMap] = {}
        self.stack = STACK
        self.launch: HostLaunch | None = None

    def run(self, function: str) -> HostLaunch:
        head, *lines = function.splitlines()
        *others, buffers = re.findall(r"ptr (%\d+)", head)
        self.values |= {**dict.fromkeys(others, 0), buffers: TABLE}
        for line in lines:
            if line.strip() not in ("ret void", "}", ""):
                self._carry_out(line.strip())
        if self.launch is None:
            raise Fault("a host function that launches nothing")
        return self.launch

    def _carry_out(self, line: str) -> None:
        result, _, what = line.rpartition(" = ")
        name, _, rest = what.partition(" ")
        if name == "store":
            value, at = re.match(r"(?:\[.*?\]|\S+) (\S+), ptr (%\d+)", rest).groups()  # type: ignore[union-attr]
            if isinstance(value := self.value(value), dict):  # bytes: a copy of tensor maps
                self.maps |= {self.value(at) + place: one for place, one in value.items()}
            else:
                self.memory[self.value(at)] = value
        elif name == "call":
            function, given = re.match(r"void @(\w+)\((.*)\)", rest).groups()  # type: ignore[union-attr]
            self._call(function, [self.value(one.split()[-1]) for one in given.split(", ")])
        elif name in COMPUTED:
            self.values[result] = COMPUTED[name](self, rest)
        else:
            raise Fault(f"the interpreter does not know this of a host function: {line}")

    def value(self, name: str):
        return self.values[name] if name in self.values else int(name)

    def _call(self, function: str, given: list[int]) -> None:
        if function == "mosaic_gpu_init_tma_desc":
            at, address, kind, rank, *arrays, swizzle, box = given
            sizes, strides, box = (self._words(first, rank) for first in (*arrays, box))
            self.maps[at] = TensorMap(address, ITEM_BYTES[kind], sizes, strides, box, swizzle)
        elif function in ("mosaic_gpu_build_kernel_spec", "mosaic_gpu_launch_kernel"):  # jax 0.10
            grid, cluster, block = (tuple(given[i : i + 3]) for i in (1, 4, 7))
            if set(cluster) - {0, 1} or block[1:] != (1, 1):
                raise Fault(f"a launch of {grid} with clusters {cluster} and blocks {block}")
            array = given[-2 if function == "mosaic_gpu_build_kernel_spec" else -1]
            count = next(i for i in itertools.count() if array + 8 * i not in self.memory)
            parameters = [self.maps_at(p) or self.memory[p] for p in self._words(array, count)]
            self.launch = HostLaunch(grid, block[0], given[10], tuple(parameters))
        else:
            raise Fault(f"the interpreter does not know a host function's call of {function}")

    def maps_at(self, first: int) -> dict[int, TensorMap]:
        """By the first byte of each, of a variable of bytes."""
        if first in self.memory:
            return {}
        return {a - first: one for a, one in self.maps.items() if first <= a < first + ROOM // 2}

    def _words(self, first: int, count: int) -> tuple[int, ...]:
        return tuple(self.memory[first + 8 * i] for i in range(count))


def _allocated(host: _Host, rest: str) -> int:
    host.stack += ROOM
    return host.stack


def _loaded(host: _Host, rest: str):
    kind, at = re.match(r"(.*), ptr (%\d+)", rest).groups()  # type: ignore[union-attr]
    return host.maps_at(host.value(at)) if kind.startswith("[") else host.memory[host.value(at)]


def _pointer(host: _Host, rest: str) -> int:
    kind, base, indices = re.match(
        r"(?:[a-z]+ )*?(ptr|i\d+|\{.*?\}), ptr (%\d+), (.*)", rest
    ).groups()  # type: ignore[union-attr]
    *outer, last = (host.value(index.split()[-1]) for index in indices.split(", "))
    if kind.startswith("{"):
        before = kind.strip("{ }").split(", ")[:last]
        if outer != [0] or set(before) - {"ptr"}:
            raise Fault(f"the interpreter does not know this pointer of a host function: {rest}")
        return host.value(base) + 8 * len(before)
    return host.value(base) + last * (8 if kind == "ptr" else int(kind[1:]) // 8)


def _extracted(host: _Host, rest: str):
    whole, place = re.match(r"\{.*\} (\S+), ([\d, ]+)$", rest).groups()  # type: ignore[union-attr]
    return host.value(whole)[place]


def _inserted(host: _Host, rest: str) -> dict:
    whole, one, place = re.match(r"\{.*\} (\S+), \S+ (\S+), ([\d, ]+)$", rest).groups()  # type: ignore[union-attr]
    return {**host.value(whole), place: host.value(one)}


def _combined(does):
    def compute(host: _Host, rest: str) -> int:
        a, b = re.match(r"(?:n[us]w )*i\d+ (\S+), (\S+)$", rest).groups()  # type: ignore[union-attr]
        return does(host.value(a), host.value(b))

    return compute


def _same(host: _Host, rest: str):
    return host.value(rest.split()[1])


COMPUTED = {
    "alloca": _allocated,
    "load": _loaded,
    "getelementptr": _pointer,
    "extractvalue": _extracted,
    "insertvalue": _inserted,
    "mul": _combined(lambda a, b: a * b),
    "add": _combined(lambda a, b: a + b),
    **dict.fromkeys(("ptrtoint", "inttoptr", "zext", "sext", "trunc"), _same),
}
