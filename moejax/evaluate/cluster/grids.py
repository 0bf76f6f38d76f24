"""Grids on the workers of a cluster: cells are shared out, one process writes what they come to.

What is measured runs first, each engine's cells on a node that Ray gives to nobody else, and one at
a time on a machine, whatever Ray takes for a node; what is counted runs then, many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.errors import UserError
from moejax.evaluate.experiments.bench import Group
from moejax.evaluate.experiments.definition import Experiment, read_experiment
from moejax.evaluate.experiments.grid import (
    Files,
    Run,
    bound_of,
    done_in,
    key_of,
    left_of,
    opened,
    run_missing,
    runs_of,
    taught,
)
from moejax.evaluate.experiments.records import KEYS, Records, read_results
from moejax.evaluate.json_lines import LineFile
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

Key = tuple[Any, ...]

_LIST = "list"
"""Work: all runs, by the engine that they are for, once policies have learned."""


@dataclasses.dataclass
class _Part:
    """Work: runs of one engine. What has come is taken out here, so that a worker that goes on
    where another ended does the rest."""

    runs: list[Run]
    bounds: set[Key]
    """Keys of the bounds that this part computes."""
    quality: list[dict[str, Any]] | None
    """What is there of the quality of its precision; None: another part measures it."""
    measured: bool
    session: int | None = None
    """The number of its start; None: nobody has started for it."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A line for one of the files."""

    file: str
    line: Mapping[str, Any]


class _Sink(LineFile):
    """A file of lines elsewhere."""

    def __init__(self, lines: Iterable[Mapping[str, Any]], tell: Callable[[dict[str, Any]], None]):
        super().__init__("lines", -1, [dict(line) for line in lines])
        self._tell = tell

    def append(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))
        self._tell(self.lines[-1])


class GridWorker(Worker):
    """A worker that runs parts of a grid. Needs the model, the texts and the policies' files at the
    paths that the definition gives them, and nothing of the directory of results."""

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
        self._scratch = _scratch()
        self._taught: Experiment | None = None

    async def run(self, items: Sequence[str | _Part]) -> AsyncIterator[list[tuple[int, Any, bool]]]:
        """Its room is one piece of work, whose lines come one by one."""
        loop, (part,) = asyncio.get_running_loop(), items
        news: asyncio.Queue[_Piece | None] = asyncio.Queue()

        def tell(piece: _Piece | None) -> None:
            loop.call_soon_threadsafe(news.put_nowait, piece)

        if isinstance(part, str):
            running = asyncio.create_task(asyncio.to_thread(lambda: runs_of(self._told())))
        else:
            running = asyncio.create_task(asyncio.to_thread(self._run, part, tell))
        running.add_done_callback(lambda _: tell(None))
        while (piece := await news.get()) is not None:
            yield [(0, piece, False)]
        try:
            yield [(0, await running, True)]
        except UserError as error:
            yield [(0, UserError(str(error)), True)]

    def _told(self) -> Experiment:
        """The experiment whose policies have learned: once a process."""
        if self._taught is None:
            self._taught = taught(self._experiment, self._scratch)
        return self._taught

    def _run(self, part: _Part, tell: Callable[[_Piece], None]) -> None:
        with _alone_here() if part.measured else contextlib.nullcontext():
            told = self._told()
            every = [run for runs in runs_of(told).values() for run in runs]
            wanted = {key_of(run) for run in part.runs}
            # To the grid, what others do is done.
            others = [_line(run) for run in every if key_of(run) not in wanted]
            bounds = [(bound_of(cell), 0) for cell, _ in every]
            others += [_line(bound) for bound in bounds if key_of(bound) not in part.bounds]
            known = {"records": others, "quality": part.quality or []}
            sinks = (
                _Sink(known.get(name, ()), lambda line, n=name: tell(_Piece(n, line)))
                for name in Files._fields
            )
            # Of drawn routing each place teaches anew.
            experiment = self._experiment if self._experiment.drawn else told
            if part.quality is None:
                experiment = dataclasses.replace(experiment, quality_tokens=None)
            run_missing(experiment, self._scratch, Files(*sinks), progress=False)


def _line(run: Run) -> dict[str, Any]:
    """What of a record tells it from all others."""
    return dict(zip(KEYS, key_of(run), strict=True))


