"""Running a grid: every cell that has no record yet, repeats by turns."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import Trace
from moejax.checkpoints.convert import installed_version
from moejax.costs.workload_plan import costs_of_trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.bench import Bench, Group, bench_of, group_of, loaded_model
from moejax.evaluate.experiments.corpus import windows
from moejax.evaluate.experiments.definition import Cell, Experiment, read_experiment
from moejax.evaluate.experiments.record_file import (
    RECORDS,
    SESSIONS,
    open_records,
    require_same,
)
from moejax.evaluate.experiments.records import KEYS, Records, read_results
from moejax.evaluate.experiments.simulated import (
    active_bytes,
    bound,
    predicted,
    recorded,
    simulated,
)
from moejax.evaluate.experiments.workload import Workload
from moejax.evaluate.json_lines import LineFile
from moejax.models.directory import model_directory
from moejax.progress import grid_progress
from moejax.requests.tokenizer import load_tokenizer

TRACES = "traces"
"""The folder of a directory of results that has the routing."""

VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")

Run = tuple[Cell, int]
"""A cell and its repeat; what is counted and not measured has the one repeat 0."""


def ablate(
    definition: str | os.PathLike[str] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    progress: bool = True,
) -> Records:
    """Runs the grid of a definition and returns its records (docs/ablation.md).

    definition: a YAML file, or a mapping of the same keys. directory: of the results; one that
    is there is gone on with, and only what it lacks is run. progress: a bar on stderr, with an
    estimate of what is left.

    Raises UserError for a definition that says what cannot be, and for a directory of another one.
    What goes wrong in a cell is its record's `error`, and the others go on.
    """
    experiment = read_experiment(definition)
    root = Path(directory)
    with _alone():
        require_same(root, experiment.asked)
        with open_records(root / RECORDS) as records, open_records(root / SESSIONS) as sessions:
            grid = _Grid(experiment, root, records, sessions)
            grid.run(progress)
    return read_results(root)


@contextlib.contextmanager
def _alone():
    """One grid at a time in a process: engines of several would disturb each other's times."""
    if not _LOCK.acquire(blocking=False):
        raise UserError("a grid runs in this process already; wait for its end")
    try:
        yield
    finally:
        _LOCK.release()


_LOCK = threading.Lock()


def runs_of(experiment: Experiment) -> dict[Group, list[Run]]:
    """All runs, by the engine that they are for, in the order in which they run: repeat after
    repeat, in each of them the policies by turns."""
    found: dict[Group, list[Run]] = {}
    for cell in experiment.cells():
        found.setdefault(group_of(cell, experiment), []).extend(
            (cell, repeat) for repeat in range(experiment.repeats if cell.mode == "measured" else 1)
        )
    for runs in found.values():
        runs.sort(key=lambda run: (run[0].mode != "measured", run[1]))  # stable
    return found


