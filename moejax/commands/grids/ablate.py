"""``moejax ablate``: a grid of policies and budgets, measured, simulated or predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.commands import EXIT_BAD_LINES, add_command, say
from moejax.commands.model import CLUSTER, add_described, asked, notes_unlogged
from moejax.errors import UserError

if TYPE_CHECKING:
    from moejax.evaluate.experiments.records import Records

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
      (docs/scale_out.md)

exit status:
  0 done, 2 a mistake that the message explains, 3 the grid is done but some of its runs are errors
  (their records say why), 130 interrupted (Ctrl-C)

docs/ablation.md has all keys of the file and all columns of the records.
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
    ablate.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="what is to be compared")
    ablate.add_argument(
        "--output",
        metavar="DIR",
        help="results, gone on with if they are there (default: CONFIG without .yaml)",
    )
    ablate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value of a key of the file, such as repeats=1 or model=DIR; repeatable",
    )
    ablate.add_argument("--new", metavar="DIR", help="write an example to begin from, and end")
    workers = dataclasses.replace(
        CLUSTER["workers"], help="workers for what is simulated or predicted (default: one a node)"
    )
    cores = dataclasses.replace(
        CLUSTER["cores_per_worker"],
        help="CPU cores of each of them (default: 1); what is measured has a node to itself",
    )
    described = {**CLUSTER, "workers": workers, "cores_per_worker": cores}
    add_described(ablate.add_argument_group("several machines"), described)
    ablate.add_argument("--quiet", action="store_true", help="no progress bar")
    ablate.add_argument("--json", action="store_true", help="a JSON line for each cell")


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

    if args.ray is None and any(asked(args, CLUSTER).values()):
        args.parser.error("--workers and --cores-per-worker need --ray")

    from moejax.evaluate.experiments.definition import read_changes
    from moejax.evaluate.experiments.grid import ablate
    from moejax.evaluate.experiments.report.page import text_tables

    with notes_unlogged():  # budgets of a grid are its own business, engine by engine
        changes = read_changes(args.set)
        quiet = args.quiet or args.json
        if args.ray is None:
            records = ablate(config, directory, changes=changes, progress=not quiet)
        else:
            records = _on_cluster(args, config, directory, changes)
    if args.json:
        for line in records.summary():
            print(json.dumps(line))
    else:
        print(text_tables(records))
        for note in records.notes():
            print(f"note: {note}")
        print(f"{len(records.rows)} records in {directory}; moejax report {directory}")
    return EXIT_BAD_LINES if records.failures else 0


def _on_cluster(
    args: argparse.Namespace, config: Path, directory: Path, changes: Mapping[str, Any]
) -> Records:
    """Runs it on Ray's workers."""
    from moejax.evaluate.cluster.grids import cluster_ablate
    from moejax.serve.cluster.fleet import Scale
    from moejax.serve.cluster.ray_cluster import connected

    scale, quiet = Scale(args.ray, args.workers, args.cores_per_worker), args.quiet or args.json
    with connected(scale.address, scale.cpus):
        return cluster_ablate(
            config, directory, scale, changes=changes, progress=not quiet, warn=say
        )
