"""Runs checks in processes of their own, so that a check that crashes, hangs or breaks the device's
context ends no other process.

A check is at fault only if it fails alone, as the first one of a process. After any failure a new
process begins: an illegal address makes everything fail that its process runs later, and a crash of
the compiler may be that of any check that compiles at the time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import jax

from pallas_kernels.triton import is_interpreted
from pallas_kernels.verification.outcomes import AnyCheck, Outcome

PATIENCE = 300.0
"""Seconds without a word after which a process counts as hanging. One compilation takes less than
a tenth of that."""


class CannotCheck(ValueError):
    """No process for checks starts on this machine."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Checks that another process can make again."""

    make: Callable[..., Sequence[AnyCheck]]
    """A function of a module."""
    arguments: tuple = ()
    """Its arguments, which pickle."""

    def checks(self) -> Sequence[AnyCheck]:
        return self.make(*self.arguments)


def outcomes_apart(
    job: Job,
    keys: Iterable[str],
    device: jax.Device,
    threads: int | None = None,
    patience: float = PATIENCE,
) -> Generator[Outcome, None, None]:
    """Yields the outcomes of these checks of the job, in order but for those that are repeated.
    Close the generator to end the process that runs.

    - `threads`: that compile at once; None: see `outcomes`.
    - `patience`: see PATIENCE.

    Raises CannotCheck.
    """
    left, doubted = dict.fromkeys(keys), collections.deque[str]()
    while left:
        alone = [doubted.popleft()] if doubted else []
        run = alone or [*left]
        with _process(job, run, device, 1 if alone else threads) as child:
            compiling: dict[str, None] = {}
            fault = None
            for word in child.words(patience):
                match word:
                    case {"compiling": key}:
                        compiling[key] = None
                    case {"compiled": key}:
                        compiling.pop(key, None)
                    case {"outcome": found}:
                        outcome = Outcome(**found)
                        if outcome.failed and not alone:
                            doubted.append(outcome.key)
                            break
                        del left[outcome.key]
                        yield outcome
                        if outcome.failed:
                            doubted.clear()
            else:
                fault = child.fault()
        running = next((key for key in run if key in left), None)
        if fault is None or running is None:
            continue
        if alone:
            del left[running]
            why = f"the kernel for {running} ends its process on {device.device_kind} ({fault})"
            yield Outcome(running, why=why, failed=True)
            doubted.clear()
        else:
            doubted.extend(dict.fromkeys([running, *compiling]))


class _Child:
    """A process that runs checks, and a thread that reads what it says."""

    def __init__(self, process: subprocess.Popen, pipe: BinaryIO, stderr: BinaryIO):
        self._process, self._pipe, self._stderr = process, pipe, stderr
        self._said: SimpleQueue[bytes | None] = SimpleQueue()
        self._hangs = False
        threading.Thread(target=self._read, name="moejax-checks", daemon=True).start()

    def _read(self) -> None:
        for line in self._pipe:
            self._said.put(line)
        self._said.put(None)

    def words(self, patience: float) -> Iterator[dict[str, Any]]:
        """Yields what the process says until it ends or hangs. Raises CannotCheck if it ends
        before its device is there."""
        began = False
        while True:
            try:  # the start of jax and CUDA has all the time that it needs
                line = self._said.get(timeout=patience if began else PATIENCE)
            except Empty:
                self._hangs = True
                line = None
            if line is None and not began:
                raise CannotCheck(f"no check can start: {self.fault()}")
            if line is None:
                return
            word = json.loads(line)
            if "began" not in word:
                yield word
            began = True

    def fault(self) -> str:
        """How the process ended."""
        if self._hangs:
            return "it hangs"
        status = self._process.wait()
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"F\d|LLVM ERROR|\w*Error\b", line)]
        last = (errors or lines or ["no message"])[-1]
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{name}, {last[:300]}"


@contextlib.contextmanager
def _process(
    job: Job, keys: Sequence[str], device: jax.Device, threads: int | None
) -> Iterator[_Child]:
    """Starts a process that runs these checks, and ends it."""
    read, write = os.pipe()
    with open(read, "rb") as pipe, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pallas_kernels.verification", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(write,),
            start_new_session=True,
            # Checks take only what they need of a device that another process uses.
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
        )
        os.close(write)
        assert process.stdin is not None
        try:
            place = device.platform, device.id, is_interpreted()
            with contextlib.suppress(BrokenPipeError):  # what ended it is its fault
                pickle.dump((place, job, [*keys], threads), process.stdin)
                process.stdin.flush()
            yield _Child(process, pipe, stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
