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
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moejax import LLM
from scripts.attacks import (
    engines,
    files,
    interrupts,
    lines,
    programs,
    requests,
    texts,
    threads,
    trees,
)
from scripts.attacks.engine import Known, check_engine, conditions, record, start
from scripts.attacks.scene import Fault, Scene, described, limit_s

Attack = Callable[[Scene], None]

KINDS: dict[str, tuple[int, Attack]] = {
    "params": (6, requests.attack_params),
    "prompts": (4, requests.attack_prompts),
    "lines": (5, lines.attack_lines),
    "results": (2, lines.attack_results),
    "interrupts": (4, interrupts.attack_interrupts),
    "callbacks": (1, interrupts.attack_callbacks),
    "threads": (2, threads.attack_threads),
    "async": (3, threads.attack_async),
    "templates": (4, texts.attack_templates),
    "tokenizers": (4, texts.attack_tokenizers),
    "configs": (3, files.attack_configs),
    "weights": (3, files.attack_weights),
    "trees": (3, trees.attack_trees),
    "outside": (2, trees.attack_outside),
    "maps": (3, trees.attack_maps),
    "combinations": (6, engines.attack_combinations),
    "pressure": (3, engines.attack_pressure),
    "running files": (4, engines.attack_running_files),
    "forks": (1, engines.attack_forks),
    "outputs": (3, engines.attack_outputs),
    "many": (1, engines.attack_many),
    "resume": (4, programs.attack_resume),
    "ray": (1, programs.attack_ray),
    "hung workers": (1, programs.attack_hung_workers),
    "places": (3, programs.attack_places),
    "caches": (1, programs.attack_caches),
    "files": (4, programs.attack_files),
}
"""Kind → how often it comes, and what it does."""

START_S = 300.0
"""A start may compile."""

GRACE_S = 5.0
"""What the watcher adds to twice the limit of a call, since one that ends tells itself."""

ERA = 50
"""Cases that one engine sees, under one set of conditions."""

COMPILING = frozenset(
    {"callbacks", "combinations", "pressure", "running files", "forks", "many", "files"}
)
"""Kinds that start a model of their own: what its compilation took stays with the process."""

MEMORY = 2.0
"""Most memory, in multiples of the normal."""

STACKS = 2**30
"""Bytes of data that stacks of new threads reserve and do not use."""


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
    counts: Counter[str] | None = None,
) -> list[Fault]:
    """Runs a case and checks the engine and the directory afterwards; returns what broke.

    directory: for the files of the case, and TMPDIR of what runs; empty afterwards. counts: takes
    what the case did.
    """
    rng = random.Random(f"case {seed} {number}")
    own = directory / "case"
    own.mkdir()
    scene = Scene(llm, known, rng, own, began, counts=Counter() if counts is None else counts)
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


@dataclasses.dataclass
class Host:
    """The models of a process, one at a time. say: tells who watches from outside."""

    say: Callable[[str, Any], None]
    directory: Path
    """For the files of the cases, and TMPDIR of what runs."""
    known: Known | None
    llm: LLM | None = None
    options: Mapping[str, Any] | None = None
    normal: int = 0
    """Bytes resident in a process that has answered the known requests."""

    def run(self, seed: int, number: int) -> list[Fault]:
        """What broke in a case."""
        llm, known = self._model(conditions(seed, number // ERA))
        forget_peak()
        began, counts = partial(self.say, "began"), Counter[str]()
        faults = run_case(llm, known, seed, number, self.directory, began, counts)
        self.say("counts", counts)
        peak = status_bytes("VmHWM")
        if kind_of(seed, number) in COMPILING:
            self._bound()
        elif peak > MEMORY * self.normal:
            text = f"{peak >> 20} MiB resident, normal are {self.normal >> 20}"
            faults.append(Fault("memory", text))
        return faults

    def _model(self, options: Mapping[str, Any]) -> tuple[LLM, Known]:
        """The model under these conditions, and its known requests."""
        if self.llm is None or self.known is None or options != self.options:
            self.say("starts", "a model")
            _bound_data(None)  # compiling needs what it needs
            if self.llm is not None:
                self.llm.close()
            self.llm, self.options = start(options), options
            if self.known is None:
                self.known = record(self.llm)
                self.say("known", self.known)
            self._bound()
        return self.llm, self.known

    def _bound(self) -> None:
        """The process is as large as normal now; twice that is its bound."""
        assert self.llm is not None and self.known is not None
        self.llm.generate(list(self.known.prompts), list(self.known.params))
        gc.collect()
        gc.freeze()
        self.normal = status_bytes("VmRSS")
        _bound_data(int(MEMORY * status_bytes("VmData")) + STACKS)


def _bound_data(nbytes: int | None) -> None:
    """Bytes of data that this process may have; None: as many as it was started with."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard if nbytes is None else nbytes, hard))


def serve(
    connection: Connection,
    known: Known | None,
    directory: Path,
    prepare: Callable[[], None] | None,
) -> None:
    """Runs the cases (seed, number) that the connection names until it names None. The messages:
    ("starts", what), ("known", the requests), ("began", what), ("counts", what the case did) and
    ("done", faults)."""
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
    host = Host(lambda message, what: connection.send((message, what)), files, known)
    while (case := connection.recv()) is not None:
        connection.send(("done", host.run(*case)))
    os._exit(0)  # a broken engine need not close well


# ---- from outside


class Worker:
    """A process that runs cases. known: answers of an earlier one; None: this one records some.
    prepare: called in the process first; tests plant defects with it."""

    def __init__(
        self, known: Known | None, directory: Path, prepare: Callable[[], None] | None = None
    ):
        directory.mkdir()
        self.known, self._log, self._said = known, directory / "log", 0
        self.counts: Counter[str] = Counter()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, known, directory, prepare)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def run(self, seed: int, number: int) -> list[Fault]:
        """What broke in a case; ends the process where it died or hangs."""
        what, self._said = "the case", self._log.stat().st_size if self._log.exists() else 0
        patience_s = START_S + 10 * limit_s()
        try:
            self._connection.send((seed, number))
            while True:
                message, said = self._receive(patience_s)
                if message == "done":
                    return said
                if message == "known":
                    self.known = said
                    continue
                if message == "counts":
                    self.counts += said
                    continue
                what = said
                patience_s = 2 * limit_s() + GRACE_S
                if message == "starts":
                    patience_s += START_S
        except TimeoutError:  # which is an OSError, too
            return [Fault("hung", f"{what}: no end: {self._dump()}")]
        except (EOFError, OSError):
            self._process.join(limit_s())  # it may be writing its last words
            return [Fault("died", f"{what}: the process ended: {self._end()}")]

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
