"""The records of a grid, their files, and their summary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import UserError, shown
from moejax.evaluate.experiments.arms import changed_outputs
from moejax.evaluate.experiments.definition import Cell
from moejax.evaluate.json_lines import LineFile, open_line_file, parsed_lines, read_line_file

DEFINITION, RECORDS, SESSIONS = "experiment.json", "records.jsonl", "sessions.jsonl"
"""Files of a directory of results: the definition, a line for each run, a line for each start."""

PLACE = tuple(field.name for field in dataclasses.fields(Cell))
"""Columns that say which cell of the grid a record is of."""

KEYS = (*PLACE, "repeat")
"""Columns that no two records share."""

TIMES = (
    *("ttft_s", "tpot_p50_s", "tpot_p99_s", "tokens_per_s", "prefill_s", "decode_s", "cpu_s"),
    "policy_s",
)
"""Columns whose medians have intervals, and that are compared in pairs."""

UNEQUAL = ("session", *TIMES, "wall_s")
"""Columns in which two runs of the same definition may differ; in all others they must not."""

COUNTS = tuple(
    f"{kind}_{name}"
    for kind in ("prefill", "decode")
    for name in ("steps", "hits", "misses", "fills", "read_through", "ahead", "bytes")
)
"""Columns in which the engine and the simulator must agree if transfers are in the step."""

LEAST_REPEATS = 6
"""Fewest repeats with a 95% interval. A median of fewer values has none that holds for any
distribution."""

Line = Mapping[str, Any]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns order statistics that hold the median with at least 95% confidence, for any
    distribution of the values (binomial). Raises UserError for fewer than LEAST_REPEATS values."""
    n, tail, cut = len(values), 0.0, -1
    if n < LEAST_REPEATS:
        raise UserError(f"--repeats {n}: the median of fewer than 6 has no 95% interval")
    while 2 * (tail := tail + math.comb(n, cut + 1) / 2**n) <= 0.05:
        cut += 1
    ordered = sorted(values)
    return ordered[cut], ordered[n - 1 - cut]


@dataclasses.dataclass(frozen=True)
class Records:
    """The content of a directory of results."""

    directory: Path
    asked: Mapping[str, Any]
    """The definition, and digests of the files that it names."""
    rows: Sequence[Line]
    """A flat record of each run: plain values by column."""
    sessions: Sequence[Line]
    """Starts of engines: machine, versions, what was compiled."""
    total: int = 0
    """Runs of the whole grid; 0: unknown."""

    def of_mode(self, mode: str) -> list[Line]:
        """Returns the records without an error of one mode: measured, simulated, predicted, priced,
        bound or quality."""
        return [row for row in self.rows if row["mode"] == mode and row["error"] is None]

    @property
    def failures(self) -> list[Line]:
        return [row for row in self.rows if row["error"] is not None]

    def summary(self) -> list[dict[str, Any]]:
        """Returns a row for each cell: counts, which repeats share, and medians over repeats.
        `_low` and `_high` are the ends of a 95% interval, if there are enough repeats. `_ratio` is
        the median ratio to the baseline with the same driver in the same repeat of the same
        session, with its interval; `ratio_apart`: its engine is another one than the baseline's,
        since its policy has steps output arrays. `counts_differ`: repeats moved different experts,
        so the policy depends on time."""
        cells: dict[tuple[Any, ...], list[Line]] = {}
        for row in self.rows:
            if row["mode"] != "quality":
                cells.setdefault(tuple(row[key] for key in PLACE), []).append(row)
        return [self._summarize(rows, cells) for rows in cells.values()]

    def _summarize(
        self, rows: Sequence[Line], cells: Mapping[tuple[Any, ...], Sequence[Line]]
    ) -> dict[str, Any]:
        found = {key: rows[0][key] for key in PLACE}
        whole = [row for row in rows if row["error"] is None]
        errors = [row["error"] for row in rows if row["error"] is not None]
        found |= {"runs": len(whole), "error": errors[0] if errors else None}
        if not whole:
            return found
        left_out = {*KEYS, *UNEQUAL, "error", "tokens", "compiled"}
        counts = {name: value for name, value in whole[0].items() if name not in left_out}
        found |= counts
        found["counts_differ"] = any(
            row.get(name) != value for row in whole[1:] for name, value in counts.items()
        )
        place = {**found, "policy": self.asked["baseline"]}
        of_baseline = cells.get(tuple(place[key] for key in PLACE), ())
        others = [row for row in of_baseline if row["error"] is None]
        same_start = {_pairing(row) for row in others}
        apart = found["ratio_apart"] = same_start.isdisjoint(_pairing(row) for row in whole)
        pairs = {_pairing(row, apart): row for row in others}
        for name in TIMES:
            values = [row[name] for row in whole if row.get(name) is not None]
            if not values:
                continue
            found |= _median(name, values)
            ratios = [
                row[name] / pair[name]
                for row in whole
                if (pair := pairs.get(_pairing(row, apart))) and row.get(name) and pair.get(name)
            ]
            if ratios:
                found |= _median(f"{name}_ratio", ratios)
        return found

    def agreement(self) -> tuple[int, int]:
        """Returns (cells that were both measured and simulated or predicted, those in which all
        counts are equal)."""
        counted = (*self.of_mode("predicted"), *self.of_mode("simulated"))
        simulated = {_place(row): row for row in counted}
        pairs = {
            place: all(row[name] == simulated[place][name] for name in COUNTS)
            for row in self.of_mode("measured")
            if "hi" not in row  # simulated on the routing of dense experts
            if (place := _place(row)) in simulated
        }
        return len(pairs), sum(pairs.values())

    def notes(self) -> list[str]:
        """Returns sentences for a reader of the report, such as the rules of a fair comparison
        (docs/how-to/compare_policies.md) that the grid does not keep."""
        return list(_notes(self))

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame of the rows. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame([dict(row) for row in self.rows])


