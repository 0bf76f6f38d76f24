"""Running a grid: every cell that has no record yet, repeats by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import Trace
from moejax.checkpoints.conversion import installed_version
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.costs.workload_plan import costs_of_trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.arms import Arm
from moejax.evaluate.experiments.bench import (
    Bench,
    Group,
    Terms,
    bench_of,
    group_of,
    keep_costs,
    loaded_model,
    terms_of_trace,
)
from moejax.evaluate.experiments.conversations.memory_run import shared_bench
from moejax.evaluate.experiments.definition import (
    MEASURE,
    NO_LINK,
    Cell,
    Experiment,
    check_experiment,
    read_experiment,
)
from moejax.evaluate.experiments.quality import scored
from moejax.evaluate.experiments.record_file import (
    QUALITY,
    RECORDS,
    SESSIONS,
    TIMELINES,
    completed,
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
from moejax.evaluate.experiments.sources.learning import Prompts, learned
from moejax.evaluate.json_lines import LineFile
from moejax.progress import grid_progress

TRACES = "traces"
"""The folder of a directory of results that has the routing."""

VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")

Run = tuple[Cell, int]
"""A cell and its repeat; what is counted and not measured has the one repeat 0."""


def ablate(
    definition: str | os.PathLike[str] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    changes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Records:
    """Runs the grid of a definition and returns its records (docs/ablation.md).

    definition: a YAML file, or a mapping of the same keys. directory: of the results; one that
    is there is gone on with, and only what it lacks is run. changes: other values of keys.
    progress: a bar on stderr, with an estimate of what is left.

    Raises UserError for a definition that says what cannot be, and for a directory of another one.
    What goes wrong in a cell is its record's `error`, and the others go on.
    """
    experiment = read_experiment(definition, changes)
    root = Path(directory)
    with opened(experiment, root) as files:
        run_missing(experiment, root, files, progress)
    return read_results(root)


class Files(NamedTuple):
    """What a grid writes."""

    records: LineFile
    sessions: LineFile
    quality: LineFile
    timelines: LineFile


@contextlib.contextmanager
def opened(experiment: Experiment, root: Path) -> Iterator[Files]:
    """The files of a directory of results, while no other grid runs in this process."""
    with _alone():
        require_same(root, experiment.asked)
        with contextlib.ExitStack() as stack:
            names = (RECORDS, SESSIONS, QUALITY, TIMELINES)
            yield Files(*(stack.enter_context(open_records(root / name)) for name in names))


def run_missing(experiment: Experiment, root: Path, files: Files, progress: bool) -> None:
    """Runs what the files lack. root: for traces. Raises UserError as ablate does."""
    told = taught(experiment, root)
    if experiment.drawn:
        _DrawnGrid(experiment, told, root, files.records).run(progress)
    elif experiment.conversations:
        _SharedGrid(experiment, root, files.records, files.sessions).run(progress)
    else:
        _Grid(told, root, files, Prompts(told)).run(progress)


def taught(experiment: Experiment, root: Path) -> Experiment:
    """The experiment whose policies say what they need, having learned what they learn within the
    grid. Raises UserError for what this shows to be none of it."""
    if experiment.conversations:
        return experiment
    if not experiment.drawn:
        return learned(experiment, Prompts(experiment), root / TRACES)
    # What has learned says who looks between layers, whatever it learned from.
    arms = _drawn_arms(experiment, root, next(experiment.cells()))
    told = dataclasses.replace(experiment, arms=arms)
    check_experiment(told)
    return told


def _drawn_arms(experiment: Experiment, root: Path, cell: Cell) -> Mapping[str, Arm]:
    """The arms, taught by the drawn routing of a cell's place."""
    arms, routing = experiment.arms, experiment.drawn[cell.text]
    if not any(arm.learns for arm in arms.values()):
        return arms
    most = max(experiment.batch)
    train = routing.train(root / TRACES, most, cell.prompt_tokens, cell.seed)
    return {name: arm.taught(train) for name, arm in arms.items()}


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


