"""A worker process: one engine, loaded once, which answers a line of JSON with a line of JSON.

Nothing here needs more than numpy: a worker may run in an environment without jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

REPOSITORY = Path(__file__).parents[3]

SEED = 20


@dataclasses.dataclass(frozen=True)
class Task:
    """What every engine of a comparison is given: the same model, tokens and threads."""

    model: str
    """A checkpoint's directory, or a GGUF file."""
    vocabulary: int
    batch: int = 8
    """Sequences of the largest decode step."""
    context: int = 128
    """Tokens of each before the first step."""
    steps: int = 32
    """Forced tokens after it; a longer block begins again with the first."""
    prompt: int = 512
    """Tokens of the timed prefill."""
    threads: int | None = 2
    """None: what an engine takes by itself."""
    precision: str | None = None
    """What moejax's experts are in; the dtype of transformers."""
    resident: bool = False
    """Whether moejax's experts have cells; else they are read where they lie in its store."""
    host_memory: int | None = None
    """What moejax may keep of experts that stay in files, and of parameters; None: they do not."""
    transfer_threads: int | None = None
    """Threads of moejax's reads from files; None: its own default."""
    verify_reads: bool = True
    """Whether moejax verifies their checksums."""

    def decoded(self) -> np.ndarray:
        """int32[batch, context + steps + 1]: contexts, forced tokens, and the last one's next."""
        shape = self.batch, self.context + self.steps + 1
        return self._drawn(0, shape)

    def prefilled(self) -> np.ndarray:
        """int32[prompt]."""
        return self._drawn(1, (self.prompt,))

    def _drawn(self, stream: int, shape: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng((SEED, stream))
        return random.integers(self.vocabulary, size=shape).astype(np.int32)


class Engine(Protocol):
    """What a worker's engine does. Each call returns when its result is there."""

    versions: dict[str, str]

    def start(self, batch: int) -> None:
        """Makes the first `batch` sequences' contexts ready, if they are not."""
        ...

    def decode(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Logits float32[batch, V] after tokens int32[batch] at this position."""
        ...

    def prefill(self, tokens: np.ndarray) -> None:
        """Computes a prompt of its own to its last token's logits, and forgets it."""
        ...

    def bytes_read(self, batch: int) -> dict[str, float] | None:
        """What a decode step of the sequences that were started reads, by what it is; None: as
        another engine."""
        ...


# ---- in the worker


def serve(load: Callable[[Task], Engine]) -> None:
    """Answers on stdout, which nothing else may write to, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    task = Task(**json.loads(sys.argv[1]))
    engine = load(task)
    answer(versions=engine.versions)
    for line in sys.stdin:
        answer(**answered(engine, task, json.loads(line)))


def answered(engine: Engine, task: Task, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question: {"what": "decode", "batch", "seconds"}, {"what": "walk", "batch",
    "first", "steps"}, {"what": "prefill"}, {"what": "check", "batch", "steps"}, {"what": "bytes",
    "batch"} or {"what": "process"}."""
    what, batch = question["what"], question.get("batch", 1)
    if what == "process":
        return {"read": disk_bytes(), "resident": peak_resident()}
    tokens = task.decoded()[:batch]
    if what == "prefill":
        return timed_steps(lambda i: engine.prefill(task.prefilled()), 1)
    if what == "bytes":
        return {"bytes": engine.bytes_read(batch)}
    engine.start(batch)

    def step(i: int) -> np.ndarray:
        position = task.context + i % task.steps
        return engine.decode(tokens[:, position], position)

    if what == "check":
        steps = range(question.get("steps", task.steps))
        found = [scores(step(i), tokens[:, task.context + i + 1]) for i in steps]
        return {"scores": found}
    if what == "walk":  # each step once: experts that a step before it left are no step's own
        return timed_steps(lambda i: step(question["first"] + i), question["steps"], math.inf)
    step(0)  # threads asleep and caches of another engine's weights are nobody's step
    return timed_steps(step, task.steps, question["seconds"])


def scores(logits: np.ndarray, tokens: np.ndarray) -> list[float]:
    """ln p of the tokens [batch] by the logits [batch, V]."""
    wide = np.asarray(logits, np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.sum(np.exp(wide - top[:, None]), axis=1))
    return (wide[np.arange(len(tokens)), tokens] - total).tolist()


def disk_bytes(process: int | str = "self") -> int:
    """What a process has made disks read, by reads and by page faults."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def peak_resident() -> int:
    """VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def timed_steps(step: Callable[[int], object], most: int, limit_s: float = 0.0) -> dict[str, Any]:
    """Seconds of each step, as many as fit into limit_s but at least one, and processor seconds of
    all."""
    seconds: list[float] = []
    processor, began = time.process_time(), time.perf_counter()
    while len(seconds) < most and (not seconds or time.perf_counter() - began < limit_s):
        start = time.perf_counter()
        step(len(seconds))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "processor": time.process_time() - processor}


# ---- in the command


class Worker:
    """The other end. A worker that dies is a RuntimeError with the end of what it said."""

    def __init__(self, name: str, python: str, module: str, task: Task, prefix: Sequence[str] = ()):
        """prefix: a command that begins the worker's, as one that puts it under a limit."""
        self.name, self.task = name, task
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self.command = [python, "-m", module, json.dumps(dataclasses.asdict(task))]
        self.shown = " ".join([Path(python).name, *self.command[1:3], repr(self.command[3])])
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        environment["OMP_NUM_THREADS"] = str(task.threads or os.cpu_count())
        self._process = subprocess.Popen(
            [*prefix, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            text=True,
        )
        self.versions: dict[str, str] = {}

    def loaded(self) -> Worker:
        """Itself, once the engine can compute."""
        self.versions = self._answer()["versions"]
        return self

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """As of `answered`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _answer says what the worker said
            print(json.dumps({"what": what, **fields}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._said.seek(0)
        last = self._said.read().strip()[-2000:]
        raise RuntimeError(f"{self.name} ended with status {status}: {last}")

    def close(self) -> None:
        """Ends the process and gives its memory back."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()
