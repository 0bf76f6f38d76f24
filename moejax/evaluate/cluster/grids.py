"""Runs grids on a cluster: parts of a grid are tasks of Ray, and one process writes their records.
Measured cells run first: each engine's runs on a node that Ray gives to nothing else, and one at a
time on a machine, even if it has several nodes of Ray. Counted cells run then, many parts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import platform
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moejax.errors import UserError
from moejax.evaluate.experiments.definition import Experiment, read_experiment
from moejax.evaluate.experiments.grid import Write, learn, open_results, run_groups, select_left
from moejax.evaluate.experiments.records import KEYS, RECORDS, Records, read_results
from moejax.progress import count_progress
from moejax.serve.cluster.ray_cluster import Node, explain_end, nodes, require_ray
from moejax.serve.cluster.workers import ANSWER_S, BEAT_S, MOST_ENDS, PLACE_S, Scale

SILENT_S = 7200.0
"""Seconds without the end of a run after which the grid ends."""

BEAT, BEGUN = "beat", "begun"
"""What a task yields in place of a file's name: BEAT, with the task's place, every BEAT_S; BEGUN,
with the current run as a record without columns."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` equal parts of the runs that a grid lacks.

    - `measured`: whether it has measured runs, engine by engine; otherwise counted runs, run by
      run.
    """

    number: int
    count: int
    measured: bool


def run_part(
    asked: Mapping[str, Any], home: str, part: Part, done: set[tuple[Any, ...]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a part, each with the name of its file, BEAT or BEGUN. This is a task of
    Ray. It needs the model, the texts and the policies' files at the paths that the definition
    gives, and nothing of the directory of results.

    - `asked`: what the definition says, with digests of its files.
    - `home`: the directory that relative paths begin at.
    - `done`: keys of the runs that are left out.

    Raises UserError for a definition or a file that differs on this machine.
    """
    lines: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_run, asked, home, part, done, lambda *line: lines.put(line))
        running.add_done_callback(lambda _: lines.put(None))
        line: tuple[str, dict[str, Any]] | None = BEAT, _place()
        while line is not None:
            yield line
            try:
                line = lines.get(timeout=BEAT_S)
            except queue.Empty:
                line = BEAT, _place()
        running.result()


def _place() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": platform.node()}


def _run(
    asked: Mapping[str, Any], home: str, part: Part, done: set[tuple[Any, ...]], tell: Write
) -> None:
    definition = {name: value for name, value in asked.items() if name != "files"}
    experiment = read_experiment(definition, home=Path(home))
    for name, digest in asked["files"].items():
        if experiment.asked["files"].get(name) != digest:
            raise UserError(f"{name} is another file here than where the grid was started")
    alone = _measure_alone() if part.measured else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="moejax-grid-") as scratch, alone:
        experiment, chosen = learn(experiment, Path(scratch)), {}
        for place, (group, runs) in enumerate(experiment.runs().items()):
            measured = [run for run in runs if run[0].mode in ("measured", "quality", "priced")]
            if part.measured:
                chosen[group] = measured if place % part.count == part.number else []
            else:
                counted = [run for run in runs if run not in measured]
                chosen[group] = counted[part.number :: part.count]
        left, begin = select_left(chosen, done), lambda line: tell(BEGUN, line)
        run_groups(experiment, left, Path(scratch), tell, begin)


@contextlib.contextmanager
def _measure_alone() -> Iterator[None]:
    """Holds a lock for one measurement at a time on a machine, which several nodes of Ray, or two
    grids, may share."""
    path = Path(tempfile.gettempdir()) / f"moejax-{os.getuid()}-measuring.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def cluster_ablate(
    definition: str | os.PathLike[str] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    scale: Scale,
    *,
    changes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Records:
    """Runs `ablate` on a connected cluster: the same records in the same files, except for their
    order, times and sessions, so either command continues what the other began.

    - `scale`: `workers` is the number of parts of the counted runs. A measured run has a node for
      itself, and all runs of an engine have one node, so that repeats are compared on one machine.

    A run that ends MOST_ENDS tasks becomes a record with an error. Raises UserError like ablate; if
    tasks end before a run begins; if a task does not answer for ANSWER_S; if Ray starts none for
    PLACE_S; and if no run ends for SILENT_S.
    """
    experiment, root = read_experiment(definition, changes), Path(directory)
    asked, home = _with_whole_paths(experiment), str(experiment.home)
    # Policies that learn within the grid may ask for more runs of the baseline than are known here.
    total = sum(map(len, experiment.runs().values()))
    with (
        open_results(experiment, root) as (done, write),
        count_progress("runs", total, len(done), progress) as report,
    ):
        for measured in (True, False):
            places = len(useful_nodes(experiment))
            count = max(places if measured else scale.workers or places, 1)

            def start(part: Part) -> Any:
                task = require_ray().remote(**task_options(part, experiment, scale))(run_part)
                return task.remote(asked, home, part, done)

            for name, line in _lines_of([Part(i, count, measured) for i in range(count)], start):
                if name == RECORDS:
                    key = tuple(line[key] for key in KEYS)
                    if key in done:
                        continue
                    done.add(key)
                    report(len(done))
                write(name, line)
    return read_results(root)


