"""Runs checks one after the other on a device; threads compile them ahead."""

from __future__ import annotations

import collections
import contextvars
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from pallas_kernels.verification.check import Check, Prepared, prepare

MOST_THREADS = 16
"""Most checks that compile at once: more would wait for Python's lock."""


class Unverified(ValueError):
    """A kernel configuration that gives wrong numbers on this device."""


def outcomes(
    wanted: Iterable[Check], device: jax.Device, threads: int | None = None
) -> Generator[tuple[Check, float | Unverified], None, None]:
    """Yields (check, its error or why it does not pass), in order. A check runs when it is asked
    for, so the device holds the arrays of one check. Meanwhile threads compile the next ones. Close
    the generator to skip the rest.

    - `threads`: None: one for each processor, at most MOST_THREADS.
    """
    threads = threads or min(_processors(), MOST_THREADS)
    pool = ThreadPoolExecutor(threads, "moejax-check")
    rest = iter(wanted)
    ahead: collections.deque[tuple[Check, Future[Prepared]]] = collections.deque()

    def compile_next() -> None:
        if (check := next(rest, None)) is not None:
            # In this thread's context, since a context variable says whether kernels are
            # interpreted.
            run = contextvars.copy_context().run
            ahead.append((check, pool.submit(run, prepare, check, device)))

    try:
        for _ in range(2 * threads):  # so that no compilation waits while a check runs
            compile_next()
        while ahead:
            check, prepared = ahead.popleft()
            found = _outcome(check, device, lambda future=prepared: future.result().error())
            compile_next()
            yield check, found
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _outcome(check: Check, device: jax.Device, measure: Callable[[], float]) -> float | Unverified:
    """The error that `measure` returns, or what is wrong if it is too large or measuring fails."""
    where = f"{device.device_kind} with jax {jax.__version__}"
    try:
        error = measure()
    except Exception as problem:  # any error of compiler or device means that the kernel cannot run
        first_line = (str(problem) or type(problem).__name__).splitlines()[0]
        refused = Unverified(
            f"the kernel for {check.key} does not run on {where} ({first_line}); "
            f"use ops={check.op}=xla and report it"
        )
        refused.__cause__ = problem
        return refused
    if not error <= check.tolerance:
        return Unverified(
            f"the kernel for {check.key} is wrong on {where}: it deviates by {error:.1e}, "
            f"{check.tolerance:.1e} is allowed; use ops={check.op}=xla and report it"
        )
    return error