def _pairing(row: Line, apart: bool = False) -> tuple[Any, ...]:
    """Returns what a record and the baseline's that it is compared with share.

    - `apart`: whether they are of different starts.
    """
    return row["repeat"], None if apart else row["session"]


def _place(row: Line) -> tuple[Any, ...]:
    """Returns the cell that a record is of, ignoring its mode."""
    return tuple(row[key] for key in PLACE if key != "mode")


def _median(name: str, values: Sequence[float]) -> dict[str, float]:
    found = {name: float(np.median(values))}
    if len(values) >= LEAST_REPEATS:
        found[f"{name}_low"], found[f"{name}_high"] = median_interval(values)
    return found


def _notes(records: Records) -> Iterator[str]:
    asked, rows = records.asked, records.of_mode("measured")
    if len(records.rows) < records.total:
        yield f"{len(records.rows)} of {records.total} runs are done; moejax ablate does the others"
    if failures := records.failures:
        yield f"{len(failures)} of {len(records.rows)} runs failed; their rows say why"
    if rows and asked["repeats"] < LEAST_REPEATS:
        yield (
            f"repeats: {asked['repeats']}, so times have no 95% interval, which takes "
            f"{LEAST_REPEATS}"
        )
    if any("random" in policy.lower() for policy in asked["policies"]) and len(asked["seeds"]) < 10:
        yield f"a policy draws random numbers, and there are {len(asked['seeds'])} of 10 seeds"
    alike: dict[tuple[Any, ...], set[str]] = {}
    whole = [row for row in records.of_mode("priced") if not row["unserved"]]
    changed = _changed(asked)
    for row in (*(r for r in rows if "hi" not in r and r["policy"] not in changed), *whole):
        # Precisions that lose bits write other tokens, those of two versions with each budget;
        # batches have other prompts.
        place = tuple(row[k] for k in ("precision", "batch", "prompt_tokens", "text", "seed"))
        alike.setdefault(place, set()).add(row["tokens"])
    if any(len(tokens) > 1 for tokens in alike.values()):
        yield "policies or budgets changed tokens, which must not be: report a bug"
    for policy, how in changed.items():
        yield f"{policy} CHANGES OUTPUTS: {how}"
    both, equal = records.agreement()
    if both:
        yield f"the simulator's counts equal the engine's in {equal} of {both} cells that have both"
    for policy in sorted(_below_min(records)):
        yield f"{policy} moved less than MIN, which cannot be: report a bug"
    if budgets := _without_choice(records):
        yield (
            f"at {', '.join(budgets)} every policy missed as many experts, as where a step's "
            "experts fill all cells of a layer and eviction has no choice"
        )
    yield from _mixed_sessions(records)
    on_cpu = any(session["platform"] == "cpu" for session in records.sessions)
    if on_cpu and any(row["link_rate"] == "none" for row in rows):
        yield (
            "times without a link_rate are of a CPU, where a miss is a copy within the same "
            "memory: no evidence about GPUs"
        )
    if any(row["compiled"] for row in rows):
        yield "some runs compiled; their times are no times of a step"


