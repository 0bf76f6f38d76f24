"""Compile JAX functions for a GPU on a machine without one, and inspect the result.

    compiled = compile_for_h200(step, cache, tokens, donate_argnums=0)
    assert not compiled.copies()                       # nothing of 1 MiB or more is copied
    assert compiled.memory.alias_bytes >= cache_bytes  # the cache is updated in place
    compile_for("rtx4090", step, cache, tokens)        # another of CARDS

XLA's CUDA compiler does the work, down to machine code; the result cannot be run here. Import this
module before the first use of jax (it does not import jax itself): it sets
JAX_SKIP_CUDA_CONSTRAINTS_CHECK, which the CUDA plugin needs where there is no GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pathlib
import re
import tempfile
from unittest import mock

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


CARDS = ("a100", "rtx4090", "h200", "rtx5060ti")
"""GPUs that are described here, in NAME.txtpb: compute capability 8.0, 8.9, 9.0 and 12.0."""


class AotUnavailable(RuntimeError):
    """This machine cannot compile for CUDA; the message says what to install."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes the program needs in device memory and (host_*) in pinned host memory."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # the part of output_bytes that reuses donated arguments
    host_argument_bytes: int
    host_output_bytes: int
    host_temp_bytes: int
    host_alias_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a GPU.

    hlo: the optimized, scheduled HLO text.
    memory: how many bytes the program needs, and where.
    thunks: XLA's own launch list (kernels with grid, threads and shared memory, memory copies),
        as debug text without a fixed format; "" if XLA_FLAGS has an xla_dump_to of its own.
    captured: the same list with what XLA puts into CUDA graphs; "" if it makes none.
    """

    hlo: str
    memory: Memory
    thunks: str
    captured: str = ""

    def graphs(self) -> list[bool]:
        """The CUDA graphs of the program, in order: whether each is launched once a run, and not
        in every turn of a loop that the host goes through."""
        lines = re.findall(r"^( *)\d+: kCommandBuffer", self.captured, re.MULTILINE)
        return [not indent for indent in lines]

    def kernels(self) -> list[str]:
        """Names of the kernels, one per call site: a Pallas-Triton kernel by its own name, any
        other custom call by its target, a fusion by its HLO name."""
        names = []
        for body in _parse(self.hlo)[1]:
            for op in body.values():
                if op.opcode in ("fusion", "fusion-start"):
                    names.append(op.name)
                elif op.opcode == "custom-call":
                    target = re.search(r'custom_call_target="([^"]*)"', op.rest)[1]
                    own = re.search(r'\bname = "([^"]+)"', op.rest) if "triton" in target else None
                    names.append(own[1] if own else target)
        return names

    def copies(self, min_bytes: int = 1 << 20) -> list[tuple[str, int]]:
        """(HLO name, bytes written) of each copy within device memory of at least min_bytes.

        That is every copy and copy-start and every fusion that only copies, transposes, slices or
        concatenates into a new buffer, such as one layer cut out of stacked weights. An in-place
        update is no copy. A copy in a loop is listed once.
        """
        return [
            (m.name, m.size)
            for m in _moves(self.hlo)
            if not (m.from_host or m.to_host or m.in_place) and m.size >= min_bytes
        ]

    def host_copies(self, min_bytes: int = 1 << 20, to_host: bool = False) -> list[tuple[str, int]]:
        """(HLO name, bytes) of each transfer out of pinned host memory (to_host: into it) of at
        least min_bytes. A kernel that reads host memory in place makes no transfer."""
        return [
            (m.name, m.size)
            for m in _moves(self.hlo)
            if (m.to_host if to_host else m.from_host) and m.size >= min_bytes
        ]


def compile_for(
    card,
    fn,
    *args,
    donate_argnums=(),
    static_argnums=(),
    host_argnums=(),
    compiler_options=None,
) -> Compiled:
    """Compiles fn(*args) for one GPU.

    card: one of CARDS.
    fn: a function, or a jax.jit function, which keeps its own settings (then no *_argnums here).
    args: arrays, jax.ShapeDtypeStruct, or pytrees of these; only shapes and dtypes are used.
    donate_argnums, static_argnums: as for jax.jit.
    host_argnums: arguments that live in pinned host memory instead of device memory.
    compiler_options: XLA's, by name.

    Raises AotUnavailable if something is not installed, and jax's own errors if fn does not
    compile, for instance because a Pallas kernel needs too much shared memory.
    """
    import jax
    from jax.sharding import AbstractMesh, SingleDeviceSharding

    try:
        from jax.sharding import AbstractDevice
    except ImportError:  # jax 0.10
        from jax._src.mesh import AbstractDevice

    positions = range(len(args))
    donate, static, host = (
        {positions[n] for n in ((argnums,) if isinstance(argnums, int) else argnums)}
        for argnums in (donate_argnums, static_argnums, host_argnums)
    )
    if not isinstance(fn, jax.stages.Wrapped):
        kwargs = {}
        if host:  # only the memory kind of this sharding reaches the compiler, not the CPU device
            pinned = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
            kwargs["in_shardings"] = tuple(
                pinned if i in host else None for i in positions if i not in static
            )
        fn = jax.jit(fn, donate_argnums=tuple(donate), static_argnums=tuple(static), **kwargs)
    elif donate or static or host:
        raise ValueError("fn is a jax.jit function: give it no *_argnums here")

    def on_host(x):  # the type fn sees for a pinned_host array on a GPU, such as float32<host>[8]
        return jax.typeof(x).update(memory_space=jax.memory.Space.Host)

    args = [jax.tree.map(on_host, arg) if i in host else arg for i, arg in enumerate(args)]
    gpu = AbstractDevice(device_kind=_known_kind(card), num_cores=None, platform="gpu")
    mesh = AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh), _mosaic_for(device_of(card).compute_capability):
        lowered = fn.trace(*args).lower(lowering_platforms=("cuda",))
    return _compile(lowered.compiler_ir("stablehlo"), device_of(card), compiler_options or {})


compile_for_h200 = functools.partial(compile_for, "h200")


def _mosaic_for(capability):
    """Inside, kernels of Mosaic GPU are lowered for this compute capability ("9.0"): jax takes that
    of a GPU that is there, and 9.0 without one."""
    from jax.experimental.mosaic.gpu import core, utils

    where = utils if hasattr(utils, "_infer_arch") else core  # jax 0.10
    arch = tuple(map(int, capability.split(".")))
    return mock.patch.object(where, "_infer_arch", return_value=arch)


@functools.cache
def _known_kind(card) -> str:
    """The card's kind by a name that Pallas's Triton backend lowers for: since jax 0.12 it knows a
    GPU that is not there by a table, and registered ones only without NVIDIA's name before it."""
    kind = device_of(card).device_kind
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return kind
    if gpu_info.gpu_version_from_device_kind(kind) is None:
        kind = kind.removeprefix("NVIDIA ")
        capability = device_of(card).compute_capability
        gpu_info.registry[kind] = lambda: gpu_info.GpuInfo(
            gpu_version=None,
            arch_name=capability,
            compute_capability=int(capability.replace(".", "")),
        )
    return kind