def done_in(records: LineFile) -> set[tuple[Any, ...]]:
    """Keys of the runs and bounds that the file has."""
    return {tuple(line[key] for key in KEYS) for line in completed(records.lines)}


def left_of(
    groups: Mapping[Group, list[Run]], done: set[tuple[Any, ...]]
) -> dict[Group, list[Run]]:
    """The runs that are not done."""
    return {
        group: [run for run in runs if key_of(run) not in done] for group, runs in groups.items()
    }


class _Records:
    """The file of records, and what of an experiment it lacks."""

    def __init__(self, experiment: Experiment, file: LineFile):
        self._file = file
        self._done = done_in(file)
        groups = runs_of(experiment)
        self.total = sum(map(len, groups.values()))
        self.left = left_of(groups, self._done)

    @property
    def count_left(self) -> int:
        return sum(map(len, self.left.values()))

    def add(self, run: Run, session: int | None, columns: Mapping[str, Any]) -> None:
        cell, repeat = run
        self._file.append({**vars(cell), "repeat": repeat, "session": session, **columns})

    def add_bound(self, terms: Terms, cell: Cell, trace: Trace) -> None:
        """MIN of the cell's place and budget, once; policies that share a place share it."""
        place = bound_of(cell)
        if key_of((place, 0)) in self._done:
            return
        self._done.add(key_of((place, 0)))
        if (columns := bound(terms, cell, trace)) is not None:
            self.add((place, 0), None, {"error": None, **columns})


class _DrawnGrid:
    """The runs of an experiment on routing without a model. told: as of `taught`."""

    def __init__(self, experiment: Experiment, told: Experiment, root: Path, records: LineFile):
        self.experiment, self.root = experiment, root
        self.records = _Records(told, records)

    def run(self, progress: bool) -> None:
        done = self.records.total - self.records.count_left
        with grid_progress(self.records.total, done, progress) as advance:
            for runs in self.records.left.values():
                # Those of one trace after the other, which is drawn once.
                terms: dict[Any, tuple[Terms, Trace]] = {}
                for cell, repeat in runs:
                    place = _place(cell)
                    if place not in terms:
                        terms[place] = self._terms(cell)
                    here, trace = terms[place]
                    self.records.add_bound(here, cell, trace)
                    columns = columns_of(lambda c=cell, t=trace, h=here: self._counted(h, c, t))
                    self.records.add((cell, repeat), None, columns)
                    advance()

    def _terms(self, cell: Cell) -> tuple[Terms, Trace]:
        experiment, root = self.experiment, self.root / TRACES
        routing = experiment.drawn[cell.text]
        output = experiment.output_tokens
        trace = routing.test(root, cell.batch, cell.prompt_tokens, output, cell.seed)
        return terms_of_trace(experiment, _drawn_arms(experiment, self.root, cell), trace), trace

    def _counted(self, terms: Terms, cell: Cell, trace: Trace) -> dict[str, Any]:
        if cell.mode == "simulated":
            return simulated(terms, cell, trace)
        with user_errors():
            costs = costs_of_trace(trace, self.experiment.costs)
        return predicted(terms, cell, trace, costs)[0]


class _SharedGrid:
    """The runs of conversations: an engine for each batch."""

    def __init__(self, experiment: Experiment, root: Path, records: LineFile, sessions: LineFile):
        self.experiment, self.root, self.sessions = experiment, root, sessions
        self.records = _Records(experiment, records)

    def run(self, progress: bool) -> None:
        done, left = self.records.total - self.records.count_left, self.records.left
        with (
            grid_progress(self.records.total, done, progress) as advance,
            loaded_model(self.experiment, self.experiment.precision[0]) as (loaded, load_s),
        ):
            for group in (g for g in left if left[g]):
                asked = self.experiment, group.batch, loaded, self.root / TRACES
                bench, started = shared_bench(*asked)
                try:
                    number = _session(self.sessions, group, {"load_s": load_s, **started})
                    for cell, repeat in left[group]:
                        columns = columns_of(lambda c=cell, b=bench: b.priced(c))
                        self.records.add((cell, repeat), number, columns)
                        advance()
                finally:
                    bench.engine.runner.delete(given=False)


