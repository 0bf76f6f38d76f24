"""Runs a grid: every cell that has no record yet, repeats by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import platform
import secrets
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.traces.reader import read_trace
from moejax.checkpoints.conversion import installed_version
from moejax.evaluate.experiments.bench import (
    EngineBench,
    TraceBench,
    engine_bench,
    keep_costs,
    loaded_model,
    teach_from_routing,
)
from moejax.evaluate.experiments.definition import (
    MEASURE,
    Experiment,
    Group,
    Run,
    check_experiment,
    read_experiment,
)
from moejax.evaluate.experiments.records import (
    KEYS,
    RECORDS,
    SESSIONS,
    Records,
    note_total,
    open_records,
    read_results,
    require_same,
)
from moejax.evaluate.experiments.sources.corpus import Prompts
from moejax.progress import count_progress
from moejax.start.build import router_weights
from moejax.start.provenance import DEFAULTS
from moejax.step.kept_programs import processor_lines

TRACES = "traces"
"""The folder in a directory of results that has the routing."""

VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")

Write = Callable[[str, dict[str, Any]], None]
"""Writes a line into one of the files RECORDS and SESSIONS."""


def ablate(
    definition: str | os.PathLike[str] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    changes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Records:
    """Runs the grid of a definition and returns its records.

    - `definition`: a YAML file, or a mapping of the same keys (docs/reference/grids.md).
    - `directory`: of the results. If it exists, only the runs that it lacks are run.
    - `changes`: other values of keys.
    - `progress`: show a bar on stderr, with an estimate of the remaining time.

    Raises UserError for an impossible definition, and for a directory of another definition. An
    error in a run becomes its record's `error`, and the other runs continue.
    """
    experiment = read_experiment(definition, changes)
    root = Path(directory)
    with open_results(experiment, root) as (done, write):
        experiment = learn(experiment, root / TRACES)
        groups = experiment.runs()
        left = select_left(groups, done)
        total = sum(map(len, groups.values()))
        note_total(root, total)
        begun = total - sum(map(len, left.values()))
        with count_progress("runs", total, begun, progress) as report:
            counted = itertools.count(begun + 1)

            def write_and_advance(name: str, line: dict[str, Any]) -> None:
                write(name, line)
                if name == RECORDS:
                    report(next(counted))

            run_groups(experiment, left, root / TRACES, write_and_advance)
    return read_results(root)


@contextlib.contextmanager
def open_results(experiment: Experiment, root: Path) -> Iterator[tuple[set[tuple], Write]]:
    """Yields (keys of the runs that a directory of results has, a function that writes lines into
    its files)."""
    # What options that are not given mean is a release's own; routing alone asks for none of them.
    defaults = {} if experiment.drawn else {"defaults": DEFAULTS}
    require_same(root, {**experiment.asked, **defaults})
    with open_records(root / RECORDS) as records, open_records(root / SESSIONS) as sessions:
        files = {RECORDS: records, SESSIONS: sessions}
        done = {tuple(line[key] for key in KEYS) for line in records.lines}
        yield done, lambda name, line: files[name].append(line)


def key_of(run: Run) -> tuple[Any, ...]:
    """Returns the values that tell a run's record from all others."""
    cell, repeat = run
    return *dataclasses.astuple(cell), repeat


def select_left(groups: Mapping[Group, Sequence[Run]], done: set[tuple]) -> dict[Group, list[Run]]:
    """Returns the runs of each group that have no record yet, without groups that have none."""
    left = {g: [run for run in runs if key_of(run) not in done] for g, runs in groups.items()}
    return {group: runs for group, runs in left.items() if runs}


def run_groups(
    experiment: Experiment,
    groups: Mapping[Group, Sequence[Run]],
    traces: Path,
    write: Write,
    begin: Callable[[dict[str, Any]], None] = lambda line: None,
) -> None:
    """Runs the runs of each group and writes their lines.

    - `experiment`: what `learn` returned.
    - `begin`: called before each run with its record without columns.

    Raises UserError for an error of all runs of a group.
    """
    if not experiment.drawn and not experiment.conversations:
        prompts = Prompts(experiment)
        for cell in {cell for runs in groups.values() for cell, _ in runs}:
            if cell.mode != "quality":
                prompts.workload(cell)  # a text without room is refused before a start
    with contextlib.closing(_benches(experiment, groups, traces)) as benches:
        for group, bench in benches:
            started, session = bench.prepare(groups[group]), None
            if started is not None:
                session = secrets.token_hex(4)
                write(SESSIONS, _session(session, group, started))
            for run in groups[group]:
                cell, repeat = run
                line = {**vars(cell), "repeat": repeat, "session": session}
                begin({**line})
                try:
                    line |= {"error": None, **bench.columns(cell)}
                except Exception as error:
                    notes = "; ".join(getattr(error, "__notes__", ()))
                    said = f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}"
                    line |= {"error": said[:1000]}
                write(RECORDS, line)