@functools.cache
def device_of(card):
    """The CUDA plugin's compile-only device. Raises AotUnavailable where there is no plugin."""
    from jax import __version__ as v
    from jax.experimental import topologies

    config = pathlib.Path(__file__).with_name(f"{card}.txtpb").read_text()
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=config
        ).devices[0]
    except NotImplementedError as e:  # no CUDA plugin was registered
        raise AotUnavailable(
            f"no CUDA plugin for jax {v}: pip install --no-deps jax-cuda13-pjrt=={v} "
            f"jax-cuda13-plugin=={v} (if they are installed: import aot_h200 before the first use "
            "of jax, or set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1)"
        ) from e


def _compile(module, device, compiler_options) -> Compiled:
    """Compiles a StableHLO module with the options that jax.jit would use, and these."""
    import jax
    from jax._src import compiler
    from jax._src.lib import xla_client

    with tempfile.TemporaryDirectory() as dump:
        flags = {} if "xla_dump_to" in os.environ.get("XLA_FLAGS", "") else {"xla_dump_to": dump}
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, env_options_overrides={**compiler_options, **flags}
        )
        try:
            program = device.client.compile(module, xla_client.DeviceList((device,)), options)
        except jax.errors.JaxRuntimeError as e:
            if "No PTX compilation provider" in str(e) or "libdevice not found" in str(e):
                raise AotUnavailable(
                    "no CUDA assembler (ptxas) or device library (libdevice): "
                    "pip install nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88"
                ) from e
            raise
        thunks, captured = (
            "".join(p.read_text() for p in pathlib.Path(dump).glob(f"*thunk_sequence{what}.txt"))
            for what in ("", "_after_thunk_passes")
        )
    stats = program.get_compiled_memory_stats()
    memory = Memory(
        *(
            getattr(stats, field.name.replace("_bytes", "_size_in_bytes"))
            for field in dataclasses.fields(Memory)
        )
    )
    return Compiled(program.hlo_modules()[0].to_string(), memory, thunks, captured)


