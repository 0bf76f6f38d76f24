"""A report: one HTML page that needs nothing else, Markdown, and CSV of the same tables."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import yaml

from moejax.errors import UserError
from moejax.evaluate.experiments.records import Records
from moejax.evaluate.experiments.report.figures import draw, plots_of
from moejax.evaluate.experiments.report.tables import Table, panels, tables_of

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
th{background:var(--tint);font-weight:600}
td:first-child,th:first-child{text-align:left}
td:first-child{white-space:normal;min-width:9rem;max-width:22rem;overflow-wrap:anywhere}
pre{background:var(--tint);padding:.8rem;overflow-x:auto}
"""

ABOUT = """\
Counts are of the decode steps after one prefill step, from a cold start. misses/step: experts, \
of all layers, that a step had to wait for; + ahead: with those moved ahead of need; MIN: the \
fewest that any policy can move, both together, with as many cells, whatever prefill left \
(Belady), where it is claimed. Times are medians over repeats, in brackets their 95% intervals; \
× baseline: the median ratio to {baseline} with the same driver in the same repeat."""

NO_FIGURES = "without matplotlib there are no figures: pip install 'moejax[plot]'"


def write_report(records: Records, directory: Path) -> tuple[Path, ...]:
    """Writes report.html, and report.md with its plots as SVG files and its tables as CSV; their
    paths, the page first. Raises UserError where there is nothing to report or a file cannot be
    written."""
    if not records.rows:
        raise UserError(f"{records.directory} has no records yet; run moejax ablate first")
    plots = _plots(records)
    files = {"report.html": page(records, plots), "report.md": _markdown(records, plots)}
    for table in tables_of(records):
        files[f"{_stem(table.title)}.csv"] = _csv(table)
    for title, drawn in plots.items():
        files |= {f"{_stem(title)}-{name}.svg": svg for name, svg in drawn.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            written = directory / f"{name}.new"
            written.write_text(text)
            os.replace(written, directory / name)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None
    return tuple(directory / name for name in files)


def _stem(title: str) -> str:
    """A file's name for a table."""
    return "report-" + re.sub(r"[^\w.-]+", "-", title)[:100]


def _plots(records: Records) -> Mapping[str, Mapping[str, str]]:
    """Title of a panel → its plots by name, as SVG; none without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return {}
    return {
        panel.title: {plot.name: draw(plot) for plot in plots_of(panel)}
        for panel in panels(records)
    }


def _notes(records: Records, plots: Mapping[str, object]) -> list[str]:
    return [*records.notes(), *([] if plots or not panels(records) else [NO_FIGURES])]


def page(records: Records, plots: Mapping[str, Mapping[str, str]]) -> str:
    """The whole page."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(records, plots))
    about = escape(ABOUT.format(baseline=records.asked["baseline"]))
    body = [f"<h1>{escape(_title(records))}</h1><ul>{notes}</ul>", f'<p class="soft">{about}</p>']
    for table in tables_of(records):
        drawn = "".join(plots.get(table.title, {}).values())
        body.append(f"<h2>{escape(table.title)}</h2>")
        body.append(f'<div class="plots">{drawn}</div>{_html(table)}')
    body.append(f"<h2>Run it again</h2><pre>{escape(definition(records))}</pre>")
    body.append(f"<h2>Machine</h2>{_html(_facts(records))}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(_title(records))}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.headings)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _markdown(records: Records, plots: Mapping[str, Mapping[str, str]]) -> str:
    parts = [f"# {_title(records)}", *[f"- {note}" for note in _notes(records, plots)], ""]
    parts.append(ABOUT.format(baseline=f"`{records.asked['baseline']}`"))
    for table in tables_of(records):
        parts += ["", f"## {table.title}", ""]
        names = plots.get(table.title, {})
        parts += [f"![{name}]({_stem(table.title)}-{name}.svg)" for name in names]
        parts += ["", *_markdown_rows(table)]
    parts += ["", "## Run it again", "", "```yaml", definition(records).rstrip(), "```", ""]
    parts += ["## Machine", "", *_markdown_rows(_facts(records))]
    return "\n".join(parts) + "\n"


def _markdown_rows(table: Table) -> Iterator[str]:
    for row in (table.headings, ["---"] * len(table.headings), *table.rows):
        shown = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(shown)} |"


def _csv(table: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.headings, *table.rows])
    return file.getvalue()


def text_tables(records: Records) -> str:
    """The tables for a terminal."""
    return "\n\n".join(_align(table) for table in tables_of(records))


def _align(table: Table) -> str:
    every: list[Sequence[str]] = [table.headings, *table.rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in every
    ]
    return "\n".join([table.title, *lines])


def definition(records: Records) -> str:
    """The YAML that runs the grid again, beside the files that it names."""
    asked = {name: value for name, value in records.asked.items() if name != "files"}
    asked = {name: value for name, value in asked.items() if value not in (None, {}, [])}
    return yaml.safe_dump(asked, sort_keys=False, allow_unicode=True)


def _facts(records: Records) -> Table:
    """Machine, versions, starts and files."""
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
