"""Grids on the workers of a cluster: runs are shared out, one process writes what they come to.

What is measured runs first, each engine's runs on a node that Ray gives to nobody else, and one at
a time on a machine, whatever Ray takes for a node; what is counted runs then, many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.errors import UserError
from moejax.evaluate.experiments.definition import Experiment, Run, read_experiment
from moejax.evaluate.experiments.grid import key_of, learn, left_of, open_results, run_groups
from moejax.evaluate.experiments.records import KEYS, RECORDS, Records, read_results
from moejax.progress import grid_progress
from moejax.serve.cluster.fleet import Scale
from moejax.serve.cluster.ray_cluster import nodes
from moejax.serve.cluster.workers import (
    Started,
    Worker,
    WorkerOptions,
    Workers,
    WorkersEnded,
)

BEGUN = "begun"
"""What is told of a run before it, in place of a file's name: who ended a worker is known."""


@dataclasses.dataclass
class _Share:
    """Work: one of `count` equal parts of what a grid lacks. A worker that goes on where another
    ended leaves out what has come since, which is in `done`."""

    number: int
    count: int
    measured: bool
    """Of what is measured, engine by engine; else of what is counted, run by run."""
    done: set[tuple[Any, ...]]
    begun: dict[str, Any] | None = None
    """The run that it is at, as a record without columns."""
    blamed: dict[str, Any] | None = None
    """The run that it was at when workers ended for it last: once more, and the run is an error."""


class GridWorker(Worker):
    """A worker that runs shares of a grid. Needs the model, the texts and the policies' files at
    the paths that the definition gives them, and nothing of the directory of results."""

    async def start(self, asked: Mapping[str, Any], home: str) -> Started | str:
        """Reads the definition: asked: what it says, and digests of its files. home: from where on
        paths are meant. What is wrong with it here, as text."""
        began = time.perf_counter()
        try:
            await asyncio.to_thread(self._read, dict(asked), home)
        except (UserError, MemoryError, ValueError) as error:
            return str(error) or type(error).__name__
        return Started(1, time.perf_counter() - began)

    def _read(self, asked: dict[str, Any], home: str) -> None:
        files = asked.pop("files")
        self._experiment = read_experiment(asked, home=Path(home))
        here = self._experiment.asked["files"]
        for name, digest in files.items():
            if here.get(name) != digest:
                raise UserError(f"{name} is another file here than where the grid was started")
        self._scratch = tempfile.TemporaryDirectory(prefix="moejax-grid-")
        self._learned: Experiment | None = None

    async def run(self, items: Sequence[_Share]) -> AsyncIterator[list[tuple[int, Any, bool]]]:
        """Its room is one share, whose lines come one by one."""
        loop, (share,) = asyncio.get_running_loop(), items
        news: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()

        def tell(name: str, line: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(news.put_nowait, (name, line))

        running = asyncio.create_task(asyncio.to_thread(self._run, share, tell))
        running.add_done_callback(lambda _: loop.call_soon(news.put_nowait, None))
        while (piece := await news.get()) is not None:
            yield [(0, piece, False)]
        try:
            yield [(0, await running, True)]
        except UserError as error:
            yield [(0, UserError(str(error)), True)]

    def _run(self, share: _Share, tell: Callable[[str, dict[str, Any]], None]) -> None:
        traces = Path(self._scratch.name)
        with _alone_here() if share.measured else contextlib.nullcontext():
            if self._learned is None:
                self._learned = learn(self._experiment, traces)
            chosen: dict[Any, list[Run]] = {}
            for place, (group, runs) in enumerate(self._learned.runs().items()):
                measured = [run for run in runs if run[0].mode in ("measured", "quality", "priced")]
                if share.measured:
                    mine = measured if place % share.count == share.number else []
                else:
                    counted = [run for run in runs if run not in measured]
                    mine = counted[share.number :: share.count]
                chosen[group] = mine
            left = left_of(chosen, share.done)
            run_groups(self._learned, left, traces, tell, lambda run: tell(BEGUN, _line(run)))

    async def close(self) -> None:
        """Removes its traces."""
        self._scratch.cleanup()


def _line(run: Run) -> dict[str, Any]:
    """A record without columns."""
    return {**dict(zip(KEYS, key_of(run), strict=True)), "session": None}


@contextlib.contextmanager
def _alone_here() -> Iterator[None]:
    """One of these at a time on a machine: several nodes of Ray, or two grids, may be on one."""
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
    warn: Callable[[str], None] = lambda text: None,
) -> Records:
    """`ablate` on the workers of a connected cluster: the same records, but for their order, times
    and sessions, into the same files, which either of both goes on with.

    scale: `workers` are those of what is counted. What is measured has a node for itself, and all
    of an engine's runs one node, so that repeats are compared on one machine. A run that ends
    workers, at last alone, is a record with an error. Raises UserError as ablate does, and where
    no worker can run.
    """
    experiment, root = read_experiment(definition, changes), Path(directory)
    # What learns within the grid may ask for more runs of the baseline than are known here.
    total = sum(map(len, experiment.runs().values()))
    with (
        open_results(experiment, root) as (done, write),
        grid_progress(total, len(done), progress) as advance,
    ):
        for measured in (True, False):
            asked = _workers(experiment, scale, measured)
            shares = [_Share(i, asked.count, measured, done) for i in range(asked.count)]
            with Workers(asked, warn) as workers:
                while shares:
                    work, shares = shares, []
                    for share, news in workers.run(work):
                        if isinstance(news, WorkersEnded):
                            shares.append(share)
                            if share.begun is None or share.begun != share.blamed:
                                share.blamed = share.begun
                                continue
                            news = RECORDS, {**share.begun, "error": str(news)[:1000]}
                        if isinstance(news, UserError):
                            raise news
                        name, line = news or (None, {})
                        if name == BEGUN:
                            share.begun = line
                        elif name == RECORDS:
                            key = tuple(line[key] for key in KEYS)
                            if key not in done:
                                done.add(key)
                                write(name, line)
                                advance()
                        elif name is not None:
                            write(name, line)
    return read_results(root)


def _workers(experiment: Experiment, scale: Scale, measured: bool) -> WorkerOptions:
    """Those for what is measured or for what is counted."""
    alive = nodes()
    on_gpu = any(n.gpus >= 1 for n in alive) and experiment.options.get("device") != "cpu"
    gpus = 1.0 if on_gpu and not experiment.drawn else 0.0
    useful = [node for node in alive if node.cpus >= 1 and node.gpus >= gpus]
    count = len(useful) if measured else scale.workers or len(useful)
    given = _with_whole_paths(experiment), str(experiment.home)
    cpus, on = (1, tuple(useful)) if measured else (scale.cores_per_worker or 1, ())
    return WorkerOptions(GridWorker, given, max(count, 1), cpus, gpus, on)


def _with_whole_paths(experiment: Experiment) -> dict[str, Any]:
    """What is asked, with paths that do not depend on the working directory."""
    asked = experiment.asked
    whole = lambda text: os.path.abspath(text) if os.path.exists(text) else text  # noqa: E731
    options = {n: whole(v) if isinstance(v, str) else v for n, v in asked["options"].items()}
    return {**asked, "model": whole(asked["model"]), "options": options}
