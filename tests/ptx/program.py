"""A function compiled for a GPU, run by XLA's own list of launches with the kernels interpreted.

What binds a kernel to its buffers is XLA's: the buffer assignment says where each value lies, the
schedule of the HLO which values an instruction reads and makes, the list of thunks the kernel, its
grid and its shared memory, and the metadata which thunk is of which instruction.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.cards import shared_class
from pallas_kernels.dispatch import KERNELS
from tests.aot.aot_h200 import Compiled, compile_for, device_of
from tests.pallas_kernels import contract
from tests.ptx import machine
from tests.ptx.machine import Launch
from tests.ptx.memory import Buffer, copy_sparse, zeros
from tests.ptx.parse import Fault, Kernel, parse

POISON = 0xFF
"""Of memory that the program has not written: NaN in every float, -1 in integers."""

EMITTED = {} if jax.__version_info__ < (0, 11) else {"xla_dump_emitter_re": ".*"}
"""What newer XLA wants to be told before it dumps PTX."""

WIDEST = 16
"""Bytes that a thread reads at once, at most."""

DTYPES = {
    "pred": np.dtype(bool),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    **{f"s{b}": np.dtype(f"i{b // 8}") for b in (8, 16, 32, 64)},
    **{f"u{b}": np.dtype(f"u{b // 8}") for b in (8, 16, 32, 64)},
    **{f"f{b}": np.dtype(f"f{b // 8}") for b in (16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Op:
    """An instruction of the HLO."""

    name: str
    type: str
    opcode: str
    rest: str
    """What follows the opening parenthesis."""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.#-]+)", _until_closed(self.rest))

    def attribute(self, name: str, pattern: str = "") -> str:
        found = re.search(pattern or rf"\b{name}=%?([\w.-]+)", self.rest)
        if found is None:
            raise Fault(f"{self.name} has no {name}")
        return found[1]


@dataclasses.dataclass(frozen=True)
class Thunk:
    kernel: str
    grid: tuple[int, int, int]
    shared: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value lies."""

    allocation: int
    offset: int
    size: int

    def meets(self, other: Place) -> bool:
        """Whether they share memory."""
        apart = self.offset + self.size <= other.offset or other.offset + other.size <= self.offset
        return self.allocation == other.allocation and not apart


@dataclasses.dataclass(frozen=True)
class Program:
    """What XLA dumped."""

    computations: Mapping[str, Mapping[str, Op]]
    entry: str
    places: Mapping[tuple[str, tuple[int, ...]], Place]
    """Of values by instruction and place in its tuple."""
    sizes: Mapping[int, int]
    """Bytes of the allocations."""
    thunks: Mapping[str, list[Thunk]]
    """Of kernels, by instruction; a large sort has several."""
    ptx: Mapping[str, str]
    """Modules by the name of their kernel."""
    mosaic: Mapping[str, tuple[str, str]]
    """Kernels of Mosaic GPU, by instruction: (module, the host's function)."""
    compiled: Compiled | None = None


def compile_program(card: str, function: Callable, *args: Any, **options: Any) -> Program:
    """function(*args) as compile_for compiles it, from XLA's dumps."""
    from jax._src import compiler
    from jax.experimental.mosaic.gpu import core  # noqa: F401, it sets variables for good

    get_compile_options = compiler.get_compile_options
    with tempfile.TemporaryDirectory() as dump:

        def with_dump(*args, env_options_overrides, **kwargs):
            dumps = {"xla_dump_to": dump, "xla_dump_large_constants": True, **EMITTED}
            overrides = {**env_options_overrides, **dumps}
            return get_compile_options(*args, env_options_overrides=overrides, **kwargs)

        with (
            mock.patch.object(compiler, "get_compile_options", with_dump),
            mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_HOST_LLVM="1"),
            _stdout(Path(dump) / "mosaic.txt"),
        ):
            compiled = compile_for(card, function, *args, **options)
        return dataclasses.replace(read_dump(Path(dump)), compiled=compiled)


