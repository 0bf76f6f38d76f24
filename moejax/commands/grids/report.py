"""``moejax report``: what a grid came to, as a page and as Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

from moejax.commands import add_command


def add_parser(commands: argparse._SubParsersAction) -> None:
    report = add_command(
        commands,
        "report",
        _run,
        "write the report of a grid",
        None,
        "Write report.html, one page that needs nothing else, and report.md with its figures, of\n"
        "the results of `moejax ablate`. A grid that is not done yet is reported as far as it is.",
    )
    report.add_argument("directory", metavar="DIR", help="of results")
    report.add_argument(
        "--output", metavar="DIR", help="where the report goes (default: into the results)"
    )


def _run(args: argparse.Namespace) -> int:
    from moejax.evaluate.experiments.records import read_results
    from moejax.evaluate.experiments.report.page import write_report

    records = read_results(args.directory)
    for path in write_report(records, Path(args.output or args.directory)):
        print(path)
    return 0
