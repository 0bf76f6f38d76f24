"""A report as Markdown, and its tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from moejax.evaluate.experiments.definition import NO_LINK
from moejax.evaluate.experiments.records import Records
from moejax.evaluate.experiments.report.content import HEADINGS, panels, table_rows
from moejax.evaluate.experiments.report.tables import other_tables

ABOUT = """\
Counts are of the decode steps after one prefill step, from a cold start. misses/step: experts, \
of all layers, that a step had to wait for; + ahead: with those moved ahead of need; MIN: the \
fewest that any policy can move, both together, with as many cells, whatever prefill left \
(Belady), where it is claimed. Times are medians over repeats, in brackets their 95% intervals; \
× baseline: the median ratio to {baseline} with the same driver in the same repeat. ∅: eviction \
had no choice."""


def table(records: Records) -> str:
    """The tables of all panels, as text for a terminal."""
    parts = [_aligned(panel.title, HEADINGS, table_rows(panel)) for panel in panels(records)]
    parts += [_aligned(*found) for found in other_tables(records)]
    return "\n\n".join(parts)


def _aligned(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    every = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in every
    ]
    return "\n".join([title, *lines])


def definition(records: Records) -> str:
    """The YAML that runs the grid again, beside the files that it names."""
    asked = {name: value for name, value in records.asked.items() if name != "files"}
    asked = {name: value for name, value in asked.items() if value not in (None, {})}
    return yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)


def facts(records: Records) -> list[tuple[str, str]]:
    """(name, value) of machine, versions and starts."""
    found = []
    for one in records.sessions:
        what = f"{one['driver']} driver, {one['precision']}, batch {one['batch']}"
        if one["link_rate"] != NO_LINK:
            what += f", link {one['link_rate']}"
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        found += [
            (
                f"start {one['session']}",
                f"{one['at']}: {what}; {one['device']} of {one['machine']}",
            ),
            ("", f"Python {one['python']}, {versions}"),
        ]
        if "compile_s" not in one:
            continue  # its times are priced
        said = (
            f"compiled {one['executables']} programs in {one['compile_s']:.1f} s, warm-up "
            f"{one['warm_up_s']:.1f} s; link {one['link_bytes_per_s'] / 1e9:.1f} GB/s, memory "
            f"{one['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        )
        found.append(("", said))
    files = records.asked["files"]
    found += [(f"SHA-256 of {name}", digest) for name, digest in files.items() if digest]
    return found


def markdown(records: Records, figures: Mapping[str, Sequence[str]]) -> str:
    """The report. figures: title of a panel → file names of its plots."""
    parts = [f"# {title(records)}", *[f"- {note}" for note in records.notes()], ""]
    parts.append(ABOUT.format(baseline=f"`{records.asked['baseline']}`"))
    for panel in panels(records):
        parts += ["", f"## {panel.title}", ""]
        parts += [f"![{panel.title}]({name})" for name in figures.get(panel.title, ())]
        parts += ["", _row(HEADINGS), _row(["---"] * len(HEADINGS))]
        parts += [_row(row) for row in table_rows(panel)]
    for what, headings, rows in other_tables(records):
        parts += ["", f"## {what}", "", _row(headings), _row(["---"] * len(headings))]
        parts += [_row(row) for row in rows]
    parts += ["", "## Run it again", "", "```yaml", definition(records).rstrip(), "```", ""]
    parts += ["## Machine", "", _row(("", "")), _row(("---", "---"))]
    parts += [_row(fact) for fact in facts(records)]
    return "\n".join(parts) + "\n"


def title(records: Records) -> str:
    asked: Mapping[str, Any] = records.asked
    counted = [("policy", "policies", "policies"), ("budget", "budgets", "budgets")]
    if len(asked.get("precision", ())) > 1:
        counted.append(("precision", "precisions", "precision"))
    what = " × ".join(_counted(asked[key], one, many) for one, many, key in counted)
    if asked.get("routing"):
        return f"routing without a model: {what} × {_counted(asked['routing'], 'kind', 'kinds')}"
    if asked.get("conversations"):
        kinds = _counted(asked["conversations"], "kind", "kinds")
        return f"{asked['model']}: {what} × {kinds} of conversations"
    return f"{asked['model']}: {what} × {_counted(asked['texts'], 'text', 'texts')}"


def _counted(values: Sequence[Any], one: str, many: str) -> str:
    return f"{len(values)} {one if len(values) == 1 else many}"


def _row(cells: Sequence[str]) -> str:
    shown = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(shown)} |"