@contextlib.contextmanager
def _stdout(path: Path) -> Iterator[None]:
    """Inside, what this process prints goes to a file, also what is no Python."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _scheduled(computations: Mapping[str, Mapping[str, Op]], name: str) -> Iterator[Op]:
    """The instructions of a computation in order, those of a loop's body where the loop is."""
    for op in computations[name].values():
        if op.opcode == "while":
            yield from _scheduled(computations, op.attribute("body"))
        yield op


def _of_mosaic(printed: str, ops: Iterator[Op]) -> dict[str, tuple[str, str]]:
    """Program.mosaic: new kernels are compiled and printed in the order of the schedule."""
    modules = re.findall(r"^\.version.*?^\}", printed, re.DOTALL | re.MULTILINE)
    hosts = re.findall(r"^define void @(?!_mlir_)\w+\([^)]*\) \{.*?^\}", printed, re.DOTALL | re.M)
    hosts = [host for host in hosts if "_mosaic_gpu_init(" not in host]
    calls = {
        op.name: op.attribute("kernel_hash", r"kernel_hash = (\"(?:[^\"\\]|\\.)*\")")
        for op in ops
        if 'custom_call_target="mosaic_gpu_v2"' in op.rest
    }
    new = [one for one in dict.fromkeys(calls.values()) if one not in _mosaic]
    if not len(new) == len(modules) == len(hosts):
        raise Fault(f"{len(new)} new kernels of Mosaic GPU, but PTX of {len(modules)}")
    _mosaic.update(zip(new, zip(modules, hosts, strict=True), strict=True))
    return {name: _mosaic[one] for name, one in calls.items()}


_mosaic: dict[str, tuple[str, str]] = {}
"""What it printed of each kernel, which this process compiles once."""


def read_dump(dump: Path) -> Program:
    def text(pattern: str) -> str:
        (path,) = dump.glob(pattern)
        return path.read_text()

    computations, entry = _computations(text("*gpu_after_optimizations.txt"))
    places, sizes = _assignment(text("*gpu_after_optimizations-buffer-assignment.txt"))
    number_of = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
    kernels = {
        int(number): Thunk(name, tuple(map(int, grid.split(","))), int(shared))  # type: ignore[arg-type]
        for number, name, grid, shared in re.findall(
            r"^\s*(\d+): kCustomKernel .*?\] (\S+) grid: \[(.*?)\] threads.*memory: (\d+)",
            text("*.thunk_sequence.txt"),
            re.M,
        )
    }
    thunks: dict[str, list[Thunk]] = {}
    for name, number in number_of.findall(text("*.thunk_metadata.txt")):
        if int(number) in kernels:
            thunks.setdefault(name, []).append(kernels[int(number)])
    modules = [one for path in dump.glob("*.ptx") for one in _entries(path.read_text())]
    ptx = {found[1]: m for m in modules if (found := re.search(r"\.entry\s+([\w$]+)", m))}
    mosaic = _of_mosaic(text("mosaic.txt"), _scheduled(computations, entry))
    return Program(computations, entry, places, sizes, thunks, ptx, mosaic)


def _entries(module: str) -> list[str]:
    """A module for each of its kernels: XLA puts its own into one."""
    head, *entries = re.split(r"^(?=\.visible \.entry)", module, flags=re.MULTILINE)
    return [head + entry for entry in entries]


def _until_closed(text: str) -> str:
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    return text


def _computations(hlo: str) -> tuple[dict[str, dict[str, Op]], str]:
    computations, entry, body = {}, "", {}
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        op = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)", line)
        if head:
            body = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif op:
            made = Op(*op.groups())
            # %tuple#1 is an element of a tuple that no instruction takes out.
            for whole, number in re.findall(r"%([\w.-]+)#(\d+)", _until_closed(made.rest)):
                name, kind = f"{whole}#{number}", leaves(body[whole].type)[int(number)][1]
                rest = f"%{whole}), index={number}"
                body[name] = Op(name, kind, "get-tuple-element", rest)
            body[made.name] = made
    return computations, entry


def _assignment(text: str):
    places, sizes, allocation = {}, {}, 0
    for line in text.splitlines():
        if found := re.match(r"allocation (\d+): size (\d+)", line):
            allocation = int(found[1])
            sizes[allocation] = int(found[2])
        elif found := re.match(
            r"\s+value: <\d+ ([\w.-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+>"
            r" \(size=(\d+),offset=(\d+)\)",
            line,
        ):
            index = tuple(map(int, filter(None, (found[2] or "").split(","))))
            places[found[1], index] = Place(allocation, int(found[4]), int(found[3]))
    return places, sizes


