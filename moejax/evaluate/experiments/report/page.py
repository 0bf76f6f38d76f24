"""Writes a report: one self-contained HTML page, Markdown, and CSV of the same tables."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import yaml

from moejax.errors import UserError
from moejax.evaluate.experiments.records import Records
from moejax.evaluate.experiments.report.figures import (
    Plot,
    draw,
    plots_beside,
    plots_of,
    points_of,
)
from moejax.evaluate.experiments.report.tables import Table, panels, tables_of, title_beside

ABOUT = """\
Counts are of the decode steps after one prefill step, from a cold start. misses/step: experts, \
of all layers, that a step had to wait for; + ahead: with those moved ahead of need; MIN: the \
fewest that any policy can move, both together, with as many cells, whatever prefill left \
(Belady), where it is claimed. Times are medians over repeats, in brackets their 95% intervals; \
× baseline: the median ratio to {baseline} with the same driver in the same repeat (~: of another \
engine, since the policy has steps output arrays); policy ms/step: its own code in a decode \
step, and the part of the step."""

NO_FIGURES = "without matplotlib there are no figures: pip install 'moejax[plot]'"

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: str(name).startswith("report.html"),
    keep_trailing_newline=True,
)

Plots = Mapping[str, Mapping[str, str]]
"""The plots of each table, by the table's title and the plot's name, as SVG."""


def write_report(records: Records, directory: Path) -> tuple[Path, ...]:
    """Writes report.html, and report.md with its plots as SVG files; the numbers of both
    as CSV. Returns their paths, the page first. Raises UserError if there is nothing to report or a
    file cannot be written."""
    if not records.rows:
        raise UserError(f"{records.directory} has no records yet; run moejax ablate first")
    figures = _figures(records)
    plots = {title: {p.name: draw(p) for p in each} for title, each in figures.items()}
    files = {f"report.{kind}": page(records, plots, kind) for kind in ("html", "md")}
    for table in tables_of(records):
        files[f"{_stem(table.title)}.csv"] = _csv([table.headings, *table.rows])
    for title, each in figures.items():
        for plot in each:
            files[f"{_stem(title)}-{plot.name}.svg"] = plots[title][plot.name]
            files[f"{_stem(title)}-{plot.name}.csv"] = _csv(points_of(plot))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            written = directory / f"{name}.new"
            written.write_text(text)
            os.replace(written, directory / name)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None
    return tuple(directory / name for name in files)


def _csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _stem(title: str) -> str:
    """Returns a file's name for a table."""
    return "report-" + re.sub(r"[^\w.-]+", "-", title)[:100]


def _figures(records: Records) -> dict[str, list[Plot]]:
    """Returns the plots of each table by its title; none without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return {}
    baseline, shown = records.asked["baseline"], panels(records)
    found = {panel.title: list(plots_of(panel)) for panel in shown}
    return {**found, title_beside(baseline): list(plots_beside(baseline, shown))}


def page(records: Records, plots: Plots, kind: str = "html") -> str:
    """Returns the report as one page.

    - `kind`: `html` or `md`, whose plots are files beside it.
    """
    return _TEMPLATES.get_template(f"report.{kind}.jinja").render(
        title=_title(records),
        notes=[*records.notes(), *([] if plots or not panels(records) else [NO_FIGURES])],
        about=ABOUT.format(baseline=records.asked["baseline"]),
        tables=[*tables_of(records)],
        plots=plots,
        stem=_stem,
        definition=definition(records),
        facts=_facts(records),
    )


def definition(records: Records) -> str:
    """Returns the YAML that runs the grid again, with the files that it names."""
    asked = {n: v for n, v in records.asked.items() if n not in ("files", "defaults")}
    asked = {name: value for name, value in asked.items() if value not in (None, {}, [])}
    return yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)


def _facts(records: Records) -> Table:
    """Returns the table of machine, versions, starts and files."""
    rows = []
    for one in records.sessions:
        what = f"{one['driver']} driver, {one['precision']}, batch {one['batch']}"
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        said = f"{what}, link {one['link_rate']}; {one['device']} of {one['machine']}; {versions}"
        if one.get("link_bytes_per_s"):
            said += f"; compiled {one['executables']} programs in {one['compile_s']:.1f} s"
            said += f"; link {one['link_bytes_per_s'] / 1e9:.1f} GB/s"
        rows.append((one["at"], said))
    files = records.asked["files"]
    rows += [(f"SHA-256 of {name}", digest) for name, digest in files.items() if digest]
    return Table("Machine", ("start", ""), rows)


def _title(records: Records) -> str:
    asked = records.asked
    names = ("policies", "budgets", "precision", "texts", "routing", "conversations")
    sizes = {name: len(asked.get(name) or ()) for name in names}
    if asked.get("routing") or asked.get("conversations"):
        sizes.pop("texts")
    model = "routing without a model" if asked.get("routing") else asked["model"]
    return f"{model}: " + " × ".join(f"{n} {name}" for name, n in sizes.items() if n)
