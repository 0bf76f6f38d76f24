"""What ptxas says about the kernels of a program that is compiled for a GPU, and their PTX.

    program, kernels = compile_kernels(step, arena, x, donate_argnums=0)
    assert kernels["linear"].spill_bytes == 0
    assert kernels["linear"].load_bits()[128]  # some loads from global memory are 128 bits wide

XLA calls the `ptxas` of the directory it is told to: a wrapper that keeps the input and adds -v.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from unittest import mock

from tests.aot.aot_h200 import AotUnavailable, Compiled, compile_for

_WRAPPER = """#!/bin/sh
case "$1" in --version | --input-as-string) exec {ptxas} "$@" ;; esac
cp "$1" {kept}/$$.ptx
{ptxas} -v "$@" 2>{kept}/$$.log
code=$?
cat {kept}/$$.log >&2
exit $code
"""

_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>\S+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_SHARED = re.compile(r"kCustomKernel .*?(\S+) grid: .*?shared_memory: (\d+) bytes")
_LOAD = re.compile(r"\bld\.global((?:\.[\w:]+)*)")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global.*?\], *\[.*?\], *(0x[\da-f]+|\d+)")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as it is launched."""

    name: str
    registers: int
    """Per thread."""
    spill_bytes: int
    """Stored to or loaded from local memory for want of registers."""
    shared_bytes: int
    """Per program; 0 if XLA_FLAGS has an xla_dump_to of its own."""
    ptx: str

    def load_bits(self) -> collections.Counter[int]:
        """How many instructions read global memory, by the bits each thread reads at once: plain
        loads and asynchronous copies to shared memory. Bulk copies (TMA) are not counted."""
        widths = collections.Counter()
        for parts in _LOAD.findall(self.ptx):
            vector = re.search(r"\.v(\d)\b", parts)
            element = re.search(r"\.[busf](\d+)\b", parts)
            assert element is not None, parts
            widths[int(vector[1] if vector else 1) * int(element[1])] += 1
        for size in _ASYNC_COPY.findall(self.ptx):
            widths[8 * int(size, 0)] += 1
        return widths


def compile_kernels(fn, *args, card="h200", **options) -> tuple[Compiled, dict[str, Kernel]]:
    """compile_for(card, fn, *args, **options) and its kernels by name, XLA's own included.

    A kernel that several call sites share is listed once; kernels of one name with different code
    get suffixes from XLA (linear, linear_1). Raises AotUnavailable without ptxas.
    """
    from jax._src import compiler

    with tempfile.TemporaryDirectory() as toolkit:
        wrapper = pathlib.Path(toolkit, "bin", "ptxas")
        wrapper.parent.mkdir()
        wrapper.write_text(_WRAPPER.format(ptxas=_ptxas(), kept=toolkit))
        wrapper.chmod(0o755)
        get_compile_options = compiler.get_compile_options

        def with_toolkit(*args, env_options_overrides, **kwargs):
            overrides = {
                **env_options_overrides,
                "xla_gpu_cuda_data_dir": toolkit,
                # Where its wheel is installed, XLA would assemble with NVIDIA's library instead.
                "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED",
            }
            return get_compile_options(*args, env_options_overrides=overrides, **kwargs)

        with mock.patch.object(compiler, "get_compile_options", with_toolkit):
            program = compile_for(card, fn, *args, **options)
        shared = {name: int(size) for name, size in _SHARED.findall(program.thunks)}
        kernels = {}
        for log in pathlib.Path(toolkit).glob("*.log"):
            ptx = log.with_suffix(".ptx").read_text()
            for found in _FUNCTION.finditer(log.read_text()):
                name = found["name"]
                kernels[name] = Kernel(
                    name,
                    int(found["registers"]),
                    int(found["stores"]) + int(found["loads"]),
                    shared.get(name, 0),
                    _entry(ptx, name),
                )
    return program, kernels


def assemble(module: str) -> list[Kernel]:
    """The kernels of a module of PTX, as its target's assembler makes them; shared memory that a
    launch adds is not known here."""
    target = re.search(r"^\.target (\w+)", module, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(module)
        file.flush()
        command = [_ptxas(), "-v", f"-arch={target[1]}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [
        Kernel(
            found["name"],
            int(found["registers"]),
            int(found["stores"]) + int(found["loads"]),
            0,
            _entry(module, found["name"]),
        )
        for found in _FUNCTION.finditer(done.stdout + done.stderr)
    ]


def _ptxas() -> str:
    """The assembler that XLA would use: the nvidia-cuda-nvcc wheel's, else one on PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        if (path := pathlib.Path(root, "cu13", "bin", "ptxas")).exists():
            return str(path)
    if path := shutil.which("ptxas"):
        return path
    raise AotUnavailable("no CUDA assembler (ptxas): pip install nvidia-cuda-nvcc==13.0.88")


def _entry(ptx: str, name: str) -> str:
    """The text of one kernel in a PTX module."""
    start = re.search(rf"\.entry {re.escape(name)}\(", ptx)
    assert start is not None, f"no kernel {name} in the PTX"
    end = re.compile(r"^}", re.MULTILINE).search(ptx, start.end())
    return ptx[start.start() : end.end() if end else None]