def _benches(
    experiment: Experiment, groups: Mapping[Group, Sequence[Run]], traces: Path
) -> Generator[tuple[Group, EngineBench | TraceBench]]:
    """Yields each group with its bench; one bench is freed before the next is made."""
    if experiment.drawn:
        bench = TraceBench(experiment, traces)
        for group in groups:
            yield group, bench
        return
    # Two versions are simulated on the routing of dense experts.
    for precision in dict.fromkeys((*experiment.precision, "dense")):
        chosen = [group for group in groups if group.precision == precision]
        if not chosen:
            continue
        with loaded_model(experiment, precision) as loaded:
            for group in chosen:
                predicts = any(cell.mode == "predicted" for cell, _ in groups[group])
                if experiment.costs == MEASURE and predicts:
                    keep_costs(experiment, group, loaded, traces)
                with engine_bench(experiment, group, loaded, traces) as bench:
                    yield group, bench


def _session(session: str, group: Group, started: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line of a start."""
    names = ("driver", "precision", "link_rate", "batch", "budget")
    return {
        "session": session,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: getattr(group, name) for name in names},
        "arrays": sorted(group.arrays),
        **started,
        "machine": f"{platform.node()}: {platform.platform()}, {os.cpu_count()} CPUs",
        "processor": _processor(),
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in VERSIONS},
            "commit": _commit(),
        },
    }


def _processor() -> str:
    lines = (line for line in processor_lines() if line.startswith("model name"))
    return next((line.partition(":")[2].strip() for line in lines), platform.machine())


@functools.cache
def _commit() -> str:
    """Returns the commit of the checkout that moejax runs from, with "+" if files differ from it;
    "installed" without a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "installed"
    git = ["git", "-C", str(root)]
    try:
        commit, changed = (
            subprocess.run([*git, *rest], capture_output=True, text=True, check=True).stdout
            for rest in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+" if changed else "")


def learn(experiment: Experiment, traces: Path) -> Experiment:
    """Teaches the policies that learn within the grid (NAME=train) and returns their experiment;
    without any, returns the same one.

    - `traces`: directory of the trace that they learn from, recorded if it is not there yet.

    Every policy gets the same trace, and one trial of its settings: those in the definition
    (docs/how-to/compare_policies.md, "A fair comparison"). Drawn routing teaches at each place
    again; here it only checks what its policies need. Raises UserError for a text that is too
    short, and for what learning shows to be impossible in this grid.
    """
    if not experiment.learns:
        return experiment
    if experiment.drawn:
        arms = teach_from_routing(experiment, next(experiment.cells()), traces)
        found = dataclasses.replace(experiment, arms=arms)
        check_experiment(found)
        return found
    arrays = frozenset().union(*(arm.train_arrays for arm in experiment.arms.values()))
    path = traces / "-".join(["train", *sorted(arrays)])
    trace = read_trace(path) if path.exists() else None
    by_router = any("expertflow" in arm.learns for arm in experiment.arms.values())
    router = None
    if trace is None or not trace.complete or by_router:
        plain = (p for p in experiment.precision if not experiment.is_mixed(p))
        precision, prompts = next(plain, "dense"), Prompts(experiment).training()
        group = Group("device", precision, experiment.link_rate[0], prompts.batch, arrays)
        with loaded_model(experiment, precision) as loaded:
            router = router_weights(loaded)
            if trace is None or not trace.complete:
                with engine_bench(experiment, group, loaded, traces) as bench:
                    trace = bench.record(prompts, path)
    arms = {name: arm.teach(trace, router) for name, arm in experiment.arms.items()}
    mixes = {name: mix.teach(trace) for name, mix in experiment.mixes.items()}
    found = dataclasses.replace(experiment, arms=arms, mixes=mixes)
    check_experiment(found)
    return found
