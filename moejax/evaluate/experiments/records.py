"""The records of a grid, and what they come to."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import UserError
from moejax.evaluate.experiments.definition import Cell
from moejax.evaluate.experiments.intervals import median_interval
from moejax.evaluate.experiments.record_file import (
    DEFINITION,
    QUALITY,
    RECORDS,
    SESSIONS,
    TIMELINES,
    completed,
    completed_keys,
    read_records,
)

PLACE = tuple(field.name for field in dataclasses.fields(Cell))
"""Columns that say which cell of the grid a record is of."""

KEYS = (*PLACE, "repeat")
"""Columns that no two records share."""

TIMES = ("ttft_s", "tpot_p50_s", "tpot_p99_s", "tokens_per_s", "prefill_s", "decode_s")
"""Columns whose medians have intervals, and that are compared in pairs; a processor's time too."""

UNEQUAL = ("session", *TIMES, "wall_s", "cpu_s")
"""Columns in which two runs of the same definition may differ; in all others they must not."""

COUNTS = tuple(
    f"{kind}_{name}"
    for kind in ("prefill", "decode")
    for name in ("steps", "hits", "misses", "fills", "read_through", "ahead", "bytes")
)
"""Columns in which the engine and the simulator must agree where transfers are in the step."""

LEAST_REPEATS = 6
"""A median of fewer values has no 95% interval that holds whatever their distribution."""


@dataclasses.dataclass(frozen=True)
class Records:
    """What is in a directory of results."""

    directory: Path
    asked: Mapping[str, Any]
    """The definition, and digests of the files that it names."""
    rows: Sequence[Mapping[str, Any]]
    """A flat record of each run: plain values by column."""
    sessions: Sequence[Mapping[str, Any]]
    """Starts of engines: machine, versions, what was compiled."""
    quality: Sequence[Mapping[str, Any]] = ()
    """Perplexity of each precision and text, where it was asked for."""
    timelines: Sequence[Mapping[str, Any]] = ()
    """What happens in some layers of each predicted cell over a link."""

    def of_mode(self, mode: str) -> list[Mapping[str, Any]]:
        """The records without an error of one mode: measured, simulated, predicted or bound."""
        return [row for row in self.rows if row["mode"] == mode and row["error"] is None]

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]

    def summary(self) -> list[dict[str, Any]]:
        """A row for each cell: counts, which repeats share, and medians over repeats; with `_low`
        and `_high` where there are enough for a 95% interval, and with `_ratio` the median ratio to
        the baseline with the same driver in the same repeat of the same session, with its interval.

        `no_choice`: eviction had no choice in any decode step, as a step's experts fill every cell
        or nothing had to go; policies that only evict are then alike. `counts_differ`: repeats
        moved different experts, so the policy depends on time.
        """
        cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            cells.setdefault(tuple(row[key] for key in PLACE), []).append(row)
        return [self._summed(rows, cells) for rows in cells.values()]

    def _summed(
        self,
        rows: Sequence[Mapping[str, Any]],
        cells: Mapping[tuple[Any, ...], Sequence[Mapping[str, Any]]],
    ) -> dict[str, Any]:
        first = rows[0]
        found = {key: first[key] for key in PLACE}
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
        if "eviction_choices" in counts:
            found["no_choice"] = counts["eviction_choices"] == 0
        place = {**found, "policy": self.asked["baseline"]}
        others = cells.get(tuple(place[key] for key in PLACE), ())
        pairs = {(row["repeat"], row["session"]): row for row in others if row["error"] is None}
        for name in (*TIMES, "cpu_s"):
            values = [row[name] for row in whole if row.get(name) is not None]
            if not values:
                continue
            found |= _median(name, values)
            ratios = [
                row[name] / pair[name]
                for row in whole
                if (pair := pairs.get((row["repeat"], row["session"]))) and row.get(name)
            ]
            if ratios:
                found |= _median(f"{name}_ratio", ratios)
        return found

    def agreement(self) -> tuple[int, int]:
        """(cells that were both measured and simulated or predicted, those in which all counts are
        equal)."""
        counted = (*self.of_mode("predicted"), *self.of_mode("simulated"))
        simulated = {_place(row): row for row in counted}
        pairs = {
            place: all(row[name] == simulated[place][name] for name in COUNTS)
            for row in self.of_mode("measured")
            if (place := _place(row)) in simulated
        }
        return len(pairs), sum(pairs.values())

    def notes(self) -> list[str]:
        """Sentences for a reader of the report, such as the rules of a fair comparison
        (docs/ablation.md) that the grid does not keep."""
        return list(_notes(self))

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of the rows. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame([dict(row) for row in self.rows])

    def plot(self, y: str = "decode_misses", x: str = "expert_bytes") -> Any:
        """A matplotlib figure: one column of the summary against another, a panel for each text and
        a line for each policy, with MIN where it has the column. Raises UserError without
        matplotlib, and for a column that no record has."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError("plot needs matplotlib: pip install 'moejax[plot]'") from error
        lines = [row for row in self.summary() if row.get(x) is not None and row.get(y) is not None]
        if not lines:
            raise UserError(f"no record has both {x} and {y}")
        texts = list(dict.fromkeys(line["text"] for line in lines))
        figure = Figure(figsize=(5 * len(texts), 4), layout="constrained")
        for axes, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
            named: dict[str, list[tuple[float, float]]] = {}
            for line in lines:
                if line["text"] == text:
                    named.setdefault(_label(line), []).append((line[x], line[y]))
            for name, points in named.items():
                dashed = "--" if name.startswith("MIN") else "o-"
                axes.plot(*zip(*sorted(points), strict=True), dashed, label=name)
            axes.set(title=text, xlabel=x, ylabel=y)
        figure.axes[0].legend(fontsize="small")
        return figure


def read_results(directory: str | os.PathLike[str]) -> Records:
    """The records in a directory of results. Raises UserError where there are none."""
    root = Path(directory)
    try:
        asked = json.loads((root / DEFINITION).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{root} is no directory of results; moejax ablate CONFIG.yaml --output DIR makes one"
        ) from None
    others = [
        read_records(root / name) if (root / name).exists() else [] for name in (QUALITY, TIMELINES)
    ]
    sessions = completed(read_records(root / SESSIONS))
    experts = sessions[0].get("experts") if sessions else None
    records = completed(read_records(root / RECORDS), experts)
    return Records(root, completed_keys(asked), records, sessions, *others)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which cell a record is of, whatever its mode."""
    return tuple(row[key] for key in PLACE if key != "mode")