def _scratch() -> Path:
    """A directory for this process's traces. Removes those of processes that have ended."""
    parent = Path(tempfile.gettempdir()) / f"moejax-{os.getuid()}-grid"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != os.getuid():
        raise UserError(f"{parent} is another user's; remove it, or set TMPDIR")
    for other in parent.iterdir():
        if other.name.isdigit() and not Path(f"/proc/{other.name}").exists():
            shutil.rmtree(other, ignore_errors=True)
    own = parent / str(os.getpid())
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    return own


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
    and numbers of sessions, into the same files, which either of both goes on with.

    scale: `workers` are those of what is counted. What is measured has a node for itself, and all
    of an engine's cells one node, so that repeats are compared on one machine. A run that ends
    workers, at last alone, is a record with an error. Raises UserError as ablate does, and where
    no worker can run.
    """
    experiment, root = read_experiment(definition, changes), Path(directory)
    with opened(experiment, root) as files:
        _ClusterGrid(experiment, files, scale, warn).run(progress)
    return read_results(root)


class _ClusterGrid:
    """Who shares out a grid and writes it."""

    def __init__(
        self,
        experiment: Experiment,
        files: Files,
        scale: Scale,
        warn: Callable[[str], None],
    ):
        self._experiment, self._files, self._scale, self._warn = experiment, files, scale, warn
        self._done = done_in(files.records)

    def run(self, progress: bool) -> None:
        groups = self._groups()
        total, left = sum(map(len, groups.values())), left_of(groups, self._done)
        parts = list(self._parts(left))
        done = total - sum(map(len, left.values()))
        with grid_progress(total, done, progress) as advance:
            for measured in (True, False):
                if chosen := [part for part in parts if part.measured == measured]:
                    with Workers(self._workers(measured, len(chosen)), self._warn) as pool:
                        self._carried_out(pool, chosen, advance)

    def _groups(self) -> dict[Group, list[Run]]:
        """All runs. Policies that learn in the grid say what they need once they have, on a
        worker."""
        if not self._experiment.learns:
            return runs_of(self._experiment)
        with Workers(self._workers(True, 1), self._warn) as pool:
            ((_, found),) = pool.run([_LIST])
        if isinstance(found, UserError):
            raise found
        return found

    def _workers(self, measured: bool, parts: int) -> WorkerOptions:
        """Workers for so many parts."""
        alive = nodes()
        on_gpu = any(n.gpus >= 1 for n in alive) and self._experiment.options.get("device") != "cpu"
        gpus = 1.0 if on_gpu and not self._experiment.drawn else 0.0
        useful = [node for node in alive if node.cpus >= 1 and node.gpus >= gpus]
        count = len(useful) if measured else self._scale.workers or len(useful)
        cpus = 1 if measured else self._scale.cores_per_worker or 1
        given = _with_whole_paths(self._experiment), str(self._experiment.home)
        on = tuple(useful) if measured else ()
        return WorkerOptions(GridWorker, given, max(min(count, parts), 1), cpus, gpus, on)

    def _parts(self, left: Mapping[Group, Sequence[Run]]) -> Iterator[_Part]:
        """What is measured, by engines; what is counted, each engine's shared out."""
        bounds, scored = set(self._done), set()
        for group, runs in left.items():
            measured = [run for run in runs if run[0].mode == "measured"]
            counted = [run for run in runs if run[0].mode != "measured"]
            size = max(-(-len(counted) // self._workers(False, len(counted)).count), 1)
            shares = [counted[first : first + size] for first in range(0, len(counted), size)]
            cuts = [measured, *shares]
            for cut in filter(None, cuts):
                # The first cell of a place says its bound, as in one process.
                own = {key_of((bound_of(cell), 0)) for cell, _ in cut} - bounds
                bounds |= own
                # Quality is of what does not tell engines of a precision apart.
                of = dataclasses.replace(
                    group, driver="", link_rate="", batch=0, arrays=frozenset()
                )
                quality = None if of in scored else list(self._files.quality.lines)
                scored.add(of)
                yield _Part(cut, own, quality, cut is measured)

    def _carried_out(self, pool: Workers, parts: list[_Part], advance: Callable[[], None]) -> None:
        while parts:
            again = []
            for part, news in pool.run(parts):
                if isinstance(news, _Piece):
                    self._take(part, news, advance)
                elif isinstance(news, WorkersEnded) and len(part.runs) > 1:
                    again += _one_by_one(part)
                elif isinstance(news, WorkersEnded) and part.runs:
                    run, error = part.runs[0], {"error": str(news)[:1000]}
                    record = {**_record(run, part.session), **error}
                    self._take(part, _Piece("records", record), advance)
                elif isinstance(news, UserError):
                    raise news
            parts = [part for part in again if part.runs]

    def _take(self, part: _Part, piece: _Piece, advance: Callable[[], None]) -> None:
        """Writes a line, once."""
        line = dict(piece.line)
        if piece.file == "sessions":
            part.session = line["session"] = len(self._files.sessions.lines)
        elif piece.file == "records":
            key = tuple(line[name] for name in KEYS)
            if key in self._done:
                return
            self._done.add(key)
            if line["session"] is not None:
                line["session"] = part.session
            if key in part.bounds:
                part.bounds.discard(key)
            else:
                part.runs = [run for run in part.runs if key_of(run) != key]
                advance()
        elif piece.file == "quality" and part.quality is not None:
            part.quality.append(line)
        getattr(self._files, piece.file).append(line)


def _one_by_one(part: _Part) -> list[_Part]:
    """A part for each run: of several nobody knows which one ended the worker, since results of
    those before it may have been on their way."""
    bounds, found = set(part.bounds), []
    for run in part.runs:
        own = {key_of((bound_of(run[0]), 0))} & bounds
        bounds -= own
        found.append(_Part([run], own, None if found else part.quality, part.measured))
    return found


def _with_whole_paths(experiment: Experiment) -> dict[str, Any]:
    """What is asked, with paths that do not depend on the working directory."""
    asked = experiment.asked
    whole = lambda text: os.path.abspath(text) if os.path.exists(text) else text  # noqa: E731
    if "model" in asked:
        options = {n: whole(v) if isinstance(v, str) else v for n, v in asked["options"].items()}
        asked |= {"model": whole(asked["model"]), "options": options}
    return asked


def _record(run: Run, session: int | None) -> dict[str, Any]:
    cell, repeat = run
    return {**vars(cell), "repeat": repeat, "session": session}
