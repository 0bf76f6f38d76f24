"""A process that runs cases, and the handle of who watches it from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moejax import LLM
from scripts.attacks import files, interrupts, lines, requests, texts, threads, trees
from scripts.attacks.engine import Known, check_engine, record, start
from scripts.attacks.scene import Fault, Scene, described, limit_s

Attack = Callable[[Scene], None]

KINDS: dict[str, tuple[int, Attack]] = {
    "params": (6, requests.attack_params),
    "prompts": (4, requests.attack_prompts),
    "lines": (5, lines.attack_lines),
    "results": (2, lines.attack_results),
    "interrupts": (4, interrupts.attack_interrupts),
    "threads": (2, threads.attack_threads),
    "async": (3, threads.attack_async),
    "templates": (4, texts.attack_templates),
    "tokenizers": (4, texts.attack_tokenizers),
    "configs": (3, files.attack_configs),
    "weights": (3, files.attack_weights),
    "trees": (3, trees.attack_trees),
    "maps": (3, trees.attack_maps),
}
"""Kind → how often it comes, and what it does."""

START_S = 300.0
"""A start may compile."""

GRACE_S = 5.0
"""What the watcher adds to twice the limit of a call, since one that ends tells itself."""

MEMORY = 2.0
"""Most memory, in multiples of the normal."""


def kind_of(seed: int, number: int) -> str:
    """The kind of a case."""
    names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    return random.Random(f"kind {seed} {number}").choices(names, weights)[0]


def run_case(
    llm: LLM,
    known: Known,
    seed: int,
    number: int,
    directory: Path,
    began: Callable[[str], None] = lambda what: None,
) -> list[Fault]:
    """Runs a case and checks the engine and the directory afterwards; returns what broke.

    directory: for the files of the case, and TMPDIR of what runs; empty afterwards.
    """
    rng = random.Random(f"case {seed} {number}")
    own = directory / "case"
    own.mkdir()
    scene = Scene(llm, known, rng, own, began)
    try:
        KINDS[kind_of(seed, number)][1](scene)
    except Exception as error:
        # Attacks catch what they provoke: this is the campaign's own mistake, or a broken engine.
        scene.fault("raised", f"outside of a call: {described(error)}")
    began("the checks")
    try:
        check_engine(scene)
    except Exception as error:
        scene.fault("engine", f"the checks fail: {described(error)}")
    shutil.rmtree(own)
    for path in sorted(directory.iterdir()):
        scene.fault("left", f"a temporary file: {path.name}")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return scene.faults


# ---- in the process


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, such as VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def forget_peak() -> None:
    """The peak of resident memory counts from now."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclasses.dataclass(frozen=True)
class Normal:
    """Bytes of a process that has answered the known requests: resident, and data."""

    resident: int
    data: int


def serve(
    connection: Connection,
    options: Mapping[str, Any],
    known: Known | None,
    directory: Path,
    prepare: Callable[[], None] | None,
) -> None:
    """Runs the cases that the connection names until it names None. The messages: `("ready", known
    requests, bytes)` once, then `("began", what)` and `("done", faults)`."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # an abort says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    files = directory / "files"
    files.mkdir()
    os.environ["TMPDIR"] = str(files)
    tempfile.tempdir = None
    if prepare is not None:
        prepare()
    with start(options) as llm:
        known = record(llm) if known is None else known
        gc.collect()
        gc.freeze()
        normal = Normal(status_bytes("VmRSS"), status_bytes("VmData"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(MEMORY * normal.data), hard))
        connection.send(("ready", known, normal.resident))
        while (case := connection.recv()) is not None:
            forget_peak()
            faults = run_case(
                llm, known, *case, files, lambda what: connection.send(("began", what))
            )
            peak = status_bytes("VmHWM")
            if peak > MEMORY * normal.resident:
                text = f"{peak >> 20} MiB resident, normal are {normal.resident >> 20}"
                faults.append(Fault("memory", text))
            connection.send(("done", faults))
        os._exit(0)  # a broken engine need not close well


# ---- from outside


class Worker:
    """A process with a model. options: of LLM. known: answers of earlier workers (None: this one
    records them). prepare: called in the process first; tests plant defects with it."""

    def __init__(
        self,
        options: Mapping[str, Any],
        known: Known | None,
        directory: Path,
        prepare: Callable[[], None] | None = None,
    ):
        directory.mkdir()
        self._log = directory / "log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, options, known, directory, prepare), daemon=True
        )
        self._said = 0
        """Bytes that it had written before the case."""
        self._process.start()
        theirs.close()
        try:
            _, self.known, self.normal = self._receive(START_S + 10 * limit_s())
        except (EOFError, TimeoutError) as error:
            raise RuntimeError(f"a worker does not start: {self._end()}") from error

    def run(self, seed: int, number: int) -> list[Fault]:
        """What broke in a case; ends the process where it died or hangs."""
        what, self._said = "the case", self._log.stat().st_size
        try:
            self._connection.send((seed, number))
            while True:
                message, said = self._receive(2 * limit_s() + GRACE_S)
                if message == "done":
                    return said
                what = said
        except (EOFError, OSError):
            self._process.join(limit_s())  # it may be writing its last words
            return [Fault("died", f"{what}: the process ended: {self._end()}")]
        except TimeoutError:
            return [Fault("hung", f"{what}: no end: {self._dump()}")]

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
            self._process.join(limit_s())
        self._end()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def _dump(self) -> str:
        """Where each of its threads is; ends it."""
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._end()

    def _end(self) -> str:
        """Kills the process; returns its exit status and what it wrote in this case, of a fatal
        error on."""
        self._process.join(0.5)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        said = ""
        with contextlib.suppress(OSError):
            said = self._log.read_bytes()[self._said :].decode(errors="replace")
        before, fatal, after = said.partition("Fatal Python error")
        said = before[-300:] + fatal + after[:1200] if fatal else said[-1500:]
        return f"exit status {code}, {said}"