def _median(name: str, values: Sequence[float]) -> dict[str, float]:
    found = {name: float(np.median(values))}
    if len(values) >= LEAST_REPEATS:
        found[f"{name}_low"], found[f"{name}_high"] = median_interval(values)
    return found


def _label(line: Mapping[str, Any]) -> str:
    parts = [line["policy"]]
    parts += [line[key] for key in ("mode", "driver") if line[key] not in ("measured", "device")]
    return ", ".join(dict.fromkeys(str(part) for part in parts if part != "bound"))


def _notes(records: Records) -> Iterator[str]:
    asked, rows = records.asked, records.of_mode("measured")
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
    for row in (*(row for row in rows if "hi" not in row), *whole):
        # Precisions that lose bits write other tokens, those of two versions with each budget;
        # batches have other prompts.
        place = tuple(row[k] for k in ("precision", "batch", "prompt_tokens", "text", "seed"))
        alike.setdefault(place, set()).add(row["tokens"])
    if any(len(tokens) > 1 for tokens in alike.values()):
        yield "policies or budgets changed tokens, which must not be: report a bug"
    both, equal = records.agreement()
    if both:
        yield f"the simulator's counts equal the engine's in {equal} of {both} cells that have both"
    for policy in sorted(_below_min(records)):
        yield f"{policy} moved less than MIN, which cannot be: report a bug"
    if len({session["machine"] for session in records.sessions}) > 1:
        yield "sessions ran on several machines; times are compared within a session only"
    if any(session["platform"] == "cpu" for session in records.sessions) and rows:
        yield (
            "times are of a CPU, where a miss is a copy within the same memory: no evidence about "
            "GPUs"
        )
    if any(row["compiled"] for row in rows):
        yield "some runs compiled; their times are no times of a step"
    marked = sum(line.get("no_choice", False) for line in records.summary())
    if marked:
        yield (
            f"in {marked} cells eviction had no choice (marked ∅): a step's experts fill every "
            "cell, or nothing had to go, so policies that only evict are alike there"
        )


def _below_min(records: Records) -> set[str]:
    """Policies that moved fewer experts than their bound somewhere; those that move cells between
    layers have the bound of one pool."""
    least = {_bounded(row): row for row in records.of_mode("bound")}
    return {
        row["policy"]
        for row in (*records.of_mode("measured"), *records.of_mode("simulated"))
        if (bound := least.get(_bounded(row)))
        and row["cells_least"] == bound["cells_least"]
        and row["decode_misses"] + row["decode_ahead"]
        < bound["pool_misses" if row["moves_cells"] else "decode_misses"]
    }


def _bounded(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which bound is a record's."""
    return tuple(row[key] for key in PLACE if key not in ("mode", "driver", "policy"))