def _without_choice(records: Records) -> list[str]:
    """Returns the budgets at which there are several policies, and all missed as many experts."""
    missed: dict[tuple[Any, ...], dict[str, int]] = {}
    for row in records.rows:
        if row["mode"] != "bound" and row.get("decode_misses") is not None:
            place = row["budget"], *(row[key] for key in PLACE if key != "policy")
            missed.setdefault(place, {})[row["policy"]] = row["decode_misses"]
    differ = {place[0] for place, counts in missed.items() if len({*counts.values()}) > 1}
    some = {
        place[0] for place, counts in missed.items() if len(counts) > 1 and any(counts.values())
    }
    return [budget for budget in records.asked["budgets"] if budget in some - differ]


def _mixed_sessions(records: Records) -> Iterator[str]:
    """Yields in what the sessions differ, with the runs of each, since a grid may go on elsewhere
    or after an update."""
    runs = collections.Counter(row["session"] for row in records.rows)
    facts = [
        {**{name: one.get(name) for name in ("machine", "processor")}, **one["versions"]}
        for one in records.sessions
    ]
    for name in dict.fromkeys(name for fact in facts for name in fact):
        count: collections.Counter[str] = collections.Counter()
        for session, fact in zip(records.sessions, facts, strict=True):
            count[str(fact.get(name))] += runs[session["session"]]
        if len(count) > 1:
            said = ", ".join(f"{value} ({n} runs)" for value, n in count.items())
            yield f"runs differ in {name}: {said}; times are compared within a session only"


def _changed(asked: Mapping[str, Any]) -> dict[str, str]:
    """Returns the policies that change outputs, with how."""
    return {name: how for name in sorted(asked["policies"]) if (how := changed_outputs(name))}


def _below_min(records: Records) -> set[str]:
    """Returns the policies that moved fewer experts than their bound somewhere. Policies that move
    cells between layers have the bound of one pool; those that change outputs have none."""

    def place(row: Line) -> tuple[Any, ...]:
        return tuple(row[key] for key in PLACE if key not in ("mode", "driver", "policy"))

    least = {
        place(row): row for row in records.of_mode("bound") if row["decode_misses"] is not None
    }
    changed = _changed(records.asked)
    return {
        row["policy"]
        for row in (*records.of_mode("measured"), *records.of_mode("simulated"))
        if row["policy"] not in changed
        and (bound := least.get(place(row)))
        and row["cells_least"] == bound["cells_least"]
        and row["decode_misses"] + row["decode_ahead"]
        < bound["pool_misses" if row["moves_cells"] else "decode_misses"]
    }


# ---- files


def read_results(directory: str | os.PathLike[str]) -> Records:
    """Returns the records in a directory of results. Raises UserError if there are none."""
    root = Path(directory)
    try:
        asked = json.loads((root / DEFINITION).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{root} is no directory of results; moejax ablate CONFIG.yaml --output DIR makes one"
        ) from None
    rows, sessions = (
        read_line_file(path, functools.partial(_parse, path))
        for path in (root / RECORDS, root / SESSIONS)
    )
    return Records(root, asked, rows, sessions, asked.pop(TOTAL, 0))


