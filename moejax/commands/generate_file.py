"""The part of ``moejax generate`` that works on files: --input and what goes with it.

Nothing heavy is imported before a job begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moejax.commands import EXIT_BAD_LINES, EXIT_INTERRUPTED
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moejax.serve.llm import LLM


def add_file_options(group: argparse._ArgumentGroup) -> None:
    """--input, --output, --on-error and --overwrite."""
    group.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines with a prompt each, instead of PROMPT; - reads stdin",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="JSON lines, appended as they finish; results that are there are kept and not made "
        "again; - writes to stdout",
    )
    group.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        help="a bad line ends the job, or gets an error as its result (default: fail)",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="remove the results in --output, start anew"
    )


def check_file_options(args: argparse.Namespace) -> None:
    """What argparse cannot say about PROMPT and --input."""
    if args.prompt is None and args.input is None:
        args.refuse("the following arguments are required: PROMPT (or --input FILE)")
    if args.prompt is not None and args.input is not None:
        args.refuse("PROMPT and --input exclude each other")
    if args.input is not None and args.output is None:
        args.refuse("--input needs --output FILE, or --output - for standard output")
    if args.input is None and (args.output or args.on_error or args.overwrite):
        args.refuse("--output, --on-error and --overwrite need --input")


def generate_file(
    args: argparse.Namespace, params: SamplingParams, start: Callable[[], LLM]
) -> tuple[int, dict[str, Any] | None]:
    """Runs the job of --input; returns the exit status and LLM.stats() (None: no model was needed).

    params: of lines that do not say otherwise; its seed is the job's. start: makes the LLM, after
    the files were found to be right. Raises UserError as OpenJob.run does.
    """
    from moejax.serve.batch.job import Job, open_job

    if args.kv_overflow == "recompute":
        raise UserError(
            "--kv-overflow recompute makes results depend on what else runs, so a job could not be "
            "resumed to the same ones; use swap, with more --swap-space if it is too small"
        )
    job = Job(
        input=args.input,
        output=args.output,
        model=args.model,
        dtype=args.dtype or "auto",
        sampling=_not_default(params),
        seed=params.seed or 0,
        on_error=args.on_error or "fail",
        overwrite=args.overwrite,
    )
    # A bar among result lines on one terminal would be no good to anybody.
    bar = not (args.quiet or args.json or (args.output == "-" and sys.stdout.isatty()))
    with open_job(job) as work:
        before, stats = work.done, None
        try:
            # A model takes long to load; a job that is done already, or empty, needs none.
            if work.complete:
                work.results.begin(overwrite=job.overwrite)
            else:
                with start() as llm:
                    work.run(llm, progress=bar, warn=_say)
                    stats = llm.stats()
        except KeyboardInterrupt:
            if args.output == "-":
                raise
            of = "" if work.total is None else f" of {work.total}"
            _say(
                f"interrupted; {work.done}{of} results are in {args.output}, and the same command "
                f"goes on from there"
            )
            return EXIT_INTERRUPTED, None
    if work.errors or not args.quiet:
        kept = f", {before} of them from before" if before else ""
        _say(f"{work.done} results{kept}, {work.errors} errors")
    return (EXIT_BAD_LINES if work.errors else 0), stats


def _not_default(params: SamplingParams) -> dict[str, Any]:
    """Fields other than the seed that do not only repeat a default, so that a new field of a later
    release does not make the results of this one foreign."""
    fields = (f.name for f in dataclasses.fields(params) if f.name != "seed")
    given = {name: getattr(params, name) for name in fields}
    return {n: value for n, value in given.items() if value != getattr(SamplingParams(), n)}


def _say(text: str) -> None:
    print(f"moejax: {text}", file=sys.stderr)