def leaves(kind: str) -> list[tuple[tuple[int, ...], str]]:
    """(place in the tuple, type) of the arrays of a type; tuples of arrays at most."""
    if not kind.startswith("("):
        return [((), kind)]
    found = re.findall(r"\b([a-z]+\d*\[[\d,]*\])", re.sub(r"\{[^}]*\}", "", kind))
    return [((i,), one) for i, one in enumerate(found)]


def dtype_and_shape(kind: str) -> tuple[np.dtype, tuple[int, ...]]:
    found = re.match(r"(\w+)\[([\d,]*)\]", kind)
    if found is None or found[1] not in DTYPES:
        raise Fault(f"a value of type {kind}")
    return DTYPES[found[1]], tuple(map(int, filter(None, found[2].split(","))))


class Execution:
    """One run of a program."""

    def __init__(
        self,
        program: Program,
        launch: Mapping[str, Any],
        edit: Callable[[str], str],
    ):
        self.program, self.launch, self.edit = program, launch, edit
        self.memory: dict[int, np.ndarray] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Parameters of the computations of loops → what the loop was begun with."""
        self.kernels: dict[str, Kernel] = {}
        self.issued: dict[str, int] = {}

    def run(self, arguments: list[np.ndarray]) -> list[np.ndarray]:
        """Results by the leaves of the root, views of this execution's memory."""
        program = self.program
        entry = program.computations[program.entry]
        given = self._parameters(entry, arguments)
        whole = {place.allocation: place.size for place, _ in given}
        for number, size in program.sizes.items():
            # Zeros are pages that do not exist before they are written (copy_sparse): an arena of
            # gigabytes of which a few records are used takes no more than those.
            if whole.get(number) == size:
                self.memory[number] = zeros((size + WIDEST,), np.dtype(np.uint8))
                self.memory[number][size:] = POISON
            else:
                self.memory[number] = np.full(size + WIDEST, POISON, np.uint8)
        for ops in program.computations.values():
            for op in ops.values():
                if op.opcode == "constant" and (op.name, ()) in program.places:
                    self._set_constant(op)
        for place, value in given:
            (copy_sparse if whole[place.allocation] == place.size else np.copyto)(
                self._view(place), _bytes(value)
            )
        self._compute(entry)
        root = list(entry.values())[-1]
        results = []
        for index, kind in leaves(root.type):
            dtype, shape = dtype_and_shape(kind)
            raw = self._view(self.place(entry, root.name, index))
            results.append(raw.view(dtype).reshape(shape))
        return results

    def _parameters(self, entry: Mapping[str, Op], arguments: list[np.ndarray]):
        """(place, value) of each parameter; those that nothing uses are left out."""
        found = []
        for op in entry.values():
            if op.opcode == "parameter":
                number = re.search(r'op_name="\w+\[(\d+)\]"', op.rest)
                assert number is not None, op.rest
                found.append((self.place(entry, op.name, ()), arguments[int(number[1])]))
        return found

    def place(self, ops: Mapping[str, Op], name: str, index: tuple[int, ...]) -> Place:
        """Where a value of a computation lies."""
        if (found := self.program.places.get((name, index))) is not None:
            return found
        op = ops[name]
        if op.opcode == "get-tuple-element":
            return self.place(ops, op.operands[0], (int(op.attribute("index")), *index))
        if op.opcode == "tuple":
            return self.place(ops, op.operands[index[0]], index[1:])
        if op.opcode in ("bitcast", "copy-done", "while"):
            return self.place(ops, op.operands[0], index)
        if op.opcode == "async-done":
            body = self.program.computations[ops[op.operands[0]].attribute("calls")]
            return self.place(body, list(body)[-1], index)
        if op.opcode == "parameter" and name in self.aliases:
            outer, init = self.aliases[name]
            return self.place(self.program.computations[outer], init, index)
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?)\}, ", op.rest)
        raise Fault(f"where does {name}{list(index)} ({op.opcode}, {aliased}) lie?")

    def _view(self, place: Place, padded: bool = False) -> np.ndarray:
        size = -(-place.size // WIDEST) * WIDEST if padded else place.size
        return self.memory[place.allocation][place.offset : place.offset + size]

    def array(self, ops: Mapping[str, Op], name: str) -> np.ndarray:
        """A value, as a view."""
        dtype, shape = dtype_and_shape(ops[name].type)
        return self._view(self.place(ops, name, ())).view(dtype).reshape(shape)

    def _set_constant(self, op: Op) -> None:
        dtype, shape = dtype_and_shape(op.type)
        literal = _until_closed(op.rest).replace("{", "").replace("}", "")
        if "..." in literal:
            raise Fault(f"the dump leaves out the constant {op.name}")
        words = {"true": 1, "false": 0}
        values = [words.get(v.strip(), v.strip()) for v in literal.split(",") if v.strip()]
        array = np.array([float(v) if dtype.kind not in "iub" else int(v) for v in values])
        self._view(self.program.places[op.name, ()])[:] = _bytes(array.astype(dtype).reshape(shape))

    def _compute(self, ops: Mapping[str, Op]) -> None:
        for op in ops.values():
            try:
                self._carry_out(ops, op)
            except Fault as fault:
                fault.add_note(f"in {op.name}")
                raise

    def _carry_out(self, ops: Mapping[str, Op], op: Op) -> None:
        if op.opcode in ("parameter", "constant", "get-tuple-element", "tuple", "bitcast"):
            return
        if op.name in self.program.mosaic:
            self._launch_of_mosaic(ops, op)
        elif op.name in self.program.thunks:
            self._begin_sort(ops, op)
            for thunk in self.program.thunks[op.name]:
                self._launch(ops, op, thunk)
        elif op.opcode in ("copy", "copy-start"):
            source, index = self.place(ops, op.operands[0], ()), (0,) * (op.opcode != "copy")
            self._view(self.place(ops, op.name, index))[:] = self._view(source).copy()
        elif op.opcode in ("copy-done", "async-start"):
            return
        elif op.opcode == "while":
            self._loop(ops, op)
        elif op.opcode in ("fusion", "async-done"):
            # A copy out of host memory is carried out as late as it may be.
            fusion = op if op.opcode == "fusion" else ops[op.operands[0]]
            result = self._fused(fusion, [self.array(ops, name).copy() for name in fusion.operands])
            self._view(self.place(ops, op.name, ()))[:] = _bytes(result)
        else:
            raise Fault(f"the interpreter does not know {op.opcode}: {op.name} = {op.rest[:80]}")

    def _loop(self, ops: Mapping[str, Op], op: Op) -> None:
        outer = next(n for n, c in self.program.computations.items() if c is ops)
        condition, body = (
            self.program.computations[op.attribute(a)] for a in ("condition", "body")
        )
        for computation in (condition, body):
            (parameter,) = (o.name for o in computation.values() if o.opcode == "parameter")
            self.aliases[parameter] = outer, op.operands[0]
        holds = list(condition.values())[-1].name
        while True:
            self._compute(condition)
            if not self.array(condition, holds)[()]:
                return
            self._compute(body)

    def _begin_sort(self, ops: Mapping[str, Op], op: Op) -> None:
        """XLA's sort is in place: first its operands are copied to where its results will be."""
        body = self.program.computations[op.attribute("calls")] if op.opcode == "fusion" else {}
        root = list(body.values())[-1] if body else op
        if root.opcode != "sort":
            return
        for (index, _), name in zip(leaves(op.type), root.operands, strict=True):
            made = body[name] if body else None
            if made is not None and made.opcode != "parameter":
                continue  # the kernel makes it
            given = op.operands[int(_until_closed(made.rest))] if made else name
            source = self._view(self.place(ops, given, ())).copy()
            self._view(self.place(ops, op.name, index))[:] = source

    def _launch(self, ops: Mapping[str, Op], op: Op, thunk: Thunk) -> None:
        arguments = self._arguments(ops, op)
        kernel = self._kernel(thunk.kernel, self.program.ptx[thunk.kernel])
        # XLA's own kernels that never wait are launched so that they need not.
        waits = any(ins.parts[0] == "griddepcontrol" for ins in kernel.code)
        launch = Launch(
            thunk.grid,
            max(thunk.shared - kernel.shared_bytes, 0),
            overlaps=op.opcode == "custom-call" or waits,
            **self.launch,
        )
        self._run(thunk.kernel, kernel, arguments, launch)

    def _launch_of_mosaic(self, ops: Mapping[str, Op], op: Op) -> None:
        module, host = self.program.mosaic[op.name]
        kernel = self._kernel(op.name, module)
        launch = Launch((1, 1, 1), host=host, overlaps=False, **self.launch)
        self._run(op.name, kernel, self._arguments(ops, op), launch)

    def _kernel(self, name: str, module: str) -> Kernel:
        if name not in self.kernels:
            self.kernels[name] = parse(self.edit(module))
        return self.kernels[name]

    def _run(self, name: str, kernel: Kernel, arguments: list[Buffer], launch: Launch) -> None:
        count = machine.run(kernel, arguments, launch)
        self.issued[name] = self.issued.get(name, 0) + count

    def _arguments(self, ops: Mapping[str, Op], op: Op) -> list[Buffer]:
        """The buffers of a kernel: its operands, its results."""
        reads = [
            self.place(ops, name, i) for name in op.operands for i, _ in leaves(ops[name].type)
        ]
        writes = [self.place(ops, op.name, index) for index, _ in leaves(op.type)]
        buffers: dict[Place, Buffer] = {}
        names = [*op.operands, *(f"{op.name}{list(index)}" for index, _ in leaves(op.type))]
        for place, name in zip((*reads, *writes), names, strict=True):
            # XLA's own kernels read whole vectors of what its allocations are padded to.
            view = self._view(place, padded=op.opcode != "custom-call")
            one = buffers.setdefault(place, Buffer(name, view, False))
            one.writable |= place in writes
        self._check_overlaps(list(buffers))
        return [buffers[place] for place in (*reads, *writes)]

    def _check_overlaps(self, places: list[Place]) -> None:
        for i, a in enumerate(places):
            for b in places[i + 1 :]:
                if a.meets(b):
                    raise Fault(f"arguments that overlap in part: {a} and {b}")

    def _fused(self, fusion: Op, given: list[np.ndarray]) -> np.ndarray:
        """A fusion that XLA carries out as a copy: of a slice, or into one."""
        values: dict[str, np.ndarray] = {}
        for op in self.program.computations[fusion.attribute("calls")].values():
            of = [values[name] for name in op.operands]
            dtype, shape = dtype_and_shape(op.type)
            if op.opcode == "parameter":
                value = given[int(_until_closed(op.rest))]
            elif op.opcode == "fusion":
                value = self._fused(op, of)
            elif op.opcode == "constant":
                value = np.array(int(_until_closed(op.rest)), dtype)
            elif op.opcode in ("bitcast", "copy", "reshape"):
                value = of[0].reshape(shape)
            elif op.opcode == "slice":
                bounds = re.findall(r"\[(\d+):(\d+)\]", op.rest)
                value = of[0][tuple(slice(int(a), int(b)) for a, b in bounds)]
            elif op.opcode in ("dynamic-slice", "dynamic-update-slice"):
                update = op.opcode == "dynamic-update-slice"
                part = of[1].shape if update else shape
                first = [
                    min(max(int(n), 0), size - some)
                    for n, size, some in zip(of[1 + update :], of[0].shape, part, strict=True)
                ]
                where = tuple(slice(a, a + n) for a, n in zip(first, part, strict=True))
                value = of[0].copy() if update else of[0][where]
                if update:
                    value[where] = of[1]
            else:
                raise Fault(f"the interpreter does not know {op.opcode} in {fusion.name}")
            values[op.name] = value
        return value


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


HOST = {"stores", "store"}
"""Arguments of ops, and fields of records, that lie in pinned host memory."""


_compiled: dict[Any, CompiledCall] = {}


def interpret(
    op: Callable,
    donate: tuple[str, ...] = (),
    *,
    card: str = "h200",
    edit: Callable[[str], str] = lambda ptx: ptx,
    launch: Mapping[str, Any] | None = None,
    **static: Any,
) -> Callable[..., Any]:
    """The op as tests.pallas_kernels.contract.compiled gives it, but compiled for a card and
    interpreted.

    card: one of CARDS; ops that have tables for its shared memory get its class. edit: changes the
    PTX of each kernel, for tests of this tool. launch: fields of machine.Launch.
    """

    kib = shared_class(device_of(card))
    if "shared_kib" in inspect.signature(op).parameters:
        static = {"shared_kib": kib, **static}
    for name, value in static.items():
        if hasattr(value, "shared_kib"):
            static[name] = dataclasses.replace(value, shared_kib=kib)
        if hasattr(value, "linear"):  # NormRouteOptions
            linear = dataclasses.replace(value.linear, shared_kib=kib)
            static[name] = dataclasses.replace(value, linear=linear)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(inspect.signature(op).bind_partial(*args, **kwargs).arguments)
        compiled = compiled_call(
            card,
            lambda given: op(**given, **static),
            (given,),
            donated=lambda path: path[1].key in donate,
            on_host=lambda path: not HOST.isdisjoint(_names(path)),
            key=(op, repr(static)),
        )
        return compiled.run(given, launch=launch or {}, edit=edit)[0]

    return call


def _names(path: tuple) -> list[str]:
    """Of arguments and fields on the way to a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    """A function of trees of arrays, compiled for a card."""

    program: Program
    results: Any
    """The structure of what it returns."""

    def run(
        self,
        *given: Any,
        launch: Mapping[str, Any],
        edit: Callable[[str], str] = lambda ptx: ptx,
    ) -> tuple[Any, Mapping[str, int]]:
        """What it returns of such arguments, interpreted, and the instructions that were issued by
        kernel. launch, edit: as of interpret. Raises Fault."""
        execution = Execution(self.program, launch, edit)
        results = execution.run([np.asarray(leaf) for leaf in jax.tree.leaves(given)])
        return jax.tree.unflatten(self.results, results), execution.issued


def compiled_call(
    card: str,
    function: Callable,
    given: tuple,
    *,
    donated: Callable[[tuple], bool],
    on_host: Callable[[tuple], bool],
    key: Any = None,
) -> CompiledCall:
    """function(*given) for a card; given may be shapes. donated, on_host: whether the leaf at that
    path of `given` is donated, or in pinned host memory. key: of what is compiled once for all
    calls with such arguments; None: it is compiled anew."""
    of_leaves, shapes, options = _of_leaves(function, given, donated, on_host)
    tree = jax.tree.structure(given)
    place = key, card, tuple((s.shape, s.dtype) for s in shapes), tree
    if key is not None and place in _compiled:
        return _compiled[place]
    program = compile_program(card, of_leaves, *shapes, **options)
    found = CompiledCall(program, jax.tree.structure(jax.eval_shape(of_leaves, *shapes)))
    if key is not None:
        _compiled[place] = found
    return found


def _of_leaves(function: Callable, given: tuple, donated: Callable, on_host: Callable):
    """(the function of all leaves of `given`, their shapes, arguments of compile_for)."""
    flat, tree = jax.tree.flatten_with_path(given)

    def of_leaves(*values):
        return function(*jax.tree.unflatten(tree, values))

    options = {
        "donate_argnums": tuple(i for i, (path, _) in enumerate(flat) if donated(path)),
        "host_argnums": tuple(i for i, (path, _) in enumerate(flat) if on_host(path)),
    }
    return of_leaves, [_shape_of(leaf) for _, leaf in flat], options


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@contextlib.contextmanager
def patched(module: Any, **options: Any) -> Iterator[None]:
    """Inside, a test module's kernels (implementations of KERNELS) run in this interpreter; what
    else it compiles, as ever. options: as interpret's."""

    def compiled(op: Callable, donate: tuple[str, ...] = (), **static: Any) -> Callable:
        if contract.implementations_of(static).isdisjoint(KERNELS):
            return contract.compiled(op, donate, **static)
        return interpret(op, donate, **options, **static)

    with mock.patch.object(module, "compiled", compiled):
        yield
