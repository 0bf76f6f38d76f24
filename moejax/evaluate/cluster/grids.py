"""Grids on a cluster: parts of a grid are tasks of Ray, and one process writes their records.

What is measured runs first, each engine's runs on a node that Ray gives to nothing else, and one at
a time on a machine, whatever Ray takes for a node; what is counted runs then, many parts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import queue
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moejax.errors import UserError
from moejax.evaluate.experiments.definition import Experiment, read_experiment
from moejax.evaluate.experiments.grid import Write, learn, open_results, run_groups, select_left
from moejax.evaluate.experiments.records import KEYS, RECORDS, Records, read_results
from moejax.progress import count_progress
from moejax.serve.cluster.ray_cluster import Node, explain_end, nodes, require_ray
from moejax.serve.cluster.workers import Scale

SILENT_S = 7200.0
"""How long no run of a grid may end, before the grid does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` equal parts of what a grid lacks. measured: of what is measured, engine by
    engine; else of what is counted, run by run."""

    number: int
    count: int
    measured: bool


def run_part(
    asked: Mapping[str, Any], home: str, part: Part, done: set[tuple[Any, ...]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a part, each with the name of its file. A task of Ray, which needs the model,
    the texts and the policies' files at the paths that the definition gives, and nothing of the
    directory of results.

    asked: what the definition says, with digests of its files. home: the directory that relative
    paths begin at. done: keys of the runs that are left out. Raises UserError for a definition or a
    file that is another one here.
    """
    lines: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_run, asked, home, part, done, lambda *line: lines.put(line))
        running.add_done_callback(lambda _: lines.put(None))
        for line in iter(lines.get, None):  # noqa: UP028 (Ray sends into its generators)
            yield line
        running.result()


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
        run_groups(experiment, select_left(chosen, done), Path(scratch), tell)


@contextlib.contextmanager
def _measure_alone() -> Iterator[None]:
    """One measurement at a time on a machine: several nodes of Ray, or two grids, may be on one."""
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
    """`ablate` on a connected cluster: the same records, but for their order, times and sessions,
    in the same files, so that either command goes on with what the other began.

    scale: `workers` are the parts of what is counted. What is measured has a node for itself, and
    all of an engine's runs one node, so that repeats are compared on one machine. Raises UserError
    as ablate does, where a part's tasks only end, and where no run ends for SILENT_S.
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
            tasks = []
            for part in (Part(i, count, measured) for i in range(count)):
                task = require_ray().remote(**task_options(part, experiment, scale))(run_part)
                tasks.append(task.remote(asked, home, part, done))
            for name, line in _lines_of(tasks):
                if name == RECORDS:
                    key = tuple(line[key] for key in KEYS)
                    if key in done:
                        continue
                    done.add(key)
                    report(len(done))
                write(name, line)
    return read_results(root)


def _lines_of(tasks: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of tasks, Ray's generators, as they come."""
    ray, heard = require_ray(), time.monotonic()
    again = "the same command goes on from the records that are there"
    while tasks:
        ready, _ = ray.wait(tasks, num_returns=1, timeout=60.0)
        if ready:
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENT_S:
            raise UserError(
                f"no run of the grid ended within {SILENT_S:.0f} s: a task hangs, or Ray has no "
                f"room for one (ray status); {again}"
            )
        for task in ready:
            if (reference := next(task, None)) is None:
                tasks.remove(task)
                continue
            try:
                yield ray.get(reference)
            except UserError as error:  # with the traceback of the task in its text
                raise UserError(str(getattr(error, "cause", error))) from None
            except ray.exceptions.RayError as error:
                raise UserError(
                    f"tasks of the grid ended: {explain_end(error)}; {again}"
                ) from error


def useful_nodes(experiment: Experiment) -> list[Node]:
    """The nodes that runs can be on: those with GPUs where there are any and the grid wants one;
    without GPUs where it wants none."""
    alive = [node for node in nodes() if node.cpus >= 1]
    wants_gpu = not experiment.drawn and experiment.options.get("device") != "cpu"
    without = [dataclasses.replace(node, gpus=0.0) for node in alive]
    return [node for node in alive if wants_gpu and node.gpus >= 1] or without


def task_options(part: Part, experiment: Experiment, scale: Scale) -> dict[str, Any]:
    """Ray's options of a part's task, which Ray starts again where its process ends: a whole node
    for what is measured, some CPUs for what is counted."""
    options: dict[str, Any] = {"max_retries": 3, "max_calls": 1, "scheduling_strategy": "SPREAD"}
    useful = useful_nodes(experiment)
    if part.measured and useful:
        node = useful[part.number]
        affinity = require_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
        # soft: another node where this one is gone.
        options |= {"scheduling_strategy": affinity(node.id, soft=True)}
        return {**options, "num_cpus": node.cpus, "num_gpus": node.gpus}
    gpus = 1.0 if any(node.gpus for node in useful) else 0.0
    return {**options, "num_cpus": scale.cores_per_worker or 1, "num_gpus": gpus}


def _with_whole_paths(experiment: Experiment) -> dict[str, Any]:
    """What is asked, with paths that do not depend on the working directory."""
    asked = experiment.asked
    whole = lambda text: os.path.abspath(text) if os.path.exists(text) else text  # noqa: E731
    options = {n: whole(v) if isinstance(v, str) else v for n, v in asked["options"].items()}
    return {**asked, "model": whole(asked["model"]), "options": options}