class _Grid:
    """The runs of an experiment with a model."""

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        files: Files,
        prompts: Prompts,
    ):
        self.experiment, self.root, self.sessions = experiment, root, files.sessions
        self.records, self.workload = _Records(experiment, files.records), prompts.workload
        self.quality, self.timelines, self.prompts = files.quality, files.timelines, prompts

    def run(self, progress: bool) -> None:
        left = self.records.left
        for runs in left.values():
            for cell, _ in runs:
                self.workload(cell)  # a text without room for a prompt is refused before a start
        done = self.records.total - self.records.count_left
        with grid_progress(self.records.total, done, progress) as advance:
            for precision in self.experiment.precision:
                groups = [g for g in left if g.precision == precision and left[g]]
                if not groups:
                    continue
                with loaded_model(self.experiment, precision) as (loaded, load_s):
                    for group in groups:
                        if self.experiment.mixed(precision):
                            self._mixed(group, loaded, load_s, advance)
                            continue
                        if self.experiment.costs == MEASURE and _predicts(left[group]):
                            keep_costs(self.experiment, group, loaded)
                        with bench_of(self.experiment, group, loaded) as bench:
                            self._group(bench, group, load_s, advance)

    def _group(self, bench: Bench, group: Group, load_s: float, advance: Any) -> None:
        began = time.perf_counter()
        runs = self.records.left[group]
        traces = self._warmed_up(bench, runs)
        warm_up_s = time.perf_counter() - began
        costs = self._costs(runs, traces)
        before = bench.engine.runner.executables()
        for cell, _ in runs:
            self.records.add_bound(bench.terms, cell, traces[_place(cell)])
        self._score(bench, group)
        took = {"warm_up_s": warm_up_s, "active_bytes": self._active_bytes(bench, traces)}
        took |= {"load_s": load_s, "executables": len(before), **bench.started}
        number = _session(self.sessions, group, took)
        for cell, repeat in runs:
            trace = traces[_place(cell)]
            columns = columns_of(lambda c=cell, t=trace: self._run(bench, c, t, costs))
            self.records.add((cell, repeat), number, columns)
            advance()

    def _mixed(self, group: Group, loaded: LoadedModel, load_s: float, advance: Any) -> None:
        """The runs of a group whose experts have two versions: each with an engine of its own,
        since what a start lays out no contents of tables bring back."""
        number = None
        self._score_mixed(group, loaded)
        for cell, repeat in self.records.left[group]:
            with bench_of(self.experiment, group, loaded) as bench:
                if number is None:
                    took = {"warm_up_s": 0.0, "active_bytes": None, "load_s": load_s}
                    took |= {"executables": len(bench.engine.runner.executables())}
                    number = _session(self.sessions, group, {**took, **bench.started})
                columns = columns_of(lambda c=cell, b=bench: b.started_run(self.workload(c)))
            self.records.add((cell, repeat), number, columns)
            advance()

    def _score(self, bench: Bench, group: Group) -> None:
        """The quality of the group's precision, if it is asked for and not there yet."""
        for text in self._unscored(group):
            bench.engine.begin_anew(bench.plan.spec, (), bench.plan.cells)
            self.quality.append(self._scored(bench, group, text))

    def _score_mixed(self, group: Group, loaded: LoadedModel) -> None:
        """The same where experts change their versions: one run over all texts in their order, from
        what the start laid out."""
        if not (missing := self._unscored(group)):
            return
        with bench_of(self.experiment, group, loaded) as bench:
            for text in self.experiment.texts:
                line = self._scored(bench, group, text) | bench.versions()
                if text in missing:
                    self.quality.append(line)

    def _unscored(self, group: Group) -> list[str]:
        """Texts whose quality was asked for and is not there."""
        if self.experiment.quality_tokens is None:
            return []
        lines = self.quality.lines
        done = {(line["precision"], line.get("budget"), line["text"]) for line in lines}
        wanted = ((group.precision, group.budget, text) for text in self.experiment.texts)
        return [place[-1] for place in wanted if place not in done]

    def _scored(self, bench: Bench, group: Group, text: str) -> dict[str, Any]:
        place = {"precision": group.precision, "budget": group.budget, "text": text}
        return {**place, **scored(bench.engine, self.prompts.quality_tokens(text))}

    def _run(
        self, bench: Bench, cell: Cell, trace: Trace, costs: CostModel | None
    ) -> dict[str, Any]:
        if cell.mode == "measured":
            return bench.measured(cell, self.workload(cell), trace)
        if cell.mode == "simulated":
            return simulated(bench.terms, cell, trace)
        assert costs is not None
        columns, events = predicted(bench.terms, cell, trace, costs)
        if events:
            told = [dataclasses.asdict(event) for event in events]
            self.timelines.append({**vars(cell), "events": told})
        return columns

    def _costs(self, runs: Iterable[Run], traces: Mapping[Any, Trace]) -> CostModel | None:
        """What predicted cells are priced by; None without any. Raises UserError where nothing was
        measured."""
        if not _predicts(runs):
            return None
        costs = self.experiment.costs
        with user_errors(where="modes: predicted (costs: FILE names what was measured): "):
            trace = next(iter(traces.values()))
            return costs_of_trace(trace, None if costs == MEASURE else costs)

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
            place: recorded(bench, self.workload(cell), self.root / TRACES / _name(cell, bench))
            for place, cell in cells.items()
        }
        for cell in arms.values():
            # What it raises is for its record to say.
            with contextlib.suppress(Exception):
                bench.measured(cell, self.workload(cell, warm_up=True), found[_place(cell)])
        bench.engine.runner.wait_compiled(everything=True)
        return found

    def _active_bytes(self, bench: Bench, traces: Mapping[Any, Trace]) -> float:
        sizes = bench.plan.spec.version_bytes
        return max(active_bytes(trace, sizes) for trace in traces.values())


