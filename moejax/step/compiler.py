"""Compiles an engine's programs in the background, and calls what is compiled."""

from __future__ import annotations

import contextvars
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from moejax.cache import bypass_compilation_cache
from moejax.step.kept_programs import KeptPrograms
from moejax.step.programs import ProgramKey

ONE_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
"""The ops that go into CUDA graphs: XLA's default and loops, so that a step is one graph. By
default the host launches a graph for each turn of the loop over layers."""


def compiler_options(platform: str, key: ProgramKey | None = None) -> dict[str, str | bool]:
    """Returns the XLA options of an executable. Without them equal programs may round differently.

    On a GPU rematerialization is off. The arena takes the memory that there is, so XLA would warn
    and search, and find nothing to save.

    - `platform`: the platform of the device.
    - `key`: a decode step becomes one CUDA graph, unless XLA_FLAGS set the ops of graphs.
    """
    options: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        options["xla_gpu_autotune_level"] = "0"
        options["xla_disable_hlo_passes"] = "rematerialization"
        graphs = "xla_gpu_enable_command_buffer"
        decodes = key is not None and key.kind == "decode" and key.part is None
        if decodes and graphs not in os.environ.get("XLA_FLAGS", ""):
            options[graphs] = ONE_GRAPH
    return options


def is_ready(array: jax.Array) -> bool:
    """Whether an array is computed."""
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  not in jax's stubs


class Compiler:
    """Compiles the executables of one engine, each once, in the background.

    - `lower`: traces and lowers a program.
    - `platform`: the platform of the device.
    - `find_kept`: returns the programs on disk, None without any.
    """

    def __init__(
        self,
        lower: Callable[[ProgramKey], jax.stages.Lowered],
        platform: str,
        find_kept: Callable[[], KeptPrograms | None] = lambda: None,
    ):
        self._lower, self._platform = lower, platform
        self._find_kept = functools.cache(find_kept)
        self._began = time.perf_counter()
        self.compile_s = 0.0
        """Seconds from the start until a first request can run."""
        self._executables: dict[ProgramKey, Future] = {}
        # Two threads: tracing holds the interpreter, XLA's compiler does not.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="moejax-compile")
        self._needed: list[ProgramKey] = []
        """The programs that every request needs."""

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """The programs that are compiled or compiling. Changes of budgets add none."""
        return tuple(self._executables)

    @property
    def compiled(self) -> list[jax.stages.Compiled]:
        """The executables so far. Waits for those that still compile."""
        return [future.result() for future in self._executables.values()]

    def start(self, key: ProgramKey) -> Future:
        """Begins to compile a program if that has not begun."""
        if key not in self._executables:
            self._executables[key] = self.submit(self._compile, key)
        return self._executables[key]

    def call(self, key: ProgramKey, *args: Any) -> Any:
        """Calls a program. Waits until it is compiled."""
        return self.start(key).result()(*args)

    def need(self, *keys: ProgramKey) -> None:
        """Begins to compile programs that every request will need."""
        for key in keys:
            self.start(key)
            self._needed.append(key)

    def wait(self, everything: bool = False) -> None:
        """Blocks until the executables that every request needs exist.

        - `everything`: also those that compile in the background.
        """
        for key in [*self._executables] if everything else self._needed:
            self.start(key).result()
        self.compile_s = self.compile_s or time.perf_counter() - self._began

    def drop(self) -> None:
        """Cancels programs that wait to compile and that not every request needs. Such a program
        compiles when it is called."""
        for key, future in [*self._executables.items()]:
            if key not in self._needed and future.cancel():
                del self._executables[key]

    def submit(self, work: Callable, *args: Any) -> Future:
        """Runs other compiling work in the same threads. Returns its Future."""
        # In the caller's context, which has the variable whether kernels are interpreted.
        return self._pool.submit(contextvars.copy_context().run, work, *args)

    def close(self) -> None:
        """Waits for programs that compile at this moment, and drops all others."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._executables.clear()

    def _compile(self, key: ProgramKey) -> jax.stages.Compiled:
        kept = self._find_kept()
        if kept is not None and (found := kept.load(key)) is not None:
            return found
        lowered, options = self._lower(key), compiler_options(self._platform, key)
        if kept is None:
            return lowered.compile(compiler_options=options)
        with bypass_compilation_cache():
            compiled = lowered.compile(compiler_options=options)
        kept.keep(key, compiled)
        return compiled
