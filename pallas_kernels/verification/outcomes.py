"""Runs checks one after the other on a device; threads compile them ahead."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import jax

MOST_THREADS = 16
"""Most checks that compile at once: more would wait for Python's lock."""


class Prepared(Protocol):
    """A check that is compiled."""

    def error(self) -> float:
        """Runs it. Returns its error."""
        ...


class AnyCheck(Protocol):
    """What runs as a check: of a kernel (check.Check), or of a whole step."""

    @property
    def op(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def tolerance(self) -> float: ...
    def prepare(self, device: jax.Device) -> Prepared: ...


class Unverified(ValueError):
    """A kernel configuration that gives wrong numbers on this device, or does not run."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found."""

    key: str
    error: float | None = None
    """Its error; None: it did not pass."""
    why: str = ""
    """Why it did not pass."""
    failed: bool = False
    """Whether the kernel is at fault. Otherwise, for example, there was no memory for the check."""


def outcomes(
    wanted: Iterable[AnyCheck],
    device: jax.Device,
    threads: int | None = None,
    report: Callable[[str, AnyCheck], None] = lambda _what, _check: None,
) -> Generator[Outcome, None, None]:
    """Yields outcomes in order. A check runs when it is asked for, so the device holds the arrays
    of one check. Meanwhile threads compile the next ones. Close the generator to skip the rest.

    - `threads`: None: one for each processor, at most MOST_THREADS.
    - `report`: called by threads with "compiling" or "compiled" and the check.
    """
    threads = threads or min(_processors(), MOST_THREADS)
    pool = ThreadPoolExecutor(threads, "moejax-check")
    rest = iter(wanted)
    ahead: collections.deque[tuple[AnyCheck, Future[Prepared]]] = collections.deque()

    def compile_one(check: AnyCheck) -> Prepared:
        report("compiling", check)
        prepared = check.prepare(device)
        report("compiled", check)
        return prepared

    def compile_next() -> None:
        if (check := next(rest, None)) is not None:
            # In this thread's context, since a context variable says whether kernels are
            # interpreted.
            run = contextvars.copy_context().run
            ahead.append((check, pool.submit(run, compile_one, check)))

    try:
        for _ in range(2 * threads):  # so that no compilation waits while a check runs
            compile_next()
        while ahead:
            check, prepared = ahead.popleft()
            found = _outcome(check, device, lambda future=prepared: future.result().error())
            compile_next()
            yield found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _outcome(check: AnyCheck, device: jax.Device, measure: Callable[[], float]) -> Outcome:
    """The error that `measure` returns, or what is wrong if it is too large or measuring fails."""
    where = f"{device.device_kind} with jax {jax.__version__}"
    try:
        error = measure()
    except Exception as problem:  # any error of compiler or device means that the kernel cannot run
        first_line = (str(problem) or type(problem).__name__).splitlines()[0]
        why = f"the kernel for {check.key} does not run on {where} ({first_line})"
        return Outcome(check.key, why=why, failed="RESOURCE_EXHAUSTED" not in first_line)
    if not error <= check.tolerance:
        why = f"the kernel for {check.key} is wrong on {where}: it deviates by {error:.1e}, "
        return Outcome(check.key, why=f"{why}{check.tolerance:.1e} is allowed", failed=True)
    return Outcome(check.key, error)
