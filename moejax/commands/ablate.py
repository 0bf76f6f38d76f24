"""``moejax ablate`` runs a grid of policies and budgets; ``moejax report`` writes its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from moejax.commands import EXIT_BAD_LINES, add_command, align_rows
from moejax.commands.model import (
    CLUSTER,
    add_described,
    connect_cluster,
    silence_notes,
    wants_cluster,
)
from moejax.errors import UserError

_EPILOG = """\
examples:
  moejax ablate --new mine
      a folder with grid.yaml and a policy of your own, my_policy.py, to begin from
  moejax ablate mine/grid.yaml
      runs it; the results are in mine/grid. After a kill the same command goes on
  moejax report mine/grid
      report.html and report.md
  moejax ablate mine/grid.yaml --ray local --workers 2
      simulated cells two at once; with HOST:PORT of a Ray cluster's head on all its machines
      (docs/how-to/ray.md)

exit status:
  0 done, 2 a mistake that the message explains, 3 the grid is done but some of its runs are errors
  (their records say why), 130 interrupted (Ctrl-C)

docs/reference/grids.md has all keys of the file and all columns of the records.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    ablate = add_command(
        commands,
        "ablate",
        _run,
        "compare policies and budgets over a grid",
        _EPILOG,
        "Run a grid of policies, budgets, batches and texts that a YAML file describes, with one\n"
        "engine and one compilation for all that agree in batch and precision.",
    )
    ablate.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="the grid (docs/reference/grids.md)"
    )
    ablate.add_argument(
        "--output",
        metavar="DIR",
        help="directory of results; existing ones are continued (default: CONFIG without .yaml)",
    )
    ablate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace the value of a key, such as repeats=1 or model=DIR; repeatable",
    )
    ablate.add_argument("--new", metavar="DIR", help="write an example grid and policy into DIR")
    workers = dataclasses.replace(
        CLUSTER["workers"], help="workers for simulated and predicted cells (default: one per node)"
    )
    cores = dataclasses.replace(
        CLUSTER["cores_per_worker"],
        help="CPU cores of a worker (default: 1); measured cells get a whole node",
    )
    described = {**CLUSTER, "workers": workers, "cores_per_worker": cores}
    add_described(ablate.add_argument_group("several machines"), described)
    ablate.add_argument("--quiet", action="store_true", help="no progress bar")
    ablate.add_argument("--json", action="store_true", help="a JSON line for each cell")
    report = add_command(
        commands,
        "report",
        _report,
        "write the report of a grid",
        None,
        "Write report.html, one page that needs nothing else, and report.md with its figures and\n"
        "tables, of the results of `moejax ablate`, as far as a grid is done.",
    )
    report.add_argument(
        "directory", nargs="+", metavar="DIR", help="directory of results; several of one grid"
    )
    report.add_argument(
        "--output", metavar="DIR", help="where the report goes (default: into the first DIR)"
    )


def _run(args: argparse.Namespace) -> int:
    if args.new is not None:
        if args.config is not None or args.output is not None or args.set:
            raise UserError("--new writes an example and runs nothing; leave out the rest")

        from moejax.evaluate.experiments.example import write_example

        print("\n".join(map(str, write_example(Path(args.new)))))
        return 0
    if args.config is None:
        raise UserError("name a definition: moejax ablate CONFIG.yaml, or --new DIR for an example")
    config = Path(args.config)
    directory = Path(args.output) if args.output else config.with_suffix("")
    if directory == config:
        raise UserError(f"{config} has no suffix; name a directory of results with --output DIR")

    on_cluster = wants_cluster(args)

    from moejax.evaluate.experiments.definition import read_changes
    from moejax.evaluate.experiments.grid import ablate
    from moejax.evaluate.experiments.report.tables import tables_of

    with silence_notes():  # every engine of a grid would log notes on its own budget
        given: dict[str, Any] = {"changes": read_changes(args.set)}
        given["progress"] = not (args.quiet or args.json)
        if not on_cluster:
            records = ablate(config, directory, **given)
        else:
            from moejax.evaluate.cluster.grids import cluster_ablate

            with connect_cluster(args) as scale:
                records = cluster_ablate(config, directory, scale, **given)
    if args.json:
        for line in records.summary():
            print(json.dumps(line))
    else:
        for table in tables_of(records):
            print(table.title, align_rows([table.headings, *table.rows]), "", sep="\n")
        for note in records.notes():
            print(f"note: {note}")
        print(f"{len(records.rows)} records in {directory}; moejax report {directory}")
    return EXIT_BAD_LINES if records.failures else 0


def _report(args: argparse.Namespace) -> int:
    from moejax.evaluate.experiments.records import merge_results, read_results
    from moejax.evaluate.experiments.report.page import write_report

    records = merge_results([read_results(directory) for directory in args.directory])
    for path in write_report(records, Path(args.output or args.directory[0])):
        print(path)
    return 0