@dataclasses.dataclass
class _Task:
    """A part's task.

    - `heard`: when it last answered; None: it has not begun.
    - `run`: the run that it is at.
    - `ends`: tasks of the part that ended since a run did.
    """

    part: Part
    ends: int = 0
    heard: float | None = None
    place: str = ""
    run: dict[str, Any] | None = None


def _lines_of(
    parts: Iterable[Part], start: Callable[[Part], Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of parts as they come.

    - `start`: starts a task of a part, of what is left of it now. Ray itself would start the same
      task again and skip as many lines as have come.
    """
    ray, tasks = require_ray(), {start(part): _Task(part) for part in parts}
    again = "the same command goes on from the records that are there"
    ended = heard = time.monotonic()
    while tasks:
        ray.wait([*tasks], num_returns=1, timeout=BEAT_S)
        ready, _ = ray.wait([*tasks], num_returns=len(tasks), timeout=0)
        for stream in ready:
            task = tasks[stream]
            if (reference := next(stream, None)) is None:
                del tasks[stream]
                continue
            try:
                name, line = ray.get(reference)
            except UserError as error:  # with the traceback of the task in its text
                raise UserError(str(getattr(error, "cause", error))) from None
            except ray.exceptions.RayError as error:
                del tasks[stream]
                ends, why = task.ends + 1, explain_end(error)
                of_python = isinstance(error, ray.exceptions.RayTaskError)
                if of_python or (ends >= MOST_ENDS and task.run is None):
                    raise UserError(f"tasks of the grid ended: {why}; {again}") from error
                if ends >= MOST_ENDS:
                    text = f"{ends} tasks ended while this ran: {why}"
                    ends = 0
                    yield RECORDS, {**(task.run or {}), "error": text[:1000]}
                tasks[start(task.part)] = _Task(task.part, ends)
                continue
            task.heard = heard = time.monotonic()
            if name == BEAT:
                task.place = f"process {line['pid']} on {line['host']}"
            elif name == BEGUN:
                task.run = line
            else:
                if name == RECORDS:
                    task.ends, ended = 0, heard
                yield name, line
        now = time.monotonic()
        for task in tasks.values():
            if task.heard is not None and now - task.heard > ANSWER_S:
                raise UserError(
                    f"a task of the grid hangs: {task.place} does not answer for "
                    f"{now - task.heard:.0f} s; end it, then {again}"
                )
        if tasks and now - heard > PLACE_S:
            raise UserError(
                f"Ray found no room for a task of the grid within {PLACE_S:.0f} s (ray status); "
                f"{again}"
            )
        if tasks and now - ended > SILENT_S:
            places = ", ".join(task.place for task in tasks.values() if task.place)
            raise UserError(
                f"no run of the grid ended within {SILENT_S:.0f} s: {places} hangs; {again}"
            )


def useful_nodes(experiment: Experiment) -> list[Node]:
    """Returns the nodes that runs can be on: those with GPUs if there are any and the grid wants
    one; those without GPUs if it wants none."""
    alive = [node for node in nodes() if node.cpus >= 1]
    wants_gpu = not experiment.drawn and experiment.options.get("device") != "cpu"
    without = [dataclasses.replace(node, gpus=0.0) for node in alive]
    return [node for node in alive if wants_gpu and node.gpus >= 1] or without


def task_options(part: Part, experiment: Experiment, scale: Scale) -> dict[str, Any]:
    """Returns Ray's options of a part's task: a whole node for measured runs, some CPUs for counted
    ones."""
    options: dict[str, Any] = {"max_retries": 0, "max_calls": 1, "scheduling_strategy": "SPREAD"}
    useful = useful_nodes(experiment)
    if part.measured and useful:
        node = useful[part.number % len(useful)]  # fewer than there were
        affinity = require_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
        # soft: another node where this one is gone.
        options |= {"scheduling_strategy": affinity(node.id, soft=True)}
        return {**options, "num_cpus": node.cpus, "num_gpus": node.gpus}
    gpus = 1.0 if any(node.gpus for node in useful) else 0.0
    return {**options, "num_cpus": scale.cores_per_worker or 1, "num_gpus": gpus}


def _with_whole_paths(experiment: Experiment) -> dict[str, Any]:
    """Returns the definition with paths that do not depend on the working directory."""
    asked = experiment.asked
    whole = lambda text: os.path.abspath(text) if os.path.exists(text) else text  # noqa: E731
    options = {n: whole(v) if isinstance(v, str) else v for n, v in asked["options"].items()}
    return {**asked, "model": whole(asked["model"]), "options": options}