def _predicts(runs: Iterable[Run]) -> bool:
    return any(cell.mode == "predicted" for cell, _ in runs)


def _session(file: LineFile, group: Group, took: Mapping[str, Any]) -> int:
    """Writes the line of a start; its number. took: what is known of it."""
    number = len(file.lines)
    names = ("driver", "precision", "link_rate", "batch", "budget")
    file.append(
        {
            "session": number,
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **{name: getattr(group, name) for name in names},
            "arrays": sorted(group.arrays),
            **took,
            "python": platform.python_version(),
            "machine": f"{platform.node()}: {platform.platform()}, {os.cpu_count()} CPUs",
            "versions": {name: installed_version(name) for name in VERSIONS},
        }
    )
    return number


def columns_of(counted: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The columns of a run; of one that fails only the error."""
    try:
        return {"error": None, **counted()}
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        said = f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}"
        return {"error": said[:1000]}


def _place(cell: Cell) -> tuple[str, int, int]:
    """Which trace of a group is a cell's."""
    return cell.text, cell.prompt_tokens, cell.seed


def bound_of(cell: Cell) -> Cell:
    """The place of MIN for a cell."""
    return dataclasses.replace(cell, mode="bound", policy="MIN", driver="device")


def key_of(run: Run) -> tuple[Any, ...]:
    """What tells its record from all others."""
    cell, repeat = run
    return tuple({**vars(cell), "repeat": repeat}[key] for key in KEYS)


def _name(cell: Cell, bench: Bench) -> str:
    arrays = sorted(bench.plan.steps.trace_arrays)
    parts = *arrays, cell.precision, f"batch{cell.batch}", f"prompt{cell.prompt_tokens}"
    if cell.link_rate != NO_LINK:
        parts = *parts, cell.link_rate.replace("/", "-")
    return "-".join([cell.driver, *parts, cell.text, f"seed{cell.seed}"])