# Reading HLO text: pinned host memory is memory space 5, written S(5) in a layout.

_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_OP = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_COPYING = {"copy", "transpose", "slice", "dynamic-slice", "concatenate", "dynamic-update-slice"}
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"}
_INDEX_BYTES = 64  # a value this small is an index, not data


_Move = collections.namedtuple("_Move", "name size in_place from_host to_host")


class _Op(collections.namedtuple("_Op", "name type opcode rest")):
    """One HLO instruction; rest is what follows the opening parenthesis."""

    def operands(self):
        return re.findall(r"%([\w.-]+)", self.rest.split(")")[0])

    def callee(self):
        return re.search(r"calls=%([\w.-]+)", self.rest)[1]


def _nbytes(hlo_type: str) -> int:
    """Bytes of an array type, or of all the arrays in a tuple type."""
    total = 0
    for _, digits, dims, layout in _ARRAY.findall(hlo_type):
        bits = int(digits or 8)  # pred takes a byte
        bits = bits if "E(" in layout else max(bits, 8)  # int4 is packed where the layout says so
        total += -(-bits * math.prod(map(int, filter(None, dims.split(",")))) // 8)
    return total


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Op]], list[dict[str, _Op]]]:
    """All computations as {name: {op name: op}}, and those of them that are not fused bodies."""
    computations, body = {}, {}
    for line in hlo.splitlines():
        if m := _OP.match(line):
            body[m[1]] = _Op(*m.groups())
        elif m := _COMPUTATION.match(line):
            body = computations[m[1]] = {}
    fused = {
        op.callee()
        for body in computations.values()
        for op in body.values()
        if op.opcode in ("fusion", "fusion-start")
    }
    return computations, [body for name, body in computations.items() if name not in fused]


def _outputs(body: dict[str, _Op]) -> list[_Op]:
    """The ops that compute the results of a fused body."""
    *_, root = body.values()
    outputs = [body[name] for name in root.operands()] if root.opcode == "tuple" else [root]
    return [body[op.operands()[0]] if op.opcode == "bitcast" else op for op in outputs]


def _moves(hlo: str) -> list[_Move]:
    """Every op that moves data and does nothing else; an asynchronous one by its start's name."""
    computations, bodies = _parse(hlo)
    moves = []
    for body in bodies:
        for op in body.values():
            if op.opcode not in ("copy", "fusion", "copy-done", "fusion-done"):
                continue
            start = body[op.operands()[0]] if op.opcode.endswith("-done") else op
            fused = start.opcode.startswith("fusion")
            inner = computations[start.callee()] if fused else {}
            data = [
                i
                for i in inner.values()
                if i.opcode not in _FREE and _nbytes(i.type) > _INDEX_BYTES
            ]
            if fused and not (data and all(i.opcode in _COPYING for i in data)):
                continue
            outputs = _outputs(inner) if fused else []
            in_place = fused and all(o.opcode == "dynamic-update-slice" for o in outputs)
            written = [inner[o.operands()[1]] for o in outputs] if in_place else [op]
            sources = [body[name].type for name in start.operands()]
            from_host = any(
                "S(5)" in t
                for t in sources
                if _nbytes(t) > _INDEX_BYTES and not (in_place and t == op.type)
            )
            size = sum(_nbytes(w.type) for w in written)
            moves.append(_Move(start.name, size, in_place, from_host, "S(5)" in op.type))
    return moves