class _Grid:
    """The runs of an experiment whose records are not there yet."""

    def __init__(self, experiment: Experiment, root: Path, records: LineFile, sessions: LineFile):
        self.experiment, self.root = experiment, root
        self.records, self.sessions = records, sessions
        done = {tuple(line[key] for key in KEYS) for line in records.lines}
        groups = runs_of(experiment)
        self.total = sum(map(len, groups.values()))
        self.left = {
            group: [run for run in runs if _key(run) not in done] for group, runs in groups.items()
        }
        self._prompts: dict[tuple[str, int], list[list[int]]] = {}
        self._tokenizer: Any = None

    def run(self, progress: bool) -> None:
        for runs in self.left.values():
            for cell, _ in runs:
                self._workload(cell)  # a text without room for a prompt is refused before a start
        left = sum(map(len, self.left.values()))
        with grid_progress(self.total, self.total - left, progress) as advance:
            for precision in self.experiment.precision:
                groups = [g for g in self.left if g.precision == precision and self.left[g]]
                if not groups:
                    continue
                with loaded_model(self.experiment, precision) as (loaded, load_s):
                    for group in groups:
                        with bench_of(self.experiment, group, loaded) as bench:
                            self._group(bench, group, load_s, advance)

    def _group(self, bench: Bench, group: Group, load_s: float, advance: Any) -> None:
        began = time.perf_counter()
        traces = self._warmed_up(bench, self.left[group])
        warm_up_s = time.perf_counter() - began
        costs = self._costs(self.left[group], traces)
        before = bench.engine.runner.executables()
        self._bounds(bench, self.left[group], traces)
        number = len(self.sessions.lines)
        self.sessions.append(
            {
                "session": number,
                "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                **{name: getattr(group, name) for name in ("driver", "precision", "batch")},
                "arrays": sorted(group.arrays),
                "load_s": load_s,
                **bench.started,
                "warm_up_s": warm_up_s,
                "executables": len(before),
                "python": platform.python_version(),
                "machine": f"{platform.node()}: {platform.platform()}, {os.cpu_count()} CPUs",
                "versions": {name: installed_version(name) for name in VERSIONS},
                "active_bytes": self._active_bytes(bench, traces),
            }
        )
        for cell, repeat in self.left[group]:
            columns = self._columns(bench, cell, traces, costs)
            self.records.append({**vars(cell), "repeat": repeat, "session": number, **columns})
            advance()

    def _columns(
        self,
        bench: Bench,
        cell: Cell,
        traces: Mapping[tuple[str, int, int], Trace],
        costs: CostModel | None,
    ) -> dict[str, Any]:
        """The columns of a run; of one that fails only the error."""
        try:
            if cell.mode == "measured":
                return {"error": None, **bench.measured(cell, self._workload(cell))}
            trace = traces[_place(cell)]
            if cell.mode == "simulated":
                return {"error": None, **simulated(bench, cell, trace)}
            assert costs is not None
            return {"error": None, **predicted(bench, cell, trace, costs)}
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            said = f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}"
            return {"error": said[:1000]}

    def _costs(self, runs: Iterable[Run], traces: Mapping[Any, Trace]) -> CostModel | None:
        """What predicted cells are priced by; None without any. Raises UserError where nothing was
        measured."""
        if not any(cell.mode == "predicted" for cell, _ in runs):
            return None
        with user_errors(where="modes: predicted (costs: FILE names what was measured): "):
            return costs_of_trace(next(iter(traces.values())), self.experiment.costs)

    def _warmed_up(self, bench: Bench, runs: Iterable[Run]) -> dict[tuple[str, int, int], Trace]:
        """The traces of the runs' prompts, and an engine in which everything has run once: the
        policies' first steps, which no record has, with what they compile."""
        cells: dict[tuple[str, int, int], Cell] = {}
        arms: dict[str, Cell] = {}
        for cell, _ in runs:
            cells.setdefault(_place(cell), cell)
            if cell.mode == "measured":
                arms.setdefault(cell.policy, cell)
        found = {
            place: recorded(
                bench, cell, self._workload(cell), self.root / TRACES / _name(cell, bench)
            )
            for place, cell in cells.items()
        }
        for cell in arms.values():
            # What it raises is for its record to say.
            with contextlib.suppress(Exception):
                bench.measured(cell, self._workload(cell, warm_up=True))
        bench.engine.runner.wait_compiled(everything=True)
        return found

    def _bounds(
        self, bench: Bench, runs: Iterable[Run], traces: Mapping[tuple[str, int, int], Trace]
    ) -> None:
        """Records of MIN, once for each place and budget; policies that share a place share it."""
        done = {tuple(line[key] for key in KEYS) for line in self.records.lines}
        for cell, _ in runs:
            place = Cell(**{**vars(cell), "mode": "bound", "policy": "MIN", "driver": "device"})
            if _key((place, 0)) in done:
                continue
            done.add(_key((place, 0)))
            if (columns := bound(bench, cell, traces[_place(cell)])) is not None:
                line = {**vars(place), "repeat": 0, "session": None, "error": None, **columns}
                self.records.append(line)

    def _active_bytes(self, bench: Bench, traces: Mapping[Any, Trace]) -> float:
        sizes = bench.plan.spec.version_bytes
        return max(active_bytes(trace, sizes) for trace in traces.values())

    def _workload(self, cell: Cell, warm_up: bool = False) -> Workload:
        """The cell's prompts. warm_up: as few tokens as tell an engine everything."""
        place = cell.text, cell.prompt_tokens
        if place not in self._prompts:
            if self._tokenizer is None:
                options = self.experiment.options
                words = options.get("tokenizer") or model_directory(self.experiment.model)
                self._tokenizer = load_tokenizer(words, required=True)
            text = self.experiment.sources[cell.text].read_text()
            ids = self._tokenizer(text)["input_ids"]
            most = max(self.experiment.batch)
            self._prompts[place] = windows(ids, most, cell.prompt_tokens, cell.text)
        prompts = tuple(map(tuple, self._prompts[place][: cell.batch]))
        output = min(self.experiment.output_tokens, 16 if warm_up else 1 << 30)
        return Workload(prompts, output, self.experiment.temperature, cell.seed)


def _place(cell: Cell) -> tuple[str, int, int]:
    """Which trace of a group is a cell's."""
    return cell.text, cell.prompt_tokens, cell.seed


def _key(run: Run) -> tuple[Any, ...]:
    cell, repeat = run
    return tuple({**vars(cell), "repeat": repeat}[key] for key in KEYS)


def _name(cell: Cell, bench: Bench) -> str:
    arrays = sorted(bench.plan.steps.trace_arrays)
    parts = *arrays, cell.precision, f"batch{cell.batch}", f"prompt{cell.prompt_tokens}"
    return "-".join([cell.driver, *parts, cell.text, f"seed{cell.seed}"])
