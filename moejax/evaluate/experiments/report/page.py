"""A report as one page that needs nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from moejax.errors import UserError
from moejax.evaluate.experiments.records import Records
from moejax.evaluate.experiments.report.content import (
    HEADINGS,
    Panel,
    miss_series,
    moved_series,
    panels,
    table_rows,
    time_series,
)
from moejax.evaluate.experiments.report.figures import figure
from moejax.evaluate.experiments.report.lanes import timeline
from moejax.evaluate.experiments.report.markdown import ABOUT, definition, facts, markdown, title
from moejax.evaluate.experiments.report.tables import other_tables

_STYLE = """\
:root{color-scheme:light dark;--ink:#1a1a1a;--soft:#6b6b6b;--rule:#dcdcdc;--paper:#fff;
--tint:#f5f5f5}
@media (prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a3a3a3;--rule:#3a3a3a;
--paper:#161616;--tint:#202020}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:1560px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-top:1px solid var(--rule);
padding-top:1rem}
p,li{max-width:75ch}.soft{color:var(--soft)}
.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
.plots svg{width:100%;height:auto;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem;margin:1rem 0}
th,td{padding:.2rem .45rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{position:sticky;top:0;background:var(--tint);font-weight:600}
td:first-child,th:first-child{text-align:left}
td:first-child{white-space:normal;min-width:9rem;max-width:22rem;overflow-wrap:anywhere}
tr.begin td{border-top:2px solid var(--rule)}
pre{background:var(--tint);padding:.8rem;overflow-x:auto}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
"""


def write_report(records: Records, directory: Path) -> tuple[Path, ...]:
    """Writes report.html, and report.md with its plots as SVG files; their paths, the page first.
    Raises UserError where there is nothing to report or a file cannot be written."""
    found = panels(records)
    if not records.rows:
        raise UserError(f"{records.directory} has no records yet; run moejax ablate first")
    files = {}
    names: dict[str, list[str]] = {}
    for panel in found:
        stem = re.sub(r"[^\w.-]+", "-", panel.title)
        for name, plot in zip(("misses", "times", "moved"), plots(panel), strict=False):
            files[f"report-{stem}-{name}.svg"] = plot
            names.setdefault(panel.title, []).append(f"report-{stem}-{name}.svg")
        if drawn := timeline(records, panel):
            files[f"report-{stem}-timeline.svg"] = drawn
            names.setdefault(panel.title, []).append(f"report-{stem}-timeline.svg")
    files = {"report.html": page(records), "report.md": markdown(records, names), **files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            written = directory / f"{name}.new"
            written.write_text(text)
            os.replace(written, directory / name)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None
    return tuple(directory / name for name in files)


def plots(panel: Panel) -> list[str]:
    """The panel's plots as SVG: misses, and where there are times also those; none of one line of
    the table, which is no comparison."""
    if len(panel.lines) < 2:
        return []
    budget, found = "budget of the experts, MiB", []
    if series := miss_series(panel):
        found.append(figure("misses and budget", budget, "misses a decode step", series))
    if series := time_series(panel):
        found.append(figure("time and budget", budget, "ms an output token", series, log=True))
    if series := moved_series(panel):
        moved = "KiB that a decode step moves"
        found.append(figure("time and bytes", moved, "ms an output token", series, log=True))
    return found


def page(records: Records) -> str:
    """The whole page."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in records.notes())
    about = escape(ABOUT.format(baseline=records.asked["baseline"]))
    body = [
        f"<h1>{escape(title(records))}</h1>",
        f"<ul>{notes}</ul>",
        f'<p class="soft">{about}</p>',
    ]
    for panel in panels(records):
        body.append(f"<h2>{escape(panel.title)}</h2>")
        if drawn := "".join(plots(panel)):
            body.append(f'<div class="plots">{drawn}</div>')
        if drawn := timeline(records, panel):
            body.append(f'<div class="scroll">{drawn}</div>')
        body.append(f'<div class="scroll">{_table(panel)}</div>')
    for found in other_tables(records):
        body.append(f"<h2>{escape(found.title)}</h2>{_plain_table(found.headings, found.rows)}")
    again = escape(definition(records))
    body.append(f"<h2>Run it again</h2><pre>{again}</pre><h2>Machine</h2>{_facts(records)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title(records))}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(panel: Panel) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    rows, before = [], None
    for line, cells in zip(panel.lines, table_rows(panel), strict=True):
        begins = ' class="begin"' if before not in (None, line["budget"]) else ""
        before = line["budget"]
        rows.append(f"<tr{begins}>{_cells(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    lines = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _facts(records: Records) -> str:
    rows = "".join(f"<tr>{_cells(fact)}</tr>" for fact in facts(records))
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)