def merge_results(parts: Sequence[Records]) -> Records:
    """Returns the records of several directories as one grid: their axes together, runs that
    several have once.

    Raises UserError if they differ in more than the axes that a grid may grow along, if a file
    differs, or if the counts of the same run do.
    """
    first = parts[0]
    asked, rows = dict(first.asked), {tuple(row[k] for k in KEYS): row for row in first.rows}
    for part in parts[1:]:
        where = f"{first.directory} and {part.directory} are no parts of one grid: "
        if names := _other_keys(asked, part.asked):
            raise UserError(f"{where}they differ in {', '.join(names)}")
        files = part.asked["files"]
        for name in asked["files"].keys() & files.keys():
            if asked["files"][name] != files[name]:
                raise UserError(f"{where}{name} is another file in each")
        for name in GROWING:
            asked[name] = list(dict.fromkeys([*asked[name], *part.asked[name]]))
        asked["files"] = {**asked["files"], **files}
        asked["repeats"] = max(asked["repeats"], part.asked["repeats"])
        for row in part.rows:
            same = rows.setdefault(tuple(row[k] for k in KEYS), row)
            if differing := [k for k in row if k not in UNEQUAL and row[k] != same.get(k)]:
                raise UserError(f"{where}a run of {row['policy']!r} differs in {differing[0]}")
    left = sum(max(part.total - len(part.rows), 0) for part in parts)
    sessions = [session for part in parts for session in part.sessions]
    return Records(first.directory, asked, list(rows.values()), sessions, len(rows) + left)


def open_records(path: Path) -> contextlib.AbstractContextManager[LineFile]:
    """Opens the file like open_line_file. Raises UserError for a file with other content."""
    return open_line_file(path, functools.partial(_parse, path))


def _parse(path: Path, data: bytes) -> list[dict[str, Any]]:
    advice = "delete the file, or choose another --output"
    return parsed_lines(path, data, "no record", advice, frozenset())


GROWING = ("policies", "budgets", "seeds", "link_rate", "modes", "routing")
"""Axes of a grid that may get more values once it has records, which stay right."""


TOTAL = "runs"
"""The key beside a definition's that says how many runs it has."""


def note_total(directory: Path, total: int) -> None:
    """Writes the number of a grid's runs beside its definition, so that a report of a part says
    so."""
    asked = json.loads((directory / DEFINITION).read_text())
    if asked.get(TOTAL) != total:
        _write_definition(directory, {**asked, TOTAL: total})


def _write_definition(directory: Path, asked: Mapping[str, Any]) -> None:
    path = directory / DEFINITION
    written = path.with_suffix(".new")  # a killed run may have left it
    written.write_text(json.dumps(asked, indent=1) + "\n")
    os.replace(written, path)


def _other_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which two definitions differ, but for those that may grow."""
    fixed = {*one, *other} - {*GROWING, "repeats", "files", TOTAL}
    return sorted(name for name in fixed if one.get(name) != other.get(name))


def _grown(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a definition asks for all runs of another one, and for more."""
    return (
        not _other_keys(before, now)
        and all({*before[name]} <= {*now[name]} for name in GROWING)
        and before["repeats"] <= now["repeats"]
        and before["files"].items() <= now["files"].items()
    )


def require_same(directory: Path, asked: Mapping[str, Any]) -> None:
    """Writes the definition into a directory of results that has no records, or records of a part
    of this grid. Otherwise raises UserError unless it has the same definition, saying what
    differs."""
    path, now = directory / DEFINITION, json.loads(json.dumps(asked))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if others := sorted(
                p.name for p in directory.iterdir() if p != path.with_suffix(".new")
            ):
                raise UserError(
                    f"{directory} is no directory of results, it has {shown(others[0])}; choose "
                    "another --output"
                )
            return _write_definition(directory, now)
        before = dict(json.loads(path.read_text()))
        before.pop(TOTAL, None)
        if before != now:
            with open_records(directory / RECORDS) as records:
                if not records.lines or _grown(before, now):
                    return _write_definition(directory, now)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read or written: {error}") from None
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing:
        said = "; ".join(_tell_difference(name, before, now) for name in differing)
        raise UserError(
            f"{directory} has results of another experiment: {said}. Give the same, or choose "
            "another --output"
        )


def _tell_difference(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = before.get(name), now.get(name)
    if name == "files" and isinstance(old, dict) and isinstance(new, dict):
        names = sorted(file for file in {*old, *new} if old.get(file) != new.get(file))
        return f"changed since then: {', '.join(names)}"
    return f"{name} was {shown(old, 200)} and is {shown(new, 200)}"
